"""Units that return objects: what these hold trains, and what they compute later. What units write to elsewhere."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal
from torch.utils.checkpoint import checkpoint

from fsdp_compiled import fully_shard
from tests.support.ranks import on_ranks
from tests.support.training import (
    assert_close,
    assert_trains_like_one_process,
    batches,
    full_grads,
    full_params,
    my_part,
    shard,
)

from .test_sharding import Flow


class Policy(Flow):
    """Returns a tensor, too, of which the loss may know nothing."""

    def forward(self):
        return self.weight.sum(), super().forward()


@on_ranks(2)
def test_a_model_that_returns_a_tensor_and_an_object_that_computes():
    model, alone = fully_shard(Policy()), Policy()
    assert_trains_like_one_process(model, lambda x: model()[1](x), alone, call_alone=lambda x: alone()[1](x))


class ComputedAhead(Flow):
    def forward(self, x):
        return functools.partial(torch.mul, super().forward()(x))


@on_ranks(2)
def test_an_object_that_is_differentiated_by_inputs_before_the_backward():
    """By the first, the unit's inputs get their gradients, and none of its parameters has one."""
    model, alone = fully_shard(ComputedAhead()), ComputedAhead()
    model.set_reshard_after_backward(False)
    for module, x in ((model, my_part(batches(1, 8, 10)[0])), (alone, batches(1, 8, 10)[0])):
        x.requires_grad_()
        loss = module(x)(2).square().mean()
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
    model.reshard()
    assert_close(full_grads(model), full_grads(alone))


class Box:
    def __init__(self, output):
        self.output = output


def _in_itself(output):
    found = {"output": output}
    found["found"] = found
    return Box(found)


# How a block returns its output, and how the model takes it.
TOLD = {
    "attribute": (Box, lambda box: box.output),
    "in a list": (lambda output: Box([output]), lambda box: box.output[0]),
    "in a dict that holds itself": (_in_itself, lambda box: box.output["output"]),
    "in a distribution": (lambda output: Independent(Normal(output, 1.0), 1), lambda policy: policy.base_dist.loc),
}
UNTOLD = {
    "in a function": (lambda output: lambda: output, lambda function: function()),
    "beside an unused tensor": (lambda output: (output.sum(), Box(output)), lambda pair: pair[1].output),
}


