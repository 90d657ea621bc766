"""Puts two graph passes of one's own behind the library's: one that changes the graph, one that only looks.

    python examples/graphs/own_pass.py

``Serialize`` undoes all overlap of communication with compute but keeps the buckets and the results: a step with
and without it tells what overlap is worth on your machine. Here one process takes the part of rank 0 of 8 in a
simulated process group, so only the order shows: ``Show`` checks the graph's rules and prints the launches and waits
before and after: ``G`` and ``W`` of all-gathers, ``R`` and ``V`` of reductions; ``c`` is a run of matrix products
between them.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import fx

import fsdp_compiled
from fsdp_compiled import SchedulePolicy, fully_shard, passes
from fsdp_compiled.passes import rules as spec
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.testing.llama import Config, Llama


@dataclass(frozen=True)
class Serialize:
    """Launches each collective just before compute waits for it. Numerics cannot change.

    ::

        G0 G1 W0 c0 W1 c1   ->  G0 W0 c0 G1 W1 c1
        c0 R0 c1 R1 V0 V1   ->  c0 R0 V0 c1 R1 V1

    An all-gather's launch moves down to its wait, a reduction's wait moves up to its launch: neither holds its memory
    for longer than before.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for wait in filter(nodes.is_wait, list(graph.nodes)):
            launch = nodes.source_of(wait)
            if nodes.stage_of(launch) == "all_gather":
                wait.prepend(launch)
            else:
                launch.append(wait)


@dataclass(frozen=True)
class Show:
    """Checks the rules that every graph of ours keeps, and prints its launches and waits in order."""

    title: str

    def __call__(self, graph: fx.Graph) -> None:
        spec.verify(graph, where=self.title)
        launches = {launch: f"{_letter(launch)}{i}" for i, launch in enumerate(filter(nodes.is_launch, graph.nodes))}
        signs = (sign for node in graph.nodes if (sign := _sign(node, launches)))
        print(f"{self.title:>10}:  {' '.join(sign for sign, _ in itertools.groupby(signs))}")


def _letter(launch: fx.Node) -> str:
    return "G" if nodes.stage_of(launch) == "all_gather" else "R"


def _sign(node: fx.Node, launches: dict[fx.Node, str]) -> str:
    if nodes.is_wait(node):
        return launches[nodes.source_of(node)].replace("G", "W").replace("R", "V")
    return launches.get(node) or ("c" if nodes.is_heavy(node) else "")


class Uncached(passes.Pipeline):
    """Keeps its graphs out of the compile caches: the keys would hold the passes' fields, but not your source."""

    def uuid(self) -> None:
        return None


def options(policy: SchedulePolicy) -> dict[str, object]:
    """Return options for ``torch.compile`` by which our passes run behind the library's, where graphs are lowered.

    The joint graph and the pass that pins the order, in the two other slots, stay as they are.
    """
    slot = "post_grad_custom_pre_pass"
    run = Uncached((*passes.post_grad(policy), Show("scheduled"), Serialize(), Show("serialized")))
    return {
        **fsdp_compiled.options(policy),
        slot: passes.beside_users_passes(slot, run),
    }


def main() -> None:
    args = parse()
    dist.init_process_group("fake", rank=0, world_size=8)
    model = Llama(Config(width=64, layers=args.layers, heads=2, kv_heads=2, hidden=192, max_seq=64))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.init_weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    compiled = torch.compile(model, fullgraph=True, options=options(SchedulePolicy(bucket="unit")))
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
