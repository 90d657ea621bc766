"""A kind of collective that the library does not know: a broadcast, from trace to rank agreement.

Two tables, right on rank 0 alone, are read by a sharded model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import profile

from fsdp_compiled import RankMismatchError, SchedulePolicy, compile, fully_shard
from fsdp_compiled.collectives import Pending, backend, define_kind, streams
from fsdp_compiled.inspect import capture
from fsdp_compiled.passes.kinds import Kind
from fsdp_compiled.sharding.dtensor import process_group
from fsdp_compiled.sharding.spec import Bucket, Group, ParamSpec, Spec
from tests.support.ranks import on_ranks, same_on_ranks

SIZE = 6


@dataclass(frozen=True)
class BroadcastSpec(Spec):
    group: Group
    dtype: torch.dtype
    source: int  # rank in the group

    @property
    def how(self) -> str:
        return f"{super().how} from rank {self.source}"


@dataclass(frozen=True)
class BroadcastBucket(Bucket):
    spec: BroadcastSpec
    params: tuple[ParamSpec, ...]
    stages = ("broadcast",)

    def group_of(self, stage: str) -> Group:
        return self.spec.group


def launch(tensors: Sequence[Tensor], bucket: BroadcastBucket) -> Pending[list[Tensor]]:
    """The recipe: packed, sent, unpacked."""
    packed = torch.cat([tensor.flatten() for tensor in tensors])
    group = process_group(bucket.spec.group.name)

    def begin() -> dist.Work:
        return dist.broadcast(packed, group=group, group_src=bucket.spec.source, async_op=True)

    def finish(work: dist.Work) -> list[Tensor]:
        work.wait()
        pieces = packed.split([layout.numel for layout in bucket.layouts])
        return [piece.view(layout.shape).clone() for piece, layout in zip(pieces, bucket.layouts, strict=True)]

    with backend.profiled("broadcast", bucket):
        waiting = partial(backend.profiled, "broadcast_wait", bucket)
        return streams.launch("broadcasts", packed.device, begin, finish, waiting)


def results(like: Tensor, bucket: BroadcastBucket) -> list[Tensor]:
    return [like.new_empty(layout.shape, dtype=bucket.spec.dtype) for layout in bucket.layouts]


define_kind(BROADCAST := Kind("broadcast", "broadcast", BroadcastBucket, {"broadcast": launch}, results))


def texts(source: int) -> dict[str, str]:
    spec = BroadcastSpec(Group(dist.group.WORLD.group_name, 2), torch.float32, source)
    params = [ParamSpec(name, "Tables", (SIZE,), 0, torch.float32) for name in ("scale", "shift")]
    return {param.name: BroadcastBucket(spec, (param,)).encode() for param in params}


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.texts = texts(source=0)
        for name in self.texts:
            self.register_buffer(name, torch.rand(SIZE) if dist.get_rank() == 0 else torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = (torch.ops.fsdp_compiled.broadcast(getattr(self, n), text) for n, text in self.texts.items())
        return self.last(self.first(x) * scale + shift)


@on_ranks(2)
def test_a_broadcast_from_trace_to_agreement():
    model, x = fully_shard(Tables()), torch.ones(2, SIZE)
    tables = [model.scale.clone(), model.shift.clone()]
    for table in tables:
        dist.broadcast(table, 0)
    whole = {name: param.full_tensor() for name, param in model.named_parameters()}
    want = x @ whole["first.weight"].t() + whole["first.bias"]
    want = (want * tables[0] + tables[1]) @ whole["last.weight"].t() + whole["last.bias"]
    torch.testing.assert_close(model(x), want)  # operators alone, between hooks

    captured = capture(model, x, schedule=SchedulePolicy(bucket="unit"), code=False)
    (broadcast,) = [each for each in captured.graphs[0].collectives if each.kind == "broadcast"]
    assert "broadcast" in str(captured) and broadcast.estimate_us > 0.0
    assert broadcast.params == ("scale", "shift") and broadcast.bytes == 2 * SIZE * 4
    assert broadcast.launch < broadcast.wait < broadcast.first_use
    same_on_ranks(str(captured.graphs[0].module.graph))
    compiled = compile(model, schedule=SchedulePolicy(bucket="unit", verify=True), fullgraph=True)
    with profile() as run:
        torch.testing.assert_close(compiled(x), want)
    assert {"FSDP::broadcast (Tables)", "FSDP::broadcast_wait (Tables)"} <= {event.name for event in run.events()}
    torch.compiler.reset()
    model.texts = texts(source=dist.get_rank())
    message = r"rank 1: broadcast of scale float32\[6\] .*sent as float32 from rank 1"
    with pytest.raises(RankMismatchError, match=message):
        compile(model, fullgraph=True)(x)
