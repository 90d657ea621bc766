"""Trains a drawn case on ranks and compares with one process."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fsdp_compiled import (
    SchedulePolicy,
    compile,
    fully_shard,
    fully_shard_with_compiled_compute,
    step_on_shards,
)
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.passes.rules import verify
from fsdp_compiled.regions.choose import set_regions
from fsdp_compiled.testing.llama import Config, Llama
from tests.support.drawn import POLICIES, Case, Node
from tests.support.drawn_lengths import EVEN
from tests.support.graphs import record, target_name
from tests.support.ranks import same_on_ranks
from tests.support.training import (
    INDUCTOR,
    assert_close,
    batches,
    full_grads,
    full_params,
    llama_loss,
    mean_over_ranks,
    my_part,
    seeded_generator,
    shard,
    square_loss,
    train,
    train_replicas,
)

RUN_ON_4 = (4, 9)  # numbers of drawn lengths


class Drawn(nn.Module):
    """What a node describes."""

    def __init__(self, node: Node, width: int, known: dict[int, nn.Linear], checkpoints: bool) -> None:
        super().__init__()
        self.node = node
        self.runs = node.runs
        self.checkpoints = checkpoints and node.checkpointed
        if node.scaled:
            self.scale = nn.Parameter(torch.rand(width) + 0.5)
        if node.hidden:
            self.up = nn.Linear(width, node.hidden, bias=node.bias)
            self.down = nn.Linear(node.hidden, width, bias=node.bias)
            if node.tied and node.hidden in known:
                self.up.weight = known[node.hidden].weight
            known.setdefault(node.hidden, self.up)
        self.below = nn.ModuleList(Drawn(each, width, known, checkpoints) for each in node.below)
        frozen = self if node.frozen == "all" else getattr(self, node.frozen, None)
        if frozen is not None:
            frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.node.scaled):
            x = x * self.scale
        if self.node.hidden:
            x = x + self.down(self.up(x).relu())
        for part in self.below:
            for _ in range(part.runs):
                x = checkpoint(part, x, use_reentrant=False) if part.checkpoints else part(x)
        return x.tanh()  # bounded, so that training stays so


def _build(case: Case, checkpoints: bool = False) -> Drawn:
    torch.manual_seed(5)
    model = Drawn(case.root, case.width, {}, checkpoints)
    for name, param in model.named_parameters():
        if case.wide == "all" or (case.wide and case.wide in name):
            param.grad_dtype = torch.float64
    return model


def _as_cast(case: Case, alone: Drawn) -> Callable[[Tensor], Tensor]:
    """What one process computes in the dtype that the case's policy asks for."""
    dtype = POLICIES[case.policy].param_dtype or torch.float32

    def call(x: Tensor) -> Tensor:
        return functional_call(alone, {name: p.to(dtype) for name, p in alone.named_parameters()}, x.to(dtype))

    return call


def _units(module: Drawn) -> Iterator[Drawn]:
    """The modules that are units, inner ones first."""
    for part in module.below:
        yield from _units(part)
    if module.node.unit:
        yield module


def _outer_units(model: Drawn) -> Iterator[Drawn]:
    """The units below the outermost one that lie in no other."""
    for part in model.below:
        yield from [part] if part.node.unit else _outer_units(part)


def _last_dim(param: nn.Parameter) -> Shard | None:
    return Shard(param.ndim - 1) if param.shape[-1] % 2 == 0 else None


def _shard(case: Case, model: Drawn) -> None:
    world = dist.get_world_size()
    shape = (world, 1) if case.replicas else (1, world)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for unit in _units(model):
        policy = POLICIES[case.policy]
        if unit is model and case.output_dtype:
            policy = replace(policy, output_dtype=getattr(torch, case.output_dtype))
        arguments = {
            "mesh": mesh if case.replicas else mesh["shard"],
            "mp_policy": policy,
            "reshard_after_forward": unit.node.reshard,
            "shard_placement_fn": _last_dim if case.last_dim else None,
        }
        if case.mode == "regional" and unit is not model:
            fully_shard_with_compiled_compute(unit, compile_kwargs={"backend": "aot_eager"}, **arguments)
        else:
            fully_shard(unit, **arguments)


def train_drawn(case: Case, rank: int) -> None:
    """Train ``case`` on this rank; a bound on memory that is too small is raised to what the error asks for."""
    asked = 0
    while True:
        try:
            return _train(case)
        except Exception as error:
            found = re.search(r"in_flight_bytes: expected at least (\d+) for this graph", str(error))
            if not found or int(found[1]) <= asked:
                raise
            asked = int(found[1])
            case = replace(case, in_flight_bytes=asked)


