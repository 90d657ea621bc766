"""A process group's collectives on flat tensors, profiler ranges, and what else only torch's private names give.

Each collective starts and returns the work to wait for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function
from torch.distributed import AllreduceOptions, AllToAllOptions, ReduceScatterOptions
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import Comm as Comm
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter

from ..agreement import peers, tripwire
from ..errors import FSDPError, RankFailureError
from ..sharding.spec import Bucket

_ATTENTION = timedelta(seconds=2)  # how often a rank that waits asks whether others have failed
# gloo knows neither floating point of 8 bits nor integers of 16.
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_KNOWN = (*_FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8)
REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}
RedOp = dist.ReduceOp | dist.ReduceOp.RedOpType
preserve_version = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]


def profiled(what: str, where: Bucket | str) -> AbstractContextManager[Any]:
    """Return the range ``FSDP::what (units)`` of a bucket's units, or of the unit of a name, if a profiler is on.

    Its name is FSDP2's where that has one. Only code that runs outside of graphs opens ranges: hooks, and the
    implementations of operators.
    """
    if not _profiler_enabled():
        return nullcontext()
    return record_function(_range_name(what, (where,) if isinstance(where, str) else where.units))


@cache
def _range_name(what: str, units: Sequence[str]) -> str:
    """Return the name with those of the units: of the outermost its class, of others their path in it."""
    names = [unit.partition(".")[2] or unit for unit in units]
    shown = ", ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]}, {len(names)} units"
    return f"FSDP::{what} ({shown})"


# torch 2.11.0 has the second of two names only. Collectives are asynchronous by the options' defaults.


def all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start an all-gather of 1-D ``input``, which may be a part of ``output``."""
    start = getattr(group, "all_gather_single", None) or group._allgather_base
    return start(_known(output), _known(input), AllgatherOptions())


def all_gather_coalesced(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: dist.ProcessGroup) -> dist.Work:
    """Start the all-gathers of several 1-D tensors in one launch."""
    start = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    return start(list(map(_known, outputs)), list(map(_known, inputs)), AllgatherOptions())


def reduce_scatter(output: Tensor, input: Tensor, group: dist.ProcessGroup, op: RedOp) -> dist.Work:
    """Start a reduce-scatter of 1-D ``input``; of gloo's process group on the CPU, an :class:`_Exchange`."""
    is_summed = type(group) is dist.ProcessGroup and output.device.type == "cpu" and op in REDUCE_OPS.values()
    if is_summed and backend_of(group, output.device).name() == "gloo":
        return _Exchange(output, input, group, op)
    options = ReduceScatterOptions()
    options.reduceOp = op  # type: ignore[assignment]
    start = getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base
    return start(_real(output), _real(input), options)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: RedOp) -> dist.Work:
    """Start an all-reduce of ``tensor`` in place."""
    options = AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]
    return group.allreduce([_real(tensor)], options)


def all_to_all(
    output: Tensor, input: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
) -> dist.Work:
    """Start an exchange of 1-D tensors: ``sent`` elements to each rank in turn, ``received`` from each."""
    start = getattr(group, "all_to_all_single", None) or group.alltoall_base
    return start(output, input, list(received), list(sent), AllToAllOptions())


class _Exchange(dist.Work):
    """A reduce-scatter in which each rank receives what it sums, 16-bit floats in fp32.

    gloo's own is an all-reduce: it sends twice as much and, measured with 2 and 4 ranks, takes about twice as long.
    """

    def __init__(self, output: Tensor, input: Tensor, group: dist.ProcessGroup, op: RedOp) -> None:
        super().__init__()
        self._output, self._op, received = output, op, torch.empty_like(input)
        self._parts: Tensor | None = received.view(group.size(), -1)
        self.work = all_to_all(_known(received), _known(input), (), (), group)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.work.wait(*(() if timeout is None else (timeout,)))
        self.add_up()
        return True

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def add_up(self) -> None:
        """Sum the parts, which are all there."""
        if (parts := self._parts) is not None:
            (torch.mean if self._op == dist.ReduceOp.AVG else torch.sum)(parts, 0, out=self._output)
            self._parts = None


def wait(work: dist.Work | None, device: torch.device) -> None:
    """Let the current stream of ``device``, or on the CPU the host, wait for ``work``.

    Raises:
        RankFailureError: it failed, with what each rank ran last, or, on the CPU, it takes long, and another rank has
            reported an error.
        RankMismatchError: on the CPU, it takes long, and ranks have run different collectives.
    """
    if work is None:
        return
    awaited = work.work if isinstance(work, _Exchange) else work
    try:
        if device.type == "cpu" and type(awaited) is dist.Work and peers.current() is not None:
            while not _has_ended(awaited):
                tripwire.check()
                _check_peers(())
        else:
            awaited.wait()
    except FSDPError:
        raise
    except RuntimeError as error:
        _check_peers()
        if last := tripwire.last_runs():
            raise RankFailureError(f"a collective failed: {str(error).splitlines()[0]}. {last}") from error
        raise
    if isinstance(work, _Exchange):
        work.add_up()


def _check_peers(awaited: Iterable[int] | None = None) -> None:
    if failure := peers.failure(awaited):
        raise RankFailureError(f"{failure}; this rank waited for it in a collective")


def _has_ended(work: dist.Work) -> bool:
    """Wait for ``work`` for a while, which harms nothing on the CPU, and tell whether it has ended well.

    gloo's own reduce-scatters ignore the limit and wait as long as the process group does.
    """
    begun = time.monotonic()
    try:
        work.wait(_ATTENTION)
    except RuntimeError:
        # Some kinds of work refuse a limit, and some end just now.
        if not work.is_completed() and time.monotonic() - begun >= _ATTENTION.total_seconds() / 2:
            return False
        work.wait()
    return True


def _known(tensor: Tensor) -> Tensor:
    """Return the same memory in a dtype that every backend knows, or as bytes."""
    real = _real(tensor)
    return real if real.dtype in _KNOWN else real.view(torch.uint8)


def _real(tensor: Tensor) -> Tensor:
    """Return the same memory as real numbers, which add up as complex ones do; gloo knows no complex ones."""
    return tensor.view(tensor.dtype.to_real()) if tensor.is_complex() else tensor


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return what serves a process group's collectives on ``device``."""
    return group._get_backend(device)


def autograd_node() -> Any:
    """Return the node whose backward runs on this thread, if any."""
    return torch._C._current_autograd_node()  # checked on torch 2.11.0, 2.13.0 and 2.15.0


def will_run(node: Any) -> bool:
    """Tell whether the running backward reaches ``node``; one that was given ``inputs`` does not reach all."""
    return torch._C._will_engine_execute_node(node)


def symmetric_memory() -> ModuleType:
    """Return torch's symmetric memory, imported when it is needed. Without GPUs never run."""
    import torch.distributed._symmetric_memory as memory

    return memory
