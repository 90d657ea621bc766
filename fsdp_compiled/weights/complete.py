"""Streams a model's complete tensors, bucket by bucket: the next one travels while the last one is read.

Every rank takes part in all collectives, so none is ahead of the slowest reader by more than a bucket. With each
bucket travels whether a rank has stopped reading, which the others learn instead of waiting for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..agreement.ledger import agree
from ..collectives import Pending, all_gather_bucket, launch_all_gather
from ..errors import RankMismatchError
from ..expect import expect, unexpected
from ..hooks.backward import without_grad
from ..param.param import FSDPParam
from ..sharding.contract import contract_of
from ..sharding.dtensor import OuterParallelism, groups_of, local_of, process_group
from ..sharding.spec import AllGatherBucket, AllGatherSpec, Group, ParamSpec
from ..tracing.dynamo import module_inside
from .adapters import merged_items
from .items import Item, batches_of, cast_dtype, check_streamed, items_of, sharded_parameters

# By default, on the CPU, where glibc maps large tensors anew each time (examples/bench/stream.py takes 0.21 s with 16
# and with 32 MB, 0.37 s with 64 MB), and on accelerators, where nothing was measured.
BUCKET_BYTES = {True: 2**24, False: 2**28}


def stream_parameters(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    bucket_bytes: int | None = None,
    ranks: Collection[int] | None = None,
    merge_adapters: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator of a sharded model's complete parameters and persistent buffers, for an inference engine.

    Call it on all ranks, between two training steps, and iterate at once; parameters must not change meanwhile. A
    rank that stops in the middle ends the streams of those that hold the other shards with an error; replicas go on.
    Each tensor comes once, under its first name in torch's ``get_model_state_dict``: of tied weights under one of
    theirs.

    Args:
        model: a module with units, which may be compiled.
        dtype: of floating-point tensors, which are cast before they travel; None leaves each its own.
        bucket_bytes: of complete tensors that travel together. Two buckets have memory at a time: the one that is
            read and the next one. A larger tensor travels alone. None: 16 MiB on the CPU, 256 MiB on accelerators.
        ranks: by their numbers in the default process group, where tensors are yielded; the others take part, and
            their iterators yield nothing. None: on all.
        merge_adapters: yield PEFT's LoRA weights merged into what they adapt, under the names of the base model.

    Yields:
        Name and tensor, plain, without gradient, on the device of compute, of the parameter's global shape. What is
        neither sharded nor cast is the model's own tensor.

    Raises:
        TypeError: an argument of another type.
        ValueError: no unit lies in ``model``, ``bucket_bytes`` is not positive, ``dtype`` not floating-point, a rank
            does not exist, or there are no adapters to merge.
        NotImplementedError: an adapter to merge is another than LoRA of a linear layer or embedding, or changes a
            tied weight under some of its names; while iterating, a tensor subclass cannot be gathered, such as
            torchao's int8 weights.
        RankMismatchError: while iterating, ranks stream different tensors, or another one has stopped in the middle.
    """
    expect("bucket_bytes", bucket_bytes, int | None, "an integer or None")
    expect("merge_adapters", merge_adapters, bool, "True or False")
    if bucket_bytes is not None and bucket_bytes <= 0:
        raise unexpected("bucket_bytes", "a positive number", bucket_bytes)
    states = check_streamed(model, dtype)
    device = states[0].device
    expect("ranks", ranks, Collection | None, "a collection of ranks or None")
    world = dist.get_world_size() if dist.is_initialized() else 1
    for rank in () if ranks is None else ranks:
        expect("ranks", rank, int, "integers")
        if not 0 <= rank < world:
            raise unexpected("ranks", f"ranks from 0 to {world - 1}", rank)
    reads = ranks is None or (dist.get_rank() if dist.is_initialized() else 0) in ranks
    items = (merged_items if merge_adapters else items_of)(module_inside(model))
    bucket_bytes = bucket_bytes or BUCKET_BYTES[device.type == "cpu"]
    params = sharded_parameters(states)
    batches = batches_of(items, lambda item: item.travelling_bytes(dtype), bucket_bytes)
    rounds = [_round(batch, params, dtype) for batch in batches]
    for root in dict.fromkeys(state.outermost for state in states):
        root.note("stream_parameters")
    stream = _Stream(dtype, device).run(rounds, reads)
    next(stream)  # launches the first bucket; from here on other ranks learn if this one stops
    return stream  # type: ignore[return-value]


Members = Sequence[tuple[int, FSDPParam]]  # of a bucket, with the ids of the sources


@dataclass(eq=False)
class _Round:
    """Items that travel together, by one all-gather for each group and dtype, and what has been launched."""

    items: Sequence[Item]
    gathers: Sequence[tuple[AllGatherBucket, Members]]
    groups: Sequence[Group]  # in which its tensors need other ranks
    flags: list[tuple[Group, Pending[Sequence[Tensor]]]] = field(default_factory=list)
    tensors: list[tuple[AllGatherBucket, Members, Pending[Sequence[Tensor]]]] = field(default_factory=list)


def _round(items: Sequence[Item], params: dict[int, FSDPParam], dtype: torch.dtype | None) -> _Round:
    found: dict[AllGatherSpec, dict[int, FSDPParam]] = {}
    groups = list[Group]()
    for item in items:
        for source in item.sources:
            param = params.get(id(source))
            if param is None or param.extension is not None:
                groups += groups_of(source)
                continue
            spec = replace(param.spec.all_gather, dtype=item.travels_in(source, dtype))
            found.setdefault(spec, {})[id(source)] = param
            groups += [spec.group, *groups_of(param.outer)]
    gathers = [
        (all_gather_bucket(spec, [param.spec.param for param in each.values()], device), list(each.items()))
        for spec, each in found.items()
        for device in [next(iter(each.values())).placement.device]
    ]
    return _Round(items, gathers, [group for group in dict.fromkeys(groups) if group.world > 1])


