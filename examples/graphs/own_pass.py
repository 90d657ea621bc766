"""Puts two graph passes of one's own behind the library's: one that changes the graph, one that only prints it.

    python examples/graphs/own_pass.py

``Serialize`` undoes all overlap of communication with compute but keeps the buckets and the results: a step with
and without it tells what overlap is worth on your machine. Here one process takes the part of rank 0 of 8 in a
simulated process group, so only the order shows: ``Show`` prints the launches and waits before and after, ``G`` and
``W`` of all-gathers, ``R`` and ``V`` of reductions; ``c`` is a run of matrix products between them. The library
checks the graph's rules after each of them.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import fx

from fsdp_compiled import SchedulePolicy, compile, fully_shard
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.testing.llama import Config, Llama


@dataclass(frozen=True)
class Serialize:
    """Launches each collective just before compute waits for it. Numerics cannot change.

    ::

        G0 G1 W0 c0 W1 c1   ->  G0 W0 c0 G1 W1 c1
        c0 R0 c1 R1 V0 V1   ->  c0 R0 V0 c1 R1 V1
    """

    def __call__(self, graph: fx.Graph) -> None:
        for wait in filter(nodes.is_wait, list(graph.nodes)):
            launch = nodes.source_of(wait)
            if nodes.kind_of(launch).is_ahead:
                wait.prepend(launch)
            else:
                launch.append(wait)


@dataclass(frozen=True)
class Show:
    """Prints a graph's launches and waits in order."""

    title: str

    def __call__(self, graph: fx.Graph) -> None:
        launches = {launch: f"{_letter(launch)}{i}" for i, launch in enumerate(filter(nodes.is_launch, graph.nodes))}
        signs = (sign for node in graph.nodes if (sign := _sign(node, launches)))
        print(f"{self.title:>10}:  {' '.join(sign for sign, _ in itertools.groupby(signs))}")

    def uuid(self) -> None:
        """Keep graphs out of the compile caches: what prints must run, and on a hit no pass does."""


def _letter(launch: fx.Node) -> str:
    return "G" if nodes.kind_of(launch).is_ahead else "R"


def _sign(node: fx.Node, launches: dict[fx.Node, str]) -> str:
    if nodes.is_wait(node):
        return launches[nodes.source_of(node)].replace("G", "W").replace("R", "V")
    return launches.get(node) or ("c" if nodes.is_heavy(node) else "")


def main() -> None:
    args = parse()
    dist.init_process_group("fake", rank=0, world_size=8)
    model = Llama(Config(width=64, layers=args.layers, heads=2, kv_heads=2, hidden=192, max_seq=64))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.init_weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    own = [Show("scheduled"), Serialize(), Show("serialized")]
    compiled = compile(model, schedule=SchedulePolicy(bucket="unit"), passes=own, fullgraph=True)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    print("forward")
    loss = compiled(tokens, tokens)
    print("backward")
    loss.backward()
    optimizer.step()
    print("one training step done")
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
