"""Modules whose forward writes to a parameter: normalises it, or clamps it."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_compiled import CPUOffloadPolicy, MixedPrecisionPolicy, SchedulePolicy, fully_shard, options
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    assert_close,
    assert_trains_like_one_process,
    backend,
    batches,
    compiled,
    each_with_regions,
    eager_and_full,
    full_grads,
    full_params,
    my_part,
    shard,
    square_loss,
    train,
)
from tests.support.variants import thorough


class Normalised(nn.Module):
    """Writes its weight when it trains, reads it again, and its gradient needs what was written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Parameter(torch.randn(13, 10)), nn.Parameter(torch.randn(10, 13))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.up.copy_(F.normalize(self.up, dim=1))
        return x + F.linear(torch.tanh(F.linear(x, self.up)), self.down)


class Net(nn.Module):
    """Also clamps a parameter of its own."""

    clamps, through_data = True, False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normalised() for _ in range(2))
        self.scale = nn.Parameter(torch.randn(10))

    def forward(self, x):
        if self.clamps:
            with torch.no_grad():
                (self.scale.data[1:] if self.through_data else self.scale).clamp_(min=0.3)
        for block in self.blocks:
            x = block(x * self.scale)
        return x


@pytest.mark.parametrize("mode", ["eager", "regional"])
@pytest.mark.parametrize(
    "settings", [{}, {"reshard_after_forward": False}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}]
)
@on_ranks(2)
def test_uncompiled_forwards_keep_what_they_write(mode, settings):
    alone, model = Net(), Net()
    call = shard(model, mode, **settings)
    assert_trains_like_one_process(model, call, alone)
    model.eval()
    before = full_params(model)
    with torch.no_grad():
        call(batches(1, 4, 10)[0])
    changed = [name for name, param in full_params(model).items() if not torch.equal(param, before[name])]
    assert changed == ["scale"]


@on_ranks(4)
def test_a_smaller_group_after_forward():
    alone, model = Net(), Net()
    assert_trains_like_one_process(model, shard(model, "eager", reshard_after_forward=2), alone)


class Halved(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


@on_ranks(2)
def test_under_tensor_parallelism():
    mesh = init_device_mesh(torch.get_default_device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(parallelize_module(Halved(10, 6), mesh["tp"], ColwiseParallel()))
    for unit in (model[0], model):
        fully_shard(unit, mesh=mesh["dp"])
    (data,), before = batches(1, 4, 10), full_params(model)
    model(data)
    torch.testing.assert_close(full_params(model)["0.weight"], before["0.weight"] / 2, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="0.weight: expected not to be written to in compiled code, got a "):
        compiled(model)(data)


@on_ranks(2)
def test_what_forward_leaves_alone_keeps_its_digits():
    """Only what it has clamped is rounded to bf16."""
    model = Net()
    before = full_params(shard(model, "eager", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)))
    train(model, model, batches(1, 8, 10), square_loss, lr=0.0)
    after = full_params(model)
    assert_close({"scale": after["scale"]}, {"scale": before["scale"].clamp(min=torch.tensor(0.3).bfloat16().item())})
    is_kept = before["scale"] > 0.31
    assert 0 < is_kept.sum() < 10 and torch.equal(after["scale"][is_kept], before["scale"][is_kept])
    assert torch.equal(after["blocks.0.down"], before["blocks.0.down"])
    assert not torch.equal(after["blocks.0.up"], before["blocks.0.up"])


@pytest.mark.parametrize("mode", ["full", "regions"])
@on_ranks(2)
def test_a_graph_says_that_it_would_lose_it(mode):
    model, (data,) = Net(), batches(1, 8, 10)
    call = shard(model, mode)
    cases = (False, False, "blocks.0.up"), (True, False, "scale"), (True, True, "scale")
    for model.clamps, model.through_data, name in cases:
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match=f"{name}: expected not to be written to in compiled code, got a "):
            call(data)


@pytest.mark.parametrize("in_lists", [False, True])
@pytest.mark.parametrize("breaks", [False, True])
@on_ranks(2)
def test_so_does_compiled_code_outside_of_forward(breaks, in_lists):
    model = fully_shard(nn.Linear(10, 6))
    before = full_params(model)

    @torch.compile(**backend())
    def change(all_of_them):
        weights = list(model.parameters()) if all_of_them else [model.weight]
        with torch.no_grad():
            torch._foreach_mul_(weights, 0.5) if in_lists else [weight.mul_(0.5) for weight in weights]
        if breaks:
            torch._dynamo.graph_break()
        return model.weight + 1

    with pytest.raises(RuntimeError, match="weight: expected not to be written to in compiled code, got a "):
        change(False)
    assert_close(full_params(model), before)
    changed = change(True)
    changed = getattr(changed, "full_tensor", lambda: changed)()  # a DTensor where the read breaks the graph
    assert_close({"weight": changed}, {"weight": before["weight"] / 2 + 1})
    assert_close(full_params(model), {name: value / 2 for name, value in before.items()})


@on_ranks(2)
def test_a_graph_that_writes_to_none_compiles():
    alone, model = Normalised().eval(), fully_shard(Normalised().eval())
    assert_trains_like_one_process(model, compiled(model), alone)


