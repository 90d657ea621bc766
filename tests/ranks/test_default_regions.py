"""What plain ``torch.compile(model)`` makes of equal blocks: regions, or in silence the flat graph."""

from __future__ import annotations

import logging
import pickle
import warnings
from contextlib import contextmanager
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch.utils.checkpoint import checkpoint

import fsdp_compiled
from fsdp_compiled.passes import Protect
from fsdp_compiled.regions.block import RegionModule
from fsdp_compiled.testing.llama import Config, Llama
from fsdp_compiled.tracing import reads
from tests.support.graphs import Recorder, regions_of
from tests.support.ranks import on_ranks
from tests.support.training import (
    assert_close,
    assert_trains_like_one_process,
    assert_trains_like_replicas,
    batches,
    full_grads,
    llama_loss,
    my_part,
    seeded_generator,
    square_loss,
)
from tests.support.variants import thorough

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="without a list there are no regions on torch 2.11"
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 14), nn.Linear(14, 10, bias=False)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x):
        return self.norm(super().forward(x))


class Aliases(Block):
    def forward(self, x):
        return x, super().forward(x)


class ChangesItsArgument(Block):
    def forward(self, x):
        return super().forward(x.mul_(1.1))


class Breaks(Block):
    def forward(self, x):
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        return super().forward(x)


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record):
        self.texts.append(record.getMessage())


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(10) + 0.5)
        self.blocks = nn.ModuleList(kind() for _ in range(depth))

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            out = block(x)
            x = out if isinstance(out, torch.Tensor) else sum(out) / 2
        return x


class Counts(Stack):
    """What runs before a graph break must not run once more."""

    def __init__(self) -> None:
        super().__init__(Aliases)
        self.count = 0

    def forward(self, x):
        self.count += 1
        torch._dynamo.graph_break()
        return super().forward(x)


def sharded(model):
    for block in model.blocks:
        fsdp_compiled.fully_shard(block)
    return fsdp_compiled.fully_shard(model)


def plain(model, fullgraph=True, name="inductor", code=False, **options):
    """``torch.compile`` as without a backend, with these options; and what records its graphs."""
    torch._dynamo.reset()
    recorder = Recorder(compiler_name=name, config=options, code=code)
    return torch.compile(model, backend=recorder, fullgraph=fullgraph), recorder


class Dropping(Block):
    """Its gradients say which elements backward took for dropped."""

    def forward(self, x):
        return nn.functional.dropout(x.sin() * self.up.weight.sum(), 0.5)


class Attending(Block):
    def forward(self, x):
        return super().forward(nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0])


class Recomputed(Stack):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x * self.scale


