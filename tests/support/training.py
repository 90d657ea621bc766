"""Small models, and training them in every mode against one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx
from torch.distributed.tensor import DTensor

from fsdp_compiled import FSDPModule, fully_shard, fully_shard_with_compiled_compute
from fsdp_compiled.passes.schedule_policy import DEFAULT
from fsdp_compiled.regions.choose import set_regions
from fsdp_compiled.testing.llama import Config, Llama
from tests.support.graphs import without_code
from tests.support.ranks import same_on_ranks

INDUCTOR = "FSDP_COMPILED_TESTS_WITH_INDUCTOR"  # set by --inductor, for the ranks' processes
MODES = ("eager", "regional", "full")
WITH_REGIONS = (*MODES, "regions")  # the full graph with every block a region
each_mode = pytest.mark.parametrize("mode", MODES)
each_with_regions = pytest.mark.parametrize("mode", WITH_REGIONS)
eager_and_full = pytest.mark.parametrize("mode", ["eager", "full"])
TINY = Config(vocab=61, width=32, layers=2, heads=4, kv_heads=2, hidden=48, max_seq=16)


def llama(seed: int = 0) -> Llama:
    model = Llama(TINY)
    model.init_weights(seed)
    return model


class MLP(nn.Module):
    """Two units' worth of layers with odd sizes, a bias, a norm and a parameter read by the root itself."""

    def __init__(self, width: int = 10, hidden: int = 14, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, width))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = x + block(x)
        return x


class Tied(nn.Module):
    """One weight behind two modules, and read twice by one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(10, 10)
        self.last = nn.Linear(10, 10)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.first(x).relu()).relu())


def shard(model: nn.Module, mode: str, inductor: bool = False, **kwargs: Any) -> Callable[..., Any]:
    """Shard every block and the model; return what to call. For ``inductor`` see :func:`compiled`.

    By default graphs all-gather the blocks' parameters again in backward, although they are small.
    """
    of_blocks = {"reshard_after_forward": True, **kwargs}
    for block in model.blocks:
        if mode == "regional":
            fully_shard_with_compiled_compute(block, compile_kwargs=backend(inductor), **of_blocks)
        else:
            fully_shard(block, **of_blocks)
    fully_shard(model, **kwargs)
    if mode == "regions":
        with_regions(model, model.blocks)
    return call_of(model, mode, inductor)


def call_of(model: nn.Module, mode: str, inductor: bool = False) -> Callable[..., Any]:
    """What to call in this mode: the model, or the model compiled as one graph."""
    return compiled(model, True, inductor) if mode in ("full", "regions") else model


def with_regions(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Make ``blocks`` regions, as ``fsdp_compiled.compile`` does; a test fails where torch refuses one.

    torch before 2.13 also refuses blocks that change buffers or hold DTensors; there they are parts of the graph.
    """
    set_regions(model, list(blocks))
    warnings.filterwarnings("error", message="regions:")
    if torch.__version__ < "2.13":
        reasons = "backend='without_codegen' raised|Backend compiler exception|Expected FakeTensor"
        warnings.filterwarnings("default", message=f"regions:.*({reasons})")


def units_inside(model: nn.Module) -> list[nn.Module]:
    """The modules given to ``fully_shard`` below the outermost one."""
    return [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]


def compiled(call: Callable[..., Any], fullgraph: bool = True, inductor: bool = False) -> Callable[..., Any]:
    """``torch.compile``; only with ``inductor`` or --inductor through code generation, which takes most of the time.

    Else the graphs, after Inductor's partitioner and our passes, run as they are.
    """
    return torch.compile(call, fullgraph=fullgraph, **backend(inductor))


def backend(inductor: bool = False) -> dict[str, Any]:
    """What makes ``torch.compile`` generate code or, in most tests, run graphs as they are."""
    if inductor or os.environ.get(INDUCTOR):
        return {}
    return {"backend": without_codegen}


def without_codegen(gm: fx.GraphModule, inputs: Any, **_: Any) -> Any:
    return compile_fx(gm, inputs, inner_compile=_run_passes, config_patches={"force_disable_caches": True})


def _run_passes(gm: fx.GraphModule, inputs: Any, **_: Any) -> Any:
    return without_code(gm, DEFAULT)


