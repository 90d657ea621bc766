"""A parameter's spec: a function of its name, layout, dtype and placement, and of its unit's configuration.

It must not know the parameter, nor what state it is in.
"""

from __future__ import annotations

import torch

from ..policy import resolved
from ..sharding.layout import ShardLayout
from ..sharding.spec import AllGatherSpec, CommSpec, Group, ParamSpec, ReductionSpec, scaling_for
from .placement import ParamPlacement
from .unit import UnitConfig


def comm_spec(
    name: str, layout: ShardLayout, dtype: torch.dtype, placement: ParamPlacement, config: UnitConfig
) -> CommSpec:
    """Return the spec of a parameter by its full name, of ``dtype`` as it is sharded.

    The first call that asks for a smaller or a separate process group makes it; every rank must make that call.
    """
    info, (param_dtype, reduce_dtype) = placement.mesh_info, resolved(placement.mp_policy, dtype)
    offloads, world = placement.offload is not None, info.shard_world * info.replicate_world
    smaller = info.smaller_group(config.post_forward_size if config.reshard_after_forward else 0)
    return CommSpec(
        ParamSpec(name, config.name, layout.shape, layout.dim, dtype),
        AllGatherSpec(info.shards, param_dtype, config.all_gather_comm, placement.device.type if offloads else ""),
        ReductionSpec(
            reduce_dtype,
            info.separate_reduce_scatter_group() if config.separate_reduce_group else info.shards,
            info.replicas,
            scaling_for(reduce_dtype, world, config.divide_factor, config.sum_only),
            config.reduce_scatter_comm,
            config.reduce_hook,
            to_host=offloads,
        ),
        reshard=config.reshard_after_forward,
        post_forward=smaller.group if smaller is not None else Group(),
        reshard_is_set=not config.reshards_by_default,
    )
