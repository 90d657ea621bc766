"""Every form that a capture is reported in, on captures made by hand."""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import fields, replace
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise

import expecttest
import pytest
import torch
from markupsafe import escape
from torch import fx

from fsdp_compiled.inspect.records import CapturedGraph, Collective, ComputeSpan, MemoryStep
from fsdp_compiled.inspect.render import figures
from fsdp_compiled.inspect.render.data import as_json, trace
from fsdp_compiled.inspect.render.drawing import lay_out
from fsdp_compiled.inspect.report import Capture
from fsdp_compiled.passes.cost import CLUSTERS
from fsdp_compiled.passes.schedule_policy import SchedulePolicy

MIB = 2**20
SUFFIXES = (".html", ".json", ".png", ".trace.json")
NASTY = ('m<b>.&"w"', "x" * 3000 + ".</script>", "weight.'$_^{\\", "名.{}")


class Made(str):
    """A verdict that no schedule gets."""

    trial = "nothing"


def _collective(start_us, end_us, exposed_us=0.0, **fields):
    made = Collective(
        kind="all_gather",
        params=("layers.0.wq.weight", "layers.0.wk.weight", "layers.0.wo.weight"),
        dtype=torch.bfloat16,
        bytes=24 * MIB,
        group="0",
        world=4,
        launch=0,
        wait=2,
        first_use=3,
        estimate_us=end_us - start_us,
        exposed_us=exposed_us,
        start_us=start_us,
        end_us=end_us,
        copies="compute",
        verdict="exposed: nothing runs before it" if exposed_us else "hidden",
    )
    made = replace(made, **fields)
    return replace(made, verdict=Made(made.verdict))


def _module(count):
    def forward(x, y):
        for _ in range(count):
            x = torch.relu(x + y)
        return x

    return fx.symbolic_trace(forward)


def _graph(collectives=(), compute=(), memory=(), kind="forward"):
    return CapturedGraph(
        kind=kind,
        module=_module(4),
        before=_module(1),
        collectives=tuple(collectives),
        compute=tuple(compute),
        memory=tuple(memory),
        peak_unsharded_bytes=max([step.bytes for step in memory], default=0),
        bound_bytes=64 * MIB,
        kept_bytes=0,
        code="if a < b & c:\n    pass",
    )


def _capture(*graphs, **fields):
    made = Capture(
        model="Transformer",
        parameters=124_439_808,
        world=4,
        torch_version="2.13.0",
        cluster=CLUSTERS["H100"],
        schedule=SchedulePolicy(in_flight_bytes=64 * MIB),
        graph_breaks=(),
        graphs=graphs,
    )
    return replace(made, **fields)


def _forward():
    """An all-gather that nothing hides, one that compute hides, and 20 µs in which the second is unpacked."""
    return _graph(
        [_collective(0, 500, 500), _collective(500, 1100, launch=3, wait=6, first_use=7, params=("head.weight",))],
        [ComputeSpan("add", 3, 500, 1300), ComputeSpan("add_1", 4, 1320, 12300)],
        [MemoryStep(0, 24 * MIB), MemoryStep(500, 48 * MIB), MemoryStep(1300, 24 * MIB), MemoryStep(12300, 0)],
    )


def _backward():
    """A reduce-scatter of which 100 µs remain when compute ends, and an all-reduce beside it on another link."""
    reduction = {"kind": "reduce_scatter", "dtype": torch.float32, "verdict": "exposed: the last one"}
    return _graph(
        [_collective(600, 1100, 100, **reduction), _collective(700, 900, kind="all_reduce", group="1")],
        [ComputeSpan("mm", 9, 0, 1000)],
        [MemoryStep(600, 24 * MIB)],
        kind="backward",
    )


def _many():
    """500 collectives, each half hidden."""
    return _graph(
        [_collective(30 * i, 30 * i + 20, 10, verdict="exposed: bound") for i in range(500)],
        [ComputeSpan(f"mm_{i}", 1, 30 * i + 20, 30 * i + 40) for i in range(500)],
        [MemoryStep(30 * i, i % 3 * MIB) for i in range(500)],
    )


