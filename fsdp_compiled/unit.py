"""What a unit tells its parameters: how to shard them, and what they are to do at present."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .mesh import DataParallelMeshInfo
from .policy import MixedPrecisionPolicy


def _nothing() -> None:
    pass


@dataclass
class UnitStatus:
    """What the parameters of one unit do at present; the unit's state writes it, the parameters read it.

    Args:
        name: the unit's full name, as far as known.
        hooked: the eager hooks have gathered this unit for the module call or backward under way.
        reshard_after_forward: free (True) or keep (False) unsharded parameters between forward and backward.
        reshard_after_backward: free (True) or keep (False) them after backward.
        reduce_grads: whether backward reduces gradients, or accumulates them unsharded.
        on_landing: called whenever a compiled backward leaves a gradient of the unit.
    """

    name: str
    hooked: bool = False
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    reduce_grads: bool = True
    on_landing: Callable[[], None] = _nothing


@dataclass(frozen=True)
class ParamPlacement:
    """How a parameter is to be sharded: over which mesh, along which dimension, in which dtypes."""

    mesh_info: DataParallelMeshInfo
    dim: int
    mp_policy: MixedPrecisionPolicy
