"""Hold estimates of training steps against one GPU, as rank 0 of ranks that are simulated (``simulated_group.py``).

    python examples/bench/gpu_steps.py --out steps.json         # measures, on a GPU
    python examples/bench/gpu_steps.py --estimate steps.json    # adds what these steps take by estimate, anywhere

The steps are those that ``published.py`` lists, of one batch each: accumulation is left out; and ``OWN``, to which no
constant is fitted. Compiled steps are one graph, the loss included. The optimizer steps on shards. What runs on the
GPU is told by a profile of one step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import simulated_group
import torch
import torch.distributed as dist
from bench_gpu import initialize, ours_eager, seconds_each
from operators import Eager, counted
from published import ROWS, Row, made
from simulated_group import SimulatedGroup
from torch import nn

import fsdp_compiled
from fsdp_compiled import SchedulePolicy, step_on_shards
from fsdp_compiled.inspect import OPTIMIZERS, capture
from fsdp_compiled.passes import CLUSTERS

GIB = 2**30

_OWN = partial(Row, "", "llama", "H200", tokens_per_s=0.0)
OWN = [
    _OWN(8, 8192, 2, checkpointing="none", is_compiled=True, width=2048, layers=16),
    _OWN(64, 4096, 4, checkpointing="none", is_compiled=True, width=2048, layers=16),
    _OWN(8, 8192, 2, checkpointing="none", width=2048, layers=16),
    _OWN(64, 8192, 1, checkpointing="selective", is_compiled=True),
    _OWN(8, 8192, 3, checkpointing="blocks", is_compiled=True),
    _OWN(8, 8192, 2, checkpointing="selective", is_compiled=True, optimizer="muon"),
    replace(ROWS[5], is_compiled=True, cluster="H200"),
]
STEPS = [*ROWS, *OWN]
CASES = 0, 3, 4, 5, 8  # published ones that a GPU of 141 GB runs in a few seconds each

# What kernels compute, by what their names have.
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "products": ("gemm", "cutlass", "nvjet", "xmma", "cublas", "splitkreduce"),
}


def sharded(row: Row, device: str) -> nn.Module:
    """Return the model, its parameters random, sharded over the default process group."""
    with torch.device(device):
        model = made(row)
    initialize(model)  # on the meta device nothing
    ours_eager(model)
    return model


def optimizers(row: Row, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return AdamW for all parameters, or Muon for the blocks' matrices and AdamW for the others."""
    params = list[nn.Parameter](model.parameters())
    found: list[torch.optim.Optimizer] = []
    if row.optimizer == "muon":
        matrices = [param for param in model.get_submodule("blocks").parameters() if param.ndim == 2]
        found, chosen = [torch.optim.Muon(matrices, lr=1e-6)], set(matrices)
        params = [param for param in params if param not in chosen]
    found.append(torch.optim.AdamW(params, lr=1e-6, fused=True))
    return list(map(step_on_shards, found))


def compiled(model: nn.Module, regions: bool) -> Callable[..., Any]:
    """Return the model in one graph, its blocks regions or not."""
    chosen = list(model.get_submodule("blocks").children()) if regions else "off"
    return fsdp_compiled.compile(model, regions=chosen, fullgraph=True)


def measured(row: Row, seconds: float, regions: bool) -> dict[str, Any]:
    """Return what a step of one batch takes, steps for so many seconds one after the other."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    simulated_group.start(row.gpus)
    model = sharded(row, "cuda")
    torch.cuda.empty_cache()  # of what the unsharded model has left
    call = compiled(model, regions) if row.is_compiled else model
    stepping = optimizers(row, model)
    tokens = torch.randint(50_000, (row.batch, row.seq + 1), device="cuda")
    tokens, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> None:
        call(tokens, targets).backward()
        for optimizer in stepping:
            optimizer.step()
            optimizer.zero_grad()

    begin = time.perf_counter()
    for _ in range(3):  # the first compiles
        step()
    torch.cuda.synchronize()
    start_s = time.perf_counter() - begin
    torch.cuda.reset_peak_memory_stats()
    with clocks() as clock:
        step_s = repeated(step, seconds)
    peak_gib, reserved_gib = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
    SimulatedGroup.wire = True
    wired_s = repeated(step, seconds)
    SimulatedGroup.wire = False
    kernels = profiled(step)
    found = {"measured_step_s": step_s, "wired_step_s": wired_s, "peak_gib": peak_gib, "reserved_gib": reserved_gib}
    return found | {"start_s": start_s, "mean_clock": clock, "measured_parts_s": by_kind(kernels), "kernels": kernels}


def repeated(step: Callable[[], None], seconds: float) -> float:
    """Return the mean time of steps that run for about so many seconds."""
    first = seconds_each(step, torch.device("cuda"), 1)
    return seconds_each(step, torch.device("cuda"), max(2, int(seconds / first)))


@contextmanager
def clocks() -> Iterator[dict[str, float]]:
    """Collect MHz and watts of the GPU meanwhile."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "500"]
    found = dict[str, float]()
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:
        yield found
        process.terminate()
        assert process.stdout is not None
        lines = [line.split(",") for line in process.stdout.read().splitlines() if line.count(",") == 1]
    if lines:
        found |= {"mhz": mean(float(mhz) for mhz, _ in lines), "watts": mean(float(watts) for _, watts in lines)}


