"""Parts of matrices and all-to-alls of them, played through without processes: every rank in turn."""

from __future__ import annotations

import pytest
import torch

from fsdp_compiled.sharding.layout import ShardLayout
from fsdp_compiled.sharding.matrices import AllToAllBucket, AllToAllSpec, Matrix, Move
from fsdp_compiled.sharding.spec import Group, ParamSpec

F32, BF16 = torch.float32, torch.bfloat16
# A shape, its sharded dimension and the rows of its matrices.
PARAMS = {
    "even": ((8, 6), 0, (8,)),
    "uneven": ((7, 5), 0, (7,)),
    "fewer rows than ranks": ((2, 9), 0, (2,)),
    "along columns": ((4, 7), 1, (4,)),
    "blocks": ((9, 4), 0, (4, 3, 2)),
    "blocks along columns": ((6, 5), 1, (4, 2)),
    "a stack": ((5, 3, 4), 0, (3,)),
    "a stack cut in rows": ((3, 5, 4), 1, (2, 3)),
    "a stack cut in columns": ((2, 3, 7), 2, (3,)),
}


def matrices_of(name):
    shape, dim, rows = PARAMS[name]
    spec = ParamSpec(name, "", shape, dim, F32)
    starts = [sum(rows[:at]) for at in range(len(rows))]
    stacked = range(shape[0] if len(shape) == 3 else 1)
    return [Matrix(spec, start, count, index) for index in stacked for start, count in zip(starts, rows, strict=True)]


def shards_of(name, shards):
    shape, dim, _ = PARAMS[name]
    layout, whole = ShardLayout(shape, dim, shards), torch.rand(shape)
    return whole, [whole.narrow(dim, layout.offset(at), layout.length(at)).clone() for at in range(shards)]


def complete(whole, matrix):
    rows = whole if whole.dim() == 2 else whole[matrix.index]
    return rows[matrix.start : matrix.start + matrix.rows]


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7])
def test_parts_cover_each_matrix_once(name, shards):
    whole, pieces = shards_of(name, shards)
    for matrix in matrices_of(name):
        made, times = torch.full(matrix.shape, -1.0), torch.zeros(matrix.shape)
        for at, shard in enumerate(pieces):
            if (part := matrix.part(at, shards)) is not None:
                assert part.of_shard(shard).shape == part.shape
                part.of_matrix(made).copy_(part.of_shard(shard))
                part.of_matrix(times).add_(1)
        assert torch.equal(made, complete(whole, matrix)) and bool((times == 1).all())
        full = [at for at in range(shards) if (p := matrix.part(at, shards)) and p.shape == matrix.shape]
        assert matrix.home(shards) == (full[0] if full else None)


def exchange(bucket, sent):
    """What an all-to-all would give each rank: the parts that others send it, in the order of their ranks."""
    world = bucket.spec.group.world
    inbox = [list[torch.Tensor]() for _ in range(world)]
    for rank in range(world):
        moves = bucket.sent(rank)
        assert [move.peer for move in moves] == sorted(move.peer for move in moves)
        for move, part in zip(moves, sent[rank], strict=True):
            inbox[move.peer].append(part)
    return inbox


@pytest.mark.parametrize(("shards", "replicas"), [(1, 3), (2, 1), (3, 1), (2, 2), (3, 2)])
def test_matrices_arrive_complete_and_updates_at_every_shard(shards, replicas):
    world = shards * replicas
    wholes = {name: shards_of(name, shards) for name in PARAMS}
    matrices = tuple(matrix for name in PARAMS for matrix in matrices_of(name))
    owners = tuple(at % world for at in range(len(matrices)))
    spec = AllToAllSpec(Group("g", world), F32, shards, to_owners=True)
    there = AllToAllBucket(spec, matrices, owners)
    sent = [
        [m.part.of_shard(wholes[matrices[m.matrix].param.name][1][rank % shards]) for m in there.sent(rank)]
        for rank in range(world)
    ]
    updates: list[dict[int, torch.Tensor]] = []
    for rank, arrived in enumerate(exchange(there, sent)):
        moves = there.received(rank)
        found = {move.matrix: torch.full(matrices[move.matrix].shape, -1.0) for move in moves}
        for move, part in zip(moves, arrived, strict=True):
            move.part.of_matrix(found[move.matrix]).copy_(part)
        assert sorted(found) == [at for at, owner in enumerate(owners) if owner == rank]
        for at, matrix in found.items():
            assert torch.equal(matrix, complete(wholes[matrices[at].param.name][0], matrices[at]))
        updates.append({at: 2 * matrix for at, matrix in found.items()})
    back = AllToAllBucket(AllToAllSpec(spec.group, F32, shards, to_owners=False), matrices, owners)
    sent = [[m.part.of_matrix(updates[rank][m.matrix]) for m in back.sent(rank)] for rank in range(world)]
    for rank, arrived in enumerate(exchange(back, sent)):
        doubled = {name: pieces[rank % shards].clone() for name, (_, pieces) in wholes.items()}
        for move, part in zip(back.received(rank), arrived, strict=True):
            move.part.of_shard(doubled[matrices[move.matrix].param.name]).copy_(part)
        for name, (_, pieces) in wholes.items():
            assert torch.equal(doubled[name], 2 * pieces[rank % shards]), name


def test_what_a_bucket_tells():
    matrices = tuple(matrices_of("blocks"))
    bucket = AllToAllBucket(AllToAllSpec(Group("g", 2), BF16, 2, to_owners=True), matrices, (1, 0, 0))
    assert [move[:2] for move in bucket.sent(0)] == [(0, 1), (1, 0)]
    assert [move[:2] for move in bucket.received(0)] == [(0, 1), (1, 1), (1, 2)]
    assert isinstance(bucket.sent(0)[0], Move)
    assert bucket.spec.how == "sent as bfloat16 to owners"
