"""What the first launch of a graph tells the ranks to agree on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_compiled import fully_shard
from fsdp_compiled.passes.graph import nodes
from fsdp_compiled.passes.rules import GraphError, verify
from tests.support.graphs import record


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x


@pytest.fixture
def graphs(fake_group):
    model = _Model()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model)
    call, recorder = record(model)
    call(torch.randn(3, 8)).sum().backward()
    return recorder


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_the_first_launch_carries_all_collectives(graphs, kind):
    launches = list(filter(nodes.is_launch, graphs.only(kind, after=True).nodes))
    contracts = [nodes.contract_at(launch) for launch in launches]
    assert contracts[0] is not None and not any(contracts[1:])
    kinds = [each.kind for each in contracts[0].collectives]
    assert kinds == [nodes.stage_of(launch).replace("_", "-") for launch in launches]
    wanted = {f"blocks.{n}.{name}" for n in range(2) for name in ("weight", "bias")}
    named = {param.split()[0] for each in contracts[0].collectives for param in each.params}
    assert named == wanted
    facts = dict(fact.split(": ", 1) for fact in contracts[0].basis)
    assert facts.keys() == {"schedule", "cluster"}


def test_a_contract_elsewhere_breaks_a_rule(graphs):
    graph = graphs.only("backward", after=True)
    first, second, *_ = filter(nodes.is_launch, graph.nodes)
    verify(graph)
    nodes.set_contract(second, nodes.contract_at(first))
    with pytest.raises(GraphError, match=f"contract: {second.name} carries the graph's contract, but launches after"):
        verify(graph)
