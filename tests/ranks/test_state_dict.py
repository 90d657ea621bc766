"""State dicts and checkpoints: ours, those of PyTorch's FSDP2, and from one to the other."""

from __future__ import annotations

import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_compiled import fully_shard, step_on_shards
from tests.support.parity import row
from tests.support.ranks import on_ranks, same_on_ranks
from tests.support.training import (
    MLP,
    MODES,
    WITH_REGIONS,
    assert_close,
    assert_trains_like_one_process,
    batches,
    full,
    full_grads,
    full_params,
    mean_over_ranks,
    my_part,
    shard,
    square_loss,
    train,
)
from tests.support.variants import thorough

each_mode = pytest.mark.parametrize("mode", MODES)
eager_and_full = pytest.mark.parametrize("mode", ["eager", "full"])
each_optimizer = pytest.mark.parametrize("mode, on_shards", [("eager", False), ("eager", True), ("full", False)])
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
DATA = (4, 8, 9)  # steps, rows, columns


class Odd(MLP):
    """Uneven and empty shards, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__(width=9, hidden=5)
        self.shift = nn.Parameter(torch.ones(9), requires_grad=False)
        self.register_buffer("gain", torch.full((9,), 1.5))

    def forward(self, x):
        return super().forward(x * self.gain) + self.shift


def _sharded(mode, model=None):
    """A model and what to call; mode "torch" is PyTorch's own FSDP2."""
    model = Odd() if model is None else model
    if mode != "torch":
        return model, shard(model, mode)
    for block in model.blocks:
        torch_fsdp.fully_shard(block)
    return torch_fsdp.fully_shard(model), model


def _other():
    """A model whose values are not those of a fresh one."""
    model = Odd()
    with torch.no_grad():
        for value in model.state_dict().values():
            value.mul_(2)
    return model


