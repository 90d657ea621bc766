"""One ``fully_shard`` call, in order: check arguments, find parameters, shard, install properties and hooks.

It must not know what runs later.
"""
