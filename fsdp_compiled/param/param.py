"""One parameter's states, sharded and unsharded, and its gradients.

It knows one parameter, its layout and its modules; it must not know which parameters share a collective, hooks or
streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import InitVar, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..collectives import padded_shard, take_shard
from ..errors import FSDPError
from ..policy import resolved
from ..sharding.dtensor import local_of, outer_parallelism, sharded_spec
from ..sharding.layout import ShardLayout
from ..sharding.spec import CommSpec
from .extension import (
    POST,
    PRE,
    AllGatherExtension,
    check_extension,
    check_smaller_group,
    is_extended,
)
from .gradients import AccumulatedGrad, after_user_hooks, tell_unit
from .memory import identifiable, same_memory, without_memory
from .placement import (
    ParamModuleInfo,
    ParamPlacement,
    ShardedState,
    TakenOriginal,
    check_replacement,
    comm_spec,
)
from .quantised import inner_tensors
from .replaced import check_untouched, storage_of
from .unit import Unit
from .unsharded import ExtendedUnsharded, Unsharded, UnshardedParam


@dataclass(eq=False)
class FSDPParam:
    """One original parameter from the moment it is sharded."""

    info: ParamModuleInfo
    placement: ParamPlacement
    unit: Unit
    name: str  # full name, relative to the outermost sharded module known so far
    first: InitVar[nn.Parameter]  # the original parameter; only read, and not kept

    def __post_init__(self, first: nn.Parameter) -> None:
        self.original = TakenOriginal(first, self)
        self.users = [self.unit]  # every unit that has modules which share it
        self.is_hooked = False  # eager hooks of any unit hold it unsharded, during a module call or backward
        # While the outermost module is called, leaves require gradients as their parameters do: a guard on a leaf is
        # far cheaper than one on a DTensor.
        self.leaf_mirrors = False
        mesh_info = self.placement.mesh_info
        unsharded = local_of(first.detach())
        self.outer = outer_parallelism(mesh_info, first)
        self.layout = ShardLayout(tuple(unsharded.shape), self.placement.dim, mesh_info.shard_world)
        self._length = self.layout.length(mesh_info.shard_rank)  # of this rank's shard, without padding
        self._reduce_scatter_group = mesh_info.shards
        self.state = ShardedState.SHARDED
        self.is_registering = False  # what is assigned to a module comes from here and not from the user
        self.sharded_param: nn.Parameter  # DTensor
        self.shard: Tensor  # padded; shares storage with the DTensor's local tensor
        self.leaf: nn.Parameter  # the shard as graphs read it; its gradient is accumulated into sharded_param.grad
        self.spec: CommSpec | Any = None  # derived from configuration, names and dtypes, see refresh()
        self._post_forward: tuple[Tensor, CommSpec] | None = None  # padded shard over the smaller group
        self._inner = inner_tensors(self.name, unsharded, self.layout)
        padded = take_shard(unsharded, self.layout, mesh_info.shard_rank)
        if self.placement.offload is not None and padded.device.type != "meta":
            padded = self.placement.pinned(padded.cpu())
        spec = sharded_spec(mesh_info, first, self.placement.dim)
        sharded = DTensor(self._unpadded(padded), spec, requires_grad=False)
        self._link(nn.Parameter(sharded, requires_grad=first.requires_grad), padded)
        self.register(self.sharded_param)

    # ---- sharded ----

    def _unpadded(self, padded: Tensor) -> Tensor:
        return padded if self._length == self.layout.chunk else padded.narrow(self.layout.dim, 0, self._length)

    def _padded(self, local: Tensor) -> Tensor:
        """Return ``local`` with padding: behind it in its own memory, if that is a shard's, or else copied."""
        nbytes = self.layout.shard_numel * local.itemsize
        is_padded = type(local) is Tensor and local.is_contiguous() and local.shape != self.layout.shard_shape
        if is_padded and not local.storage_offset() and local.untyped_storage().nbytes() == nbytes:
            return torch.as_strided(local, self.layout.shard_shape, local.stride(), 0)
        return padded_shard(local, self.layout)

    def _link(self, sharded: nn.Parameter, padded: Tensor) -> None:
        """Take ``sharded``, whose local tensor lies in ``padded``, and make the leaf that graphs read."""
        self.sharded_param = sharded
        self.shard = padded if self._inner is None else self._inner.extend(padded.detach())  # not the user's tensor
        self._local = identifiable(local_of(sharded), padded)
        self._spec = sharded._spec  # type: ignore[attr-defined]
        self._storage = storage_of(sharded)
        self.is_differentiable = padded.is_floating_point() or padded.is_complex()
        self.extension = self._new_extension()
        # A tensor subclass is no argument for our operators; a plain leaf without memory takes its gradients.
        plain = padded if self.extension is None else without_memory(padded)
        self.leaf = nn.Parameter(plain, requires_grad=self.is_differentiable)
        if self.is_differentiable:
            tell_unit(self.leaf, self.unit)
        self._unsharded: Unsharded | None = None  # made by the first eager all-gather
        # While sync is off; and padded ones that only the shard group has reduced.
        self.unsharded_grad = AccumulatedGrad(self.layout.shape, self.dtypes[1], self.unit)
        self.partial_grad = AccumulatedGrad(self.layout.shard_shape, self.dtypes[1], self.unit)
        self.refresh()

    def _new_extension(self) -> AllGatherExtension | None:
        extended = next((tensor for tensor in (self._local, self.shard) if is_extended(tensor)), None)
        if extended is None:
            return None
        policy, mesh = self.placement.mp_policy, self.placement.mesh_info.shard_mesh
        unsharded = torch.empty(self.layout.shape, device="meta")
        arguments = (mesh, unsharded.shape, unsharded.stride(), self.info.module, policy)
        # The DTensor's local tensor itself, if it needs no padding: torchao keeps its scale there.
        shard = self._local if self._local.shape == self.shard.shape else self.shard
        dtype, shape = resolved(policy, self.shard.dtype)[0], self.layout.shape
        return AllGatherExtension(extended, shard, arguments, dtype, self.placement.device, shape)

    def relink(self) -> None:
        """Take over what replaced the sharded parameter or its storage: ``to``, ``to_empty``, ``assign=True``.

        TypeError or ValueError if that is no DTensor of the same shape and placements.
        """
        current = self.info.module._parameters[self.info.name]
        if self.state is ShardedState.UNSHARDED or current is None:
            raise FSDPError(f"{self.name}: relinked while {self.state}")
        try:
            self.check_replacement(current)
        except (TypeError, ValueError):
            self.register(self.sharded_param)
            raise
        local = local_of(current)
        if current is self.sharded_param and (local is self._local or same_memory(local, self._unpadded(self.shard))):
            self._storage = storage_of(current)
            self.register(current)  # load_state_dict(assign=True) may have parted shared places
            return
        unsharded_grad, partial_grad = self.unsharded_grad.take(), self.partial_grad.take()
        padded = self.placement.pinned(self._padded(local.detach()))
        if not same_memory(local, padded) or tuple(local.shape) != self.layout.shard_shape:
            current._local_tensor = self._unpadded(padded)  # type: ignore[attr-defined]
        self._link(current, padded)
        self.register(current)
        for accumulated, kept in ((self.unsharded_grad, unsharded_grad), (self.partial_grad, partial_grad)):
            if kept is not None:
                accumulated.add(kept.to(self.placement.device))

    def check_replacement(self, current: Tensor | None) -> None:
        """Raise if ``current`` cannot become the sharded parameter, see :meth:`relink`."""
        check_replacement(self.name, self._spec, current)

    def take_over(self) -> bool:
        """Follow what the user has put past its module or on its local tensor; tell whether there was anything."""
        registered = [module._parameters.get(name) for module, name in self.info.places()]
        others = [each for each in registered if isinstance(each, nn.Parameter) and each is not self.sharded_param]
        is_replaced = bool(others) and self.state is ShardedState.SHARDED
        if is_replaced:
            self.check_replacement(others[0])
            self.register(others[0])
            self.relink()
        known = self.extension is not None and self.extension.is_of(self._local)
        is_extended_now = is_extended(self._local) and not known
        if is_extended_now:
            check_extension(self.name, self._local)
            check_smaller_group(self.name, self._local, self.spec.post_forward.world)
            self._link(self.sharded_param, self.shard)
        return is_replaced or is_extended_now

    def check_untouched(self) -> None:
        """Raise if something that forward would ignore has taken the parameter's place, see ``replaced.py``."""
        unsharded = self.unsharded_param if self.state is ShardedState.UNSHARDED else None
        check_untouched(self.name, self.info, unsharded, self.sharded_param, self._storage)

    def follow_hooks(self) -> None:
        """Take over whether hooks of any unit hold it."""
        self.is_hooked = any(user.hooked for user in self.users)
        self._choose_read()

    def mirror_leaf(self, mirror: bool) -> None:
        """Note whether the leaf requires a gradient exactly if the parameter does."""
        self.leaf_mirrors = mirror
        self._choose_read()

    def share(self, places: Iterable[tuple[nn.Module, str]], user: Unit) -> None:
        """Let modules of another unit share it."""
        self.info = replace(self.info, shared=(*self.info.shared, *places))
        self.users.append(user)
        self.register(self.sharded_param)

    def start_copy(self, memo: dict[int, Any]) -> None:
        """Put a copy into ``memo`` of ``deepcopy``: sharded, in memory of its own, without gradients and hooks."""
        copied = memo[id(self)] = copy(self)
        copied.shard = self.placement.pinned(self.shard.detach().clone())
        local = memo[id(self._local)] = copied._unpadded(copied.shard)
        vars(local).update(deepcopy({m: f for m, f in vars(self._local).items() if m in (PRE, POST)}, memo))
        sharded = nn.Parameter(DTensor(local, self._spec, requires_grad=False), self.sharded_param.requires_grad)
        copied.sharded_param = memo[id(self.sharded_param)] = sharded
        if self.unsharded_param is not None:
            memo[id(self.unsharded_param)] = sharded  # which may be registered

    def finish_copy(self, memo: dict[int, Any]) -> None:
        """Complete this copy, once ``memo`` has those of modules and units."""
        vars(self).update({name: deepcopy(vars(self)[name], memo) for name in ("info", "unit", "users", "_inner")})
        if (original := self.original()) is not None:  # a module outside of units may still share it
            self.original = TakenOriginal(deepcopy(original, memo), self)
        self.state, self._post_forward = ShardedState.SHARDED, None
        self.is_hooked = self.leaf_mirrors = self.is_registering = False
        self._link(self.sharded_param, self.shard)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """(all-gather dtype, reduce dtype)."""
        return resolved(self.placement.mp_policy, self.leaf.dtype)

    @property
    def device(self) -> torch.device:
        """Device of the shard."""
        return self.leaf.device

    # ---- the spec ----

    def refresh(self) -> None:
        """Derive the spec anew; call it after any change of the unit's configuration, of a name or a dtype.

        Traced reads take constants, because Dynamo guards every attribute that they read.
        """
        spec = comm_spec(self.name, self.layout, self.leaf.dtype, self.placement, self.unit.config)
        spec = replace(spec, reduction=replace(spec.reduction, shards=self._reduce_scatter_group))
        if spec != self.spec:
            self.spec = spec
            self.spec_text = spec.encode()
            self.input_spec_text = replace(spec, param=replace(spec.param, shape=None)).encode()
        if self.extension is not None:
            self.extension.name = self.name
        self._follow_config()

    def _follow_config(self) -> None:
        self.reduces_grads = self.unit.config.reduce_grads and self.unit.config.all_reduce_grads
        self.is_plain = self.extension is None and self.outer is None
        self._choose_read()

    def _choose_read(self) -> None:
        # In one attribute of each parameter, because every traced read guards what it asks for, in every step; and in
        # another one without gradients, where a graph does not depend on how they are reduced.
        is_ready = self.is_plain and self.leaf_mirrors and not self.is_hooked
        self.plain_spec_without_grad = self.spec_text if is_ready else None
        self.plain_spec = self.plain_spec_without_grad if self.reduces_grads else None

    def use_separate_reduce_scatter_group(self, separate: bool) -> None:
        """Reduce gradients over a process group of its own, or over that of the all-gathers."""
        info = self.placement.mesh_info
        self._reduce_scatter_group = info.separate_reduce_scatter_group() if separate else info.shards
        self.refresh()

    @property
    def requires_grad(self) -> bool:
        """Whether the user trains the parameter."""
        return self.leaf.requires_grad if self.leaf_mirrors else self.sharded_param.requires_grad

    # ---- gradients ----

    def prepare_to_accumulate(self) -> None:
        """Make the leaves that take gradients which are not completely reduced, if the unit is configured so."""
        self._follow_config()
        if not self.leaf.requires_grad:
            return
        if not self.unit.config.reduce_grads:
            self.unsharded_grad.prepare(self.placement.device)
        if not self.unit.config.all_reduce_grads:
            self.partial_grad.prepare(self.placement.device)

    @property
    def has_unreduced_grad(self) -> bool:
        """Whether there is an unsharded gradient, of this backward or accumulated, that no reduction has taken."""
        return self._eager_grad is not None or self.unsharded_grad.grad is not None

    @property
    def _eager_grad(self) -> Tensor | None:
        return getattr(self.unsharded_param, "grad", None)

    def accumulate_leaf_grad(self) -> None:
        """Take the gradient that a compiled backward has left in the leaf, if any."""
        grad = self.leaf.grad
        if grad is not None:
            self.leaf.grad = None
            self.accumulate_grad(grad.detach() if grad.requires_grad else grad)  # create_graph=True gives it a graph

    def accumulate_grad(self, padded: Tensor) -> None:
        """Add a reduced, padded gradient to ``sharded_param.grad`` and run the parameter's own hooks."""
        local = self._unpadded(padded)
        if local.device != self.device:
            local = local.to(self.device)
        sharded = self.sharded_param
        if sharded._backward_hooks:
            local = after_user_hooks(sharded, self.name, self._sharded_grad(local))
        if sharded.grad is None:
            sharded.grad = self._sharded_grad(local)
        else:
            local_of(sharded.grad).add_(local)
        for hook in (getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(sharded)

    def _sharded_grad(self, local: Tensor) -> DTensor:
        # Without DTensor.__init__, which does nothing but leave Dynamo, for 2 us a gradient.
        return DTensor.__new__(DTensor, local, self._spec, requires_grad=False)

    def accumulate_zeros(self) -> None:
        """Give a trainable parameter that has no gradient one of zeros."""
        if self.sharded_param.requires_grad and self.sharded_param.grad is None:
            self.accumulate_grad(torch.zeros(self.layout.shard_shape, dtype=self.leaf.dtype, device=self.device))

    def take_eager_grad(self) -> Tensor | None:
        """Return the gradient that eager autograd accumulated, local and unsharded, and forget it."""
        grad, unsharded = self._eager_grad, self.unsharded_param
        if grad is None or unsharded is None:
            return None
        unsharded.grad = None
        return grad if self.outer is None else self.outer.local_grad(grad)

    # ---- unsharded ----

    @property
    def unsharded_param(self) -> nn.Parameter | None:
        """The unsharded parameter, with memory or without, once there has been one."""
        return getattr(self._unsharded, "param", None)

    def all_gather_inputs(self) -> tuple[list[Tensor], list[CommSpec]]:
        """Return what this rank sends, and for each the spec by which it is all-gathered."""
        if self._post_forward is not None:
            shard, spec = self._post_forward
            return [shard], [spec]
        if self.extension is None:
            return [self.shard], [self.spec]
        sent = list(self.extension.launch())
        spec = CommSpec.decode(self.input_spec_text)
        return sent, [spec.for_input(each.shape, each.dtype) for each in sent]

    def allocate(self, specs: Sequence[CommSpec]) -> Sequence[Tensor]:
        """Give the all-gather outputs memory and return them, see :class:`Unsharded`."""
        if self._unsharded is None:
            device = self.placement.device
            self._unsharded = (
                UnshardedParam(self.spec, device, self.outer)
                if self.extension is None
                else ExtendedUnsharded(self.extension, specs, device, self.outer)
            )
        return self._unsharded.allocate(specs)

    def to_unsharded(self) -> None:
        """Register the unsharded parameter, which must have been all-gathered."""
        if self._unsharded is None:
            raise FSDPError(f"{self.name}: unsharded before it was all-gathered")
        self._unsharded.complete()
        self._unsharded.param.requires_grad = self.sharded_param.requires_grad
        self.state = ShardedState.UNSHARDED  # before it is true: a reset must see what an exception has cut off
        self.register(self._unsharded.param)
        self._post_forward = None

    def free_unsharded(self) -> None:
        """Free what was allocated for an all-gather that nobody needs, unless the parameter is unsharded."""
        if self.state is not ShardedState.UNSHARDED:
            self._free()

    def to_sharded(self) -> None:
        """Register the sharded parameter and free all other memory."""
        self.register(self.sharded_param)
        self._free()
        self._post_forward = None
        self.state = ShardedState.SHARDED

    def abandon_unsharded(self) -> None:
        """Leave the unsharded memory to what may still write to it; the next all-gather gets memory of its own."""
        unsharded, self._unsharded = self.unsharded_param, None
        if unsharded is not None:
            torch.autograd.graph.increment_version(unsharded)  # so that graphs which have saved it raise
            if unsharded.device.type != "cpu":
                torch.accelerator.synchronize()  # the allocator knows no side stream

    def _free(self) -> None:
        if self._unsharded is not None and not self.unit.config.keep_unsharded_storage:
            self._unsharded.free()

    def to_sharded_post_forward(self) -> None:
        """Register the sharded parameter, and keep a shard over the smaller group rather than the parameter."""
        smaller = self.placement.mesh_info.smaller_group(self.spec.post_forward.world)
        if smaller is None or self._unsharded is None or self.extension is not None:
            raise FSDPError(f"{self.name}: expected an unsharded parameter and a smaller group, found {self.state}")
        unsharded = local_of(self._unsharded.param.detach())
        kept = take_shard(unsharded, replace(self.layout, world=smaller.group.world), smaller.rank)
        self.to_sharded()
        self._post_forward = (kept, self.spec.after_forward)
        self.state = ShardedState.SHARDED_POST_FORWARD

    def register(self, param: nn.Parameter) -> None:
        """Register ``param`` wherever the parameter is used."""
        for module, name in self.info.places():
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = param
                continue
            try:
                self.is_registering = True
                setattr(module, name, param)
            finally:
                self.is_registering = False
