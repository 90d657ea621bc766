"""Hybrid sharding whose replicas are torchft's replica groups: one may die and come back while the others train.

Each group is sharded over its own ranks, in a process group of its own. What groups share is this file's: the average
of their gradients, and the state by which one that comes back catches up.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
import torchft
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor

from ..collectives.reference import copy_each
from ..param.param import FSDPParam
from ..sharding.dtensor import dtensor_like, local_of
from ..tracing.dynamo import module_inside
from ..weights.items import batches_of, check_streamed, sharded_tensors

BUCKET_BYTES = 2**26  # of gradients that travel together


class ReplicatedOptimizer(torchft.Optimizer):
    """An optimizer that steps with the mean gradients of all replica groups that take part in the step.

    ``zero_grad`` begins a step: torchft finds out during forward which groups take part. ``step`` averages, and steps
    if all of the group's ranks have received the averages; else it leaves parameters as they are, and the batch is
    lost. A group that comes back receives parameters, buffers and optimizer state from another one, rank by rank.

    Args:
        manager: with ``use_async_quorum=True``, its default. What else must be equal on all groups, such as a
            scheduler, is given to its ``register_state_dict_fn``.
        optimizer: of ``model``; :func:`fsdp_compiled.step_on_shards` may have been called on it.
        model: given to ``fully_shard`` over the ranks of one group. All groups have equally many.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: no unit lies in ``model``.
    """

    def __init__(self, manager: torchft.Manager, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        super().__init__(manager, optimizer)
        # Found once: torchft's thread asks for the state while forward registers unsharded parameters.
        inside = module_inside(model)
        self._found = sharded_tensors(inside, check_streamed(model, None))
        # By module and name, since forward may assign another tensor to a buffer.
        self._places = {id(buffer): (m, name) for m in inside.modules() for name, buffer in m._buffers.items()}
        self._is_averaged = False
        manager.register_state_dict_fn("fsdp_compiled", self._load, self._state)

    @property
    def _tensors(self) -> list[tuple[str, Tensor]]:
        """Parameters and persistent buffers, sharded; in the same order on all groups."""
        return [(name, self._current(tensor, param)) for name, tensor, param in self._found]

    def _current(self, found: Tensor, param: FSDPParam | None) -> Tensor:
        """Return what is in the place of a tensor that was found at the beginning."""
        if param is not None:
            return param.sharded_param
        module, name = self._places.get(id(found), (None, ""))
        return found if module is None else module.get_buffer(name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._is_averaged = False
        super().zero_grad(set_to_none)

    def step(self, closure: object = None) -> None:
        if not self._is_averaged:
            self.average_gradients()
        super().step(closure)

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Replace each gradient by the mean over groups; call it where clipping comes between backward and step.

        A trainable parameter without a gradient has one of zeros then, because another group may have one. If a group
        fails meanwhile, gradients are without meaning, and ``step`` does nothing.
        """
        self._is_averaged = True
        under_way = []
        for grads in self._buckets():
            # The one counts groups: torchft zeroes all of a group that catches up, but counts it in the first step.
            packed = torch.cat([*(grad.reshape(-1) for grad in grads), grads[0].new_ones(1)])
            under_way.append((grads, packed, self.manager.allreduce(packed, reduce_op=ReduceOp.SUM)))
        for grads, packed, work in under_way:
            work.wait()
            pieces = packed[:-1].div_(packed[-1]).split([grad.numel() for grad in grads])
            copy_each([piece.view(grad.shape) for piece, grad in zip(pieces, grads, strict=True)], grads)

    def _buckets(self) -> Iterator[list[Tensor]]:
        """Yield local gradients of one dtype, some at a time."""
        params = [(self._current(found, sharded), sharded) for _, found, sharded in self._found]
        trained = [(param, sharded) for param, sharded in params if param.requires_grad]
        for param, sharded in trained:
            if param.grad is None:  # of the dtype that another group's has
                dtype = param.grad_dtype if sharded is None else sharded.spec.param.gradient_dtype
                param.grad = torch.zeros_like(param, dtype=dtype)
        grads = (local_of(param.grad) for param, _ in trained)  # type: ignore[arg-type]
        real = (torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads)
        for _, alike in groupby(real, key=lambda grad: grad.dtype):
            yield from batches_of(alike, lambda grad: grad.nbytes, BUCKET_BYTES)

    def _state(self) -> dict[str, Any]:
        """Return what another group's rank of the same number needs. DTensors would bring this group's mesh along."""
        tensors = {name: local_of(tensor) for name, tensor in self._tensors}
        optimizer = self.optim.state_dict()
        state = {
            number: {name: (isinstance(value, DTensor), local_of(value)) for name, value in values.items()}
            for number, values in optimizer["state"].items()
        }
        return {"tensors": tensors, "optimizer": {**optimizer, "state": state}}

    @torch.no_grad()
    def _load(self, given: dict[str, Any]) -> None:
        for name, tensor in self._tensors:
            local_of(tensor).copy_(given["tensors"][name])
        params = [param for group in self.optim.param_groups for param in group["params"]]
        state = {
            number: {
                name: dtensor_like(params[number], value) if is_sharded else value
                for name, (is_sharded, value) in values.items()
            }
            for number, values in given["optimizer"]["state"].items()
        }
        self.optim.load_state_dict({**given["optimizer"], "state": state})