CORNERS = {
    "usual": _capture(_forward(), _backward()),
    "no graphs": _capture(),
    "nothing in a graph": _capture(_graph()),
    "no collectives": _capture(_graph(compute=[ComputeSpan("mm", 1, 0, 5)])),
    "no compute": _capture(_graph([_collective(0, 9, 9)])),
    "no time": _capture(_graph([_collective(0, 0)], memory=[MemoryStep(0, MIB), MemoryStep(0, 0)])),
    "no parameters": _capture(_graph([_collective(0, 9, params=())])),
    "500 collectives": _capture(_many()),
    "nasty names": _capture(
        _graph([_collective(0, 9, params=NASTY, verdict="<i>")], [ComputeSpan("<mm>", 1, 0, 5)]),
        model="<M>",
        graph_breaks=('print(<"&">)\nin a line',),
    ),
}
corners = pytest.mark.parametrize("capture", CORNERS.values(), ids=CORNERS.keys())


# ---- files ----


@corners
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_equal_captures_make_equal_files(capture, suffix, tmp_path):
    path = tmp_path / f"report{suffix}"
    assert capture.save(path) == path
    first = path.read_bytes()
    assert first
    assert capture.save(str(path)) == path
    assert path.read_bytes() == first
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_unknown_suffix(tmp_path):
    with pytest.raises(ValueError) as error:
        _capture().save(tmp_path / "report.txt")
    assert str(error.value) == (
        f"{tmp_path}/report.txt: a capture is saved as .trace.json, .json, .html, .png, not as '.txt'; "
        "rename the file"
    )


def test_without_matplotlib_the_old_file_stays(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = tmp_path / "report.png"
    path.write_text("old")
    with pytest.raises(ImportError) as error:
        _capture().save(path)
    assert str(error.value) == (
        "Capture.save: a .png is drawn by matplotlib, which is not installed; "
        "run pip install 'fsdp-compiled[inspect]'"
    )
    assert path.read_text() == "old"


def test_a_failed_write_leaves_nothing(tmp_path):
    (tmp_path / "report.json").mkdir()
    with pytest.raises(OSError):
        _capture().save(tmp_path / "report.json")
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


# ---- table ----


class TableText(expecttest.TestCase):
    maxDiff = None

    def test_table(self):
        capture = _capture(_forward(), _backward(), graph_breaks=("call to print\n  in forward",))
        self.assertExpectedInline(
            str(capture),
            """\
Transformer: 124,439,808 parameters on 4 ranks, torch 2.13.0, cluster H100
schedule: bucket auto, prefetch auto, in flight 64 MiB, keep unsharded auto
graph breaks: 1
  - call to print in forward

forward: collectives 2, bytes 48 MiB, compute 11.8 ms, communication 1.1 ms, exposed 500 µs, peak unsharded 48 MiB,
  bound 64 MiB, kept unsharded 0 B, copies 2 on the compute stream
  #  kind        dtype       size  ranks  launch  wait  use  estimate  exposed  params
  0  all-gather  bfloat16  24 MiB      4       0     2    3    500 µs   500 µs  3: layers.0.{wq,wk,wo}.weight
  1  all-gather  bfloat16  24 MiB      4       3     6    7    600 µs   hidden  1: head.weight
  500 µs exposed: nothing runs before it (#0)

backward: collectives 2, bytes 48 MiB, compute 1 ms, communication 700 µs, exposed 100 µs, peak unsharded 24 MiB,
  bound 64 MiB, kept unsharded 0 B, copies 2 on the compute stream
  #  kind            dtype       size  ranks  launch  wait  use  estimate  exposed  params
  0  reduce-scatter  float32   24 MiB      4       0     2    3    500 µs   100 µs  3: layers.0.{wq,wk,wo}.weight
  1  all-reduce      bfloat16  24 MiB      4       0     2    3    200 µs   hidden  3: layers.0.{wq,wk,wo}.weight
  100 µs exposed: the last one (#0)""",
        )


@corners
def test_lines_are_short(capture):
    assert max(map(len, str(capture).splitlines())) <= 118


def test_several_graphs_of_a_kind_are_numbered():
    text = str(_capture(_graph(), _graph(kind="backward"), _graph()))
    assert [line.split(":")[0] for line in text.splitlines() if ": collectives" in line] == [
        "forward 1",
        "backward",
        "forward 2",
    ]


# ---- JSON ----


@corners
def test_json_holds_everything(capture, tmp_path):
    data = json.loads(capture.save(tmp_path / "report.json").read_text(encoding="utf-8"))
    more = ["headline", "peak_bytes", "peak_unsharded_bytes", "step_parts_us", "step_us"]
    assert list(data) == [*(field.name for field in fields(capture)), *more]
    assert data["peak_bytes"] == capture.peak_bytes
    assert (data["headline"], data["peak_unsharded_bytes"]) == (capture.headline, capture.peak_unsharded_bytes)
    assert [len(graph["collectives"]) for graph in data["graphs"]] == [len(g.collectives) for g in capture.graphs]


def test_json_of_a_graph():
    (graph,) = json.loads(as_json(_capture(_forward())))["graphs"]
    assert graph["after"] == str(_module(4).graph)
    assert graph["before"] == str(_module(1).graph)
    assert graph["exposed_us"] == 500
    assert graph["memory"][1] == {"start_us": 500, "bytes": 48 * MIB}
    assert graph["collectives"][1]["dtype"] == "bfloat16"
    assert graph["collectives"][1]["params"] == ["head.weight"]


# ---- trace ----


@corners
def test_trace_events_are_valid(capture):
    events = trace(capture)["traceEvents"]
    assert {event["ph"] for event in events} <= {"X", "C", "M"}
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in map(sorted, lanes.values()):
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(spans))


