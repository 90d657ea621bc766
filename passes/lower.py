"""Replaces the library's opaque operators by the launch and the wait of each bucket's collectives.

It groups nodes by their assigned bucket and emits; it must not know modules, and it does not choose a schedule: a
bucket stands where its first all-gather stood, or after its last gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch._inductor import config  # see inductor.py

from ..sharding.spec import AllGatherBucket, ParamSpec, ReductionBucket
from .cost.cluster import gathers_into_place
from .graph import nodes


@dataclass(frozen=True)
class Lower:
    """One launch and one wait per collective. Numerics cannot change: a bucket only concatenates.

    ::

        w1 = unshard(s1); w2 = unshard(s2)
            ->  w1, w2 = wait_all_gather(launch_all_gather([s1, s2]))
        d1 = reduce_grad(g1); d2 = reduce_grad(g2)
            ->  d1, d2 = wait_reduce_scatter(launch_reduce_scatter([g1, g2]))

    Over replicas a pair ``launch_all_reduce``, ``wait_all_reduce`` follows on the handle that the wait before it
    returned; where shards live on the CPU, ``launch_copy_to_host`` and ``wait_copy_to_host``. A node without a bucket
    travels alone; on one rank, where nothing travels, casts are left.
    """

    def __call__(self, graph: fx.Graph) -> None:
        _require_no_cuda_graphs(graph)
        for node in list(graph.nodes):
            if (nodes.is_unshard(node) or nodes.is_reduce_grad(node)) and not nodes.travels(node):
                _lower_local(node)
        params = nodes.params_of(graph)
        for opaque in _assigned(graph, nodes.is_unshard):
            _lower_all_gather(opaque, tuple(params[node] for node in opaque))
        for opaque in _assigned(graph, nodes.is_reduce_grad):
            _lower_reduction(opaque, tuple(params[node] for node in opaque))


def _require_no_cuda_graphs(graph: fx.Graph) -> None:
    on_gpu = (nodes.computes_on(node).type == "cuda" for node in graph.nodes if nodes.travels(node))
    if config.triton.cudagraphs and any(on_gpu):
        raise NotImplementedError(
            "CUDA graphs (mode='reduce-overhead' or 'max-autotune') cannot hold collectives that other streams run; "
            "compile with mode='max-autotune-no-cudagraphs' or the default"
        )


def _assigned(graph: fx.Graph, is_kind: Callable[[fx.Node], bool]) -> Iterable[list[fx.Node]]:
    """Return nodes of equal buckets together, ordered by the first of each."""
    found: dict[int | fx.Node, list[fx.Node]] = {}
    for node in filter(is_kind, graph.nodes):
        found.setdefault(node.meta.get(nodes.BUCKET, node), []).append(node)
    return found.values()


def _lower_all_gather(opaque: Sequence[fx.Node], params: tuple[ParamSpec, ...]) -> None:
    spec, shards = nodes.spec_of(opaque[0]).all_gather, list(map(nodes.source_of, opaque))
    bucket = AllGatherBucket(spec, params, inputs_persist=all(map(nodes.is_parameter, shards)))
    dims, device = [param.dim for param in params], nodes.computes_on(opaque[0])
    bucket = replace(bucket, into_place=gathers_into_place(spec, dims, bucket.sizes, device))
    _replace(opaque, nodes.insert_stage(opaque[0], "all_gather", shards, bucket))


def _lower_reduction(opaque: Sequence[fx.Node], params: tuple[ParamSpec, ...]) -> None:
    bucket = ReductionBucket(nodes.spec_of(opaque[0]).reduction, params)
    behind, results = opaque[-1].next, list(map(nodes.source_of, opaque))
    for stage in bucket.stages:
        results = nodes.insert_stage(behind, stage, results, bucket)
    _replace(opaque, results)


def _lower_local(node: fx.Node) -> None:
    spec, result = nodes.spec_of(node), nodes.source_of(node)
    if nodes.is_unshard(node):
        result = nodes.insert_cast(node, result, spec.all_gather.dtype)
    else:
        result = nodes.insert_cast(node, result, spec.reduction.dtype)
        if spec.reduction.scaling.pre_divide != 1.0:
            result = nodes.insert(node, torch.ops.aten.div.Tensor, result, spec.reduction.scaling.pre_divide)
        result = nodes.insert_cast(node, result, spec.param.dtype)
    _replace([node], [result])


def _replace(opaque: Sequence[fx.Node], results: Sequence[fx.Node]) -> None:
    for node, result in zip(opaque, results, strict=True):
        node.replace_all_uses_with(result)
        node.graph.erase_node(node)
