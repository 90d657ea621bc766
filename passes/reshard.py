"""Decides, in the joint graph, which unsharded parameters live from forward to backward."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..sharding.spec import CommSpec
from .cost import Cluster
from .cost.compute import packet_of
from .graph import emit, nodes
from .graph.anchors import PARAMETER, mark_parameters
from .schedule_policy import DEFAULT, SchedulePolicy

aten = torch.ops.aten


# What makes a smaller tensor: the partitioner computes it again in backward, unless what it is computed from is more
# than four times as large. *Source:* should_ban_recomputation in torch/_functorch/partitioners.py of torch 2.13.0.
_REDUCTIONS = {aten.sum, aten.mean, aten.amax, aten.amin, aten.argmax, aten.any, aten.prod}
_LOOKUPS = {aten.index, aten.gather, aten.index_select}
_PARTS = {aten.slice, aten.select}

_RECOMPUTED = {CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE}


class Candidate(NamedTuple):
    """A parameter that backward would all-gather again: what keeping it takes, and the time that it saves."""

    key: Hashable
    bytes: int
    all_gather_us: float


def decide_kept(candidates: Iterable[Candidate], budget_bytes: int) -> set[Hashable]:
    """Return the keys to keep: those with the largest all-gather time per byte, as many as the budget holds.

    *Source:* the order is the one of DeepCompile's selective gathering (arXiv 2504.09983).
    """
    kept = set[Hashable]()
    for candidate in sorted(candidates, key=lambda c: -c.all_gather_us / max(c.bytes, 1)):
        if candidate.bytes <= budget_bytes:
            budget_bytes -= candidate.bytes
            kept.add(candidate.key)
    return kept


def kept_by(policy: SchedulePolicy, specs: Mapping[Hashable, CommSpec], cluster: Cluster) -> set[Hashable]:
    """Return the keys of the parameters that ``policy`` keeps in a graph that reads all of ``specs``."""
    candidates, lane = [], cache(cluster.lane)
    for key, spec in specs.items() if policy.kept_bytes else ():
        group, size = spec.all_gather.group, spec.all_gather_bytes
        if group.world > 1 and policy.may_keep(spec):
            candidates.append(Candidate(key, size, lane(group).link.collective_us(size, group.world)))
    return decide_kept(candidates, policy.kept_bytes)


@dataclass(frozen=True)
class Reshard:
    """Tags every unshard for AOTAutograd's partitioner. Numerics cannot change.

    ::

        unshard(reshard=True)    ->  MUST_RECOMPUTE: only the shard is saved, backward all-gathers again
        unshard(reshard=False)   ->  MUST_SAVE: the unsharded parameter is saved, backward all-gathers nothing;
                                     MUST_RECOMPUTE if it is the shard itself, which backward would overwrite
        w = with_gradient(v)     ->  w = v, tagged as an unshard is: an all-gather extension made it of several
        w = unshard(s)           ->  p = take_shard(unshard(s)); w = unshard(p), over the smaller group if there is
                                     one: p is saved, backward all-gathers w again, and Normalize drops the
                                     second all-gather of forward
        sum(x), w[numbers]       ->  MUST_SAVE, and w[:length] MUST_RECOMPUTE, whatever their sizes are

    ``keep_unsharded_bytes`` of the policy turn some of the first kind into the second. An untagged custom operator
    would be saved, so without this pass every parameter would stay unsharded.

    Raises NotImplementedError for a region within a checkpoint that draws random numbers: computed again, it would
    draw others. The partitioner keeps the random state of operators of the graph itself alone.
    """

    policy: SchedulePolicy = DEFAULT

    def __call__(self, graph: fx.Graph) -> None:
        _check_regions(graph)
        _drop_gradient_marks(graph)
        mark_parameters(graph)  # for estimates of backward, which reads what is kept as it reads activations
        unshards = nodes.calls_of(graph, "unshard")
        specs = {_key(node): nodes.spec_of(node) for node in unshards}
        kept = kept_by(self.policy, specs, self.policy.cluster_for(nodes.device_of(graph)))
        for node in unshards:
            spec = nodes.spec_of(node)
            keep = (not spec.reshard or _key(node) in kept) and not _is_shard(spec)
            _tag(node, keep)
            if not keep and spec.post_forward.world > 1:
                _keep_over_smaller_group(node)
        _decide_by_operator(graph)


def _check_regions(graph: fx.Graph) -> None:
    for call in graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        if call.meta.get("recompute") in _RECOMPUTED:
            modules = (each for each in nodes.region_module_of(call).modules() if isinstance(each, fx.GraphModule))
            for node in (node for module in modules for node in module.graph.nodes if _is_random(node)):
                raise NotImplementedError(
                    f"regions: expected a block within a checkpoint to draw no random numbers, got {node.target}, of "
                    'which backward would draw others than forward; compile it with regions="off"'
                )


def _is_random(node: fx.Node) -> bool:
    """Tell whether an operator draws random numbers; attention does where it drops out."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    given = node.normalized_arguments(torch.nn.Module(), normalize_to_only_use_kwargs=True)  # with defaults
    return given is None or given.kwargs.get("dropout_p") != 0.0


