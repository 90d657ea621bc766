"""The user's own hooks on sharded parameters."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compiled import fully_shard, fully_shard_with_compiled_compute
from tests.support.ranks import on_ranks
from tests.support.training import (
    MLP,
    assert_close,
    batches,
    full_grads,
    my_part,
    shard,
    square_loss,
)


def _sharded(mode: str):
    model = MLP()
    if mode != "regional":
        return model, shard(model, mode)
    for block in model.blocks:
        fully_shard_with_compiled_compute(block, compile_kwargs={"backend": "aot_eager"})
    return model, fully_shard(model)


@pytest.mark.parametrize("mode", ["eager", "regional", "full"])
@on_ranks(2)
def test_hooks_see_and_replace_the_sharded_gradient(mode):
    model, call = _sharded(mode)
    alone = MLP()
    (data,) = batches(1, 8, 10)
    calls = []

    def note(grad):
        calls.append((grad.placements, grad.full_tensor().clone()))

    weight = model.blocks[0][0].weight
    kept = weight.register_hook(note)
    doubling = weight.register_hook(lambda grad: grad * 2)
    weight.register_post_accumulate_grad_hook(lambda param: calls.append(param.grad.full_tensor().clone()))
    square_loss(alone, data).backward()
    want = alone.blocks[0][0].weight.grad.clone()
    square_loss(call, my_part(data)).backward()
    (placements, seen), after = calls
    assert placements == weight.placements
    torch.testing.assert_close(seen, want)
    torch.testing.assert_close(after, 2 * want)
    alone.blocks[0][0].weight.grad.mul_(2)
    assert_close(full_grads(model), full_grads(alone))
    doubling.remove()
    square_loss(call, my_part(data)).backward()  # each backward's gradient is hooked before it is added
    torch.testing.assert_close(calls[2][1], want)
    torch.testing.assert_close(calls[3], 3 * want)
    kept.remove()
    square_loss(call, my_part(data)).backward()
    assert len(calls) == 5  # the other kind of hook is still there


@pytest.mark.parametrize("mode", ["eager", "regional", "full"])
@on_ranks(2)
def test_hooks_run_once_for_all_that_is_reduced_at_the_end(mode):
    """Optimizers that step in such hooks would step on parts of a gradient."""
    model, alone = MLP(), MLP()
    call = shard(model, mode, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    data = batches(3, 8, 10)
    weight, seen, after = model.blocks[0][0].weight, [], []
    weight.register_hook(lambda grad: seen.append(grad.full_tensor().clone()))
    weight.register_post_accumulate_grad_hook(lambda param: after.append(param.grad.full_tensor().clone()))
    for index, batch in enumerate(data):
        model.set_requires_gradient_sync(index > 0)
        model.set_requires_all_reduce(index == 2)
        square_loss(call, my_part(batch)).backward()
        square_loss(alone, batch).backward()
    for (grad,) in (seen, after):
        torch.testing.assert_close(grad, alone.blocks[0][0].weight.grad)
    assert_close(full_grads(model), full_grads(alone))


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (lambda grad: grad.to_local(), TypeError, "to return None or a DTensor as it was given, got a Tensor"),
        (lambda grad: grad[:1], ValueError, r"to return shape \(14, 10\) with .*, got \(1, 10\)"),
    ],
)
def test_hooks_that_return_something_else(fake_group, hook, error, message):
    model = MLP()
    shard(model, "eager")
    model.blocks[0][0].weight.register_hook(hook)
    with pytest.raises(error, match=rf"blocks\.0\.0\.weight: expected a hook on its gradient {message}"):
        model(torch.randn(2, 10)).sum().backward()


class _Broken(MLP):
    """Compiled in two pieces; ``hook`` sees the gradient between them."""

    hook = None

    def forward(self, x):
        first, second = self.blocks
        x = x * self.scale
        x = x + first(x)
        torch._dynamo.graph_break()
        if self.hook is not None:
            x.register_hook(self.hook)
        return x + second(x)


@on_ranks(2)
def test_a_backward_that_fails_between_two_graphs_leaves_no_gradient():
    model, alone = _Broken(), MLP()
    shard(model, "eager")
    call = torch.compile(model, backend="aot_eager")
    (data,) = batches(1, 8, 10)

    def fail(grad):
        assert any(param.leaf.grad is not None for param in model.blocks[1][0]._fsdp_params.values())
        raise ValueError("in the middle")

    model.hook = fail
    with pytest.raises(ValueError, match="in the middle"):
        square_loss(call, my_part(data)).backward()
    model.hook = None
    square_loss(call, my_part(data)).backward()
    square_loss(alone, data).backward()
    assert_close(full_grads(model), full_grads(alone))
