"""One parameter: its states, sharded and unsharded, which of its tensors is registered, and what replaces them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..collectives import take_shard
from ..errors import FSDPError
from ..expect import unexpected
from ..sharding.dtensor import dtensor_like, local_of, outer_parallelism, set_local, sharded_spec
from ..sharding.layout import ShardLayout
from ..sharding.spec import CommSpec
from .extension import POST, PRE, check_extension, inner_tensors, is_extended, take_extended
from .gradients import Gradients
from .placement import ParamPlacement, Place, ShardedState, TakenOriginal, comm_spec
from .storage import ShardStorage, Unsharded, same_memory, unpadded, without_memory
from .unit import Unit

HELD = ""  # in place of a spec: hooks hold the unsharded parameter, so a traced read is of what is registered
HELD_SPECS = (HELD, HELD), (HELD, HELD)
_Specs = tuple[tuple[str | None, str | None], ...]  # local_spec, local_spec_without_grad; outside of calls, in one


class FSDPParam:
    """One original parameter from the moment it is sharded.

    ``name`` is full, relative to the outermost sharded module known so far. ``first``, the original, is not kept.
    """

    def __init__(
        self, places: Sequence[Place], placement: ParamPlacement, unit: Unit, name: str, first: nn.Parameter
    ) -> None:
        self.places, self.placement, self.unit, self.name = tuple(places), placement, unit, name
        mesh_info, unsharded = placement.mesh_info, local_of(first.detach())
        self.original = TakenOriginal(first, self)
        self.users = [unit]  # every unit that has modules which share it
        self.outer = outer_parallelism(name, mesh_info, first)
        layout = ShardLayout(tuple(unsharded.shape), placement.dim, mesh_info.shard_mesh_size)
        self.state = ShardedState.SHARDED
        inner = inner_tensors(name, unsharded, layout)
        take = take_extended if is_extended(unsharded) else take_shard
        padded = take(unsharded, layout, mesh_info.shard_mesh_rank)
        if placement.offload is not None and padded.device.type != "meta":
            padded = placement.pinned(padded.cpu())
        local = unpadded(padded, layout, layout.length(mesh_info.shard_mesh_rank))
        sharded = DTensor(local, sharded_spec(mesh_info, first, self.outer, placement.dim), requires_grad=False)
        sharded_param = nn.Parameter(sharded, requires_grad=first.requires_grad)
        self._link(ShardStorage(sharded_param, padded, layout, inner))
        self.unit.followers.append(self)
        self.register(self.sharded_param)

    def _link(self, storage: ShardStorage, earlier: Gradients | None = None) -> None:
        """Take the sharded parameter of ``storage``, and sums of ``earlier``; make the leaf that graphs read."""
        self.storage, padded = storage, storage.padded
        self.sharded_param = storage.sharded  # a DTensor
        self.placement = self.placement.following(self.sharded_param)
        self.placement.give_grad_dtype(self.sharded_param)
        reduction = self.placement.dtypes(padded.dtype).reduction
        if self.outer is not None and self.outer.reduction != reduction:  # graphs are guarded on the object
            self.outer = replace(self.outer, reduction=reduction)
        self.extension = self.storage.extension(self.places[0][0], self.placement)
        # A tensor subclass is no argument for our operators; a plain leaf without memory takes its gradients.
        is_sent = self.extension is None
        plain = storage.counted if is_sent else without_memory(padded.shape, padded.dtype, padded.device)
        # The shard as graphs read it; its gradient is accumulated into sharded_param.grad. While the outermost module
        # is called it requires a gradient as the parameter does: a guard on a leaf is far cheaper than on a DTensor.
        self.leaf = nn.Parameter(plain, requires_grad=plain.is_floating_point() or plain.is_complex())
        self.leaf_is_current = False
        self.gradients = Gradients(self.leaf, self.storage, self.placement, self.unit)
        self.unsharded = Unsharded(self.placement.device, self.outer, self.extension)
        self.follow_config(respec=True)
        if earlier is not None:
            self.gradients.take_unreduced(earlier)

    def follow_config(self, respec: bool) -> None:
        """Derive what depends on the unit's configuration; with ``respec`` also what depends on the name."""
        if respec:
            spec = comm_spec(self.name, self.storage.layout, self.leaf.dtype, self.placement, self.unit.config)
            if spec != vars(self).get("spec"):  # else the same object, by which buckets are found again
                self.spec, self.spec_text = spec, spec.encode()
            if self.extension is not None:
                self.extension.name = self.name
                self.extension.input_spec_text = replace(spec, param=replace(spec.param, shape=None)).encode()
        self.gradients.follow(self.spec, self.spec_text, self.unit.config)
        text = self.spec_text if self.extension is None and self.outer is None else None
        is_usual = self.gradients.unsharded_leaf is None and self.gradients.shard_leaf is None  # the leaf takes them
        free = (None, None), (text if is_usual else None, text)
        self._specs: tuple[_Specs, _Specs] = free, free  # as they are, and where hooks do not hold the parameter
        self.follow_hold()

    def follow_hold(self) -> None:
        """Let traced reads be of what is registered while hooks hold the parameter."""
        free = self._specs[1]
        self._specs = HELD_SPECS if self.is_held else free, free
        self.follow_call(self.unit.in_call)

    def follow_call(self, in_call: bool) -> None:
        """Let the leaf require a gradient as the parameter does if it is ``in_call``, else if it can.

        This runs for every parameter at both ends of every call. In every step Dynamo guards each attribute that a
        traced read asks for. So where nothing else counts, one of them says it all: ``local_spec``, or without
        gradients, where reductions do not matter, the other one.
        """
        if self.leaf_is_current is not in_call:
            self.leaf_is_current = in_call
            if in_call and self.state is ShardedState.UNSHARDED:
                self.unsharded.follow_requires_grad(self.sharded_param, is_registered=True)
            requires_grad = self.gradients.is_differentiable and (not in_call or self.sharded_param.requires_grad)
            if self.leaf.requires_grad is not requires_grad:
                self.leaf.requires_grad = requires_grad
        self.local_spec, self.local_spec_without_grad = self._specs[0][in_call]

    @property
    def is_held(self) -> bool:
        """Whether eager hooks of any unit hold it unsharded, for a module call or backward under way."""
        return self.unit.hooked or (len(self.users) > 1 and any(user.hooked for user in self.users))

    def register(self, param: nn.Parameter) -> None:
        for module, name in self.places:
            module._parameters[name] = param
            if type(module).__setattr__ is not nn.Module.__setattr__:
                setattr(module, name, param)  # which may want to see it

    def share(self, places: Iterable[Place], user: Unit) -> None:
        self.places = (*self.places, *places)
        self.users.append(user)
        user.followers.append(self)
        self.register(self.sharded_param)

    def check_untouched(self) -> None:
        """Raise RuntimeError unless the parameter is registered wherever it is used, over the storage it had."""
        is_unsharded = self.state is ShardedState.UNSHARDED
        expected = self.unsharded.param if is_unsharded else self.sharded_param
        for module, attribute in self.places:
            found = module._parameters.get(attribute)
            if found is not expected and not (is_unsharded and self.unsharded.is_also(found)):
                raise not_registered(self.name, type(found).__name__)
        if self.sharded_param.untyped_storage() is not self.storage.of_dtensor:
            got = "another by param.data = ..., which a DTensor does not follow"
            do = "use param.copy_(...) under torch.no_grad(), or load_state_dict()"
            raise unexpected(self.name, "the shard that it had", got, do, RuntimeError)

    def check_replacement(self, current: Tensor | None) -> None:
        """Raise TypeError or ValueError unless ``current`` is a DTensor as the sharded parameter."""
        sharded: Any = self.sharded_param  # a DTensor
        if not isinstance(current, DTensor):
            do = f"assign a DTensor with placements {sharded.placements}, or load without assign=True"
            raise unexpected(self.name, "a sharded DTensor", f"a {type(current).__name__}", do, TypeError)
        if current.shape != sharded.shape or current.placements != sharded.placements:
            expected = f"shape {tuple(sharded.shape)} with {sharded.placements}"
            got = f"{tuple(current.shape)} with {current.placements}"
            raise unexpected(self.name, expected, got, "redistribute it first")

    def relink(self) -> bool:
        """Adopt what replaced the parameter or its storage, as ``to`` does, if :meth:`check_replacement` lets it.

        Tell whether anything did.
        """
        module, name = self.places[0]
        current = module._parameters[name]
        if self.state is ShardedState.UNSHARDED or current is None:
            raise FSDPError(f"{self.name}: relinked while {self.state}")
        try:
            self.check_replacement(current)
        except (TypeError, ValueError):
            self.register(self.sharded_param)
            raise
        is_same = current is self.sharded_param and same_memory(local_of(current), self.storage.local)
        if is_same:
            self.storage.of_dtensor = current.untyped_storage()
            set_local(current, self.storage.local)  # not an alias, whose writes autograd would count by themselves
            self.placement.following(current).give_grad_dtype(current)
        else:
            self.unsharded.count_write()  # a backward of a forward before this would find it without memory
            padded = self.storage.adopt_memory(current, self.placement)
            self._link(ShardStorage(current, padded, self.storage.layout, self.storage.inner), self.gradients)
        self.register(current)  # everywhere: load_state_dict(assign=True) may have parted shared places
        return not is_same

    def adopt_replacement(self) -> bool:
        """Follow what the user has put past its module or on its local tensor; tell whether there was anything."""
        registered = [module._parameters.get(name) for module, name in self.places]
        others = [each for each in registered if isinstance(each, nn.Parameter) and each is not self.sharded_param]
        is_replaced = bool(others) and self.state is ShardedState.SHARDED
        if is_replaced:
            self.check_replacement(others[0])
            self.register(others[0])
            self.relink()
        local = self.storage.local
        is_extended_now = is_extended(local) and not (self.extension is not None and self.extension.is_of(local))
        if is_extended_now:
            check_extension(self.name, local, self.spec.post_forward.world)
        sets_grad_dtype = self.placement != self.placement.following(self.sharded_param)
        has_changed = is_extended_now or (sets_grad_dtype and self.state is ShardedState.SHARDED)
        if has_changed:
            self._link(self.storage, self.gradients)
        return is_replaced or has_changed

    def start_copy(self, memo: dict[int, Any]) -> None:
        """Put a copy into ``memo`` of ``deepcopy``: sharded, in memory of its own, without gradients and hooks."""
        if self.state is ShardedState.UNSHARDED:
            self.unsharded.follow_requires_grad(self.sharded_param, is_registered=True)
        copied, storage = copy(self), copy(self.storage)
        copied.storage = storage
        memo[id(self)] = copied
        own = self.placement.pinned(storage.padded.detach().clone())
        storage.padded = memo.setdefault(id(storage.of_dtensor), own)  # one for all that were tied after fully_shard
        local = memo[id(self.storage.local)] = storage.unpadded(storage.padded)
        vars(local).update(deepcopy({m: f for m, f in vars(storage.local).items() if m in (PRE, POST)}, memo))
        sharded = memo.get(id(self.sharded_param))  # of an optimizer that was copied before the model
        if sharded is None:
            sharded = nn.Parameter(dtensor_like(self.sharded_param, local), requires_grad=False)
        set_local(sharded, local)
        sharded.grad, sharded.requires_grad = None, self.sharded_param.requires_grad
        copied.sharded_param = memo[id(self.sharded_param)] = sharded
        if self.unsharded.param is not None:
            memo[id(self.unsharded.param)] = sharded  # which may be registered

    def finish_copy(self, memo: dict[int, Any]) -> None:
        """Complete this copy, once ``memo`` has those of modules and units."""
        vars(self).update({name: deepcopy(vars(self)[name], memo) for name in ("places", "unit", "users")})
        if (original := self.original()) is not None:  # a module outside of units may still share it
            self.original = TakenOriginal(deepcopy(original, memo), self)
        self.state = ShardedState.SHARDED
        for user in self.users:
            user.followers.append(self)
        inner = deepcopy(self.storage.inner, memo)
        self._link(ShardStorage(self.sharded_param, self.storage.padded, self.storage.layout, inner))

    def all_gather_inputs(self) -> tuple[list[Tensor], list[CommSpec]]:
        """Return what this rank sends, and for each the spec by which it is all-gathered."""
        if self.unsharded.post_forward is not None:
            shard, spec = self.unsharded.post_forward
            return [shard], [spec]
        if self.extension is None:
            return [self.storage.padded], [self.spec]
        return self.extension.launch()

    def allocate(self, specs: Sequence[CommSpec]) -> Sequence[Tensor]:
        """Give the all-gather outputs memory and return them, see :class:`Unsharded`."""
        return self.unsharded.allocate(specs, [self.spec] if self.extension is None else specs)

    def to_unsharded(self) -> None:
        """Register the unsharded parameter, which must have been all-gathered."""
        param = self.unsharded.complete()
        if param is None:
            raise FSDPError(f"{self.name}: unsharded before it was all-gathered")
        self.unsharded.follow_requires_grad(self.sharded_param, is_registered=False)
        self.state = ShardedState.UNSHARDED  # before it is true: a reset must see what an exception has cut off
        self.register(param)
        self.unsharded.post_forward = None

    def drop_unsharded(self, is_lost: bool) -> None:
        """Free what was allocated for an all-gather that nobody needs, unless the parameter is unsharded.

        The memory of one that ``is_lost`` is left to it, and the next all-gather gets memory of its own.
        """
        if is_lost:
            abandoned = self.unsharded
            self.unsharded = Unsharded(self.placement.device, self.outer, self.extension)
            self.unsharded.post_forward = abandoned.post_forward
            abandoned.forbid_use()
        elif self.state is not ShardedState.UNSHARDED and not self.unit.config.keep_unsharded_storage:
            self.unsharded.free()

    def to_sharded(self) -> None:
        """Register the sharded parameter and free all other memory, unless the unit keeps it."""
        if self.state is ShardedState.UNSHARDED:
            self.unsharded.follow_requires_grad(self.sharded_param, is_registered=True)
        self.register(self.sharded_param)
        if not self.unit.config.keep_unsharded_storage:
            self.unsharded.free()
        self.unsharded.post_forward = None
        self.state = ShardedState.SHARDED

    def to_sharded_post_forward(self) -> None:
        """Register the sharded parameter, and keep a shard over the smaller group rather than the parameter."""
        world = self.spec.post_forward.world
        if world == 1 or self.unsharded.param is None or self.extension is not None:
            raise FSDPError(f"{self.name}: expected an unsharded parameter and a smaller group, found {self.state}")
        rank = self.placement.mesh_info.shard_mesh_rank % world
        kept = take_shard(local_of(self.unsharded.param.detach()), replace(self.storage.layout, world=world), rank)
        self.to_sharded()
        self.unsharded.post_forward = (kept, self.spec.after_forward)
        self.state = ShardedState.SHARDED_POST_FORWARD