class Boxes(nn.Module):
    """Its blocks return objects; their parameters are as large as what the allocator gives back to the system."""

    def __init__(self, wrap, unwrap) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.unwrap = unwrap
        self.first = nn.Linear(512, 512)
        self.blocks = nn.ModuleList(InBox(wrap) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + self.unwrap(block(x))
        return x


class InBox(nn.Sequential):
    def __init__(self, wrap) -> None:
        super().__init__(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(super().forward(x))


@pytest.mark.parametrize("kind", TOLD)
@on_ranks(2)
def test_objects_with_tensors_as_attributes_train(kind):
    """Backward waits for a block's parameters before it uses them."""
    model, alone = Boxes(*TOLD[kind]), Boxes(*TOLD[kind])
    assert_trains_like_one_process(model, shard(model, "eager"), alone, batches(3, 8, 512))


@pytest.mark.parametrize("kind", UNTOLD)
@on_ranks(2)
def test_objects_that_hide_their_tensors_are_not_all_gathered_ahead(kind):
    """Nothing tells of their backward in time: it would use what has not arrived yet."""
    model = Boxes(*UNTOLD[kind])
    call = shard(model, "eager")
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
        call(my_part(batches(1, 8, 512)[0])).sum().backward()


class ChangesOutputs(nn.Module):
    """Of three dimensions, what a linear layer returns is a view; changed in place, it skips its own hooks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))

    def forward(self, x):
        x = x.unsqueeze(1)
        for block in self.blocks:
            x = block(x).add_(x)
            x[..., 0] = 0
        return x.squeeze(1)


@on_ranks(2)
def test_outputs_that_are_views_and_change_in_place():
    model, alone = ChangesOutputs(), ChangesOutputs()
    assert_trains_like_one_process(model, shard(model, "eager"), alone)


class Teller(nn.Linear):
    def __init__(self, number) -> None:
        super().__init__(10, 10)
        self.number = number

    def forward(self, x, losses, stack, told):
        y = super().forward(x).tanh()
        losses.append(y.square().mean(1, True))
        told["losses"].append(super().forward(y).abs().mean(1, True))
        told["total"] = told.get("total", 0) + told["losses"][-1]
        y = y + stack.pop(self.number - 2, 0)
        stack[self.number] = x  # as it is, and for another block
        return y


class Tellers(nn.Module):
    """Its blocks write to lists and dicts that they get, as video autoencoders and experts do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(map(Teller, range(4)))

    def forward(self, x):
        losses, stack, told = [], {}, {"losses": []}
        for block in self.blocks:
            x = block(x, losses, stack, told=told)
        assert (len(losses), len(told["losses"]), [*stack]) == (4, 4, [2, 3])
        return x + sum(losses) + told["losses"][-1] + told["total"]


@on_ranks(2)
def test_what_units_write_to_lists_and_dicts_of_their_callers():
    model, alone = Tellers(), Tellers()
    assert_trains_like_one_process(model, shard(model, "eager"), alone)


class Stops(nn.Linear):
    def forward(self, x, inputs):
        inputs[0] = super().forward(inputs[0])
        if len(inputs) > 1:
            raise ValueError
        return x + inputs[0]


@on_ranks(2)
def test_a_list_stays_the_callers_own_where_a_unit_leaves_it_or_fails():
    model, x = fully_shard(Stops(10, 10)), torch.ones(2, 10, requires_grad=True)
    with pytest.raises(ValueError):
        model(x, failed := [x, x])
    model(x, inputs := [x]).sum().backward()
    assert failed[0] is failed[1] is x and inputs[0] is not x and not model._get_fsdp_state().unit.inputs


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@on_ranks(2)
def test_forwards_that_a_checkpoint_cuts_off_do_not_count_as_under_way():
    """Each unit's backward ends when its inputs have their gradients, in the second step as in the first."""
    model, events = Checkpointed(), []
    shard(model, "eager")
    for index, block in enumerate(model.blocks):
        state = block._get_fsdp_state()
        for name in ("pre_backward", "post_backward"):
            noted = functools.partial(lambda run, event: (events.append(event), run()), getattr(state, name))
            setattr(state, name, functools.partial(noted, (name, index)))
    for _ in range(2):
        model(torch.ones(2, 10, requires_grad=True)).sum().backward()
    assert events[: len(events) // 2] == events[len(events) // 2 :]
    assert events.index(("post_backward", 2)) < events.index(("post_backward", 0))


class Calls(nn.Linear):
    """Calls itself, at first with what it has computed, as a tree does for each branch."""

    def forward(self, x, depths, depth=2):
        y = super().forward(x).tanh()
        depths.append(y.mean(1, True))
        return self(y, depths, depth - 1) + self(2 * y, depths, depth - 1) if depth else y


class Trees(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Calls(10, 10) for _ in range(2))

    def forward(self, x):
        depths = []
        for block in self.blocks:
            x = block(x, depths)
        return x + sum(depths) / len(depths)


@on_ranks(2)
def test_a_unit_that_calls_itself():
    model, alone = Trees(), Trees()
    assert_trains_like_one_process(model, shard(model, "eager"), alone)


@on_ranks(2)
def test_an_outermost_unit_that_calls_itself_and_writes_to_its_callers_list():
    def call(model, x):
        depths = [x.clone().requires_grad_()]
        y = model(x, depths)
        assert len(depths) == 8
        return y + sum(depths)

    model, alone = fully_shard(Calls(10, 10)), Calls(10, 10)
    alone.load_state_dict(full_params(model))
    assert_trains_like_one_process(
        model, functools.partial(call, model), alone, call_alone=functools.partial(call, alone)
    )


class Twins(nn.Module):
    """Shard together, and one calls the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.outer, self.inner = Outer(10, 10), nn.Linear(10, 10)

    def forward(self, x):
        return self.outer(self.outer(x, self.inner), self.inner)


class Outer(nn.Linear):
    def forward(self, x, inner):
        return inner(super().forward(x).tanh())


@on_ranks(2)
def test_modules_of_one_unit_that_call_each_other():
    model, alone = Twins(), Twins()
    fully_shard([model.outer, model.inner])
    assert_trains_like_one_process(model, fully_shard(model), alone)


class Renews(nn.Linear):
    def forward(self, x, cache):
        oldest = next(iter(cache))
        cache[oldest] = super().forward(x) + cache.pop(oldest)
        return x


@on_ranks(2)
def test_a_dict_keeps_the_order_in_which_a_unit_writes_to_it():
    x = torch.ones(2, 10, requires_grad=True)
    fully_shard(Renews(10, 10))(x, cache := {"a": x, "b": x})
    assert [*cache] == ["b", "a"]
