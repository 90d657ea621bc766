"""Puts each schedule where ``TORCH_TRACE`` writes, for tlparse: its records as JSON, a table, and a link to its page.

The page is a file below torch's log, since tlparse shows artifacts as text. Called by the passes' pipeline through
:func:`fsdp_compiled.passes.log.observe`, for every graph that is scheduled while torch writes a trace.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx

from ..passes.graph import nodes
from ..passes.log import trace_artifact
from ..passes.schedule_policy import SchedulePolicy
from .reading import Scheduled, captured_graph
from .records import GraphKind
from .render.data import as_json
from .report import Capture

_TEXTS = ("module", "before", "code")  # fields of a graph that torch's own artifacts show


def write(graph: fx.Graph, policy: SchedulePolicy, kind: GraphKind, folder: Path, compile_id: str) -> None:
    """Write what the passes have made of a graph, which is left alone; ``folder`` is where torch writes its trace."""
    capture = _captured(graph, policy, kind)
    (found,) = capture.graphs
    name = f"fsdp_compiled_{kind}"
    data = {field.name: getattr(found, field.name) for field in fields(found) if field.name not in _TEXTS}
    data = {"model": capture.model, "world": capture.world, "schedule": policy, **data}
    trace_artifact("artifact", as_json(data), name=name, encoding="json")
    trace_artifact("artifact", str(capture), name=name, encoding="string")
    rank = dist.get_rank() if dist.is_initialized() else 0
    pages = folder.resolve() / "fsdp_compiled"  # a folder of its own: tlparse takes any file for a log
    try:
        pages.mkdir(parents=True, exist_ok=True)
        page = capture.save(pages / f"{kind}_rank_{rank}_{compile_id.replace('/', '_')}.html")
    except OSError as error:
        logging.getLogger("fsdp_compiled").warning("%s: the page of a schedule was not written: %s", pages, error)
        return
    trace_artifact("link", name=f"{name}.html", url=page.as_uri())


def _captured(graph: fx.Graph, policy: SchedulePolicy, kind: GraphKind) -> Capture:
    read = Scheduled(graph, policy)
    found = captured_graph(read, kind, fx.GraphModule(graph.owning_module or {}, copy.deepcopy(graph)))
    params = (
        {request.param.name: request.param for bucket in read.plan.buckets for request in bucket} if read.plan else {}
    )
    return Capture(
        model=", ".join(dict.fromkeys(param.unit.partition(".")[0] for param in params.values())),
        parameters=sum(param.layout(1).numel for param in params.values()),
        world=max((collective.world for collective in found.collectives), default=1),
        torch_version=torch.__version__,
        cluster=nodes.cluster_of(graph, policy.cluster),
        schedule=policy,
        graph_breaks=(),
        graphs=(found,),
    )
