"""What travels: mesh infos, the arithmetic of shards and packed buffers, DTensor placements, the spec of a collective.

Pure facts, which every other folder may import. Nothing here may know modules, graphs, streams or when anything runs.
"""
