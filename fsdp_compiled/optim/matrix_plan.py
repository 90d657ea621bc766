"""Plans a step of matrices: the owner of each, rounds, what travels in each, and what ranks agree on."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..collectives.all_to_all import Exchange
from ..expect import unexpected
from ..passes import cost
from ..passes.cost.matrix_cost import newton_schulz_us, owners_us
from ..sharding.contract import Contract, ContractLine
from ..sharding.dtensor import group_of_all, process_group
from ..sharding.matrices import AllToAllBucket, AllToAllSpec, Matrix, Part
from ..sharding.owners import owners_of, rounds_of
from ..sharding.spec import Group, ParamSpec, word
from .matrix_rules import MatrixRule

Blocks = Mapping[Tensor, tuple[int, ...]]  # rows of each matrix in turn, by parameter


@dataclass(frozen=True)
class Holders:
    """Which ranks hold the shards of a parameter."""

    mesh: DeviceMesh | None  # None: this rank alone
    shard_dim: int | None  # of the mesh

    @cached_property
    def shards(self) -> int:
        return 1 if self.mesh is None or self.shard_dim is None else self.mesh.size(self.shard_dim)


class Param(NamedTuple):
    """A parameter of an optimizer as a step finds it."""

    tensor: Tensor
    name: str
    group: Mapping[str, Any]  # its settings
    has_grad: bool


@dataclass(frozen=True)
class MatrixWork:
    """One matrix in a step."""

    param: int  # of all of the optimizer
    matrix: Matrix
    flops: float


@dataclass(frozen=True, eq=False)
class Round:
    """What is exchanged, computed and exchanged back together."""

    items: tuple[MatrixWork, ...]  # that travel, in the order of the buckets
    local: tuple[tuple[MatrixWork, Part], ...]  # that this rank alone works on and needs; where its shard has them
    there: Exchange | None  # brings complete matrices to their owners; None if nothing travels
    back: Exchange | None  # brings updates to shards


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A step of parameters with gradients, what ranks agree on before it, and all their meshes."""

    rounds: tuple[Round, ...]
    contract: Contract
    meshes: tuple[DeviceMesh, ...]


def holders_of(param: Tensor, name: str) -> Holders:
    """Return where a parameter's shards are.

    Raises:
        ValueError: it is no real matrix, and no stack of such.
        NotImplementedError: it is sharded over several mesh dimensions, or lives elsewhere than its mesh computes.
    """
    if param.dim() not in (2, 3) or param.is_complex():
        got = f"{param.dtype} of shape {tuple(param.shape)}"
        raise unexpected(name, "a real matrix, or a stack of matrices", got, "give it to another optimizer")
    if not isinstance(param, DTensor):
        return Holders(None, None)
    cut = [dim for dim, placement in enumerate(param.placements) if not placement.is_replicate()]
    if len(cut) > 1 or any(type(param.placements[dim]) is not Shard for dim in cut):
        do = "step matrices under tensor parallelism without step_on_shards"
        got = f"{param.placements} on {param.device_mesh}"
        raise unexpected(name, "matrices sharded over one mesh dimension", got, do, NotImplementedError)
    if param.device.type not in (param.device_mesh.device_type, "meta"):
        expected, do = f"a matrix on {param.device_mesh.device_type}", "do not offload matrices"
        got = f"one on {param.device.type} (CPUOffloadPolicy)"
        raise unexpected(name, expected, got, do, NotImplementedError)
    return Holders(param.device_mesh, cut[0] if cut else None)


def matrices_of(param: Tensor, holders: Holders, name: str, blocks: Blocks) -> list[Matrix]:
    """Return the matrices of a parameter of two dimensions, or of a stack of such, cut into blocks of rows."""
    if not param.numel():
        return []
    dim = 0 if holders.shard_dim is None else param.placements[holders.shard_dim].dim  # type: ignore[attr-defined]
    spec, found = ParamSpec(name, "", tuple(param.shape), dim, param.dtype), list[Matrix]()
    for index in range(param.shape[0] if param.dim() == 3 else 1):
        start = 0
        for count in blocks.get(param) or (param.shape[-2],):
            found.append(Matrix(spec, start, count, index))
            start += count
    return found