@contextmanager
def in_silence():
    """Raise where regions warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="regions")
        yield


def regions_called(recorder) -> int:
    return sum(len(regions_of(graph)) for kind, graph in recorder.after if kind == "forward")


def made(model) -> int:
    return sum(isinstance(module, RegionModule) for module in model.modules())


@pytest.mark.parametrize("code", [False, True])
@thorough(when=lambda code: code)
@on_ranks(2)
def test_equal_blocks_are_regions(code):
    alone, model = Stack(), sharded(Stack())
    assert made(model) == 0
    with torch.no_grad():
        model(batches(1, 4, 10)[0])
    assert made(model) == 0  # an uncompiled call needs none
    call, recorder = plain(model, code=code)
    assert_trains_like_one_process(model, call, alone)
    assert regions_called(recorder) >= 3


@on_ranks(2)
def test_through_torch_compile_itself():
    alone, model = Stack(), sharded(Stack())
    torch._dynamo.reset()
    assert_trains_like_one_process(model, torch.compile(model, fullgraph=True), alone)
    assert made(model) == 4


@on_ranks(2)
def test_a_model_that_is_compiled_in_place():
    torch._dynamo.reset()
    alone, model, recorder = Stack(), sharded(Stack()), Recorder(compiler_name="inductor")
    model.compile(fullgraph=True, backend=recorder)
    assert_trains_like_one_process(model, model, alone)
    assert made(model) == 4 and regions_called(recorder) >= 3
    alone, model = Stack(Aliases), sharded(Stack(Aliases))
    model.compile(fullgraph=True, backend=recorder)
    assert_trains_like_one_process(model, model, alone)
    assert made(model) == 0


@thorough()
@on_ranks(2)
def test_gradients_where_backward_is_given_memory_of_its_arguments():
    config = Config(vocab=256, width=64, layers=4, heads=2, kv_heads=2, hidden=192, max_seq=128)
    alone, model = Llama(config), Llama(config)
    for each in (alone, model):
        each.init_weights(seed=0)
    call, recorder = plain(sharded(model), code=True)
    tokens = torch.randint(256, (4, 129), generator=seeded_generator(0))
    llama_loss(alone, tokens).backward()
    llama_loss(call, my_part(tokens)).backward()
    assert regions_called(recorder) >= 3
    assert_close(full_grads(model), full_grads(alone), rtol=1e-4)


class Halves(Block):
    """The gradient of a half is a part of zeros whose size varies."""

    def forward(self, x):
        y = self.up(x)[None]
        return x + self.down(torch.cat([-y[..., 7:], y[..., :7]], -1).tanh())[0]


@on_ranks(2)
def test_graphs_of_blocks_whose_sizes_vary_can_be_read_from_a_cache():
    alone, model = Stack(Halves), sharded(Stack(Halves))
    call, recorder = plain(model)
    for rows in (8, 12, 16):
        assert_trains_like_one_process(model, call, alone, batches(1, rows, 10))
    assert len([kind for kind, _ in recorder.before if kind == "backward"]) == 2
    for _, graph in recorder.before:
        for each in regions_of(graph):
            pickle.loads(pickle.dumps(each.owning_module))


class Scaled(nn.Module):
    gain = 1.0

    def forward(self, x):
        return (x * self.gain).tanh()


class Holds(Block):
    """A module without parameters, of which torch compares nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.act = Scaled()

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


def _other_module(block):
    block.act = nn.Identity()


def _own_forward(block):
    block.act.forward = MethodType(lambda self, x: x.sin(), block.act)


def _own_attribute(block):
    block.act.gain = 3.0


def _hook(block):
    block.up.register_forward_hook(lambda module, args, output: output * 2)


def _pre_hook(block):
    block.down.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


@pytest.mark.parametrize("change", [_other_module, _own_forward, _own_attribute, _hook, _pre_hook])
@pytest.mark.parametrize("which", [0, 2])
@thorough(when=lambda which: which == 2)
@on_ranks(2)
def test_blocks_whose_modules_differ(change, which):
    alone, model = Stack(Holds, depth=5), Stack(Holds, depth=5)
    for each in (alone, model):
        change(each.blocks[which])
    call, recorder = plain(sharded(model))
    assert_trains_like_one_process(model, call, alone)
    assert made(model) == 5 and regions_called(recorder) >= 4


@pytest.mark.parametrize("change", [_other_module, _own_forward, _own_attribute])
@thorough(when=lambda change: change is _own_attribute)
@on_ranks(2)
def test_a_module_that_changes_later_is_seen(change):
    alone, model = Stack(Holds), sharded(Stack(Holds))
    call, _ = plain(model)
    assert_trains_like_one_process(model, call, alone)
    for each in (alone, model):
        change(each.blocks[2])
    assert_trains_like_one_process(model, call, alone)
    assert made(model) == 4


@on_ranks(2)
def test_equal_blocks_are_traced_once(monkeypatch):
    traced, enter = [], reads.enter_region
    monkeypatch.setattr(reads, "enter_region", lambda *args: traced.append(enter(*args)))
    alone, model = Stack(Typed, depth=5), Stack(Typed, depth=5)
    call, _ = plain(sharded(model))
    assert_trains_like_one_process(model, call, alone)
    assert made(model) == 5 and len(traced) == 1


