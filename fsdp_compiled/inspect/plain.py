"""A capture as plain data for JSON, with every key documented; all but the FX modules themselves."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .facts import dtype_name
from .records import CapturedGraph, Collective

if TYPE_CHECKING:
    from .report import Capture


def plain(capture: Capture) -> dict[str, Any]:
    """Return dicts, lists, strings and numbers.

    Returns:
        - ``model``, ``parameters``, ``world``, ``torch_version``, ``graph_breaks``: as in :class:`Capture`.
        - ``peak_unsharded_bytes``: the largest of all graphs.
        - ``cluster``, ``schedule``: the fields of :class:`Cluster` and :class:`SchedulePolicy`.
        - ``graphs``: a list, each as in :func:`plain_graph`.
    """
    return {
        "model": capture.model,
        "parameters": capture.parameters,
        "world": capture.world,
        "torch_version": capture.torch_version,
        "cluster": asdict(capture.cluster),
        "schedule": asdict(capture.schedule),
        "graph_breaks": list(capture.graph_breaks),
        "peak_unsharded_bytes": capture.peak_unsharded_bytes,
        "graphs": [plain_graph(graph) for graph in capture.graphs],
    }


def plain_graph(graph: CapturedGraph) -> dict[str, Any]:
    """Return one graph.

    Returns:
        - ``kind``, ``peak_unsharded_bytes``, ``bound_bytes``, ``kept_bytes``, ``code``, ``compute_us``,
          ``communication_us``, ``exposed_us``, ``total_us``: as in :class:`CapturedGraph`.
        - ``collectives``: a list, each with the fields of :class:`Collective`; ``dtype`` as ``"float32"``.
        - ``compute``, ``memory``: lists with the fields of :class:`ComputeSpan` and :class:`MemoryStep`.
        - ``before``, ``after``: the graph as text, before and after the passes.
    """
    return {
        "kind": graph.kind,
        "compute_us": graph.compute_us,
        "communication_us": graph.communication_us,
        "exposed_us": graph.exposed_us,
        "total_us": graph.total_us,
        "peak_unsharded_bytes": graph.peak_unsharded_bytes,
        "bound_bytes": graph.bound_bytes,
        "kept_bytes": graph.kept_bytes,
        "collectives": [plain_collective(collective) for collective in graph.collectives],
        "compute": [asdict(span) for span in graph.compute],
        "memory": [asdict(step) for step in graph.memory],
        "before": str(graph.before.graph),
        "after": str(graph.module.graph),
        "code": graph.code,
    }


def plain_collective(collective: Collective) -> dict[str, Any]:
    """Return the fields of a collective, ``dtype`` as a name."""
    return {**asdict(collective), "params": list(collective.params), "dtype": dtype_name(collective.dtype)}