def plan_step(params: Sequence[Param], rule: MatrixRule, blocks: Blocks) -> StepPlan:
    """Return the plan of a step of an optimizer's parameters, in order; all ranks of a mesh get the same rounds."""
    by_holders = defaultdict[Holders, list[int]](list)
    for index, param in enumerate(params):
        by_holders[holders_of(param.tensor, param.name)].append(index)
    rounds, collectives = list[Round](), list[ContractLine]()
    for holders, held in by_holders.items():
        items = [
            MatrixWork(index, matrix, rule.flops(params[index].group, matrix.shape))
            for index in held
            if params[index].has_grad
            for matrix in matrices_of(params[index].tensor, holders, params[index].name, blocks)
        ]
        exchange = _exchange(holders, items, rule, params[held[0]].tensor.device)
        owners = _owners(holders, items, exchange)
        rounds += _rounds(holders, items, owners, exchange, rule)
        if exchange.group.world > 1:
            described = tuple(_described(params[index]) for index in held)
            present = sum(params[index].has_grad for index in held)
            form = f"{present} with a gradient, owners {zlib.crc32(str(owners).encode()):08x}"
            collectives.append(ContractLine(exchange.group.name, "all-to-all", exchange.how, described, form))
    meshes = dict.fromkeys(holders.mesh for holders in by_holders if holders.mesh is not None)
    return StepPlan(tuple(rounds), Contract(tuple(collectives)), tuple(meshes))


def _described(param: Param) -> str:
    shape = list(param.tensor.shape)
    return f"{param.name} {word(param.tensor.dtype)}{shape}" + ("" if param.has_grad else " without a gradient")


def _exchange(holders: Holders, items: Sequence[MatrixWork], rule: MatrixRule, device: torch.device) -> AllToAllSpec:
    """Return how matrices travel to owners: within a shard group, or among all replicas where that is faster."""
    mesh, shards, group = holders.mesh, holders.shards, Group()
    # Replicas may share where a rank's shard follows from its number.
    may_share = mesh is not None and mesh.size() > shards and holders.shard_dim in (None, mesh.ndim - 1)
    if mesh is not None and may_share and items and _saves_by_sharing(mesh, shards, items, device):
        group = Group(group_of_all(mesh).group_name, mesh.size())
    elif mesh is not None and shards > 1:
        group = Group(mesh.get_group(holders.shard_dim).group_name, shards)
    return AllToAllSpec(group, rule.dtype, shards, to_owners=True)


def _saves_by_sharing(mesh: DeviceMesh, shards: int, items: Sequence[MatrixWork], device: torch.device) -> bool:
    """Tell whether replicas that share the owners, and send each other all updates, are faster."""
    cost.share(device, mesh)
    cluster, ranks = cost.detect(device), mesh.mesh.flatten().tolist()
    costs_us = newton_schulz_us([item.matrix.shape for item in items], cluster)
    elements = sum(item.matrix.numel for item in items)
    alike_us, shared_us = (owners_us(costs_us, elements, ranks, shards, shares, cluster) for shares in (False, True))
    return shared_us < alike_us


def _owners(holders: Holders, items: Sequence[MatrixWork], exchange: AllToAllSpec) -> list[int]:
    world, shards = exchange.group.world, holders.shards
    homes = [item.matrix.home(shards) for item in items]
    ranks = [() if home is None else range(home, world, shards) for home in homes]
    return owners_of([item.flops for item in items], world, ranks)


def _rounds(
    holders: Holders, items: Sequence[MatrixWork], owners: Sequence[int], exchange: AllToAllSpec, rule: MatrixRule
) -> Iterator[Round]:
    world = exchange.group.world
    rank = 0 if world == 1 else process_group(exchange.group.name).rank()
    sizes = [item.matrix.numel * rule.dtype.itemsize for item in items]
    stays = [
        world == holders.shards and item.matrix.home(world) == owner
        for item, owner in zip(items, owners, strict=True)
    ]
    for each in rounds_of(sizes, [item.flops for item in items], owners):
        moved = [at for at in each if not stays[at]]
        mine = [items[at] for at in each if stays[at] and owners[at] == rank]
        local = tuple((item, part) for item in mine if (part := item.matrix.part(rank, world)) is not None)
        there = AllToAllBucket(exchange, tuple(items[at].matrix for at in moved), tuple(owners[at] for at in moved))
        back = replace(there, spec=replace(exchange, to_owners=False))
        exchanges = (Exchange(there, rank), Exchange(back, rank)) if moved else (None, None)
        yield Round(tuple(items[at] for at in moved), local, *exchanges)
