"""The memory of one parameter: this rank's shard, and the unsharded parameter of eager mode, which comes and goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ..collectives import backend, padded_shard, take_shard
from ..sharding.dtensor import OuterParallelism, count_as_one, local_of, set_local, storage_of
from ..sharding.layout import ShardLayout
from ..sharding.spec import CommSpec
from .extension import AllGatherExtension, InnerTensors, is_extended, is_wrapper
from .placement import ParamPlacement


class ShardStorage:
    """The memory of one sharded parameter, with padding."""

    def __init__(self, param: nn.Parameter, padded: Tensor, layout: ShardLayout, inner: InnerTensors | None) -> None:
        self.sharded, self.layout = param, layout
        self.inner = inner  # of a wrapper subclass without an all-gather of its own
        self.padded = padded if inner is None else inner.extend(padded.detach())  # not the user's tensor
        if type(local_of(param)) is Tensor and not is_extended(local_of(param)) and not param.is_inference():
            count_as_one(param)
        self.local = local_of(param)  # it lies in ``padded``
        if not self.local.numel() and padded.numel():
            # accelerate finds an optimizer's parameters again by this address, which is 0 for every empty tensor.
            # It is pickled without these attributes, which torch.load(weights_only=True) refuses.
            vars(self.local).update(data_ptr=padded.data_ptr, __reduce_ex__=self.local.detach().__reduce_ex__)
        self.of_dtensor = param.untyped_storage()  # without memory; another one after ``sharded.data = ...``

    def unpadded(self, padded: Tensor) -> Tensor:
        """Return the part of a padded shard, or of its gradient, that is not padding."""
        return padded if self.layout.is_even else unpadded(padded, self.layout, self.local.shape[self.layout.dim])

    @property
    def counted(self) -> Tensor:
        """The padded shard, as a tensor for which autograd counts writes to the DTensor and its local tensor, too."""
        padded, local = self.padded, self.local
        if type(local) is not Tensor or type(padded) is not Tensor or local.is_inference():
            return padded
        return local.as_strided(padded.shape, padded.stride(), padded.storage_offset())

    @property
    def versions(self) -> list[int]:
        """How often the DTensor and its local tensor were written to; a subclass there has a count of its own."""
        return [each._version for each in (self.sharded, self.local) if not each.is_inference()]

    def follow(self, unsharded: Tensor, rank: int) -> None:
        """Take from the unsharded parameter what differs from this rank's shard, as it is in that one's dtype."""
        padded = self.counted
        shard = take_shard(unsharded, self.layout, rank).to(padded.device)
        padded.copy_(torch.where(shard == padded.to(shard.dtype), padded, shard.to(padded.dtype)))

    def extension(self, module: nn.Module, placement: ParamPlacement) -> AllGatherExtension | None:
        """Return what extends the all-gather of the parameter, which is registered on ``module`` first, or None."""
        extended = next((tensor for tensor in (self.local, self.padded) if is_extended(tensor)), None)
        if extended is None:
            return None
        # The DTensor's local tensor itself, if it needs no padding: torchao keeps its scale there.
        sent = self.local if self.local.shape == self.padded.shape else self.padded
        return AllGatherExtension(extended, sent, module, placement, self.layout.shape)

    def adopt_memory(self, current: nn.Parameter, placement: ParamPlacement) -> Tensor:
        """Return padded memory for ``current``, a DTensor as this one, and let its local tensor lie in it."""
        local = local_of(current)
        padded = placement.pinned(self._with_padding(local.detach()))
        if not same_memory(local, padded):
            set_local(current, self.unpadded(padded))
        return padded

    def _with_padding(self, local: Tensor) -> Tensor:
        """Return ``local`` with padding: behind it in its own memory, if that is a shard's, or else copied."""
        nbytes = self.layout.shard_numel * local.itemsize
        is_padded = type(local) is Tensor and local.is_contiguous() and local.shape != self.layout.shard_shape
        if is_padded and not local.storage_offset() and local.untyped_storage().nbytes() == nbytes:
            return torch.as_strided(local, self.layout.shard_shape, local.stride(), 0)
        return padded_shard(local, self.layout)