class Registered:
    """Sharded parameters as they are registered, and their storages.

    Unlike :meth:`FSDPParam.check_untouched` it is fast, and does not know what else may be right, such as unsharded
    ones. It keeps the parameters; weak references to them would forbid ``torch.utils.swap_tensors``.
    """

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        places = [(place, param.sharded_param) for param in params for place in param.places]
        self._dicts = [module._parameters for (module, _), _ in places]
        self._names = [name for (_, name), _ in places]
        self._expected = [sharded for _, sharded in places]
        # Each is the same object for as long as it is kept. That of a DTensor has no memory.
        self._storages = [sharded.untyped_storage() for sharded in self._expected]

    def still(self) -> bool:
        """Tell whether the same parameters are registered, over the same storages."""
        registered = map(dict.get, self._dicts, self._names)
        storages = map(Tensor.untyped_storage, self._expected)
        return all(map(is_, registered, self._expected)) and all(map(is_, storages, self._storages))


def not_registered(name: str, found: str) -> Exception:
    """Return the error for a parameter in whose place ``found`` is registered."""
    places = "torch.func.functional_call, torch.nn.utils.parametrize and nonstrict_trace of a module"
    got = f"a {found} in its place, as {places} put there"
    do = (
        "call the model with its own parameters and copy values into them, or parametrize it before fully_shard; "
        "after an exception call reset_iter_state()"
    )
    return unexpected(name, "the parameter that fully_shard registered", got, do, RuntimeError)
