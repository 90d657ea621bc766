"""A capture as one HTML page that needs nothing else: summary, timelines, tables and the text of the graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from torch import fx

from . import facts
from .drawing import drawing
from .lanes import Lanes, is_exposed, lay_out
from .names import abbreviate
from .palette import DARK, LIGHT
from .records import CapturedGraph, Collective

if TYPE_CHECKING:
    from .report import Capture

NAMES = 30  # characters of a table cell's names; they unfold

# The hatch is defined once; drawings refer to it. A policy of no sources keeps the promise that nothing is loaded.
DOCUMENT = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" \
content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<svg width="0" height="0" style="position: absolute" aria-hidden="true"><defs>\
<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse">\
<rect width="6" height="6"/><path d="M-1 7L7 -1M-1 1L1 -1M5 7L7 5"/></pattern></defs></svg>
{body}
<div id="tip" role="tooltip" hidden></div>
<script>
{script}
</script>
</body>
</html>
"""


def page(capture: Capture) -> str:
    """Return the page's source."""
    sections = [
        line
        for number, (title, graph) in enumerate(zip(facts.titles(capture.graphs), capture.graphs, strict=True))
        for line in _section(f"g{number}", title, graph)
    ]
    dark = f"@media (prefers-color-scheme: dark) {{ {_colours(DARK)} }}"
    return DOCUMENT.format(
        title=escape(f"{capture.model}: collectives"),
        style="\n".join([_colours(LIGHT), dark, _resource("page.css")]),
        body="\n".join([*_head(capture), *sections]),
        script=_resource("page.js"),
    )


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8").rstrip()


def _colours(palette: Mapping[str, str]) -> str:
    return f":root {{ {' '.join(f'--{name}: {colour};' for name, colour in palette.items())} }}"


def _head(capture: Capture) -> Iterator[str]:
    yield f"<header><h1>{escape(capture.model)}</h1><p class='about'>{escape(facts.about(capture))}</p></header>"
    yield "<section><h2>Summary</h2>"
    yield from _summary(capture)
    yield f"<h3>Schedule</h3>{_facts(facts.schedule(capture.schedule))}"
    yield f"<h3>{escape(facts.graph_breaks(capture).capitalize())}</h3>"
    if capture.graph_breaks:
        yield f"<ul class='breaks'>{_items(capture.graph_breaks)}</ul>"
    yield "</section>"


def _summary(capture: Capture) -> Iterator[str]:
    """Yield a table with a row for each graph."""
    if not capture.graphs:
        yield "<p>No graph was compiled.</p>"
        return
    rows = [facts.graph_facts(graph) for graph in capture.graphs]
    yield "<div class='scroll'><table><thead><tr><th>graph</th>"
    yield "".join(_tag("th", escape(label), "right") for label, _ in rows[0])
    yield "</tr></thead><tbody>"
    for number, (title, row) in enumerate(zip(facts.titles(capture.graphs), rows, strict=True)):
        figures = "".join(_tag("td", escape(value), "right") for _, value in row)
        yield f"<tr><td><a href='#g{number}'>{escape(title)}</a></td>{figures}</tr>"
    yield "</tbody></table></div>"


def _section(key: str, title: str, graph: CapturedGraph) -> Iterator[str]:
    yield f"<section id='{key}'><h2>{escape(title)}</h2>"
    yield _facts(facts.graph_facts(graph))
    lanes = lay_out(graph)
    yield f"<div class='scroll'>{drawing(title, graph, lanes)}</div>"
    yield _legend(graph, lanes)
    if graph.collectives:
        yield from _collectives(key, graph)
    marked = {n for c in graph.collectives for n in (c.launch, c.wait, c.first_use)}
    yield _details("Graph before the passes", _listing(graph.before.graph, {}))
    yield _details("Graph after the passes", _listing(graph.module.graph, {n: f"{key}-n{n}" for n in marked}))
    yield _details("Code that Inductor generated", escape(graph.code))
    yield "</section>"


def _legend(graph: CapturedGraph, lanes: Lanes) -> str:
    kinds = sorted({facts.words(collective.kind) for collective in graph.collectives})
    copies, stalls = ["copy"] if lanes.copies else [], ["exposed", "stall"] if lanes.stalls else []
    marks = ["compute", *copies, *kinds, *stalls]
    boxes = (f"<svg aria-hidden='true'><rect class='{mark}' width='14' height='12'/></svg>{mark}" for mark in marks)
    return f"<ul class='legend'>{''.join(_tag('li', box) for box in boxes)}</ul>"


def _collectives(key: str, graph: CapturedGraph) -> Iterator[str]:
    """Yield a table with a row for each collective; positions lead into the graph's text."""
    yield "<h3>Collectives</h3><div class='scroll'><table><thead><tr>"
    yield "".join(_tag("th", column.title, "right" if column.is_right else "") for column in facts.COLUMNS)
    yield "<th>verdict</th><th>params</th></tr></thead><tbody>"
    for number, collective in enumerate(graph.collectives):
        yield f"<tr id='{key}-c{number}'>{''.join(_cells(key, number, collective))}</tr>"
    yield "</tbody></table></div>"
    reasons = [str(verdict) for verdict in facts.verdicts(graph)]
    if reasons:
        yield f"<ul class='reasons'>{_items(reasons)}</ul>"


def _cells(key: str, number: int, collective: Collective) -> Iterator[str]:
    positions = {"launch": collective.launch, "wait": collective.wait, "use": collective.first_use}
    for column in facts.COLUMNS:
        text = escape(column.text(number, collective))
        if column.title in positions:
            text = f"<a href='#{key}-n{positions[column.title]}'>{text}</a>"
        is_late = column.title == "exposed" and is_exposed(collective)
        yield _tag("td", text, "right late" if is_late else "right" if column.is_right else "")
    yield _tag("td", escape(collective.verdict.removeprefix("exposed: ")), "wide")
    yield _tag("td", _params(collective.params), "wide params")


def _params(params: tuple[str, ...]) -> str:
    short = escape(f"{len(params)}: {abbreviate(params, NAMES)}")
    if len(params) < 2 and "…" not in short:
        return short
    return f"<details><summary>{short}</summary><ul>{_items(params)}</ul></details>"


def _listing(graph: fx.Graph, ids: Mapping[int, str]) -> str:
    """Return a line for each node with its position; those in ``ids`` can be linked to."""
    lines = []
    for position, node in enumerate(graph.nodes):
        line = escape(f"{position:>5}  {node.format_node()}")
        lines.append(f"<b id='{ids[position]}'>{line}</b>" if position in ids else line)
    return "\n".join(lines)


def _details(summary: str, content: str) -> str:
    return f"<details class='text'><summary>{escape(summary)}</summary><pre>{content}</pre></details>"


def _facts(pairs: Iterable[facts.Fact]) -> str:
    cells = (f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in pairs)
    return f"<dl class='facts'>{''.join(cells)}</dl>"


def _items(texts: Iterable[str]) -> str:
    return "".join(_tag("li", escape(text)) for text in texts)


def _tag(name: str, content: str, kind: str = "") -> str:
    return f"<{name} class='{kind}'>{content}</{name}>" if kind else f"<{name}>{content}</{name}>"
