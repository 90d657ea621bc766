"""What travels: meshes, layouts of shards and packed buffers, DTensors, the spec of a collective. Pure facts."""