@pytest.mark.parametrize("keeps", [{}, {"reshard_after_forward": False}], ids=["root", "all"])
@eager_and_full
@on_ranks(2)
def test_what_is_written_to_parameters_that_forward_has_left_unsharded_stays(mode, keeps):
    alone, model = MLP(), MLP()
    call, (data,) = shard(model, mode, **keeps), batches(1, 8, 10)
    copies = []
    for follow in (model.state_dict, lambda: copies.append(copy.deepcopy(model)), model.reshard, lambda: None):
        model(data)
        assert not all(isinstance(param, DTensor) for param in model.parameters())
        for each in (alone, model):
            with torch.no_grad():
                for param in each.parameters():
                    param.mul_(0.9)
        follow()
        square_loss(alone, data).backward()
        square_loss(call, my_part(data)).backward()
        assert_close(full_grads(model), full_grads(alone))
        assert_close(full_params(model), full_params(alone))
    originals = full_params(alone)
    assert_close(full_params(copies[0]), {name: value / 0.9**2 for name, value in originals.items()})


@on_ranks(2)
def test_what_is_written_to_what_a_step_has_made_stale_is_an_error():
    alone, model = MLP(), MLP()
    shard(model, "eager")
    optimizers, (data,) = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)], batches(1, 8, 10)
    model.set_reshard_after_backward(False)
    square_loss(alone, data).backward()
    square_loss(model, my_part(data)).backward()
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        model.scale.mul_(0.9)
    with pytest.raises(
        RuntimeError, match="scale: expected writes to the unsharded parameter or to the sharded one,"
    ):
        model(data)
    torch.testing.assert_close(model(data), alone(data))  # of the sharded parameters


@each_with_regions
@on_ranks(2)
def test_what_is_loaded_between_forward_and_backward_is_a_write_and_a_move_that_changes_nothing_is_none(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]

    def halved(each):
        return {name: value / 2 for name, value in each.state_dict().items()}

    def write(each):
        with torch.no_grad():
            for param in each.parameters():
                param.mul_(2)

    writes = (
        lambda each: each.load_state_dict(halved(each)),
        write,
        lambda each: set_model_state_dict(each, halved(each)),
    )
    for data, is_written in zip(batches(6, 8, 10), (False, False, True, True, False, True), strict=True):
        losses = square_loss(alone, data), square_loss(call, my_part(data))
        change, *writes = writes if is_written else (lambda each: None, *writes)
        for each, loss, optimizer in zip((alone, model), losses, optimizers, strict=True):
            change(each)
            each.to(torch.get_default_device())
            with pytest.raises(RuntimeError, match="by an inplace operation") if is_written else nullcontext():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(full_params(model), full_params(alone))


@on_ranks(2)
def test_what_a_unit_has_written_whose_forward_fails_is_lost():
    """Ranks may fail at different places, and would not have the same."""
    model, (data,) = Net(), batches(1, 8, 10)
    shard(model, "eager", reshard_after_forward=False)
    before = full_params(model)
    fails = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(data)
    fails.remove()
    assert torch.equal(full_params(model)["scale"], before["scale"]) and before["scale"].min() < 0.3


class Followed(nn.Module):
    """Has one block follow the other, before the other has run or after it."""

    def __init__(self, early: bool = True) -> None:
        super().__init__()
        self.early = early
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.blocks[1].requires_grad_(False)

    def forward(self, x):
        first, second = self.blocks
        x = torch.tanh(first(x))
        if self.early:
            self.follow()
        x = x * second(x.detach())
        if not self.early:
            self.follow()
        return x

    def follow(self):
        first, second = self.blocks
        with torch.no_grad():
            for leader, follower in zip(first.parameters(), second.parameters(), strict=True):
                follower.mul_(0.5).add_(leader, alpha=0.5)


@on_ranks(2)
def test_what_was_all_gathered_ahead_and_written_to_since_is_all_gathered_again():
    alone, model = Followed(), Followed()
    call = shard(model, "eager")
    first, second = model.blocks
    first.set_modules_to_forward_prefetch([second])
    assert_trains_like_one_process(model, call, alone)


@pytest.mark.parametrize("mode", ["full", "regions"])
@on_ranks(2)
def test_a_graph_follows_what_is_read_before_and_not_what_is_read_after(mode):
    alone, model = Followed(early=False), Followed(early=False)
    call = shard(model, mode)
    for _ in range(2):
        torch._dynamo.reset()  # and in the second trace parameters were written to before
        assert_trains_like_one_process(model, call, alone)


@on_ranks(2)
def test_the_graph_breaks_between_what_is_written_and_what_is_read():
    alone, model = Followed(), Followed()
    call = shard(model, "full")
    with pytest.raises(RuntimeError, match=r"blocks.1.weight: expected not to be written to in .* before it is read"):
        call(batches(1, 8, 10)[0])
    assert_trains_like_one_process(model, compiled(model, fullgraph=False), alone)


class Returning(nn.Module):
    """Also returns a weight. Some ranks have smaller shards than others, or empty ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.other = nn.Sequential(nn.Linear(10, 13), nn.Linear(13, 1)), nn.Linear(10, 13)

    def forward(self, x):
        return self.blocks(x), self.other.weight


@pytest.mark.parametrize("policy", [SchedulePolicy(), SchedulePolicy(bucket="none", prefetch=0)])
@thorough(when=lambda policy: policy.prefetch == 0)
@on_ranks(2)
def test_a_graph_reads_parameters_before_it_writes_to_them(policy):
    """Inductor would write early to what nothing reads, and has a shard and its DTensor as two inputs."""
    model, alone, (data,) = Returning(), Returning(), batches(1, 8, 10)
    shard(model, "eager", reshard_after_forward=True)

    @torch.compile(options=options(policy))
    def step(x):
        results = model(x)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        return results

    for result, expected in zip(step(data), alone(data), strict=True):
        torch.testing.assert_close(result.detach(), expected.detach())
    halved = {name: param.detach() / 2 for name, param in alone.named_parameters()}
    torch.testing.assert_close(full_params(model), halved, rtol=0, atol=0)
