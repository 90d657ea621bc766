"""A sharded model's weights for others, such as an inference engine: complete, or this rank's shards that changed."""

from .complete import stream_parameters as stream_parameters
from .shards import LocalShard as LocalShard
from .shards import stream_shards as stream_shards
