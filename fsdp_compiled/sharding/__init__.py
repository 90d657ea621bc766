"""What travels: mesh infos, layouts of shards and packed buffers, DTensor placements, the spec of a collective.

Pure facts, which every other folder may import. Nothing here may know modules, graphs, streams or when things run.
"""
