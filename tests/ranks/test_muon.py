"""Muon by step_on_shards, bit by bit what one process computes from the same gradients."""

from __future__ import annotations

import gc
import time
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn, optim
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.profiler import profile

from fsdp_compiled import RankFailureError, RankMismatchError, fully_shard, set_rank_agreement, step_on_shards
from fsdp_compiled.agreement import peers, tripwire
from fsdp_compiled.collectives import all_to_all, backend
from fsdp_compiled.hooks.optimizers import hook_steps, unhook_steps
from fsdp_compiled.optim import matrix_plan
from tests.support.parity import row
from tests.support.ranks import on_ranks, same_on_ranks
from tests.support.training import MLP, batches, each_mode, full, my_part, seeded_generator, shard, square_loss
from tests.support.until import until

# Even and uneven, tall and wide; fewer rows than ranks; one row.
SHAPES = ((16, 8), (8, 16), (7, 5), (2, 9), (1, 6), (33, 20), (12, 12))
LAYOUTS = {"rows": (Shard(0),), "columns": (Shard(1),), "replicas": (Replicate(),)}


def drawn(seed: int, shapes=SHAPES, dtype=torch.float32) -> list[Tensor]:
    generator = seeded_generator(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


class Pair:
    """Matrices of one process and the same ones distributed, each with its Muon."""

    def __init__(self, mesh, placements, shapes=SHAPES, dtype=torch.float32, **options):
        self.place = lambda tensor: distribute_tensor(tensor, mesh, placements)
        self.shapes, self.dtype, self.steps = shapes, dtype, 0
        self.whole = [nn.Parameter(tensor) for tensor in drawn(0, shapes, dtype)]
        self.params = [nn.Parameter(self.place(tensor)) for tensor in drawn(0, shapes, dtype)]
        self.alone = optim.Muon(self.whole, lr=0.1, **options)
        self.optimizer = step_on_shards(optim.Muon(self.params, lr=0.1, **options))

    def step(self, without=()):
        self.steps += 1
        grads = drawn(self.steps, self.shapes, self.dtype)
        for at, (whole, param, grad) in enumerate(zip(self.whole, self.params, grads, strict=True)):
            placed = self.place(grad)  # a collective
            whole.grad, param.grad = (None, None) if at in without else (grad, placed)
        self.alone.step()
        self.optimizer.step()

    def check(self):
        for whole, param in zip(self.whole, self.params, strict=True):
            assert_equal(param, whole)
            want, got = self.alone.state.get(whole, {}), self.optimizer.state.get(param, {})
            assert want.keys() == got.keys()
            for key, value in want.items():
                assert isinstance(got[key], DTensor)
                assert_equal(got[key], value)


def assert_equal(got: Tensor, want: Tensor):
    assert torch.equal(full(got.detach()), full(want.detach()))


def mesh_of(*sizes):
    names = ("replicate", "shard")[-len(sizes) :]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def _equals_one_process(layout):
    for options in (
        {"nesterov": True},
        {"nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"nesterov": False, "adjust_lr_fn": "original", "momentum": 0.5, "ns_steps": 3, "lr_as_tensor": True},
    ):
        lr_as_tensor = options.pop("lr_as_tensor", False)
        pair = Pair(mesh_of(dist.get_world_size()), LAYOUTS[layout], **options)
        for each in (pair.alone, pair.optimizer):
            if lr_as_tensor:
                each.param_groups[0]["lr"] = torch.tensor(0.1)
        for _ in range(5):
            pair.step()
        pair.check()


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_on_2_ranks(layout):
    _equals_one_process(layout)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@on_ranks(3)
def test_on_3_ranks(layout):
    _equals_one_process(layout)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@on_ranks(4)
def test_on_4_ranks(layout):
    _equals_one_process(layout)


@on_ranks(2)
def test_where_not_every_process_has_sharded_a_model():
    """The library notes steps of all optimizers from the first fully_shard on."""
    unhook_steps()
    if dist.get_rank() == 0:
        hook_steps()
    pair = Pair(mesh_of(2), (Shard(0),))
    for _ in range(3):
        pair.step()
        pair.step()
        time.sleep(0.5)  # for what runs afterwards to be compared
    pair.check()
    hook_steps()


@on_ranks(2)
def test_bf16_parameters_keep_their_momentum():
    pair = Pair(mesh_of(2), (Shard(0),), dtype=torch.bfloat16)
    pair.step()
    for whole, param in zip(pair.whole, pair.params, strict=True):
        # torch's own bf16 addition rounds an element differently by its place in the tensor, on the CPU.
        torch.testing.assert_close(full(param.detach()), whole.detach(), rtol=2**-7, atol=2e-4)
        assert_equal(pair.optimizer.state[param]["momentum_buffer"], pair.alone.state[whole]["momentum_buffer"])
    pair = Pair(mesh_of(2), (Shard(0),), dtype=torch.bfloat16, nesterov=False)
    want = [torch.zeros_like(whole) for whole in pair.whole]
    for step in range(1, 3):
        pair.step()
        for momentum, grad in zip(want, drawn(step, dtype=torch.bfloat16), strict=True):
            momentum.lerp_(grad, 1 - 0.95)
    for param, momentum in zip(pair.params, want, strict=True):
        assert_equal(pair.optimizer.state[param]["momentum_buffer"], momentum)


@pytest.mark.parametrize("shares", [False, True])
@on_ranks(4)
def test_replicas_do_alike_or_share_owners(shares):
    with mock.patch.object(matrix_plan, "_saves_by_sharing", lambda *_: shares):
        pair = Pair(mesh_of(2, 2), (Replicate(), Shard(0)))
        for _ in range(3):
            pair.step()
    pair.check()
    for param in pair.params:
        mine = param.to_local().detach()
        others = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(others, mine.contiguous(), group=param.device_mesh.get_group("replicate"))
        assert torch.equal(*others)
    worlds = {len(each.there.sent.splits) for each in pair.optimizer._matrices._plan.rounds if each.there}
    assert worlds == ({4} if shares else {2})


@on_ranks(4)
def test_replicas_on_some_of_the_ranks_share_owners():
    """As in each stage of a pipeline."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "replicate", "shard"))["replicate", "shard"]
    with mock.patch.object(matrix_plan, "_saves_by_sharing", lambda *_: True):
        pair = Pair(mesh, (Replicate(), Shard(0)))
        for _ in range(3):
            pair.step()
    pair.check()
    assert {len(each.there.sent.splits) for each in pair.optimizer._matrices._plan.rounds if each.there} == {2}


@on_ranks(4)
def test_replicas_share_owners_where_that_is_faster():
    """Large matrices on links that cost little, and small ones where each collective takes long."""
    mesh = mesh_of(2, 2)
    found = []
    for shapes in ([(2048, 2048)] * 8, [(8, 8)] * 4):
        params = [nn.Parameter(distribute_tensor(torch.zeros(s), mesh, (Replicate(), Shard(0)))) for s in shapes]
        step = step_on_shards(optim.Muon(params))._matrices
        given = [matrix_plan.Param(param, "", {"ns_steps": 5}, True) for param in params]
        plan = matrix_plan.plan_step(given, step.rule, {})
        found.append(len(plan.rounds[0].there.sent.splits))
    assert found == [4, 2]
    same_on_ranks(found)


def _sharded_mlp(mode="eager", **kwargs):
    model = MLP()
    return model, shard(model, mode, **kwargs)


def _matrices(model):
    return [param for param in model.parameters() if param.ndim == 2]


def _others(model):
    return [param for param in model.parameters() if param.ndim != 2]


class Training:
    """A sharded model beside a model of one process that is given the same gradients before each step."""

    def __init__(self, model, call, **options):
        self.model, self.call = model, call
        self.alone = MLP()
        self.muon = step_on_shards(optim.Muon(_matrices(model), lr=0.05, **options))
        self.adam = step_on_shards(optim.AdamW(_others(model), lr=0.01))
        self.optimizers = [self.muon, self.adam]
        muon = optim.Muon(_matrices(self.alone), lr=0.05, **options)
        self.theirs = [muon, optim.AdamW(_others(self.alone), lr=0.01)]

    def backward(self, batch):
        square_loss(self.call, my_part(batch)).backward()

    def step(self):
        for param, other in zip(self.model.parameters(), self.alone.parameters(), strict=True):
            other.grad = None if param.grad is None else full(param.grad).clone()
        for each in (*self.optimizers, *self.theirs):
            each.step()
            each.zero_grad()

    def check(self):
        for param, other in zip(self.model.parameters(), self.alone.parameters(), strict=True):
            assert_equal(param, other)


@row("optimizers and evaluation")
@each_mode
@on_ranks(2)
def test_trains_in_every_mode(mode):
    training = Training(*_sharded_mlp(mode))
    schedulers = [optim.lr_scheduler.ExponentialLR(each, 0.7) for each in (training.muon, training.theirs[0])]
    exchanges = []
    start = backend.all_to_all

    def counted(*args):
        exchanges.append(args)
        return start(*args)

    with mock.patch.object(backend, "all_to_all", counted):
        for batch in batches(3, 8, 10):
            for micro in range(2):  # accumulated: one step, and exchanges only there
                training.model.set_requires_gradient_sync(micro == 1)
                training.backward(batch)
            before = len(exchanges)
            nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
            assert len(exchanges) == before
            training.step()
            assert len(exchanges) - before == 2 * len(training.muon._matrices._plan.rounds) > 0
            for scheduler in schedulers:
                scheduler.step()
    training.check()


@row("meshes", "optimizers and evaluation")
@pytest.mark.parametrize("mode", ["eager", "full"])
@on_ranks(4)
def test_trains_with_replicas_that_share_owners(mode):
    with mock.patch.object(matrix_plan, "_saves_by_sharing", lambda *_: True):
        training = Training(*_sharded_mlp(mode, mesh=mesh_of(2, 2)))
        for batch in batches(3, 8, 10):
            training.backward(batch)
            training.step()
    training.check()
    assert all(each.there.bucket.spec.group.world == 4 for each in training.muon._matrices._plan.rounds)


@row("optimizers and evaluation", mode="full")
@on_ranks(2)
def test_compiles_one_forward_and_one_backward_once():
    model, call = _sharded_mlp("full")
    training = Training(model, call)
    torch._dynamo.reset()
    counters.clear()
    for batch in batches(10, 8, 10):
        training.backward(batch)
        training.step()
    training.check()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert counters["aot_autograd"]["ok"] == 1


@row("optimizers and evaluation", mode="eager")
@on_ranks(2)
def test_parameters_of_torch_fsdp():
    model = MLP()
    for block in model.blocks:
        torch_fsdp.fully_shard(block)
    torch_fsdp.fully_shard(model)
    training = Training(model, model)
    for batch in batches(3, 8, 10):
        training.backward(batch)
        training.step()
    training.check()


@row("optimizers and evaluation", mode="eager")
@on_ranks(3)
def test_unused_and_frozen_parameters_and_groups():
    pair = Pair(mesh_of(3), (Shard(0),))
    for each, params in ((pair.alone, pair.whole), (pair.optimizer, pair.params)):
        each.param_groups[0]["params"] = params[:3]
        each.add_param_group({"params": params[3:], "lr": 0.02, "momentum": 0.5, "weight_decay": 0.3})
    for without in ((0, 4), (), range(len(SHAPES)), (1,), (0, 4)):
        pair.step(without)
    pair.check()
    assert len(pair.optimizer.state) == len(SHAPES)


@row("optimizers and evaluation", mode="eager")
@on_ranks(2)
def test_closures_hooks_and_copies():
    pair = Pair(mesh_of(2), (Shard(0),))
    seen = []

    def closure():
        seen.append(torch.is_grad_enabled())
        for param, grad in zip(pair.params, drawn(1), strict=True):
            param.grad = pair.place(grad)
        return torch.tensor(3.0)

    pair.optimizer.register_step_post_hook(lambda *_: seen.append("hook"))
    assert pair.optimizer.step(closure).item() == 3.0 and seen == [True, "hook"]
    for whole, grad in zip(pair.whole, drawn(1), strict=True):
        whole.grad = grad
    pair.alone.step()
    pair.check()
    assert type(deepcopy(pair.optimizer)) is optim.Muon


class Fused(nn.Module):
    """Parameters that hold several matrices: fused, stacked, and both."""

    SHAPES = {"qkv": (14, 6), "experts": (4, 5, 6), "gate_up": (4, 10, 6), "plain": (6, 6)}
    ROWS = {"qkv": (8, 3, 3), "gate_up": (5, 5)}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name, shape in self.SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))


def _pieces(name, tensor):
    stack = [tensor] if tensor.dim() == 2 else list(tensor)
    rows = Fused.ROWS.get(name, (tensor.shape[-2],))
    return [piece.clone() for matrix in stack for piece in matrix.split(rows)]


@pytest.mark.parametrize("dim", [0, 1])
@on_ranks(2)
def test_fused_and_stacked_matrices(dim):
    model, mesh = Fused(), mesh_of(2)
    whole = {name: param.detach() for name, param in model.named_parameters()}
    alone = {name: [nn.Parameter(piece) for piece in _pieces(name, each)] for name, each in whole.items()}
    params = {name: nn.Parameter(distribute_tensor(each, mesh, (Shard(dim),))) for name, each in whole.items()}
    want = optim.Muon([p for each in alone.values() for p in each], adjust_lr_fn="match_rms_adamw")
    got = optim.Muon([param for param in params.values() if param.ndim == 2], adjust_lr_fn="match_rms_adamw")
    got.add_param_group({"params": [param for param in params.values() if param.ndim == 3]})
    step_on_shards(got, blocks={params[name]: rows for name, rows in Fused.ROWS.items()})
    for step in range(3):
        grads = dict(zip(params, drawn(step, Fused.SHAPES.values()), strict=True))
        for name, param in params.items():
            param.grad = distribute_tensor(grads[name], mesh, (Shard(dim),))
            for piece, grad in zip(alone[name], _pieces(name, grads[name]), strict=True):
                piece.grad = grad
        want.step()
        got.step()
    for name, param in params.items():
        for piece, expected in zip(_pieces(name, full(param.detach())), alone[name], strict=True):
            assert torch.equal(piece, expected), name
    moved = {item.matrix.param.shape for each in got._matrices._plan.rounds for item in each.items}
    # Others are complete on a rank, as are blocks of rows if rows are cut between them.
    assert moved == {(14, 6), (6, 6)} | ({(4, 5, 6)} if dim else set())


@on_ranks(2)
def test_a_newton_schulz_of_the_users():
    asked = []

    def sign(matrix, coefficients, steps, eps):
        asked.append((matrix.dtype, matrix.is_contiguous(), len(coefficients), steps, eps))
        return matrix.sign_().float()

    param = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh_of(2), (Shard(0),)))
    optimizer = step_on_shards(optim.Muon([param], lr=1.0, weight_decay=0.0, ns_steps=7), newton_schulz=sign)
    (grad,) = drawn(1, [(4, 4)])
    param.grad = distribute_tensor(grad, param.device_mesh, (Shard(0),))
    optimizer.step()
    assert torch.equal(full(param.detach()), -grad.sign())
    assert all(each == (torch.bfloat16, True, 3, 7, 1e-7) for each in asked)
    everyone = [None, None]
    dist.all_gather_object(everyone, len(asked))
    assert sum(everyone) == 1  # one owner


@on_ranks(4)
def test_bytes_sent_are_at_most_four_for_each_element_of_a_shard():
    mesh, sizes = mesh_of(4), []
    shapes = [(32, 32)] * 16
    params = [nn.Parameter(distribute_tensor(torch.randn(shape), mesh, (Shard(0),))) for shape in shapes]
    optimizer = step_on_shards(optim.Muon(params))
    for param in params:
        param.grad = distribute_tensor(torch.randn(param.shape), mesh, (Shard(0),))
    start = backend.all_to_all

    def counted(output, input, received, sent, group):
        sizes.append(input.nbytes)
        assert sum(sent) == input.numel() and sum(received) == output.numel()
        return start(output, input, received, sent, group)

    with mock.patch.object(backend, "all_to_all", counted), profile() as run:
        optimizer.step()
    elements = sum(a * b for a, b in shapes)
    assert sum(sizes) == 4 * elements // 4
    rounds = len(optimizer._matrices._plan.rounds)
    assert len(sizes) == 2 * rounds == 8
    names = [event.name for event in run.events()]
    assert names.count("FSDP::all_to_all (matrices)") == names.count("FSDP::all_to_all_wait (matrices)") == 8
    started = [name for name in names if name.startswith("gloo:")]
    assert all("all_to_all" in name or "alltoall" in name for name in started)


@on_ranks(2)
def test_an_exchange_starts_before_the_round_that_hides_it():
    """Also that no more than two rounds have buffers, and none after the step."""
    pair = Pair(mesh_of(2), (Shard(0),), shapes=[(32, 32)] * 16)
    earlier = _of_bf16()  # of other tests in this process; held, so that their ids stay theirs
    order, before = [], set(map(id, earlier))
    two_rounds = 2 * 3 * (2 * 32 * 32 * 2)  # on each rank: what it sends, receives and owns
    launch, function = all_to_all.Exchange.launch, pair.optimizer._matrices.rule.matrix_function

    def launched(exchange, parts, device):
        order.append("to" if exchange.bucket.spec.to_owners else "from")
        # gloo's threads let go late of what is waited for
        assert until(lambda: _nbytes_made_since(before) <= two_rounds)
        return launch(exchange, parts, device)

    def computed(group, matrix):
        order.append("compute")
        return function(group, matrix)

    rule = pair.optimizer._matrices.rule
    pair.optimizer._matrices.rule = matrix_plan.replace(rule, matrix_function=computed)
    with mock.patch.object(all_to_all.Exchange, "launch", launched):
        pair.step()
    pair.check()
    two = ["compute"] * 2
    assert order == ["to", "to", *two, "from", "to", *two, "from", "to", *two, "from", *two, "from"]
    assert until(lambda: _nbytes_made_since(before) == 0)


def _nbytes_made_since(before: set[int]) -> int:
    gc.collect()
    made = (each for each in _of_bf16() if id(each) not in before)
    kept = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in made}
    return sum(kept.values())


def _of_bf16() -> list[Tensor]:
    return [each for each in gc.get_objects() if type(each) is Tensor and each.dtype is torch.bfloat16]


@on_ranks(2, timeout_s=20)
def test_ranks_whose_gradients_differ():
    pair = Pair(mesh_of(2), (Shard(0),))
    pair.step()
    before = [full(param.detach()).clone() for param in pair.params]
    without = (2,) if dist.get_rank() else ()
    message = r"rank 1: all-to-all of param_groups\[0\]\['params'\]\[2\] float32\[7, 5\] without a gradient"
    with pytest.raises(RankMismatchError, match=message):
        pair.step(without)
    assert all(torch.equal(full(param.detach()), kept) for param, kept in zip(pair.params, before, strict=True))
    assert {len(state) for state in pair.optimizer.state.values()} == {1}


@on_ranks(2, timeout_s=20)
def test_ranks_whose_gradients_differ_along_known_steps():
    """Each step has followed the other on both ranks, and the rank whose gradients change compares all the same."""
    pair = Pair(mesh_of(2), (Shard(0),))
    for without in ((), (2,), (), (), (2,), (2,), ()):
        pair.step(without)
    if dist.get_rank():
        pair.params[2].grad = None
        store, said = dist.group.WORLD.get_group_store(), f"{tripwire._LAST}/0"
        assert until(lambda: "7 with a gradient" in peers.value(store, said))  # by a thread, once rank 0 waits
    message = "rank 0 neither came to all-to-all of .* 6 with a gradient, .* ran last: rank 0: .* 7 with a gradient"
    set_rank_agreement(deadline=timedelta(seconds=2))
    try:
        with pytest.raises(RankMismatchError if dist.get_rank() else RankFailureError, match=message):
            pair.optimizer.step()
    finally:
        set_rank_agreement()


@on_ranks(2, timeout_s=20)
def test_a_rank_without_any_gradient():
    pair = Pair(mesh_of(2), (Shard(0),))
    with pytest.raises(RankMismatchError, match="rank 0: all-to-all of .* without a gradient"):
        pair.step(range(len(SHAPES)) if dist.get_rank() == 0 else ())
    assert not pair.optimizer.state


@row("state dict", mode="eager")
@on_ranks(2)
def test_state_dicts_of_checkpoints_have_the_same_keys_on_every_rank():
    training = Training(*_sharded_mlp())
    training.backward(batches(1, 8, 10)[0])
    training.step()
    found = get_optimizer_state_dict(training.model, training.muon)
    same_on_ranks([(name, sorted(values)) for name, values in found["state"].items()])
    assert found["state"].keys() == {n for n, p in training.model.named_parameters() if p.ndim == 2}


STEPS = 2


def _continue(folder, load, save, wrap=step_on_shards):
    """Train on from a checkpoint with drawn gradients, on however many ranks, and save."""
    model = MLP()
    if wrap is step_on_shards:
        fully_shard(model)
    optimizer = wrap(optim.Muon(_matrices(model), lr=0.05))
    first = 0
    if load:
        first = STEPS * load
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder / f"after_{load}")
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for step in range(first, first + STEPS):
        params = _matrices(model)
        for param, grad in zip(params, drawn(step, [p.shape for p in params]), strict=True):
            is_sharded = isinstance(param, DTensor)
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if is_sharded else grad
        optimizer.step()
    for param in model.parameters():
        param.grad = None
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder / f"after_{save}")


def _plain(optimizer):
    return optimizer


@on_ranks(4)
def on_4_ranks(folder, load, save):
    _continue(Path(folder), load, save)


@on_ranks(3)
def on_3_ranks(folder, load, save):
    _continue(Path(folder), load, save)


@on_ranks(2)
def on_2_ranks(folder, load, save):
    _continue(Path(folder), load, save)


@on_ranks(1)
def in_one_process(folder, load, save):
    _continue(Path(folder), load, save, _plain)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # here it is; ranks are other processes
def test_checkpoints_continue_on_other_ranks_and_in_one_process(tmp_path):
    results = []
    for name, runs in {
        "changing": (on_4_ranks, on_2_ranks, on_3_ranks, in_one_process, on_4_ranks),
        "alone": (in_one_process,) * 5,
    }.items():
        folder = tmp_path / name
        for at, run in enumerate(runs):
            run(folder=str(folder), load=at, save=at + 1)
        whole = MLP()
        optimizer = optim.Muon(_matrices(whole), lr=0.05)
        state = {"model": whole.state_dict(), "optimizer": get_optimizer_state_dict(whole, optimizer)}
        dcp.load(state, checkpoint_id=folder / "after_5", no_dist=True)
        results.append(state)
    for name, tensor in results[1]["model"].items():
        assert torch.equal(results[0]["model"][name], tensor), name
    assert results[0]["optimizer"]["state"].keys() == results[1]["optimizer"]["state"].keys()
    for name, values in results[1]["optimizer"]["state"].items():
        assert torch.equal(results[0]["optimizer"]["state"][name]["momentum_buffer"], values["momentum_buffer"]), name
