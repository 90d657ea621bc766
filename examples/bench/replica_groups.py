"""Time a training step in torchft's replica groups and one of plain hybrid sharding, without any fault.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 examples/bench/replica_groups.py

Four ranks, two groups of two. Both contenders train the same Llama in turn on the same batches; medians in ms. Their
parameters must be equal in the end. ``--json FILE`` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from fsdp_compiled import fully_shard, step_on_shards
from fsdp_compiled.integrations.torchft import ReplicatedOptimizer
from fsdp_compiled.testing.llama import Config, Llama

TIMEOUT = timedelta(seconds=60)
SIZES = {"4 x 256": (4, 256, 128, 2), "6 x 128": (6, 128, 64, 1)}  # layers, width, sequence, sequences per rank


def model_of(layers: int, width: int, seq: int, mesh: DeviceMesh) -> nn.Module:
    hidden = -(-width * 8 // 3 // 32) * 32
    config = Config(vocab=256, width=width, layers=layers, heads=4, kv_heads=2, hidden=hidden, max_seq=seq)
    model = Llama(config)
    model.init_weights(seed=0)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def manager_of(mesh: DeviceMesh, lighthouse: str) -> Manager:
    """Return the manager of this rank's group, with a store of the group's own."""
    group, rank = mesh["shard"].get_group(), mesh.get_local_rank("shard")
    ports: list[Any] = [None]
    if rank == 0:
        # Kept by the manager's process as long as it lives.
        manager_of.store = store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        ports = [store.port]
    dist.broadcast_object_list(ports, group=group, group_src=0)
    return Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        replica_id=f"group_{mesh.get_local_rank('replicate')}",
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=rank,
        world_size=mesh["shard"].size(),
        store_addr="127.0.0.1",
        store_port=ports[0],
        lighthouse_addr=lighthouse,
        init_sync=False,  # parameters are equal; else one group alone would count in the first step
    )


def measure(name: str, steps: int, compiled: bool, lighthouse: str) -> dict[str, float]:
    layers, width, seq, batch = SIZES[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    models = {"plain": model_of(layers, width, seq, mesh), "torchft": model_of(layers, width, seq, mesh["shard"])}
    calls = {key: torch.compile(model, fullgraph=True) if compiled else model for key, model in models.items()}
    optimizers: dict[str, Any] = {
        key: step_on_shards(torch.optim.AdamW(model.parameters(), lr=1e-3)) for key, model in models.items()
    }
    manager = manager_of(mesh, lighthouse)
    optimizers["torchft"] = ReplicatedOptimizer(manager, optimizers["torchft"], models["torchft"])
    taken: dict[str, list[float]] = {key: [] for key in models}
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * 4 + dist.get_rank())
        tokens = torch.randint(256, (batch, seq + 1), generator=generator)
        for key, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            optimizers[key].zero_grad()
            call(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizers[key].step()
            taken[key].append((time.perf_counter() - start) * 1e3)
    for one, other in zip(*(model.parameters() for model in models.values()), strict=True):
        torch.testing.assert_close(one.full_tensor(), other.full_tensor(), rtol=1e-3, atol=1e-4)  # type: ignore[attr-defined]
    manager.shutdown(wait=False)
    found = {key: statistics.median(each[steps // 4 :]) for key, each in taken.items()}
    return {**found, "ratio": found["torchft"] / found["plain"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.set_num_threads(1)
    addresses: list[Any] = [None]
    if dist.get_rank() == 0:
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100)
        addresses = [lighthouse.address()]
    dist.broadcast_object_list(addresses)
    found = {name: measure(name, args.steps, args.compile, addresses[0]) for name in SIZES}
    if dist.get_rank() == 0:
        for name, figures in found.items():
            print(name, "  ".join(f"{key} {value:.2f}" for key, value in figures.items()), flush=True)
        if args.json:
            setup = {"torch": torch.__version__, "compiled": args.compile, "steps": args.steps}
            args.json.write_text(json.dumps({**setup, "ms": found}, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
