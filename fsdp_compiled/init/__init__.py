"""One ``fully_shard`` call, in order: check arguments, find parameters, place them, shard and install hooks."""