def my_part(batch: Tensor) -> Tensor:
    """This rank's rows of the whole batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def seeded_generator(seed: int) -> torch.Generator:
    """A generator where tensors are created, see ``--device``."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def batches(steps: int, *shape: int, seed: int = 7) -> Tensor:
    """``[steps, *shape]``, the same on every rank."""
    return torch.randn(steps, *shape, generator=seeded_generator(seed))


def token_batches(steps: int, batch: int = 8, seed: int = 7) -> Tensor:
    return torch.randint(TINY.vocab, (steps, batch, TINY.max_seq + 1), generator=seeded_generator(seed))


def llama_loss(call: Callable[..., Tensor], tokens: Tensor) -> Tensor:
    return call(tokens[:, :-1], tokens[:, 1:])


def square_loss(call: Callable[..., Tensor], x: Tensor) -> Tensor:
    return F.mse_loss(call(x).to(x.dtype), x.roll(1, dims=-1))


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of a DTensor, or the tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else full(p.grad).clone() for n, p in model.named_parameters()}


def full_params(model: nn.Module) -> dict[str, Tensor]:
    return {n: full(p.detach()).clone() for n, p in model.named_parameters()}


def assert_close(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None], rtol: float = 1e-5) -> None:
    """Compare two sets of tensors by name, with an absolute tolerance that follows each tensor's size."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        got = actual[name]
        assert (got is None) == (want is None), f"{name}: {got} against {want}"
        if want is not None:
            atol = rtol * max(want.abs().max().item() if want.numel() else 0, 1e-3)
            of_one = want.to(got.device)  # which --device puts elsewhere than shards on the host
            torch.testing.assert_close(got, of_one, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(
    model: nn.Module,
    call: Callable[..., Tensor],
    data: Tensor,
    loss_of: Callable[..., Tensor],
    lr: float = 0.1,
    sharded: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """Train with SGD or another optimizer, one step per batch; return the mean losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for batch in data:
        loss = loss_of(call, my_part(batch) if sharded else batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss) if sharded else loss.item())
    return losses


def train_replicas(
    model: nn.Module, call: Callable[..., Tensor], data: Tensor, loss_of: Callable[..., Tensor], lr: float = 0.1
) -> list[float]:
    """Train an unsharded model on this rank's part, averaging gradients by hand: what sharding must not change.

    Unlike one process with the whole batch, it has each rank's own batch statistics and low-precision rounding.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for batch in data:
        loss = loss_of(call, my_part(batch))
        loss.backward()
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


def assert_sizes_may_vary(model: nn.Module, call: Callable[..., Any], alone: nn.Module) -> None:
    """Batches of other sizes give one process's gradients, and one more compilation for all of them."""
    counters.clear()
    for count in (8, 12, 16, 20):
        (data,) = batches(1, count, 10)
        square_loss(alone, data).backward()
        square_loss(call, my_part(data)).backward()
        assert_close(full_grads(model), full_grads(alone))
        for each in (model, alone):
            each.zero_grad()
    assert counters["stats"]["unique_graphs"] == 2


def assert_trains_like_one_process(
    model: nn.Module,
    call: Callable[..., Any],
    alone: nn.Module,
    data: Tensor | None = None,
    call_alone: Callable[..., Any] | None = None,
) -> None:
    """Train both with SGD and compare losses and parameters; by default three steps of ``[8, 10]``."""
    data = batches(3, 8, 10) if data is None else data
    want = train(alone, call_alone or alone, data, square_loss, sharded=False)
    got = train(model, call, data, square_loss)
    same_on_ranks(got)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=0)
    assert_close(full_params(model), full_params(alone))


def assert_trains_like_replicas(
    model: nn.Module,
    call: Callable[..., Tensor],
    alone: nn.Module,
    data: Tensor,
    call_alone: Callable[..., Tensor] | None = None,
    rtol: float = 1e-5,
) -> None:
    """Train a sharded model and replicas of ``alone`` with SGD; compare losses, parameters and buffers."""
    want = train_replicas(alone, call_alone or alone, data, square_loss)
    got = train(model, call, data, square_loss)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=rtol, atol=0)
    assert_close(full_params(model), full_params(alone), rtol=rtol)
    assert_close(dict(model.named_buffers()), dict(alone.named_buffers()), rtol=rtol)