def _optimizer(model, on_shards=False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return step_on_shards(optimizer) if on_shards else optimizer


def _steps(call, optimizer, data):
    losses = []
    for x in data:
        loss = square_loss(call, my_part(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


def _assert_same_state(got, want):
    """Two nested dicts of tensors, DTensors among them, agree in every bit."""
    assert got.keys() == want.keys()
    for key, value in want.items():
        if isinstance(value, dict):
            _assert_same_state(got[key], value)
        elif isinstance(value, torch.Tensor):
            assert type(got[key]) is type(value), key
            torch.testing.assert_close(full(got[key]), full(value), rtol=0, atol=0, msg=key)
        else:
            assert got[key] == value, key


@row("state dict")
@each_mode
@on_ranks(2)
def test_loading_strictly_or_not_and_below_a_prefix(mode):
    (model, call), (other, other_call) = _sharded(mode), _sharded(mode, _other())
    data = batches(*DATA)
    train(model, call, data[:2], square_loss)
    train(other, other_call, data[:2], square_loss)  # what was compiled must see what is loaded
    state = model.state_dict(prefix="model.")
    assert list(state) == [f"model.{name}" for name in Odd().state_dict()]
    assert {name for name, value in state.items() if not isinstance(value, DTensor)} == {"model.gain"}

    wrapper = nn.ModuleDict({"model": other})
    without = {name: value for name, value in state.items() if "blocks.1" not in name} | {
        "model.extra": torch.ones(1)
    }
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"model\.blocks\.1\.0\.weight".*Unexpected.*extra'):
        wrapper.load_state_dict(without)
    kept = full_params(other.blocks[1])
    outcome = wrapper.load_state_dict(without, strict=False)
    assert sorted(outcome.missing_keys) == sorted(name for name in state if "blocks.1" in name)
    assert outcome.unexpected_keys == ["model.extra"]
    assert_close(full_params(other.blocks[1]), kept, rtol=0)
    torch.testing.assert_close(full(other.scale.detach()), full(model.scale.detach()), rtol=0, atol=0)

    other.blocks[1].load_state_dict(model.blocks[1].state_dict())  # one unit of it
    _assert_same_state(wrapper.state_dict(), state)
    want = train(model, call, data, square_loss)
    assert train(other, other_call, data, square_loss) == want
    assert all(isinstance(value, DTensor) for value in model.parameters())


@row("state dict")
@each_mode
@on_ranks(2)
def test_assigned_tensors_are_the_parameters_from_then_on(mode):
    (model, call), (other, other_call) = _sharded(mode), _sharded(mode, _other())
    data = batches(*DATA)
    train(other, other_call, data[:1], square_loss)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    other.load_state_dict(state, assign=True)
    want = train(model, call, data, square_loss)
    assert train(other, other_call, data, square_loss) == want
    _assert_same_state(other.state_dict(), model.state_dict())
    whole = {name: full(value) + 1 for name, value in state.items()}
    with pytest.raises(
        TypeError, match=r"scale: expected a sharded DTensor, got a Tensor; assign a DTensor with plac"
    ):
        other.load_state_dict(whole, assign=True)
    distributed = {
        name: distribute_tensor(whole[name], value.device_mesh, value.placements)
        for name, value in state.items()
        if isinstance(value, DTensor)
    }
    other.load_state_dict(distributed | {"gain": whole["gain"]}, assign=True)
    alone = Odd()
    alone.load_state_dict(whole)
    want = square_loss(alone, data[0]).item()
    torch.testing.assert_close(mean_over_ranks(square_loss(other_call, my_part(data[0]))), want, rtol=1e-5, atol=0)


@row("state dict")
@eager_and_full
@on_ranks(2)
def test_a_state_dict_between_forward_and_backward(mode):
    alone = Odd()
    model, call = _sharded(mode)
    x = batches(*DATA)[0]
    for _ in range(2):
        loss = square_loss(call, my_part(x))
        state = model.state_dict()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        _assert_same_state({name: full(value) for name, value in state.items()}, alone.state_dict())
        loss.backward()
        square_loss(alone, x).backward()
        for m in (model, alone):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
            m.zero_grad()
        assert_close(full_params(model), full_params(alone))
        alone.load_state_dict({name: full(value) for name, value in model.state_dict().items()})


@row("state dict")
@each_optimizer
@on_ranks(2)
def test_full_state_dicts(mode, on_shards):
    alone = Odd()
    alone_optimizer = _optimizer(alone)
    model, call = _sharded(mode)
    optimizer = _optimizer(model, on_shards)
    data = batches(*DATA)
    for x in data[:2]:
        square_loss(alone, x).backward()
        alone_optimizer.step()
        alone_optimizer.zero_grad()
    _steps(call, optimizer, data[:2])

    whole = get_model_state_dict(model, options=FULL)
    moments = deepcopy(
        get_optimizer_state_dict(model, optimizer, options=FULL)
    )  # step counts are the optimizer's own
    if dist.get_rank() == 0:
        assert not any(isinstance(value, DTensor) for value in whole.values())
        torch.testing.assert_close(whole, dict(alone.state_dict()), rtol=1e-4, atol=1e-6)
        want = get_optimizer_state_dict(alone, alone_optimizer)
        assert moments["state"].keys() == want["state"].keys() >= {"scale"}
        torch.testing.assert_close(moments["state"], want["state"], rtol=1e-4, atol=1e-6)
    else:
        assert not whole and not moments
    everywhere = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert everywhere.keys() == Odd().state_dict().keys()
    same_on_ranks({name: value.tolist() for name, value in everywhere.items()})

    other, other_call = _sharded(mode, _other())
    other_optimizer = _optimizer(other, on_shards)
    set_model_state_dict(other, whole, options=FROM_RANK_0)
    set_optimizer_state_dict(other, other_optimizer, moments, options=FROM_RANK_0)
    _assert_same_state(other.state_dict(), model.state_dict())
    want = _steps(call, optimizer, data[2:])
    assert _steps(other_call, other_optimizer, data[2:]) == want

    third, third_call = _sharded(mode, _other())
    set_model_state_dict(third, everywhere, options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(mean_over_ranks(square_loss(third_call, my_part(data[2]))), want[0], rtol=1e-6, atol=0)


class Scaled(MLP):
    def __init__(self) -> None:
        super().__init__(width=9, hidden=5)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return super().forward(x) * self.gain


@eager_and_full
@pytest.mark.parametrize("on_shards", [False, True])
@pytest.mark.parametrize("options", [FROM_RANK_0, StateDictOptions(full_state_dict=True)])
@on_ranks(2)
def test_full_state_dicts_with_scalars(mode, on_shards, options):
    model, call = _sharded(mode, Scaled())
    optimizer = _optimizer(model, on_shards)
    data = batches(*DATA)
    _steps(call, optimizer, data[:2])
    to_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=options.broadcast_from_rank0)
    whole = deepcopy(get_model_state_dict(model, options=to_rank_0))
    moments = deepcopy(get_optimizer_state_dict(model, optimizer, options=to_rank_0))
    with torch.device("meta"):
        other, other_call = _sharded(mode, Scaled())
    set_model_state_dict(other, whole, options=options)
    other_optimizer = _optimizer(other)
    set_optimizer_state_dict(other, other_optimizer, moments, options=options)
    assert _steps(other_call, other_optimizer, data[2:]) == _steps(call, optimizer, data[2:])
    _assert_same_state(other.state_dict(), model.state_dict())


@on_ranks(2)
def test_an_optimizer_of_dtensors_takes_the_state_of_one_that_steps_on_shards():
    model, call = _sharded("eager", Scaled())
    optimizer, other = _optimizer(model, on_shards=True), _optimizer(model)
    data = batches(*DATA)
    _steps(call, optimizer, data[:2])
    state, moments = deepcopy(model.state_dict()), deepcopy(optimizer.state_dict())
    want = _steps(call, optimizer, data[2:])
    model.load_state_dict(state)
    other.load_state_dict(moments)
    assert _steps(call, other, data[2:]) == want


@on_ranks(2)
def test_scalars_of_another_device_than_the_mesh_stay_there():
    model, call = _sharded("eager", Scaled())
    optimizer = _optimizer(model, on_shards=True)
    data = batches(*DATA)
    _steps(call, optimizer, data[:1])
    moments, gain = optimizer.state[model.gain], full(model.gain).clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.gain.device_mesh, "_device_type", "meta")  # as a GPU's, of a model on the CPU
        square_loss(call, my_part(data[1])).backward()
        optimizer.step()
        model.load_state_dict({"gain": gain}, strict=False, assign=True)
    assert not any(value.is_meta for value in (model.gain, moments["exp_avg"], moments["exp_avg_sq"]))


@on_ranks(2)
def test_a_backward_after_an_assignment_raises():
    model, _ = _sharded("eager")
    x = my_part(batches(*DATA)[0])
    loss = square_loss(model, x)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    square_loss(model, x).backward()


class Listed(MLP):
    """Parameters in a list, which is not called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList([torch.rand(10) + 0.5])

    def forward(self, x):
        return super().forward(x) * self.factors[0]


@pytest.mark.parametrize("mode", ["eager", "regional"])
@on_ranks(2)
def test_a_state_dict_within_forward(mode):
    alone, model = Listed(), Listed()
    call, seen = shard(model, mode), []
    if mode == "eager":
        model.blocks[0].register_forward_hook(lambda *_: seen.append(deepcopy(model.state_dict())))
    else:
        model.register_forward_pre_hook(lambda *_: seen.append(deepcopy(model.state_dict())))
    before = full_params(model)
    assert_trains_like_one_process(model, call, alone)
    assert len(seen) == 3 and all(isinstance(value, DTensor) for state in seen for value in state.values())
    assert_close({name: full(value) for name, value in seen[0].items()}, before, rtol=0)


@pytest.mark.parametrize("of_block", [False, True])
@on_ranks(2)
def test_a_state_dict_after_an_exception(of_block):
    """In backward, or in a call of a block, which end nothing: it reshards the model."""
    alone, model = MLP(), MLP()
    shard(model, "eager")
    optimizer = _optimizer(model)

    def fail(*_):
        raise ValueError("stop")

    fails = fail if of_block else lambda module, args, out: out.register_hook(fail) and None
    hook = model.blocks[0][0].register_forward_hook(fails)
    with pytest.raises(ValueError, match="stop"):
        square_loss(model.blocks[0] if of_block else model, my_part(batches(1, 8, 10)[0])).backward()
    hook.remove()
    state, moments = get_state_dict(model, optimizer)
    assert all(isinstance(value, DTensor) for value in (*state.values(), *model.parameters()))
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)
    assert_trains_like_one_process(model, model, alone)


@on_ranks(2)
def test_empty_shards_are_pickled_as_any():
    model, file = fully_shard(nn.Linear(3, 1)), io.BytesIO()
    torch.save(model.state_dict(keep_vars=True), file)
    file.seek(0)
    for name, value in torch.load(file, weights_only=True).items():
        assert torch.equal(value.to_local(), model.get_parameter(name).to_local())


# ---- distributed checkpoints ----


def _write(path, mode, on_shards=False):
    """Train two steps and save; train on, and save those losses beside the checkpoint."""
    model, call = _sharded(mode)
    optimizer = _optimizer(model, on_shards)
    data = batches(*DATA)
    _steps(call, optimizer, data[:2])
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    whole = get_model_state_dict(model, options=FULL)
    losses = _steps(call, optimizer, data[2:])
    if dist.get_rank() == 0:
        torch.save((whole, losses), Path(path) / "continued.pt")
    dist.barrier()


def _read(path, mode, on_shards=False, rtol=1e-5, meta=False):
    """Load into a model of other values, and expect the same losses."""
    whole, losses = torch.load(Path(path) / "continued.pt")
    with torch.device("meta" if meta else "cpu"):
        model, call = _sharded(mode, Odd() if meta else _other())
    if meta:
        model.to_empty(device="cpu")
    optimizer = _optimizer(model, on_shards)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    _assert_same_state({name: full(value) for name, value in model.state_dict().items()}, whole)
    got = _steps(call, optimizer, batches(*DATA)[2:])
    same_on_ranks(got)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(losses), rtol=rtol, atol=0)


@on_ranks(2)
def _on_2(body, **kwargs):
    globals()[body](**kwargs)


@on_ranks(4)
def _on_4(body, **kwargs):
    globals()[body](**kwargs)


@row("state dict")
@each_optimizer
def test_a_checkpoint_goes_round(tmp_path, mode, on_shards):
    _on_2(body="_write", path=str(tmp_path), mode=mode, on_shards=on_shards)
    _on_2(body="_read", path=str(tmp_path), mode=mode, on_shards=not on_shards, rtol=0)


@row("state dict")
@pytest.mark.parametrize("mode", ["eager", "full"])
def test_a_checkpoint_of_torch_fsdp(tmp_path, mode):
    exact = 0 if mode == "eager" else 1e-5
    _on_2(body="_write", path=str(tmp_path / "torch"), mode="torch")
    _on_2(body="_read", path=str(tmp_path / "torch"), mode=mode, rtol=exact)
    _on_2(body="_write", path=str(tmp_path / "ours"), mode=mode)
    _on_2(body="_read", path=str(tmp_path / "ours"), mode="torch", rtol=exact)


@row("state dict", mode=("eager", "full"))
@pytest.mark.parametrize(
    "writer, reader", [("eager", "eager"), ("full", "full"), ("torch", "eager"), ("eager", "torch")]
)
def test_a_checkpoint_on_another_world_size(tmp_path, writer, reader):
    _on_4(body="_write", path=str(tmp_path / "4"), mode=writer)
    _on_2(body="_read", path=str(tmp_path / "4"), mode=reader)
    _on_2(body="_write", path=str(tmp_path / "2"), mode=writer)
    _on_4(body="_read", path=str(tmp_path / "2"), mode=reader)


@row("state dict")
@eager_and_full
def test_a_checkpoint_into_a_model_made_on_the_meta_device(tmp_path, mode):
    _on_2(body="_write", path=str(tmp_path), mode="eager")
    _on_2(body="_read", path=str(tmp_path), mode=mode, meta=True)


@row("state dict")
@eager_and_full
@on_ranks(2)
def test_a_full_state_dict_into_a_model_made_on_the_meta_device(mode):
    source, source_call = _sharded(mode, _other())
    whole = get_model_state_dict(source, options=FULL)
    want = train(source, source_call, batches(*DATA), square_loss)

    def meta():
        with torch.device("meta"):
            return _sharded(mode, Odd())

    model, call = meta()
    set_model_state_dict(model, whole, options=FROM_RANK_0)
    assert train(model, call, batches(*DATA), square_loss) == want
    model, call = meta()
    model.load_state_dict(_sharded(mode, _other())[0].state_dict(), assign=True)
    assert train(model, call, batches(*DATA), square_loss) == want


@row("state dict")
@each_mode
@on_ranks(2)
def test_a_parameter_assigned_before_the_first_forward_is_trained(mode):
    alone, model = MLP(width=9, hidden=5), MLP(width=9, hidden=5)  # uneven
    call = shard(model, mode)
    weight = model.blocks[0][0].weight
    model.blocks[0][0].weight = nn.Parameter(
        distribute_tensor(full(weight).detach() * 2, weight.device_mesh, weight.placements)
    )
    assert model.blocks[0][0].weight is not weight
    with torch.no_grad():
        alone.blocks[0][0].weight *= 2
    assert_trains_like_one_process(model, call, alone, batches(3, 8, 9))


@row("tied and shared")
@each_mode
@on_ranks(2)
def test_parameters_tied_after_they_were_sharded(mode):
    alone, model = MLP(width=9, hidden=5), MLP(width=9, hidden=5)  # uneven
    call = shard(model, mode)
    for each in (alone, model):
        each.blocks[1][0].weight = each.blocks[0][0].weight
    assert_trains_like_one_process(model, call, alone, batches(3, 8, 9))


class Slow(MLP):
    """Gives another thread time to look at each block's parameters while they are unsharded, in eager mode."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(self._pause)

    @staticmethod
    def _pause(*_) -> None:
        if not torch.compiler.is_compiling():
            time.sleep(0.01)


@pytest.mark.parametrize("mode", WITH_REGIONS)
@pytest.mark.parametrize("keep_vars", [True, False])
@thorough(when=lambda mode, keep_vars: mode != "eager" and not keep_vars)
@on_ranks(2)
def test_another_thread_takes_state_dicts_while_the_model_trains(mode, keep_vars):
    alone, model = Slow(), Slow()
    call = shard(model, mode)
    params, seen, ends = dict(model.named_parameters()), [], threading.Event()

    def look() -> None:
        while not ends.is_set():
            seen.append(model.state_dict(keep_vars=keep_vars))
            time.sleep(0.001)  # lets the other thread train meanwhile

    with ThreadPoolExecutor(1) as threads:
        looking = threads.submit(look)
        try:
            assert_trains_like_one_process(model, call, alone)
        finally:
            ends.set()
    looking.result()
    assert seen
    for state in seen:
        assert state.keys() == params.keys()
        for name, value in state.items():
            assert isinstance(value, DTensor) and value.placements == params[name].placements, name
            assert value.to_local().data_ptr() == params[name].to_local().data_ptr(), name
            assert (value is params[name]) is keep_vars


@on_ranks(2)
def test_a_thread_that_has_not_called_the_model_reshards_nothing_to_take_its_state_dict():
    model = MLP()
    shard(model, "eager")
    model.unshard()
    with ThreadPoolExecutor(1) as threads:
        state = threads.submit(model.state_dict).result()
    assert not isinstance(model.scale, DTensor)  # a step that begins meanwhile may be about to use it
    assert isinstance(state["scale"], DTensor)


@each_mode
@on_ranks(2)
def test_another_threads_state_dict_between_forward_and_backward(mode):
    alone, model = MLP(), MLP()
    call = shard(model, mode)
    (x,) = batches(1, 8, 10)
    square_loss(alone, x).backward()
    loss = square_loss(call, my_part(x))
    with ThreadPoolExecutor(1) as threads:
        state = threads.submit(model.state_dict).result()
    assert all(isinstance(value, DTensor) for value in state.values())
    loss.backward()
    assert_close(full_grads(model), full_grads(alone))


@row("state dict")
@each_mode
@on_ranks(2)
def test_state_dict_goes_round(mode):
    model, other = MLP(), MLP()
    call, other_call = shard(model, mode), shard(other, mode)
    data = batches(2, 8, 10)
    train(model, call, data, square_loss)
    with torch.no_grad():
        call(data[0])  # the root keeps its parameters unsharded in eager mode
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    other_call(data[0])
    other.load_state_dict(state)
    assert_close(full_params(other), full_params(model))
    third = MLP()
    third_call = shard(third, mode)
    third.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
    want = train(model, call, data, square_loss)
    assert train(other, other_call, data, square_loss) == want
    assert train(third, third_call, data, square_loss) == want
