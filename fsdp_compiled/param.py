"""One parameter's states: sharded, unsharded, and what a traced read of it becomes.

It knows one parameter, its layout and its modules; it must not know which parameters share a collective, hooks
or streams.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import InitVar, dataclass
from enum import Enum, auto

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Checked on torch 2.11.0, 2.13.0 and 2.15.0: DTensor(local, spec) costs a few microseconds where the public
# DTensor.from_local costs ten times that for every gradient of every step.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from . import collectives
from .errors import FSDPError
from .layout import ShardLayout
from .passes.ir import Route
from .policy import resolved
from .unit import ParamPlacement, UnitStatus
from .unsharded import UnshardedParam


class ShardedState(Enum):
    """Which tensor is registered on the modules, and so which memory a parameter holds.

    SHARDED: the DTensor; only this rank's shard has memory.
    UNSHARDED: the plain tensor used in compute; the shard and the whole parameter have memory.
    """

    SHARDED = auto()
    UNSHARDED = auto()


@dataclass(frozen=True)
class ParamModuleInfo:
    """Where a parameter is registered: its first module and name, and every other place that shares it."""

    module: nn.Module
    name: str
    shared: tuple[tuple[nn.Module, str], ...] = ()

    def places(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield every (module, name) under which the parameter is registered."""
        yield self.module, self.name
        yield from self.shared


class TakenOriginal(weakref.ref[nn.Parameter]):
    """A weak reference on an original parameter, by which a module outside the unit that shares it is found."""

    def __init__(self, original: nn.Parameter, taken_by: FSDPParam) -> None:
        self.taken_by = taken_by

    def __new__(cls, original: nn.Parameter, taken_by: FSDPParam) -> TakenOriginal:
        return super().__new__(cls, original)


