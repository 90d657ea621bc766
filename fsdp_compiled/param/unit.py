"""One unit as its parameters see it: the user's configuration, and what the hooks tell of the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class UnitConfig:
    """What the user has configured for one unit. It is replaced as one, by :meth:`Unit.configure`."""

    name: str  # full name, relative to the outermost unit known so far
    reshard_after_forward: bool = True  # free unsharded parameters between forward and backward, or keep them
    reshards_by_default: bool = False  # the user has not set it: freed unless this is the outermost unit
    post_forward_size: int = 0  # if they are freed, how many ranks hold them sharded until backward; 0 for all
    reshard_after_backward: bool = True  # free them after backward, or keep them
    keep_unsharded_storage: bool = False  # a reshard leaves the unsharded memory allocated
    unshard_in_backward: bool = True  # whether backward all-gathers at all
    trains: bool = True  # False where the unit stays unsharded over many calls, none of which may have gradients
    has_hooks: bool = True  # False where all units do, so that eager hooks have nothing to do
    reduce_grads: bool = True  # backward reduces gradients, or accumulates them unsharded
    all_reduce_grads: bool = True  # it also reduces them over replicas, or accumulates what the shards reduced
    reduces_in_hooks: bool = False  # graphs leave that to the end of backward
    reduce_unused: bool = False  # parameters without a gradient take part in the reduction, with zeros
    divide_factor: float | None = None  # what sums of gradients are divided by; None for the number of ranks
    sum_only: bool = False  # reductions must not use an averaging collective
    separate_reduce_group: bool = False  # reduce-scatters have a process group of their own
    all_gather_comm: str = ""  # name of the user's all-gather, "" for none
    reduce_scatter_comm: str = ""  # of the user's reduce-scatter
    reduce_hook: str = ""  # of the user's hook on reduced gradients

    @property
    def ends_forward_sharded(self) -> bool:
        """Whether a forward that ends now frees the unsharded parameters.

        Without a backward to come, an unsharded root would hold stale values after the next optimizer step, and an
        optimizer that is made next would see unsharded parameters.
        """
        return self.reshard_after_forward or (self.reshards_by_default and not torch.is_grad_enabled())


# Fields that no spec depends on. Users change them in every step, and deriving specs takes time.
_SYNC = frozenset({"reduce_grads", "all_reduce_grads", "reduces_in_hooks"})


class Follower(Protocol):
    """What a unit tells of its changes: ``FSDPParam``, whose file imports this one."""

    def follow_config(self, respec: bool) -> None: ...
    def follow_hold(self) -> None: ...
    def follow_call(self, in_call: bool) -> None: ...


@dataclass(eq=False)
class Unit:
    """One unit; what changes it lets its parameters derive anew what depends on that."""

    config: UnitConfig  # the user's; read it here, since it is replaced
    hooked: bool = False  # eager hooks hold the unit unsharded, for the module call or backward under way
    in_call: bool = False  # a call of the outermost module, or an eager backward, is under way
    on_compiled_gradient: Callable[[], None] = field(default=lambda: None, repr=False)  # called for each that is left
    followers: list[Follower] = field(default_factory=list, repr=False)  # parameters, also of units that share theirs

    @torch.inference_mode(False)  # what this makes trains
    def configure(self, **changes: Any) -> None:
        self.config = replace(self.config, **changes)
        for param in self.followers:
            param.follow_config(respec=not _SYNC.issuperset(changes))

    def hold(self, hooked: bool) -> None:
        if self.hooked is not hooked:
            self.hooked = hooked
            for param in self.followers:
                param.follow_hold()

    def call(self, in_call: bool) -> None:
        self.in_call = in_call
        for param in self.followers:
            param.follow_call(in_call)