@dynamo_config.patch(recompile_limit=64)  # three sets of modules, each accumulated, synchronized and evaluated
def _train(case: Case) -> None:
    alone, model = _build(case), _build(case, checkpoints=True)
    _shard(case, model)
    if case.mode == "regions":
        set_regions(model, list(_outer_units(model)))
    compiled = case.mode in ("full", "regions", "switching")
    call, recorder = record(model, case.schedule, code=INDUCTOR in os.environ) if compiled else (model, None)
    one = _as_cast(case, alone)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.02) for each in (alone, model)]
    rtol = 0.1 if "bf16" in case.policy else 1e-5
    if case.on_shards:
        step_on_shards(optimizers[1])
    for step, sharded in enumerate((call, model if case.mode == "switching" else call, call)):
        for part in (*alone.modules(), *model.modules()):
            if isinstance(part, Drawn):
                part.runs = 0 if part.node.rests == step else part.node.runs
        data = batches(case.micro, 8, case.width, seed=step)
        want = sum(_backward(one, x) for x in data)
        got = torch.zeros(())
        for index, x in enumerate(data):
            model.set_requires_gradient_sync(index == case.micro - 1)
            got = got + _backward(sharded, *_my_length(case, step, x))
        if not any(param.grad is not None for param in alone.parameters()):
            return  # nothing trains; without a backward the outermost unit stays unsharded
        _assert_close({"loss": torch.tensor(mean_over_ranks(got))}, {"loss": want.float()}, rtol)
        _assert_close(full_grads(model), full_grads(alone), rtol)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        _assert_close(full_params(model), full_params(alone), rtol)
        if case.evaluates:
            # PyTorch's checkpoint around compiled code fails when sizes begin to vary (pytorch issue 166926).
            x = data[0][:4] if case.mode == "regional" else data[0]
            with torch.no_grad():
                _assert_close({"output": sharded(x).float()}, {"output": one(x).float()}, rtol)
    # What has gone through code generation hides launches and waits in control dependencies.
    graphs = [graph for _, graph in recorder.after] if recorder and not recorder.code else []
    for graph in graphs:
        verify(graph)
    same_on_ranks(list(dict.fromkeys(str(_collectives(graph)) for graph in graphs)))  # one may compile once more


def _collectives(graph: fx.Graph) -> list[tuple[str, Any]]:
    """What ranks must agree on. Their inputs may be views at other offsets, which become inputs of their own."""
    return [(target_name(node), node.args[1]) for node in graph.nodes if nodes.is_launch(node) or nodes.is_wait(node)]


def _my_length(case: Case, step: int, x: Tensor) -> tuple[Tensor, float]:
    """This rank's part of a batch, and what its loss counts beside the other ranks'."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world != 2 or case.mode == "regional":  # there sizes must not vary, see below
        return my_part(x), 1.0
    mine = x.split([case.lengths[step], len(x) - case.lengths[step]])[rank]
    return mine, world * len(mine) / len(x)


def _backward(call: Callable[[Tensor], Tensor], x: Tensor, weight: float = 1.0) -> Tensor:
    loss = square_loss(call, x) * weight
    if loss.requires_grad:
        loss.backward()
    return loss.detach().float()


def _assert_close(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None], rtol: float) -> None:
    """Compare by name, within a part of the largest value of all: what nearly cancels has no digits of its own."""
    assert actual.keys() == expected.keys()
    largest = max((want.abs().max().item() for want in expected.values() if want is not None), default=0.0)
    for name, want in expected.items():
        got = actual[name]
        assert (got is None) == (want is None), f"{name}: {got} against {want}"
        if want is not None:
            close = {"rtol": rtol, "atol": rtol * max(largest, 1e-3)}
            torch.testing.assert_close(got, want, **close, msg=lambda text, name=name: f"{name}: {text}")


@dataclass(frozen=True)
class Lengths:
    """A Llama that ranks train, each with lengths of its own, through code generation."""

    dynamic: bool | None
    of_ranks: tuple[tuple[int, ...], ...]  # each step's


def draw_lengths(number: int) -> Lengths:
    """Draw 100 to 4000 tokens for each of 2 ranks, or of 4 for two of twelve numbers, and each of 1 to 2 steps."""
    rng = random.Random(number)
    near = rng.randint(100, 3600)
    kinds: list[Callable[[], int]] = [
        lambda: rng.randint(100, 4000),
        lambda: round(100 * 40 ** rng.random()),
        lambda: round(near * rng.uniform(1, 1.1)),
    ]
    dynamic, draw = (False, True, None)[number % 3], kinds[number // 3 % 3]
    world, steps = 4 if number in RUN_ON_4 else 2, 1 if dynamic is False else 2
    return Lengths(dynamic, tuple(tuple(draw() for _ in range(steps)) for _ in range(world)))


def train_lengths(drawn: Lengths) -> None:
    """Compare with replicas of an unsharded model; a rank that disagreed would raise."""
    sizes = Config(vocab=101, width=32, layers=2, heads=4, kv_heads=2, hidden=48, max_seq=4096)
    alone, model = Llama(sizes), Llama(sizes)
    for each in (alone, model):
        each.init_weights(0)
    shard(model, "eager")
    call = compile(model, schedule=SchedulePolicy(cluster=EVEN), fullgraph=True, dynamic=drawn.dynamic)
    mine = drawn.of_ranks[dist.get_rank()]
    for step, length in enumerate(mine):
        generator = seeded_generator(step)
        tokens = torch.randint(sizes.vocab, (dist.get_world_size(), length + 1), generator=generator)[None]
        want = train_replicas(alone, alone, tokens, llama_loss)
        got = train(model, call, tokens, llama_loss)
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=0)
    assert_close(full_params(model), full_params(alone))