def profiled(step: Callable[[], None]) -> list[tuple[str, int, int, float]]:
    """Return the kernels of a step: name, stream, how many, and seconds together; the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    found = defaultdict[tuple[str, int], list[float]](list)
    for event in profile.profiler.kineto_results.events():
        is_range = event.name().startswith(("FSDP::", "ProfilerStep", "Optimizer", "##", "Torch-Compiled"))
        if event.device_type() == torch.autograd.DeviceType.CUDA and not is_range:
            found[event.name()[:120], event.device_resource_id()].append(event.duration_ns() / 1e9)
    kernels = [(*key, len(times), sum(times)) for key, times in found.items()]
    return sorted(kernels, key=lambda kernel: -kernel[-1])


def by_kind(kernels: list[tuple[str, int, int, float]]) -> dict[str, float]:
    """Return seconds of products, attention and other kernels, those of other streams apart."""
    parts, spent = defaultdict[str, float](float), defaultdict[int, float](float)
    for _, stream, _, seconds in kernels:
        spent[stream] += seconds
    compute = max(spent, key=lambda stream: spent[stream])
    for name, stream, _, seconds in kernels:
        kind = next((kind for kind, has in KINDS.items() if any(each in name.lower() for each in has)), "others")
        parts[kind if stream == compute else "side streams"] += seconds
    return dict(parts)


def estimated(row: Row, regions: bool = True) -> dict[str, Any]:
    """Return what the step takes by estimate, a compiled one with regions or without."""
    cluster = CLUSTERS[row.cluster]
    if not row.is_compiled:
        eager = Eager(cluster)
        numel = counted(partial(made, row), row.batch, row.seq, eager)
        optimizer_us = cluster.memory_us(OPTIMIZERS["adamw"].traffic * 4 * numel / row.gpus)
        packing_us = cluster.memory_us((2 + 4) * numel)  # gradients, from bf16 to fp32
        parts = {
            part: us / 1e6 for part, us in {**eager.us, "optimizer": optimizer_us, "packing": packing_us}.items()
        }
        return {"estimated_step_s": sum(parts.values()), "parts_s": parts}
    dist.init_process_group("fake", rank=0, world_size=row.gpus)
    model = sharded(row, "meta").to_empty(device="cpu")
    compiled(model, regions)  # captures use this setting
    tokens, schedule = torch.zeros(row.batch, row.seq, dtype=torch.int64), SchedulePolicy(cluster=cluster)
    graph = capture(model, tokens, tokens, schedule=schedule, code=False, optimizer=row.optimizer)
    parts = {part: us / 1e6 for part, us in graph.step_parts_us.items()}
    peak = {"estimated_peak_gib": graph.peak_bytes / GIB} if graph.peak_bytes else {}
    return {"estimated_step_s": graph.step_us / 1e6, "parts_s": parts} | peak


def add_estimates(file: Path) -> None:
    """Estimate, each in a process of its own, what the file has measured."""
    content = json.loads(file.read_text())
    for case in content["steps"]:
        if "error" not in case:
            given = f"gpu_steps.Row(**{case['row']!r}), {case['regions']}"
            code = f"import json, gpu_steps; print(json.dumps(gpu_steps.estimated({given})))"
            run = subprocess.run(
                [sys.executable, "-c", code], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True
            )
            case |= json.loads(run.stdout.splitlines()[-1])
            print(line(case), flush=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


def line(found: dict[str, Any]) -> str:
    row = found["row"]
    name = f"{row['model']} {row['width']} x {row['layers']}, {row['batch']} x {row['seq']}, {row['gpus']} ranks"
    name += f", {row['checkpointing']}, {row.get('optimizer', 'adamw')}, regions {found['regions']}"
    if "error" in found:
        return f"{name}: {found['error']}"
    keys = ["measured_step_s", "wired_step_s", "estimated_step_s", "peak_gib", "reserved_gib", "estimated_peak_gib"]
    values = [f"{key} {found[key]:.3f}" for key in keys if key in found]
    parts = [f"{part} {s:.3f}" for part, s in found["measured_parts_s"].items()]
    expected = [f"{part} {s:.3f}" for part, s in found.get("parts_s", {}).items()]
    return f"{name}: {', '.join(values)}\n  measured {', '.join(parts)}\n  estimated {', '.join(expected)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", type=int, nargs="*", default=CASES, help="of those published, then our own, from 0")
    parser.add_argument("--regions", action="store_true", help="the blocks of compiled models are regions")
    parser.add_argument("--layers", type=int, help="of every model, instead of its own")
    parser.add_argument("--seconds", type=float, default=8.0, help="of steps without, and with a wire")
    parser.add_argument("--out", type=Path, help="write what is measured as JSON")
    parser.add_argument("--estimate", type=Path, metavar="FILE", help="of --out, to which estimates are added")
    args = parser.parse_args()
    if args.estimate:
        add_estimates(args.estimate)
        return
    os.environ.setdefault("LOCAL_WORLD_SIZE", "8")
    device, found = torch.cuda.get_device_name(), list[dict[str, Any]]()
    cluster = next((name for name in CLUSTERS if name in device), "H100")
    for index in args.row:
        row = replace(STEPS[index], accumulation=1, cluster=cluster, layers=args.layers or STEPS[index].layers)
        case = {"row": asdict(row), "regions": args.regions and row.is_compiled}
        try:
            case |= measured(row, args.seconds, args.regions)
        except Exception as error:  # the others still count
            traceback.print_exc()
            case |= {"error": f"{type(error).__name__}: {error}"[:500]}
        finally:
            dist.destroy_process_group()
        print(line(case), flush=True)
        found.append(case)
        if args.out:
            about = {"device": device, "torch": torch.__version__}
            args.out.write_text(json.dumps(about | {"steps": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
