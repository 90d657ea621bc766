"""Optimizers of sharded parameters that step on this rank's shards."""

from .on_shards import step_on_shards as step_on_shards