@dataclass(eq=False)
class FSDPParam:
    """One original parameter from the moment it is sharded.

    Args:
        info: where it is registered.
        placement: how to shard it.
        status: of its unit.
        name: full name, relative to the outermost sharded module known so far.
        first: the original parameter; only read, and not kept.
    """

    info: ParamModuleInfo
    placement: ParamPlacement
    status: UnitStatus
    name: str
    first: InitVar[nn.Parameter]

    def __post_init__(self, first: nn.Parameter) -> None:
        self._original = TakenOriginal(first, self)
        mesh_info = self.placement.mesh_info
        self.layout = ShardLayout(tuple(first.shape), self.placement.dim, mesh_info.shard_world)
        self._length = self.layout.length(mesh_info.shard_rank)  # of this rank's shard, without padding
        self.state = ShardedState.SHARDED
        self.sharded_param: nn.Parameter  # DTensor
        self.leaf: nn.Parameter  # padded shard; shares storage with the DTensor's local tensor
        self._unsharded: UnshardedParam | None = None  # made by the first eager gather
        self._sink: nn.Parameter | None = None  # leaf without memory; its .grad is the pending gradient
        padded = self._cut(first.detach())
        self._link(nn.Parameter(self._as_dtensor(padded), requires_grad=first.requires_grad), padded)
        self._register(self.sharded_param)

    # ---- sharded ----

    def _cut(self, whole: Tensor) -> Tensor:
        """Return this rank's padded shard of ``whole``, contiguous and in memory of its own."""
        layout, rank = self.layout, self.placement.mesh_info.shard_rank
        mine = whole.narrow(layout.dim, layout.offset(rank), self._length)
        return self._padded(mine.clone(memory_format=torch.contiguous_format))

    def _padded(self, local: Tensor) -> Tensor:
        if tuple(local.shape) == self.layout.shard_shape:
            return local.contiguous()
        padded = local.new_zeros(self.layout.shard_shape)
        padded.narrow(self.layout.dim, 0, local.shape[self.layout.dim]).copy_(local)
        return padded

    def _unpadded(self, padded: Tensor) -> Tensor:
        return padded if self._length == self.layout.chunk else padded.narrow(self.layout.dim, 0, self._length)

    def _as_dtensor(self, padded: Tensor) -> DTensor:
        return DTensor(self._unpadded(padded), self._spec(padded.dtype), requires_grad=False)

    def _spec(self, dtype: torch.dtype) -> DTensorSpec:
        shape = torch.Size(self.layout.shape)
        stride = torch.empty(shape, device="meta").stride()
        mesh_info = self.placement.mesh_info
        placements = mesh_info.placements(self.layout.dim)
        return DTensorSpec(mesh_info.mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))

    def _link(self, sharded: nn.Parameter, padded: Tensor) -> None:
        """Take ``sharded``, whose local tensor lies in ``padded``, and make the leaf that graphs read."""
        self.sharded_param = sharded
        self._padded_shard = padded
        self._grad_spec = sharded._spec  # type: ignore[attr-defined]
        differentiable = padded.is_floating_point() or padded.is_complex()
        self.leaf = nn.Parameter(padded, requires_grad=differentiable)
        if differentiable:
            self.leaf.register_post_accumulate_grad_hook(self._land)
        self._sink = self._unsharded = None
        self.publish()

    def relink(self) -> None:
        """Take over what replaced the sharded parameter or its storage: ``to``, ``to_empty``, ``assign=True``.

        Raises:
            TypeError: what is registered now is no DTensor.
            ValueError: it has another shape or placement.
        """
        current = self.info.module._parameters[self.info.name]
        if self.state is not ShardedState.SHARDED or current is None:
            raise FSDPError(f"{self.name}: relinked while {self.state}")
        try:
            self.check_replacement(current)
        except (TypeError, ValueError):
            self._register(self.sharded_param)
            raise
        local = _local(current)
        if current is self.sharded_param and _same_memory(local, self._unpadded(self._padded_shard)):
            self._register(current)  # load_state_dict(assign=True) may have parted shared places
            return
        pending = self.take_pending()
        padded = self._padded(local.detach())
        if not _same_memory(local, padded) or tuple(local.shape) != self.layout.shard_shape:
            current._local_tensor = self._unpadded(padded)  # type: ignore[attr-defined]
        self._link(current, padded)
        self._register(current)
        if pending is not None:
            self.store(pending.to(self.device))

    def check_replacement(self, current: Tensor) -> None:
        """Raise if ``current`` cannot become the sharded parameter, see :meth:`relink`."""
        if not isinstance(current, DTensor):
            raise TypeError(
                f"{self.name}: expected a sharded DTensor, got a {type(current).__name__}; assign a DTensor with "
                f"placements {self._grad_spec.placements}, or load without assign=True"
            )
        if tuple(current.shape) != self.layout.shape or current.placements != self._grad_spec.placements:
            raise ValueError(
                f"{self.name}: expected shape {self.layout.shape} with {self._grad_spec.placements}, got "
                f"{tuple(current.shape)} with {current.placements}; redistribute it first"
            )

    # ---- traced reads ----

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """(gather dtype, reduce dtype)."""
        return resolved(self.placement.mp_policy, self.leaf.dtype)

    @property
    def device(self) -> torch.device:
        """Device of the shard."""
        return self.leaf.device

    def publish(self) -> None:
        """Write what a traced read needs into constants; call it after any change of name or policy."""
        info = self.placement.mesh_info
        dtype, reduce_dtype = self.dtypes
        self.route: tuple[object, ...] = Route(
            shape=self.layout.shape,
            dim=self.layout.dim,
            dtype=dtype,
            reduce_dtype=reduce_dtype,
            grad_dtype=self.leaf.dtype,
            reshard=self.status.reshard_after_forward,
            unit=self.status.name,
            param=self.name,
            shard_group=info.shard_group,
            shard_world=info.shard_world,
            replicate_group=info.replicate_group,
            replicate_world=info.replicate_world,
        ).args()

    def gathered(self) -> Tensor:
        """Return the unsharded parameter as a function of the shard; Dynamo traces this."""
        if not self.sharded_param.requires_grad:
            return collectives.unshard(self.leaf.detach(), None, self.route)
        return collectives.unshard(self.leaf, None if self.status.reduce_grads else self._sink, self.route)

    # ---- gradients ----

    def prepare_to_store(self) -> None:
        """Make the leaf that takes unsharded gradients while sync is off."""
        if self._sink is None and self.leaf.requires_grad:
            one = torch.zeros(1, dtype=self.dtypes[1], device=self.device)
            self._sink = nn.Parameter(one.expand(self.layout.shape))
            self._sink.register_post_accumulate_grad_hook(lambda _: self.status.on_landing())

    @property
    def pending_grad(self) -> Tensor | None:
        """Unsharded gradient accumulated while sync was off, in the reduce dtype."""
        return None if self._sink is None else self._sink.grad

    def store(self, grad: Tensor) -> None:
        """Add an unsharded gradient to the pending one."""
        self.prepare_to_store()
        if self._sink is None:
            raise FSDPError(f"{self.name}: a gradient came for a parameter of {self.leaf.dtype}")
        grad = grad.to(self.dtypes[1])
        self._sink.grad = grad if self._sink.grad is None else self._sink.grad.add_(grad)

    def take_pending(self) -> Tensor | None:
        """Return the pending gradient and forget it."""
        if self._sink is None:
            return None
        pending, self._sink.grad = self._sink.grad, None
        return pending

    def _land(self, leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        self.status.on_landing()
        self.land(grad)

    def land(self, padded: Tensor | None) -> None:
        """Add a reduced, padded gradient to ``sharded_param.grad`` and run the parameter's own hooks."""
        if padded is None:
            return
        local = self._unpadded(padded)
        if self.sharded_param.grad is None:
            # Without DTensor.__init__, which does nothing but leave Dynamo, for 2 us a gradient.
            self.sharded_param.grad = DTensor.__new__(DTensor, local, self._grad_spec, requires_grad=False)
        else:
            _local(self.sharded_param.grad).add_(local)
        for hook in (getattr(self.sharded_param, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(self.sharded_param)

    # ---- unsharded ----

    def allocate(self) -> Tensor:
        """Give the unsharded parameter memory and return it, see :meth:`UnshardedParam.allocate`."""
        if self._unsharded is None:
            self._unsharded = UnshardedParam(self.layout, self.dtypes[0], self.device)
        return self._unsharded.allocate()

    def to_unsharded(self) -> None:
        """Register the unsharded parameter, which must have been gathered."""
        if self._unsharded is None:
            raise FSDPError(f"{self.name}: unsharded before it was gathered")
        self._unsharded.param.requires_grad_(self.sharded_param.requires_grad)
        self._register(self._unsharded.param)
        self.state = ShardedState.UNSHARDED

    def to_sharded(self) -> None:
        """Register the sharded parameter and free the unsharded one's memory."""
        self._register(self.sharded_param)
        if self._unsharded is not None:
            self._unsharded.free()
        self.state = ShardedState.SHARDED

    def take_unsharded_grad(self) -> Tensor | None:
        """Return the gradient that eager autograd accumulated, and forget it."""
        return None if self._unsharded is None else self._unsharded.take_grad()

    def _register(self, param: nn.Parameter) -> None:
        for module, name in self.info.places():
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = param
            else:
                setattr(module, name, param)


def _local(dtensor: Tensor) -> Tensor:
    # to_local() would be differentiable, and an in-place change of its result would not reach the DTensor.
    return dtensor._local_tensor  # type: ignore[attr-defined]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    if a.device != b.device or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.numel() == 0 or (a.device.type != "meta" and a.data_ptr() == b.data_ptr())