def test_trace_names_threads_and_waits():
    events = trace(_capture(_forward(), _backward()))["traceEvents"]
    threads = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert threads == [
        (1, "compute"),
        (1, "communication"),
        (2, "compute"),
        (2, "communication 1"),
        (2, "communication 2"),
    ]
    stalls = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e.get("cat") == "stall"]
    assert stalls == [(1, "waits for #0", 0, 500), (2, "waits for #0", 1000, 100)]
    assert [e["args"] for e in events if e["ph"] == "C" and e["pid"] == 2] == [{"bytes": 24 * MIB}]


# ---- timeline ----


def _marks(graph, lane, *kinds):
    return [(mark.name, mark.start_us, mark.end_us) for mark in lay_out(graph)[lane] if mark.kind in kinds]


def test_gaps_in_compute_are_stalls_or_copies():
    assert _marks(_forward(), "compute", "stall") == [("waits for #0", 0, 500)]
    assert _marks(_forward(), "compute", "copy") == [("packs or unpacks", 1300, 1320)]


def test_an_exposed_part_is_at_the_end():
    assert _marks(_backward(), "communication 1", "exposed") == [("#0 reduce-scatter", 1000, 1100)]
    assert _marks(_backward(), "communication 2", "all-reduce", "exposed") == [("#1 all-reduce", 700, 900)]


def test_a_wait_that_begins_before_its_transfer():
    graph = _graph([_collective(0, 10), _collective(10, 20, 15)], [ComputeSpan("mm", 1, 0, 5)])
    assert _marks(graph, "compute", "stall") == [("waits for #1", 5, 20)]
    assert _marks(graph, "communication", "exposed") == [("#1 all-gather", 10, 20)]


def test_the_compute_lane_and_links_do_not_overlap():
    for lane, marks in lay_out(_many()).items():
        spans = sorted((mark.start_us, mark.end_us) for mark in marks if mark.kind != "exposed")
        assert all(end <= start for (_, end), (start, _) in pairwise(spans)), lane


# ---- html ----


class _Page(HTMLParser):
    """Collects ids and references, and checks that tags close in order."""

    VOID = ("meta", "br")

    def __init__(self, source):
        super().__init__()
        self.open, self.ids, self.targets, self.tips, self.tags = [], [], [], [], set()
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        attributes = dict(attrs)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.targets += [attributes["href"]] if "href" in attributes else []
        self.tips += [attributes["data-tip"]] if "data-tip" in attributes else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def _page_of(capture, tmp_path):
    return capture.save(tmp_path / "report.html").read_text(encoding="utf-8")


