"""``uninstall()`` leaves torch as it was before the library was imported."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._inductor import decomposition
from torch._logging import _internal as torch_logging
from torch.compiler import nested_compile_region
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer

INVOKE = torch.ops.higher_order.invoke_subgraph
NAMESPACES = (nn.Module, nn.Parameter, torch.Tensor, DTensor, torch.optim.Optimizer, torch.autograd.Function)
MODULES = (torch, torch.compiler, torch.distributed.fsdp, dist, torch.optim, module_hooks)
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
CONFIGS = (torch._inductor.config, torch._dynamo.config, torch._functorch.config)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x


def snapshot() -> dict[str, Any]:
    """What a library could put into torch and the interpreter, by where it would stand."""
    seen: dict[str, Any] = {
        "sys.excepthook": sys.excepthook,
        "sys.unraisablehook": sys.unraisablehook,
        "threading.excepthook": threading.excepthook,
        "start callbacks": list(callback_handler.start_callbacks),
        "end callbacks": list(callback_handler.end_callbacks),
        "logs": dict(torch_logging.log_registry.log_alias_to_log_qnames),
        "optimizer hooks": (
            dict(optimizer._global_optimizer_pre_hooks),
            dict(optimizer._global_optimizer_post_hooks),
        ),
        "log handlers": list(logging.getLogger("torch").handlers),
    }
    for config in CONFIGS:
        seen |= {f"{config.__name__}.{key}": value for key, value in config.get_config_copy().items()}
    tables = {"usual": decomposition.decompositions, "random": decomposition.fast_random_decomps()}
    seen |= {f"{product} ({name})": table[product] for name, table in tables.items() for product in PRODUCTS}
    for owner in (*NAMESPACES, *MODULES):
        seen |= {f"{owner.__name__}.{name}": value for name, value in vars(owner).items()}
    seen |= {f"invoke_subgraph.{name}": value for name, value in vars(INVOKE).items()}
    seen["invoke_subgraph.gen_schema"] = INVOKE.gen_schema
    # what torch counts and caches itself, and modules that are imported later
    return {name: value for name, value in seen.items() if "cache" not in name and not isinstance(value, type(sys))}


def train(call: Any) -> None:
    for _ in range(2):
        call(torch.ones(2, 8).requires_grad_()).sum().backward()


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = sorted(before.keys() | after.keys())
    pairs = {name: (before.get(name), after.get(name)) for name in names}
    return [name for name, (old, new) in pairs.items() if old is not new and old != new]


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=4)
    train(torch.compile(nested_compile_region(Model()), backend="aot_eager"))  # what torch fills by itself
    before = snapshot()

    from fsdp_compiled import compile, fully_shard, uninstall

    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    train(compile(model, regions="auto", fullgraph=True))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    put_in = changed(before, snapshot())
    print(*put_in, sep="\n")
    uninstall()
    assert changed(before, snapshot()) == []
    fully_shard(Model())
    assert changed(before, snapshot()) == put_in


def test_uninstall_leaves_torch_as_it_was():
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-m", __name__], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "aten.addmm.default (random)",
        "aten.addmm.default (usual)",
        "aten.bmm.default (random)",
        "aten.bmm.default (usual)",
        "aten.mm.default (random)",
        "aten.mm.default (usual)",
        "end callbacks",
        "invoke_subgraph.gen_schema",
        "invoke_subgraph.non_fallthrough_keys",
        "logs",
        "optimizer hooks",
        "start callbacks",
        "sys.excepthook",
        "torch._inductor.config._pre_fusion_custom_pass",
        "torch._inductor.config.joint_custom_pre_pass",
        "torch._inductor.config.post_grad_custom_post_pass",
        "torch._inductor.config.post_grad_custom_pre_pass",
    ]


if __name__ == "__main__":
    main()
