"""What users get: captures that print tables and are saved as files, and what ``TORCH_TRACE`` gets."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx

from ..expect import expect
from ..passes.graph import nodes
from ..passes.log import trace_artifact
from ..passes.schedule_policy import SchedulePolicy
from ..sharding.dtensor import process_group
from ..sharding.mesh import siblings_of
from .comparison import Comparison, compare
from .reading import Scheduled, captured_graph
from .records import CapturedModel, GraphKind
from .render import figures
from .render.data import as_json, trace
from .render.html import html
from .render.png import png
from .render.text import capture_text

WRITERS: dict[str, Callable[[CapturedModel], str | bytes]] = {
    ".trace.json": lambda capture: as_json(trace(capture)),  # before .json, which it ends with
    ".json": as_json,
    ".html": html,
    ".png": png,
}

_SHOWN_BY_TORCH = ("module", "before", "code")  # fields of a graph that torch's own artifacts show


class Capture(CapturedModel):
    """The compiled graphs of a model, and the estimated cost of their collectives. ``print`` shows a table."""

    __str__ = capture_text

    @property
    def headline(self) -> str:
        """How long the step takes by estimate, for how much of it compute waits, and what to try against that."""
        return figures.headline(self)

    def compare(self, trace: str | Path) -> Comparison:
        """Hold the estimates against a run: the file of ``torch.profiler``'s ``export_chrome_trace``, of one rank.

        The run compiles this model with the schedule of the capture, on batches of its size, and the trace holds
        complete steps. ``record_shapes=True`` tells matrix products of different shapes apart, and on the CPU
        ``TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE=1`` shows generated kernels, which else count as the host's time.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no trace, or not one of the collectives that were captured.
        """
        return compare(self, trace)

    def save(
        self, path: str | Path, *, beside: CapturedModel | None = None, measured: Comparison | None = None
    ) -> Path:
        """Write the capture in the format that the path's suffix names. Equal captures make equal files.

        ``.html`` is one page that needs nothing else, ``.json`` the records as data (see :func:`as_json`),
        ``.trace.json`` a trace for Perfetto or chrome://tracing, and ``.png`` the timelines.

        A file that exists is replaced, or left as it was if anything fails. Returns the path.

        Args:
            beside: another capture, which the page compares with this one, timelines on one time axis.
            measured: what :meth:`compare` returned, which the page shows.

        Raises:
            ValueError: the suffix is none of these, or not ``.html`` where something is compared.
            ImportError: matplotlib is missing and the suffix is ``.png``.
            OSError: the file cannot be written.
        """
        expect("beside", beside, CapturedModel | None, "another capture")
        expect("measured", measured, Comparison | None, "what compare returned")
        path, expected = Path(path), ", ".join(WRITERS)
        writer = next((writer for suffix, writer in WRITERS.items() if path.name.endswith(suffix)), None)
        if writer is None:
            raise ValueError(f"{path}: a capture is saved as {expected}, not as {path.suffix!r}; rename the file")
        if (beside is not None or measured is not None) and writer is not html:
            raise ValueError(f"{path}: captures and runs are compared in an .html file, not in {path.suffix!r}")
        content = writer(self) if writer is not html else html(self, beside, measured)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_bytes(content.encode(errors="replace") if isinstance(content, str) else content)
            return partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def write_artifacts(graph: fx.Graph, policy: SchedulePolicy, kind: GraphKind, folder: Path, compile_id: str) -> None:
    """Write what the passes have made of a graph, which is left alone, for tlparse: records as JSON, a table, a link.

    The link leads to a page below ``folder``, where torch writes its trace, since tlparse shows artifacts as text.
    """
    read = Scheduled(graph, policy)
    found = captured_graph(read, kind, fx.GraphModule(graph.owning_module or {}, copy.deepcopy(graph)))
    params = {request.param.name: request.param for request in read.requests}
    groups = {collective.group for collective in found.collectives}
    ranks = {rank for group in groups for sibling in siblings_of(process_group(group)) for rank in sibling}
    capture = Capture(
        model=", ".join(dict.fromkeys(param.unit.partition(".")[0] for param in params.values())),
        parameters=sum(param.layout(1).numel for param in params.values()),
        world=len(ranks) or 1,
        torch_version=torch.__version__,
        cluster=policy.cluster_for(nodes.device_of(graph)),
        schedule=policy,
        graph_breaks=(),
        graphs=(found,),
    )
    name = f"fsdp_compiled_{kind}"
    data = {"model": capture.model, "world": capture.world, "schedule": policy}
    data |= {field: value for field, value in vars(found).items() if field not in _SHOWN_BY_TORCH}
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