@dataclass(eq=False)
class _Stream:
    dtype: torch.dtype | None
    device: torch.device  # of compute
    told: set[Group] = field(default_factory=set)  # in which all know that a rank has stopped

    def run(self, left: list[_Round], reads: bool) -> Iterator[tuple[str, Tensor] | None]:
        """Yield None once the first round is launched, then the tensors; ``left`` are those not launched yet."""
        ahead = self._launch(left.pop(0)) if left else None
        try:
            yield None
            while ahead is not None:
                launched, ahead = ahead, None
                tensors = self._wait(launched)
                if left:
                    ahead = self._launch(left.pop(0))
                while tensors and reads:
                    yield tensors.pop()
                del tensors
        except BaseException:
            self._stop(ahead, left)
            raise

    @without_grad
    def _launch(self, this: _Round, stopped: bool = False) -> _Round:
        """Start the round's all-gathers, but for those among ranks that know that one has stopped."""
        for group in this.groups:
            if group not in self.told:
                bucket = _flag_bucket(group)
                agree(contract_of(bucket))
                flag = torch.full((1,), int(stopped), dtype=torch.int32, device=self.device)
                this.flags.append((group, launch_all_gather([flag], bucket)))
        for bucket, members in this.gathers:
            if bucket.spec.group not in self.told:
                agree(contract_of(bucket))
                shards = [param.storage.padded for _, param in members]
                this.tensors.append((bucket, members, launch_all_gather(shards, bucket)))
        return this

    @without_grad
    def _wait(self, launched: _Round) -> list[tuple[str, Tensor]]:
        """Return the round's complete tensors, the last one first; RankMismatchError if a rank has stopped."""
        items, stopped = launched.items, self._stopped(launched)
        complete = self._gathered(launched)
        if stopped:
            expected, got = f"all ranks to read on from {items[0].name}", f"ranks {stopped} stopped before it"
            do = "read a stream to its end, or stop at the same tensor on all ranks"
            raise unexpected("stream_parameters", expected, got, do, RankMismatchError)
        found = list[tuple[str, Tensor]]()
        for item in items:
            sources = [complete[id(source), item.travels_in(source, self.dtype)] for source in item.sources]
            tensor = sources[0] if item.join is None else item.join(*sources)
            found.append((item.name, tensor.to(cast_dtype(tensor, self.dtype))))
        return found[::-1]

    def _gathered(self, launched: _Round) -> dict[tuple[int, torch.dtype], Tensor]:
        """Return the complete sources, but for those over groups that know that a rank has stopped."""
        complete: dict[tuple[int, torch.dtype], Tensor] = {}
        for bucket, members, pending in launched.tensors:
            for (key, param), layout, padded in zip(members, bucket.layouts, pending.wait(), strict=True):
                tensor = padded if layout.is_even else padded.narrow(layout.dim, 0, layout.shape[layout.dim])
                outer = param.outer
                if outer is not None and not self._knows(outer):
                    tensor = outer.dtensor(tensor).full_tensor()
                complete[key, bucket.spec.dtype] = tensor
        for item in launched.items:
            for source in item.sources:
                dtype = item.travels_in(source, self.dtype)
                if (id(source), dtype) not in complete:
                    complete[id(source), dtype] = self._gathered_alone(item, source, dtype)
        return complete

    def _gathered_alone(self, item: Item, source: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor that is in no bucket, by DTensor if it is one."""
        if not isinstance(source, DTensor) or self._knows(source):
            return source.detach()
        try:
            return source.detach().to(dtype).full_tensor()  # type: ignore[attr-defined]
        except NotImplementedError as error:
            expected, got = "a tensor that DTensor can gather", f"a {type(local_of(source)).__name__}"
            raise unexpected(item.name, expected, got, "send what it is made of", NotImplementedError) from error

    def _knows(self, tensor: DTensor | OuterParallelism) -> bool:
        """Tell whether the ranks that it needs to be complete know that one of them has stopped."""
        return not self.told.isdisjoint(groups_of(tensor))

    def _stopped(self, launched: _Round) -> list[int]:
        """Return the ranks that have stopped, as far as the round's groups know, and note these groups."""
        ranks = set[int]()
        for group, pending in launched.flags:
            flags = pending.wait()[0].tolist()
            if any(flags):
                self.told.add(group)
                members = dist.get_process_group_ranks(process_group(group.name))
                ranks.update(rank for rank, flag in zip(members, flags, strict=True) if flag)
        return sorted(ranks)

    @without_grad
    def _stop(self, ahead: _Round | None, left: Sequence[_Round]) -> None:
        """Take part in the current round, and tell the ranks of each group in the next one that they wait for."""
        if ahead is not None:
            self._stopped(ahead)
            self._gathered(ahead)
        for this in left:
            if not self.told.issuperset(this.groups):
                self._launch(this, stopped=True)
                self._stopped(this)  # notes the groups: this rank's own flag is among theirs
                self._gathered(this)


def _flag_bucket(group: Group) -> AllGatherBucket:
    param = ParamSpec("whether a rank stops in stream_parameters", "", (group.world,), 0, torch.int32)
    return AllGatherBucket(AllGatherSpec(group, torch.int32), (param,))
