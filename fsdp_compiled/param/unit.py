"""What the parameters of one unit share: the user's configuration, and whether hooks have all-gathered them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class UnitConfig:
    """What the user has configured for one unit. It is replaced as one, by :meth:`FSDPState.configure`."""

    name: str  # full name, relative to the outermost unit known so far
    reshard_after_forward: bool = True  # free unsharded parameters between forward and backward, or keep them
    reshards_by_default: bool = False  # the user has not set it: freed unless this is the outermost unit
    post_forward_size: int = 0  # if they are freed, how many ranks hold them sharded until backward; 0 for all
    reshard_after_backward: bool = True  # free them after backward, or keep them
    keep_unsharded_storage: bool = False  # a reshard leaves the unsharded memory allocated
    unshard_in_backward: bool = True  # whether backward all-gathers at all
    reduce_grads: bool = True  # backward reduces gradients, or accumulates them unsharded
    all_reduce_grads: bool = True  # it also reduces them over replicas, or accumulates what the shards reduced
    reduce_unused: bool = False  # parameters without a gradient take part in the reduction, with zeros
    divide_factor: float | None = None  # what sums of gradients are divided by; None for the number of ranks
    sum_only: bool = False  # reductions must not use an averaging collective
    all_gather_comm: str = ""  # name of the user's all-gather, "" for none
    reduce_scatter_comm: str = ""  # of the user's reduce-scatter
    reduce_hook: str = ""  # of the user's hook on reduced gradients


def _ignore() -> None:
    pass


@dataclass(eq=False)
class Unit:
    """One unit, as its parameters see it."""

    config: UnitConfig  # the user's; read it here, since it is replaced
    # Eager hooks have all-gathered the unit for the module call or backward under way; they alone write it.
    hooked: bool = False
    # A compiled backward that has not ended has left gradients of the unit; what is called when it leaves the first.
    has_compiled_gradients: bool = False
    on_compiled_gradient: Callable[[], None] = field(default=_ignore, repr=False)