class Typed(Block):
    """Computes by the type of an attribute, and with attributes that may be one object."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gain = 1, SimpleNamespace(by=1.0)
        self.act = Gain(self.gain)

    def forward(self, x):
        y = self.down(self.act(self.up(x))) * self.gain.by
        return x + y * (0.5 if isinstance(self.value, (bool, float, list)) else 0.1)


class Gain(nn.Module):
    def __init__(self, gain) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x):
        return x * self.gain.by


@pytest.mark.parametrize("values", [(1, True), (1, 1.0), ((2.0, 3.0), [2.0, 3.0])], ids=str)
@thorough(when=lambda values: values[1] is not True)
@on_ranks(2)
def test_equal_values_of_other_types(values):
    alone, model = Stack(Typed, depth=5), Stack(Typed, depth=5)
    for each in (alone, model):
        for index, block in enumerate(each.blocks):
            block.value = values[index % 2]
    call, recorder = plain(sharded(model))
    assert_trains_like_one_process(model, call, alone)
    assert made(model) == 5 and regions_called(recorder) >= 4


@on_ranks(2)
def test_attributes_that_are_one_object_in_some_blocks():
    alone, model = Stack(Typed, depth=5), Stack(Typed, depth=5)
    for each in (alone, model):
        each.blocks[2].act.gain = SimpleNamespace(by=0.5)
    call, recorder = plain(sharded(model))
    assert_trains_like_one_process(model, call, alone)
    assert made(model) == 5 and regions_called(recorder) >= 4


@on_ranks(2)
def test_a_value_gets_another_type_later():
    alone, model = Stack(Typed), sharded(Stack(Typed))
    call, _ = plain(model)
    assert_trains_like_one_process(model, call, alone)
    for value in ((2.0, 3.0), None, [2.0]):
        for each in (alone, model):
            each.blocks[1].value = value
        assert_trains_like_one_process(model, call, alone)
    assert made(model) == 4


@pytest.mark.parametrize("depth", [2, 3])
@on_ranks(2)
def test_few_blocks_are_parts_of_the_graph(depth):
    alone, model = Stack(depth=depth), sharded(Stack(depth=depth))
    call, recorder = plain(model)
    assert_trains_like_one_process(model, call, alone)
    assert regions_called(recorder) == 0


@on_ranks(2)
def test_what_the_user_has_chosen_stays():
    for regions, count in (("off", 0), ("auto", 4), ("first two", 2)):
        model = sharded(Stack())
        fsdp_compiled.compile(model, regions=list(model.blocks[:2]) if regions == "first two" else regions)
        call, _ = plain(model)
        square_loss(call, my_part(batches(1, 8, 10)[0])).backward()
        assert made(model) == count, regions


@pytest.mark.parametrize("kind", [Aliases, Normed, ChangesItsArgument])
@on_ranks(2)
def test_a_block_that_torch_cannot_make_a_region_of_is_a_part_of_the_graph_in_silence(kind):
    alone, model = Stack(kind), sharded(Stack(kind))
    call, _ = plain(model)
    logger, heard = logging.getLogger("fsdp_compiled"), Heard()
    logger.addHandler(heard)
    logger.setLevel(logging.DEBUG)  # of ranks but the first
    with in_silence():
        assert_trains_like_replicas(model, call, alone, batches(3, 8, 10))
    logger.removeHandler(heard)
    logger.setLevel(logging.NOTSET)
    said = [text for text in heard.texts if "as a part of the graph, because torch" in text]
    assert len(said) == (made(model) == 0)


@on_ranks(2)
def test_what_is_drawn_within_a_checkpoint_is_drawn_again():
    model = sharded(Recomputed(Dropping))
    call, _ = plain(model, code=True)
    x = torch.ones(4, 10, requires_grad=True)
    with in_silence():
        output = call(x)
    output.sum().backward()
    torch.testing.assert_close(x.grad == 0, output == 0)  # an element that one block drops is dropped for good


@on_ranks(2)
def test_attention_within_a_checkpoint_that_drops_nothing_leaves_the_regions():
    alone, model = Recomputed(Attending), sharded(Recomputed(Attending))
    call, recorder = plain(model)
    assert_trains_like_replicas(model, call, alone, batches(3, 8, 10))
    assert regions_called(recorder) >= 3


@on_ranks(2)
def test_only_the_class_that_fails_loses_its_regions():
    def kinds():
        model = Stack()
        model.blocks.extend(Aliases() for _ in range(4))
        return model

    alone, model = kinds(), sharded(kinds())
    call, _ = plain(model)
    with in_silence():
        assert_trains_like_one_process(model, call, alone)
    assert made(model) == 4


@on_ranks(2)
def test_graph_breaks_in_blocks():
    alone, model = Stack(Breaks), sharded(Stack(Breaks))
    call, recorder = plain(model, fullgraph=False)
    with in_silence():
        assert_trains_like_one_process(model, call, alone)
    assert regions_called(recorder) == 0


@on_ranks(2)
def test_nothing_runs_twice_for_a_region_that_fails():
    model = sharded(Counts())
    call, recorder = plain(model, fullgraph=False)
    square_loss(call, my_part(batches(1, 8, 10)[0])).backward()
    assert model.count == 1 and regions_called(recorder) == 0


@on_ranks(2)
def test_an_assertion_of_the_users_is_raised_once_and_leaves_the_regions():
    called = []

    def fails(module, args):
        called.append(len(args))
        raise AssertionError("no such batch")

    model = sharded(Stack())
    call, _ = plain(model, fullgraph=False)
    handle = model.register_forward_pre_hook(torch.compiler.disable(fails))
    with pytest.raises(AssertionError, match="no such batch"):
        call(batches(1, 4, 10)[0])
    handle.remove()
    assert called == [1] and made(model) == 4


def _mine(scheduled):
    return scheduled


@pytest.mark.parametrize("options", [{"_pre_fusion_custom_pass": _mine}, {"triton.cudagraphs": True}])
@on_ranks(2)
def test_options_that_do_not_go_with_regions(options):
    alone, model = Stack(), sharded(Stack())
    call, recorder = plain(model, **options)
    assert_trains_like_one_process(model, call, alone)
    assert regions_called(recorder) == 0


@on_ranks(2)
def test_a_pass_in_the_slot_of_theirs():
    alone, model = Stack(), sharded(Stack())
    assert isinstance(config._pre_fusion_custom_pass, Protect)
    with config.patch(_pre_fusion_custom_pass=_mine):
        sharded(Stack())
        assert config._pre_fusion_custom_pass is _mine
        call, recorder = plain(model)
        assert_trains_like_one_process(model, call, alone)
        assert regions_called(recorder) == 0


@on_ranks(2)
def test_other_backends_and_functions_get_the_flat_graph():
    alone, model = Stack(), sharded(Stack())
    call, recorder = plain(model, name="mine")
    assert_trains_like_one_process(model, call, alone)
    assert regions_called(recorder) == 0
    recorder = Recorder(compiler_name="inductor")
    call = torch.compile(lambda x: model(x), backend=recorder, fullgraph=True)
    square_loss(call, my_part(batches(1, 8, 10)[0])).backward()
    assert regions_called(recorder) == 0


@on_ranks(2)
def test_uninstall_ends_them():
    alone, model = Stack(), sharded(Stack())
    fsdp_compiled.uninstall()
    try:
        assert config._pre_fusion_custom_pass is None
        assert_trains_like_one_process(model, torch.compile(model, fullgraph=True), alone)
    finally:
        sharded(Stack())
    assert isinstance(config._pre_fusion_custom_pass, Protect)
