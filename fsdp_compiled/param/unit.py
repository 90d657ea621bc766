"""What the parameters of one unit share: the user's configuration, and whether hooks have all-gathered them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class UnitConfig:
    """What the user has configured for one unit. It is replaced as one, by :meth:`FSDPState.configure`.

    Args:
        name: full name, relative to the outermost unit known so far.
        reshard_after_forward: free (True) or keep (False) unsharded parameters between forward and backward.
        post_forward_size: if they are freed, how many ranks hold them sharded until backward; 0 for all.
        reshard_after_backward: free (True) or keep (False) them after backward.
        keep_unsharded_storage: whether a reshard leaves the unsharded memory allocated.
        unshard_in_backward: whether backward all-gathers at all.
        reduce_grads: whether backward reduces gradients, or accumulates them unsharded.
        all_reduce_grads: whether it also reduces them over replicas, or accumulates what the shards reduced.
        reduce_unused: whether parameters without a gradient take part in the reduction, with zeros.
        divide_factor: what sums of gradients are divided by; None for the number of ranks.
        sum_only: whether reductions must not use an averaging collective.
        all_gather_comm: name of the user's all-gather, "" for none.
        reduce_scatter_comm: name of the user's reduce-scatter, "" for none.
        reduce_hook: name of the user's hook on reduced gradients, "" for none.
    """

    name: str
    reshard_after_forward: bool = True
    post_forward_size: int = 0
    reshard_after_backward: bool = True
    keep_unsharded_storage: bool = False
    unshard_in_backward: bool = True
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reduce_unused: bool = False
    divide_factor: float | None = None
    sum_only: bool = False
    all_gather_comm: str = ""
    reduce_scatter_comm: str = ""
    reduce_hook: str = ""


def _ignore() -> None:
    pass


@dataclass(eq=False)
class Unit:
    """One unit, as its parameters see it.

    Args:
        config: the user's; read it here, since it is replaced.
        hooked: eager hooks have all-gathered the unit for the module call or backward under way; they alone write it.
        leaves_mirror: the leaves require gradients as their parameters do, while the outermost module is called: a
            guard on a leaf is far cheaper than one on a DTensor.
        on_compiled_gradient: called whenever a compiled backward leaves a gradient of the unit.
    """

    config: UnitConfig
    hooked: bool = False
    leaves_mirror: bool = False
    on_compiled_gradient: Callable[[], None] = field(default=_ignore, repr=False)
