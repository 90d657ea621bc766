"""Hold estimates of a step against what others have published of real clusters, without a GPU.

    python examples/bench/published.py                                  # every row, a process each
    python examples/bench/published.py --row 1 --out published.json     # one of them

A compiled model is sharded over as many ranks as published, in a process group that sends nothing, and captured:
nothing is computed. One that was published uncompiled runs with fake tensors, unsharded, as it was published
(``as_published.py``): each operator reads and writes its tensors, and collectives count as hidden.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import as_published
import torch
import torch.distributed as dist
import torch.nn.functional as F
from memory import CHECKPOINTING, checkpointed
from operators import Eager, counted
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fsdp_compiled import MixedPrecisionPolicy, SchedulePolicy, fully_shard
from fsdp_compiled.inspect import OPTIMIZERS, Capture, capture
from fsdp_compiled.inspect.memory import ALLOCATOR_FRACTION
from fsdp_compiled.passes.cost import CLUSTERS, Cluster
from fsdp_compiled.testing.llama import PRESETS, Config, Llama

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """What was published: tokens per second and GPU, and where.

    Args:
        model: "llama" or "mpt".
        width, layers: of the model; a Llama has 8 billion parameters, and 1 billion where its width is 2048.
        batch: sequences of a rank at a time.
        accumulation: how many such batches make a step.
        memory_gib: that PyTorch's allocator reserved; 0 where it was not published.
        optimizer: "adamw", or "muon" for the matrices in blocks.
    """

    source: str
    model: str
    cluster: str
    gpus: int
    seq: int
    batch: int
    tokens_per_s: float
    checkpointing: str
    is_compiled: bool = False
    accumulation: int = 1
    memory_gib: float = 0.0
    width: int = 4096
    layers: int = 32
    optimizer: str = "adamw"

    @property
    def step_s(self) -> float:
        return self.batch * self.seq * self.accumulation / self.tokens_per_s


_TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_TITAN_A100 = "pytorch/torchtitan, docs/performance.md of May 2024"
_FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"


_MPT = partial(Row, _FOUNDRY, "mpt", "H100")

ROWS = [
    Row(_TITAN, "llama", "H100-500W", 8, 8192, 2, 6667, "selective", is_compiled=True, memory_gib=77.0),
    Row(_TITAN, "llama", "H100-500W", 8, 8192, 2, 5762, "selective", memory_gib=82.4),
    Row(_TITAN_A100, "llama", "A100", 64, 8192, 1, 2973, "selective", is_compiled=True),
    _MPT(8, 2048, 24, 63147, "none", accumulation=2, width=1536, layers=24),
    _MPT(16, 2048, 20, 46037, "none", accumulation=1, width=2048, layers=24),
    _MPT(8, 4096, 5, 20964, "none", accumulation=6, width=2560, layers=32),
    _MPT(8, 4096, 16, 8611, "blocks", accumulation=2, width=4096, layers=32),
    _MPT(8, 8192, 8, 6935, "blocks", accumulation=2, width=4096, layers=32),
    _MPT(8, 2048, 2, 4792, "none", accumulation=1, width=5120, layers=40),
    _MPT(8, 16384, 3, 2985, "blocks", accumulation=3, width=5120, layers=40),
    _MPT(16, 2048, 10, 2263, "blocks", accumulation=3, width=7168, layers=48),
]
# Others of the same tables, to which nothing was fitted.
CHECKS = [
    Row(_TITAN, "llama", "H100-500W", 128, 8192, 2, 6514, "selective", is_compiled=True, memory_gib=62.0),
    Row(_TITAN, "llama", "H100-500W", 128, 8192, 2, 5605, "selective", memory_gib=67.0),
    _MPT(16, 2048, 24, 68551, "none", accumulation=1, width=1536, layers=24),
    _MPT(8, 8192, 6, 41825, "none", accumulation=2, width=1536, layers=24),
    _MPT(8, 512, 56, 52275, "none", accumulation=4, width=2048, layers=24),
    _MPT(8, 16384, 2, 19649, "none", accumulation=4, width=2048, layers=24),
    _MPT(8, 1024, 20, 27046, "none", accumulation=6, width=2560, layers=32),
    _MPT(8, 16384, 1, 11152, "none", accumulation=6, width=2560, layers=32),
    _MPT(8, 2048, 6, 10643, "none", accumulation=1, width=4096, layers=32),
    _MPT(8, 32768, 2, 3318, "blocks", accumulation=2, width=4096, layers=32),
    _MPT(8, 1024, 40, 5502, "blocks", accumulation=3, width=5120, layers=40),
    _MPT(8, 4096, 10, 4717, "blocks", accumulation=3, width=5120, layers=40),
    _MPT(64, 2048, 2, 4800, "none", accumulation=1, width=5120, layers=40),
    _MPT(8, 4096, 1, 1802, "blocks", accumulation=21, width=7168, layers=48),
    _MPT(64, 2048, 8, 1039, "blocks", accumulation=4, width=8192, layers=80),
]


STEPS = [*ROWS, *CHECKS]


class MptBlock(nn.Module):
    """LayerNorm, causal attention, LayerNorm, GELU with four times the width; no biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (each.unflatten(-1, (-1, 128)).transpose(1, 2) for each in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Mpt(nn.Module):
    """A GPT with learned positions and tied embeddings, which returns the loss."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50368, row.width), nn.Embedding(row.seq, row.width)
        self.blocks = nn.ModuleList(MptBlock(row.width) for _ in range(row.layers))
        self.norm, self.recomputes = nn.LayerNorm(row.width, bias=False), row.checkpointing == "blocks"

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _sizes(row: Row) -> Config:
    return replace(PRESETS["1b" if row.width == 2048 else "8b"], layers=row.layers, max_seq=row.seq)


def made(row: Row) -> Any:
    """Return the model, unsharded."""
    return Mpt(row) if row.model == "mpt" else checkpointed(Llama(_sizes(row)), row.checkpointing)


def made_as_published(row: Row) -> Any:
    """Return the model with all operators that it was published with, unsharded."""
    if row.model == "mpt":
        return as_published.Mpt(row.width, row.layers, row.seq, recomputes=row.checkpointing == "blocks")
    return checkpointed(as_published.llama(_sizes(row)), row.checkpointing)


def cluster_of(row: Row) -> Cluster:
    """Return the cluster, an H100 at the rates of products and attention that the software of 2024 reached.

    *Source:* what each reaches alone, 0.73 of the peak by products (SemiAnalysis, MI300X vs H100 vs H200 Benchmark
    Part 1), 333 and 318 of 989 TFLOP/s by flash attention of version 2, forward and backward (arXiv:2407.08608),
    times 0.85 and 0.6, which are fitted to ROWS together.
    """
    found = CLUSTERS[row.cluster]
    if not row.cluster.startswith("H100"):
        return found
    return replace(found, efficiency=0.85 * 0.73, attention_efficiency=(0.6 * 333 / 989, 0.6 * 318 / 989))


def captured(row: Row) -> Capture:
    """Return what a rank's step of one batch costs by estimate."""
    dist.init_process_group("fake", rank=0, world_size=row.gpus)
    with torch.device("meta"):
        model = made(row)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cpu")  # memory that the system has promised; nothing touches it
    tokens = torch.zeros(row.batch, row.seq, dtype=torch.int64)
    inputs = (tokens,) if row.model == "llama" else (tokens, tokens)
    return capture(model, *inputs, loss=_one, schedule=SchedulePolicy(cluster=cluster_of(row)), code=False)


def _one(output: Tensor) -> Tensor:
    return output[(0,) * output.dim()]


def estimate_uncompiled(row: Row) -> dict[str, Any]:
    """The published models' own operators, FSDP's, a clipped norm and AdamW."""
    eager = as_published.AsThen(cluster_of(row))
    numel = counted(partial(made_as_published, row), row.batch, row.seq, eager)
    sharding_us = eager.cluster.memory_us(as_published.SHARDING_BYTES[row.model] * numel)
    traffic = OPTIMIZERS["adamw"].traffic + as_published.CLIPPING
    optimizer_us = eager.cluster.memory_us(traffic * 4 * numel / row.gpus)
    us = {part: row.accumulation * us for part, us in (eager.us | {"sharding": sharding_us}).items()}
    us["optimizer"] = optimizer_us
    return {"estimated_step_s": sum(us.values()) / 1e6, "parts_s": {part: us / 1e6 for part, us in us.items()}}


def estimate_compiled(row: Row) -> dict[str, Any]:
    """The published models compile each block; their loss is not compiled and works on copies of the logits."""
    found = captured(row)
    assert found.memory is not None
    with FakeTensorMode():
        logits = torch.empty(row.batch * row.seq, PRESETS["8b"].vocab, dtype=torch.bfloat16, requires_grad=True)
        with Eager(cluster_of(row)) as eager:
            F.cross_entropy(logits.float(), torch.zeros(len(logits), dtype=torch.int64)).backward()
    loss_us, exposed_us = sum(eager.us.values()), sum(graph.exposed_us for graph in found.graphs)
    step_us = row.accumulation * (found.step_us - found.optimizer_us + loss_us) + found.optimizer_us
    # in backward: log-softmax, its gradient and that of the logits, all fp32
    (before,) = [level.bytes for level in found.memory.curve if level.graph == "forward"][-1:]
    peak = max(found.memory.peak.bytes, before + 3 * 4 * logits.numel())
    parts = {"exposed": row.accumulation * exposed_us, "optimizer": found.optimizer_us, "loss": loss_us}
    return {
        "estimated_step_s": step_us / 1e6,
        "parts_s": {part: us / 1e6 for part, us in parts.items()},
        "estimated_memory_gib": (1 + ALLOCATOR_FRACTION) * peak / GIB,
    }


def estimate(row: Row) -> dict[str, Any]:
    """Return what was published, its estimate and the error."""
    found = estimate_compiled(row) if row.is_compiled else estimate_uncompiled(row)
    return asdict(row) | {"step_s": row.step_s, "error": found["estimated_step_s"] / row.step_s - 1} | found


def line(found: dict[str, Any]) -> str:
    size = "8B" if found["model"] == "llama" else f"{found['width']} x {found['layers']}"
    batch = f"{found['batch']} x {found['seq']}" + f" x {found['accumulation']}" * (found["accumulation"] > 1)
    memory = f"{found['memory_gib'] or ''} | {round(found.get('estimated_memory_gib', 0), 1) or ''}"
    cells = [f"{found['model']} {size}", found["cluster"], found["gpus"], batch, found["checkpointing"]]
    cells += [
        "compiled" if found["is_compiled"] else "",
        f"{found['step_s']:.2f}",
        f"{found['estimated_step_s']:.2f}",
    ]
    return f"| {' | '.join(map(str, cells))} | {found['error']:+.0%} | {memory} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", type=int, nargs="*", default=list(range(len(STEPS))), help="0 is the first")
    parser.add_argument("--out", type=Path, help="write what is found as JSON")
    args = parser.parse_args()
    if len(args.row) == 1:
        found = [estimate(STEPS[args.row[0]])]
        print(line(found[0]), flush=True)
    else:
        print("| model | cluster | GPUs | batch | checkpointing | | step, s | estimate | | GiB | estimate |")
        print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
        found = []
        for index in args.row:
            one = Path(f"{args.out or 'published'}.{index}")
            subprocess.run([sys.executable, __file__, "--row", str(index), "--out", str(one)], check=True)
            found += json.loads(one.read_text())
            one.unlink()
    if len(args.row) > 1:
        for name, is_check in (("rates were fitted to", False), ("nothing was fitted to", True)):
            chosen = zip(args.row, found, strict=True)
            if errors := [abs(each["error"]) for index, each in chosen if (index >= len(ROWS)) == is_check]:
                print(f"those that {name}: median {median(errors):.1%}, largest {max(errors):.1%}")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    assert CHECKPOINTING.keys() >= {row.checkpointing for row in ROWS}
    main()
