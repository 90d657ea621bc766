"""Measures what it costs that ranks agree before they start collectives: the first time, and in every step.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/bench/bench_agreement.py
    python examples/bench/bench_agreement.py --clients 64

The first trains a small model with agreement, without its tripwire (the thread that sends a hash per window of what
ran) and without agreement, ten steps each in turn, and prints the medians. The second connects that many clients,
threads of one process, to one TCPStore and lets them agree on a graph with as many parameters as a model of 8 billion
has: seconds until all know the verdict, the first time and a second time. Then they compare windows of 100
collectives, one every 25 ms: CPU time of the training thread and of the reporting thread for a window, and requests
to the store per rank.
``--json FILE`` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from compare import full_graph, ours_eager

from fsdp_compiled import SchedulePolicy, set_rank_agreement, step_on_shards
from fsdp_compiled.agreement import tripwire
from fsdp_compiled.agreement.ledger import Ledger, agree
from fsdp_compiled.agreement.tripwire import Entry, Tripwire
from fsdp_compiled.sharding.contract import Collective, Contract
from fsdp_compiled.testing.llama import Config, Llama

TURN = 10  # steps
PARAMETERS = 291  # of Llama 3 8B


def steps(args: argparse.Namespace) -> dict[str, float]:
    """Return the median milliseconds of a step, and the microseconds that one graph's agreement takes in it."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    config = Config(256, 64, args.layers, 1, 1, 192, max_seq=8)
    model = Llama(config)
    model.init_weights(seed=0)
    call = full_graph(SchedulePolicy()).shard(model) if args.mode == "full" else ours_eager(model)
    optimizer = step_on_shards(torch.optim.AdamW(model.parameters()))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    seconds: dict[str, list[float]] = {"with": [], "without tripwire": [], "without": []}
    add = Tripwire.add
    for number in range(3 * args.steps):
        name = list(seconds)[number // TURN % 3]
        set_rank_agreement(name != "without")
        Tripwire.add = add if name == "with" else _add_nothing
        dist.barrier()
        start = time.perf_counter()
        call(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % TURN > 1:  # the thread may still be busy with what ran before
            seconds[name].append(time.perf_counter() - start)
    set_rank_agreement(True)
    Tripwire.add = add
    medians = {f"ms {name}": 1e3 * statistics.median(each) for name, each in seconds.items()}
    dist.barrier()
    contract = graph_contract(str(dist.group.WORLD.group_name))
    agree(contract)
    agree(contract)
    packed, calls = contract.pack(), 10_000
    start = time.perf_counter()
    for _ in range(calls):
        agree(Contract.unpack(packed))
    medians["us of one graph"] = 1e6 * (time.perf_counter() - start) / calls
    dist.destroy_process_group()
    return medians


def _add_nothing(wire: Tripwire, contract: Contract) -> None:
    """In place of :meth:`Tripwire.add`: ranks compare what follows for the first time, and nothing afterwards."""


def graph_contract(group: str) -> Contract:
    """Return the contract of a backward graph: every parameter is all-gathered and reduced, in buckets of nine."""
    names = [f"model.layers.{number // 9}.weight_{number % 9} bfloat16[4096, 4096]" for number in range(PARAMETERS)]
    buckets = [tuple(names[first : first + 9]) for first in range(0, PARAMETERS, 9)]
    kinds = ("all-gather", "reduce-scatter")
    return Contract(tuple(Collective(group, kind, "sent as bfloat16", each) for each in buckets for kind in kinds))


def first_time(clients: int) -> dict[str, float]:
    """Return the seconds in which clients of one store agree."""
    # Each rank's windows are reported by a thread below.
    tripwire._reporter = lambda process: SimpleNamespace(queue=SimpleQueue(), last=None, differing=[])
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(clients)]
    contract, ranks = graph_contract("0"), tuple(range(clients))
    ledgers = [Ledger(store, rank, ranks, timedelta(minutes=1)) for rank, store in enumerate(stores)]
    contract.digest  # noqa: B018  what a graph's first call computes is not the store's cost
    return {
        "s the first time": all_enter(ledgers, contract),
        "s again": all_enter(ledgers, contract),
        **windows([Tripwire(_Counting(store), rank, ranks) for rank, store in enumerate(stores)]),
    }


class _Counting:
    """A client of a store that counts its requests."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.count = store, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.count += 1
        return getattr(self.store, name)


def windows(wires: list[Tripwire], count: int = 100, every_s: float = 0.025) -> dict[str, float]:
    """Return what it costs to compare windows, each rank's reported by a thread of its own."""
    names = [Contract((Collective("0", "all-gather", "", (f"{number}",)),)) for number in range(100)]
    window = [Entry(each.digest, each, "", number, 0) for number, each in enumerate(names, start=1)]

    def report(wire: Tripwire) -> float:
        start = time.thread_time()
        for _ in range(count):
            wire.follow([window])
            time.sleep(every_s)
        return time.thread_time() - start

    with ThreadPoolExecutor(len(wires)) as pool:
        seconds = list(pool.map(report, wires))
    assert not any(wire.differs for wire in wires)
    training = []
    for _ in range(count):
        start = time.thread_time()
        for contract in names:
            wires[0].check()
            wires[0].add(contract)
        training.append(time.thread_time() - start)
        time.sleep(every_s)
    return {
        "us a window, thread": 1e6 * statistics.median(seconds) / count,
        "us a window, training": 1e6 * statistics.median(training),
        "requests a window": statistics.mean(wire.store.count for wire in wires) / count,
    }


def all_enter(ledgers: list[Ledger], contract: Contract) -> float:
    """Let every ledger enter a contract on a thread of its own, and return the seconds until all have."""
    threads = [threading.Thread(target=ledger.enter, args=(contract,)) for ledger in ledgers]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=0, help="of one store; 0 measures steps")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mode", choices=("full", "eager"), default="full")
    parser.add_argument("--steps", type=int, default=60, help="with agreement, and as many without")
    parser.add_argument("--json", help="where to keep the figures")
    args = parser.parse_args()
    figures = first_time(args.clients) if args.clients else steps(args)
    if os.environ.get("RANK", "0") != "0":
        return
    for name, value in figures.items():
        print(f"{name:20} {value:10.3f}")
    if args.json:
        with open(args.json, "w") as file:
            asked = {name: value for name, value in vars(args).items() if name != "json"}
            json.dump({"torch": torch.__version__, **asked, **figures}, file, indent=1)


if __name__ == "__main__":
    main()
