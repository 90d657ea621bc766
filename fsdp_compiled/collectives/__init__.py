"""The one collective stack, which hooks and graph operators call: recipes, copies, streams, communicators."""

from .all_gather import all_gather_bucket as all_gather_bucket
from .all_gather import launch_all_gather as launch_all_gather
from .backend import AllGather as AllGather
from .backend import Comm as Comm
from .backend import ReduceScatter as ReduceScatter
from .communicators import Hook as Hook
from .communicators import register as register
from .operators import define_kind as define_kind
from .operators import reduce_grad as reduce_grad
from .operators import unshard as unshard
from .operators import unshard_all as unshard_all
from .operators import with_gradient as with_gradient
from .reduction import launch_reduction as launch_reduction
from .reduction import launch_replica_reduction as launch_replica_reduction
from .reference import padded_shard as padded_shard
from .reference import take_shard as take_shard
from .streams import Pending as Pending