def _drop_gradient_marks(graph: fx.Graph) -> None:
    """Remove identities whose gradient the joint graph has by now; what they mark is an unsharded parameter."""
    for node in nodes.calls_of(graph, "with_gradient"):
        unsharded = nodes.source_of(node)
        if nodes.spec_of(node).reshard:
            _recompute_from_all_gathers(unsharded)
        else:
            _tag(unsharded, keep=True)
        emit.replace_by([node], [unsharded])


def _recompute_from_all_gathers(unsharded: fx.Node) -> None:
    """Tag every node between the all-gathers and ``unsharded``, so that none of them is saved instead."""
    stack = [unsharded]
    while stack:
        node = stack.pop()
        if node.op == "call_function" and nodes.operator_of(node) != "unshard":
            _tag(node, keep=False)
            stack += node.all_input_nodes


def _decide_by_operator(graph: fx.Graph) -> None:
    """Tag what the partitioner would save or not by its size: ranks with batches of other lengths must agree.

    What is summed up, or taken from a parameter by numbers, is saved; a part of a parameter follows its all-gather.
    """
    behind = set[fx.Node]()  # what backward computes
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
        elif node.op == "call_function" and "recompute" not in node.meta:
            operator, is_parameter = packet_of(node), PARAMETER in node.meta
            is_lookup = operator in _LOOKUPS and PARAMETER in nodes.source_of(node).meta
            if is_parameter and operator in _PARTS:
                _tag(node, keep=False)
            elif not is_parameter and (is_lookup or operator in _REDUCTIONS):
                _tag(node, keep=True)


def _is_shard(spec: CommSpec) -> bool:
    """Tell whether the unsharded parameter is the shard; AOTAutograd lets backward write over it as a new tensor."""
    return spec.all_gather.local_steps(spec.param) == (spec.param.dtype,)


def _keep_over_smaller_group(node: fx.Node) -> None:
    if any(nodes.operator_of(user) == "take_shard" for user in node.users):
        return
    behind, spec = node.next, nodes.spec_of(node)
    group = spec.post_forward
    cut = torch.ops.fsdp_compiled.take_shard.default  # for the smaller group, to this rank's padded piece
    shard = emit.insert(behind, cut, node, spec.param.dim, group.world, group.name)
    again = emit.insert_unshard(behind, shard, spec.after_forward)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not shard)
    _tag(shard, keep=True)
    _tag(again, keep=False)


def _tag(node: fx.Node, keep: bool) -> None:
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE
    # A parameter that two checkpointed regions read would otherwise be turned into MUST_SAVE.
    node.meta.pop("ac_graph_id", None)


def _key(node: fx.Node) -> Hashable:
    return nodes.source_of(node), nodes.spec_of(node)