class Unsharded:
    """A parameter over storages that are resized between all of their memory and nothing.

    Autograd saves aliases of the parameter in forward; since the storages stay the same objects, filling them again
    before backward gives the aliases their values back.
    """

    def __init__(
        self, device: torch.device, outer: OuterParallelism | None, extension: AllGatherExtension | None
    ) -> None:
        self.param: nn.Parameter | None = None  # with memory or without, once there has been one
        self.post_forward: tuple[Tensor, CommSpec] | None = None  # padded shard over the smaller group
        self._device = device  # of compute
        self._outer = outer  # other parallelism, of which what is all-gathered is the local part
        self._extension = extension  # makes the parameter of several all-gather outputs
        # 1-D, padded, made by the first all-gather; autograd does not count what is written to them.
        self._outputs: list[Tensor] | None = None
        self._views: list[Tensor] = []  # of each, without padding
        self._version: int | None = None  # of the parameter, as all-gathered
        self._counted = 0  # writes to the shard, among those that autograd counts
        self._requires_grad = False  # the parameter's, unless the user has changed it since
        self._nbytes: dict[Tensor, int] = {}  # of every tensor that holds memory
        self._made: Tensor | None = None  # what the extension returned, maybe with padding

    def allocate(self, specs: Sequence[CommSpec], largest: Sequence[CommSpec]) -> Sequence[Tensor]:
        """Return the outputs for an all-gather by ``specs``, flat and padded, in memory for the ``largest``.

        Writing to them does not count as a modification, because it restores the values that autograd saved.
        """
        if self._outputs is None:
            layouts = [spec.layout for spec in largest]
            forms = [(spec.layout.padded_numel, spec.all_gather.dtype) for spec in largest]
            made = [torch.empty(numel, dtype=dtype, device=self._device) for numel, dtype in forms]
            self._views = [flat[: each.numel].view(each.shape) for flat, each in zip(made, layouts, strict=True)]
            self._nbytes = {output: output.untyped_storage().nbytes() for output in made}
            if self._extension is None:
                self.param = self._parameter(self._views[0])
            self._outputs = [output.data for output in made]  # set last: an exception leaves nothing made
        for tensor, nbytes in self._nbytes.items():
            storage = tensor.untyped_storage()
            if storage.nbytes() != nbytes:  # else resize_ would move it
                storage.resize_(nbytes)
        pairs = [(output, spec.layout.padded_numel) for output, spec in zip(self._outputs, specs, strict=True)]
        return [output if output.numel() == size else output[:size] for output, size in pairs]

    def complete(self) -> nn.Parameter | None:
        """Return the parameter after its outputs have been filled; None before there were any."""
        if self._extension is None or self._outputs is None:
            self._return_to_memory()
            self._version = self.version
            return self.param
        if self._made is None or self.param is None:
            made, inner = self._extension.join(self._views, self._extension.metadata)
            self.param = self._parameter(self._extension.without_padding(made))
            self._nbytes |= {tensor: tensor.untyped_storage().nbytes() for tensor in inner}
            self._made = made
        else:
            # A subclass may keep more than memory, such as a scale, on the very object that compute reads.
            out = self._made if type(self._made) is Tensor else local_of(self.param)
            with backend.preserve_version(out):
                self._extension.refill(self._views, out)
        if self._extension.releases_outputs:
            _free(self._outputs)
        return self.param

    def _parameter(self, local: Tensor) -> nn.Parameter:
        param = nn.Parameter(local, requires_grad=False) if self._outer is None else self._outer.parameter(local)
        param.grad_dtype = None  # a function may return fp32 gradients of bf16 parameters, to be reduced as they are
        return param

    @property
    def version(self) -> int | None:
        """How often the parameter itself was written to; None of none, and of a tensor of inference."""
        return None if self.param is None or self.param.is_inference() else self.param._version - self._counted

    def follow_requires_grad(self, sharded: nn.Parameter, is_registered: bool) -> None:
        """Require a gradient as the sharded parameter; but what the user has set while this was registered counts."""
        if self.param is not None:
            if is_registered and self.param.requires_grad is not self._requires_grad:
                sharded.requires_grad = self.param.requires_grad
            self.param.requires_grad = self._requires_grad = sharded.requires_grad

    def take_change(self) -> Tensor | None:
        """Return the local parameter if it was written to since it was all-gathered, or since the last call."""
        before, self._version = self._version, self.version
        return self._views[0] if self._extension is None and self._version != before else None

    def is_also(self, other: object) -> bool:
        """Tell whether ``other`` is the parameter, or the same frozen one as another object.

        Modules of bitsandbytes put one in its place, which also says how it is quantised.
        """
        if self.param is None or not isinstance(other, nn.Parameter):
            return False
        if other.requires_grad or self.param.requires_grad:
            return other is self.param
        return other.shape == self.param.shape and other.untyped_storage() is self.param.untyped_storage()

    def holds(self, memory: torch.UntypedStorage) -> bool:
        """Tell whether :meth:`free` takes ``memory`` away."""
        return any(storage_of(each) is memory for each in (self.param, *self._nbytes) if each is not None)

    def _return_to_memory(self) -> None:
        """Put the parameter back over its output if a module has moved it, as recurrent ones do for cuDNN."""
        if self.param is None or self._outer is not None or self._extension is not None:
            return  # none that a module could move
        (view,) = self._views
        if self.param.untyped_storage() is not view.untyped_storage():
            self.param.data = view

    def free(self) -> None:
        """Take the memory away, and keep autograd's aliases."""
        self._return_to_memory()
        _free(self._nbytes)

    def count_write(self) -> None:
        """Let backwards raise that need the parameter as it was, as after any write to a tensor."""
        if self.param is not None and self.version is not None:
            torch.autograd.graph.increment_version(self.param)
            self._counted += 1

    def forbid_use(self) -> None:
        """Let backwards raise that need the parameter; its memory is freed once nothing writes to it."""
        self.count_write()
        if self.param is not None and self.param.device.type != "cpu":
            torch.accelerator.synchronize()  # the allocator knows no side stream

    @property
    def grad(self) -> Tensor | None:
        """The gradient that eager autograd accumulated."""
        return None if self.param is None else self.param.grad

    def drop_grad(self) -> None:
        """Forget it. Unlike :meth:`take_grad` this needs no other rank."""
        if self.param is not None:
            self.param.grad = None

    def take_grad(self) -> Tensor | None:
        """Return that gradient, local and unsharded, and forget it."""
        grad = self.grad
        self.drop_grad()
        return grad if grad is None or self._outer is None else self._outer.local_grad(grad)


def unpadded(padded: Tensor, layout: ShardLayout, length: int) -> Tensor:
    """Return the first ``length`` of a padded shard's sharded dimension."""
    return padded if length == layout.chunk else padded.narrow(layout.dim, 0, length)


def without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor whose elements are all one."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are the same view of the same memory; of a subclass, the same object."""
    if a is b:
        return True
    is_subclass = is_extended(a) or is_wrapper(a)
    if a.device != b.device or a.dtype != b.dtype or a.shape != b.shape or is_subclass:
        return False
    return a.numel() == 0 or (a.device.type != "meta" and a.data_ptr() == b.data_ptr())


def _free(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
