"""One parameter's states: sharded, unsharded, and what a traced read of it becomes.

It knows one parameter, its layout and its modules; it must not know which parameters share a collective, hooks
or streams.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, replace
from enum import Enum, auto

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import collectives
from .collectives import padded_shard, take_shard
from .errors import FSDPError
from .extension import AllGatherExtension, is_extended
from .layout import ShardLayout
from .passes.route import Route, reduction_for
from .pending import PendingGrad, on_gradient
from .policy import resolved
from .spmd import local_of, outer_parallelism, sharded_spec
from .unit import ParamPlacement, UnitStatus
from .unsharded import ExtendedUnsharded, Unsharded, UnshardedParam


class ShardedState(Enum):
    """Which tensor is registered on the modules, and so which memory a parameter holds.

    SHARDED: the DTensor; only this rank's shard has memory.
    SHARDED_POST_FORWARD: the DTensor; beside the shard, a larger one over a smaller group has memory.
    UNSHARDED: the plain tensor used in compute; the shard and the whole parameter have memory.
    """

    SHARDED = auto()
    SHARDED_POST_FORWARD = auto()
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
        self.original = TakenOriginal(first, self)
        self.users = [self.status]  # of every unit that has modules which share it
        self.is_lent = False  # whether there is more than one
        mesh_info = self.placement.mesh_info
        whole = local_of(first.detach())
        self.outer = outer_parallelism(mesh_info, first)
        self.layout = ShardLayout(tuple(whole.shape), self.placement.dim, mesh_info.shard_world)
        self._length = self.layout.length(mesh_info.shard_rank)  # of this rank's shard, without padding
        self._reduce_group = ""
        self.state = ShardedState.SHARDED
        self.sharded_param: nn.Parameter  # DTensor
        self.shard: Tensor  # padded; shares storage with the DTensor's local tensor
        self.leaf: nn.Parameter  # the shard as graphs read it; its gradient lands
        self._unsharded: Unsharded | None = None  # made by the first eager gather
        self._post_forward: tuple[Tensor, Route] | None = None  # padded shard over the smaller group, and its way
        self.pending: PendingGrad  # unsharded gradients, while sync is off
        self.partial: PendingGrad  # padded gradients that only the shard group has reduced
        padded = take_shard(whole, self.layout, mesh_info.shard_rank)
        if self.placement.offload is not None and padded.device.type != "meta":
            padded = self._pinned(padded.cpu())
        spec = sharded_spec(mesh_info, first, self.placement.dim)
        sharded = DTensor(self._unpadded(padded), spec, requires_grad=False)
        self._link(nn.Parameter(sharded, requires_grad=first.requires_grad), padded)
        self._register(self.sharded_param)

    # ---- sharded ----

    def _unpadded(self, padded: Tensor) -> Tensor:
        return padded if self._length == self.layout.chunk else padded.narrow(self.layout.dim, 0, self._length)

    def _pinned(self, shard: Tensor) -> Tensor:
        offload = self.placement.offload
        if offload is None or not offload.pin_memory or shard.device.type != "cpu" or shard.is_pinned():
            return shard
        return shard.pin_memory()

    def _link(self, sharded: nn.Parameter, padded: Tensor) -> None:
        """Take ``sharded``, whose local tensor lies in ``padded``, and make the leaf that graphs read."""
        self.sharded_param = sharded
        self.shard = padded
        self._local = local_of(sharded)
        self._spec = sharded._spec  # type: ignore[attr-defined]
        differentiable = padded.is_floating_point() or padded.is_complex()
        self.extension = self._new_extension() if is_extended(padded) else None
        # A tensor subclass is no argument for our operators; its gradients land on a plain leaf without memory.
        plain = padded if self.extension is None else _without_memory(padded)
        self.leaf = nn.Parameter(plain, requires_grad=differentiable)
        if differentiable:
            on_gradient(self.leaf, self._land)
        self._unsharded = None
        self.pending = PendingGrad(self.layout.shape, self.dtypes[1], self._on_landing)
        self.partial = PendingGrad(self.layout.shard_shape, self.dtypes[1], self._on_landing)
        self.publish()

    def _new_extension(self) -> AllGatherExtension:
        policy, mesh, module = self.placement.mp_policy, self.placement.mesh_info.shard_mesh, self.info.module
        whole = torch.empty(self.layout.shape, device="meta")
        dtype = resolved(policy, self.shard.dtype)[0]
        outer = (whole.shape, whole.stride())
        # The DTensor's local tensor itself, if it needs no padding: torchao keeps its scale there.
        shard = self._local if self._local.shape == self.shard.shape else self.shard
        return AllGatherExtension(shard, mesh, module, policy, outer, dtype, self.placement.device)

    def relink(self) -> None:
        """Take over what replaced the sharded parameter or its storage: ``to``, ``to_empty``, ``assign=True``.

        Raises:
            TypeError: what is registered now is no DTensor.
            ValueError: it has another shape or placement.
        """
        current = self.info.module._parameters[self.info.name]
        if self.state is ShardedState.UNSHARDED or current is None:
            raise FSDPError(f"{self.name}: relinked while {self.state}")
        try:
            self.check_replacement(current)
        except (TypeError, ValueError):
            self._register(self.sharded_param)
            raise
        local = local_of(current)
        if current is self.sharded_param and (
            local is self._local or _same_memory(local, self._unpadded(self.shard))
        ):
            self._register(current)  # load_state_dict(assign=True) may have parted shared places
            return
        pending, partial = self.pending.take(), self.partial.take()
        padded = self._pinned(padded_shard(local.detach(), self.layout))
        if not _same_memory(local, padded) or tuple(local.shape) != self.layout.shard_shape:
            current._local_tensor = self._unpadded(padded)  # type: ignore[attr-defined]
        self._link(current, padded)
        self._register(current)
        if pending is not None:
            self.pending.add(pending.to(self.placement.device))
        if partial is not None:
            self.partial.add(partial.to(self.placement.device))

    def check_replacement(self, current: Tensor) -> None:
        """Raise if ``current`` cannot become the sharded parameter, see :meth:`relink`."""
        if not isinstance(current, DTensor):
            raise TypeError(
                f"{self.name}: expected a sharded DTensor, got a {type(current).__name__}; assign a DTensor with "
                f"placements {self._spec.placements}, or load without assign=True"
            )
        if current.shape != self._spec.shape or current.placements != self._spec.placements:
            raise ValueError(
                f"{self.name}: expected shape {tuple(self._spec.shape)} with {self._spec.placements}, got "
                f"{tuple(current.shape)} with {current.placements}; redistribute it first"
            )

    # ---- traced reads ----

    @property
    def is_hooked(self) -> bool:
        """Whether eager hooks of any unit have gathered it for a module call or backward under way."""
        return any(user.hooked for user in self.users)

    def lend(self, places: Iterable[tuple[nn.Module, str]], user: UnitStatus) -> None:
        """Let modules of another unit share it."""
        self.info = replace(self.info, shared=(*self.info.shared, *places))
        self.users.append(user)
        self.is_lent = True
        self._register(self.sharded_param)

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
        size = self.status.post_forward_size if self.status.reshard_after_forward else 0
        self.smaller = self.placement.mesh_info.smaller_group(size)
        self.route = self._route()
        self.route_text = self.route.encode()
        self.partial_route_text = replace(self.route, sink_is_sharded=True).encode()
        self.input_route_text = replace(self.route, follows_shard=True).encode()
        self._choose_read()

    def _choose_read(self) -> None:
        reduces = self.status.reduce_grads and self.status.all_reduce_grads
        self.is_plain = reduces and self.extension is None and self.outer is None

    def _route(self) -> Route:
        info, status, (dtype, reduce_dtype) = self.placement.mesh_info, self.status, self.dtypes
        world = info.shard_world * info.replicate_world
        scaling = reduction_for(reduce_dtype, world, status.divide_factor, status.sum_only)
        return Route(
            shape=self.layout.shape,
            dim=self.layout.dim,
            dtype=dtype,
            reduce_dtype=reduce_dtype,
            grad_dtype=self.leaf.dtype,
            reshard=status.reshard_after_forward,
            unit=status.name,
            param=self.name,
            shard_group=info.shard_group,
            shard_world=info.shard_world,
            replicate_group=info.replicate_group,
            replicate_world=info.replicate_world,
            reduce_group=self._reduce_group,
            pre_divide=scaling.pre_divide,
            op=scaling.op,
            post_divide=scaling.post_divide,
            post_forward_group=self.smaller.name if self.smaller else "",
            post_forward_world=self.smaller.world if self.smaller else 0,
            gather_comm=status.gather_comm,
            reduce_comm=status.reduce_comm,
            reduce_hook=status.reduce_hook,
            device=self.placement.device.type if self.placement.offload else "",
        )

    def set_reduce_group(self, own: bool) -> None:
        """Reduce gradients over a process group of its own, or over that of the all-gathers."""
        self._reduce_group = self.placement.mesh_info.new_reduce_scatter_group() if own else ""
        self.publish()

    def gathered(self) -> Tensor:
        """Return the unsharded parameter as a function of the shard; Dynamo traces this.

        Every attribute read here is a guard of every step, so that the common case reads few.
        """
        if self.is_plain and self.sharded_param.requires_grad:
            return collectives.unshard(self.leaf, None, self.route_text)
        if self.extension is not None:
            return self._gathered_by_extension(self.extension)
        local = collectives.unshard(*self._leaf_sink_and_route())
        return local if self.outer is None else self.outer.wrap(local)

    def _gathered_by_extension(self, extension: AllGatherExtension) -> Tensor:
        sent, metadata = extension.split()
        outputs = [collectives.unshard(each, None, self.input_route_text).view(-1, *each.shape[1:]) for each in sent]
        whole, _ = extension.join(outputs, metadata)
        local = collectives.with_gradient(whole, *self._leaf_sink_and_route())
        return local if self.outer is None else self.outer.wrap(local)

    def _leaf_sink_and_route(self) -> tuple[Tensor, Tensor | None, str]:
        """Return the leaf, where its gradient goes if not to itself, and how."""
        if not self.sharded_param.requires_grad:
            return self.leaf.detach(), None, self.route_text
        if not self.status.reduce_grads and self.pending.leaf is not None:
            return self.leaf, self.pending.leaf, self.route_text
        if not self.status.all_reduce_grads and self.partial.leaf is not None:
            return self.leaf, self.partial.leaf, self.partial_route_text
        return self.leaf, None, self.route_text

    # ---- gradients ----

    def prepare_to_store(self) -> None:
        """Make the leaves that take gradients while they are not reduced wholly."""
        self._choose_read()
        if not self.leaf.requires_grad:
            return
        if not self.status.reduce_grads:
            self.pending.prepare(self.placement.device)
        if not self.status.all_reduce_grads:
            self.partial.prepare(self.placement.device)

    @property
    def has_unsharded_grad(self) -> bool:
        """Whether eager autograd has left a gradient that no reduction has taken."""
        return getattr(getattr(self._unsharded, "param", None), "grad", None) is not None

    def _land(self, leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        self._on_landing()
        self.land(grad)

    def _on_landing(self) -> None:
        self.status.on_landing()

    def land(self, padded: Tensor | None) -> None:
        """Add a reduced, padded gradient to ``sharded_param.grad`` and run the parameter's own hooks."""
        if padded is None:
            return
        local = self._unpadded(padded)
        if local.device != self.device:
            local = local.to(self.device)
        if self.sharded_param.grad is None:
            # Without DTensor.__init__, which does nothing but leave Dynamo, for 2 us a gradient.
            self.sharded_param.grad = DTensor.__new__(DTensor, local, self._spec, requires_grad=False)
        else:
            local_of(self.sharded_param.grad).add_(local)
        for hook in (getattr(self.sharded_param, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(self.sharded_param)

    def land_zeros(self) -> None:
        """Give a trainable parameter that has no gradient one of zeros."""
        if self.sharded_param.requires_grad and self.sharded_param.grad is None:
            self.land(torch.zeros(self.layout.shard_shape, dtype=self.leaf.dtype, device=self.device))

    # ---- unsharded ----

    def all_gather_inputs(self) -> tuple[list[Tensor], list[ShardLayout], Route]:
        """Return what this rank sends, how each result is laid out, and the way."""
        if self._post_forward is not None:
            shard, route = self._post_forward
            return [shard], [replace(self.layout, world=route.shard_world)], route
        if self.extension is None:
            return [self.shard], [self.layout], self.route
        sent = list(self.extension.launch())
        whole = replace(self.route, follows_shard=True)
        return sent, [ShardLayout(whole.for_shard(each).shape, 0, self.layout.world) for each in sent], self.route

    def allocate(self, layouts: Sequence[ShardLayout], dtypes: Sequence[torch.dtype]) -> Sequence[Tensor]:
        """Give the all-gather outputs memory and return them, see :class:`Unsharded`."""
        if self._unsharded is None:
            self._unsharded = self._new_unsharded(layouts, dtypes)
        return self._unsharded.allocate(layouts)

    def _new_unsharded(self, layouts: Sequence[ShardLayout], dtypes: Sequence[torch.dtype]) -> Unsharded:
        device = self.placement.device
        if self.extension is not None:
            return ExtendedUnsharded(self.extension, layouts, dtypes, device, self.outer)
        return UnshardedParam(self.layout, self.dtypes[0], device, self.outer)

    def to_unsharded(self) -> None:
        """Register the unsharded parameter, which must have been gathered."""
        if self._unsharded is None:
            raise FSDPError(f"{self.name}: unsharded before it was gathered")
        self._unsharded.complete()
        self._unsharded.param.requires_grad_(self.sharded_param.requires_grad)
        self._register(self._unsharded.param)
        self._post_forward = None
        self.state = ShardedState.UNSHARDED

    def free_unsharded(self) -> None:
        """Free what was allocated for a gather that nobody wants, unless the parameter is unsharded."""
        if self.state is not ShardedState.UNSHARDED:
            self._free()

    def to_sharded(self) -> None:
        """Register the sharded parameter and free all other memory."""
        self._register(self.sharded_param)
        self._free()
        self._post_forward = None
        self.state = ShardedState.SHARDED

    def _free(self) -> None:
        if self._unsharded is not None and not self.status.keep_unsharded_storage:
            self._unsharded.free()

    def to_sharded_post_forward(self) -> None:
        """Register the sharded parameter, and keep a shard over the smaller group rather than the whole."""
        smaller = self.smaller
        if smaller is None or self._unsharded is None or self.extension is not None:
            raise FSDPError(f"{self.name}: expected an unsharded parameter and a smaller group, found {self.state}")
        whole = local_of(self._unsharded.param.detach())
        kept = take_shard(whole, replace(self.layout, world=smaller.world), smaller.rank)
        self.to_sharded()
        self._post_forward = (kept, self.route.post_forward())
        self.state = ShardedState.SHARDED_POST_FORWARD

    def take_unsharded_grad(self) -> Tensor | None:
        """Return the gradient that eager autograd accumulated, local and unsharded, and forget it."""
        if self._unsharded is None or not self.has_unsharded_grad:
            return None
        grad, self._unsharded.param.grad = self._unsharded.param.grad, None
        return grad if grad is None or self.outer is None else self.outer.local_grad(grad)

    def _register(self, param: nn.Parameter) -> None:
        for module, name in self.info.places():
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = param
            else:
                setattr(module, name, param)


def _without_memory(like: Tensor) -> Tensor:
    return torch.zeros(1, dtype=like.dtype, device=like.device).expand(like.shape)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if a.device != b.device or a.dtype != b.dtype or a.shape != b.shape or is_extended(a):
        return False
    return a.numel() == 0 or (a.device.type != "meta" and a.data_ptr() == b.data_ptr())