@corners
def test_the_page_is_complete_and_needs_nothing_else(capture, tmp_path):
    source = _page_of(capture, tmp_path)
    for reference in ("http://", "https://", "src=", "@import", "<link"):
        assert reference not in source
    page = _Page(source)
    assert len(set(page.ids)) == len(page.ids)
    assert {target.removeprefix("#") for target in page.targets} <= set(page.ids)
    rows = {f"g{g}-c{c}" for g, graph in enumerate(capture.graphs) for c in range(len(graph.collectives))}
    assert rows <= set(page.ids)
    for graph in capture.graphs:
        for name in (name for collective in graph.collectives for name in collective.params):
            assert escape(name) in source


def test_the_page_escapes(tmp_path):
    source = _page_of(CORNERS["nasty names"], tmp_path)
    page = _Page(source)
    assert not page.tags & {"b>.&", "m", "mm", "i"}
    assert any('m<b>.&"w"' in tip for tip in page.tips)
    assert "if a &lt; b &amp; c:" in source
    assert 'print(<"&">)' in unescape(source)


def test_tips_tell_bytes_and_times(tmp_path):
    tips = _Page(_page_of(_capture(_forward()), tmp_path)).tips
    assert "stall: waits for #0 all-gather\n500 µs, from 0 µs to 500 µs\nexposed: nothing runs before it" in tips
    assert (
        "#1 all-gather: 24 MiB of bfloat16 over 4 ranks\n600 µs, from 500 µs to 1.1 ms\nhidden\nhead.weight" in tips
    )
    assert "48 MiB\n800 µs, from 500 µs to 1.3 ms" in tips


# ---- png ----


@corners
def test_png(capture, tmp_path):
    content = capture.save(tmp_path / "report.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert width == 1440
    assert height == 96 + 360 * len(capture.graphs)


# ---- figures and names ----


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0 B", 0),
        ("1023 B", 1023),
        ("1 KiB", 1024),
        ("1.5 MiB", 3 * 2**19),
        ("1 MiB", 2**20 - 1),
        ("24 MiB", 24 * MIB),
        ("1.46 GiB", 1500 * MIB),
        ("5000 TiB", 5000 * 2**40),
    ],
)
def test_sizes(text, count):
    assert figures.size(count) == text


@pytest.mark.parametrize(
    ("text", "time_us"),
    [("0 µs", 0.001), ("0.42 µs", 0.42), ("840 µs", 840.2), ("1 ms", 999.7), ("12.3 ms", 12345), ("7.57 s", 7.57e6)],
)
def test_durations(text, time_us):
    assert figures.duration(time_us) == text


def test_runs_of_indices():
    assert figures.indices([0, 3, 4, 7, 8, 9]) == "#0, #3, #4, #7-9"


@pytest.mark.parametrize(("end", "marks"), [(1, [0, 0.5, 1]), (2600, [0, 1000, 2000]), (0.03, [0, 0.01, 0.02, 0.03])])
def test_ticks(end, marks):
    assert figures.ticks(end, 3) == pytest.approx(marks)


LAYER = [f"layers.3.{name}.weight" for name in ("wq", "wk", "wv", "wo")]


@pytest.mark.parametrize(
    ("text", "names", "width"),
    [
        ("", [], 10),
        ("head.weight", ["head.weight"], 11),
        ("head.…ight", ["head.attention.weight"], 10),
        ("layers.3.{wq,wk,wv,wo}.weight", LAYER, 40),
        ("layers.3.{wq,…,wo}.weight", LAYER, 26),
        ("layers.3.*.weight", LAYER, 20),
        ("layers.…weight,…", LAYER, 16),
        ("{tok,head}.weight", ["tok.weight", "head.weight"], 20),
        ("a,a.b", ["a", "a.b"], 20),
        ("w,w,…,w", ["w"] * 500, 8),
    ],
)
def test_names(text, names, width):
    assert figures.abbreviate(names, width) == text
    assert len(text) <= width
