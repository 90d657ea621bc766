"""A capture as one HTML page that needs nothing else: summary, timelines, tables and the text of the graphs.

``page.html`` has a policy that lets it load nothing, and the hatch that drawings refer to; ``page.css`` styles the
kinds of shapes and the columns of tables, which are classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files

from torch import fx

from ..records import CapturedGraph, CapturedModel, Collective
from . import figures
from .drawing import COLOUR_OF, COLOURS, Box, Line, Shape, Text, draw

NAMES = 30  # characters of a table cell's names; they unfold
WIDEST = 8000  # pixels of a timeline


def html(capture: CapturedModel, beside: CapturedModel | None = None) -> str:
    """Return the page's source: of one capture, or of one and then another, with both compared above."""
    captures = [capture] if beside is None else [capture, beside]
    names, facts = figures.side_by_side(captures) if beside is not None else ([""], [])
    parts, headlines = list[str](), []
    if beside is not None:
        parts += _comparison(facts, dict(zip(names, captures, strict=True)))
    for number, (name, each) in enumerate(zip(names, captures, strict=True)):
        parts += _part(name, f"{number or ''}", each)
        whose = f"<b>{escape(name)}</b>: " if name else ""
        headlines.append(
            f"<p class='headline'>{whose}{escape(figures.headline(each)) or 'No graph was compiled.'}</p>"
        )
    return _resource("page.html").format(
        model=escape(capture.model),
        about=escape(figures.about(capture)),
        headlines="\n".join(headlines),
        style="\n".join([*_colours(), _resource("page.css").rstrip()]),
        script=_resource("page.js").rstrip(),
        parts="\n".join(parts),
    )


def _comparison(facts: Sequence[Mapping[str, str]], captures: Mapping[str, CapturedModel]) -> Iterator[str]:
    """Yield a table of both captures' figures, and each graph's timelines below each other on one time axis."""
    yield "<section><h2>Side by side</h2>"
    yield _table([{escape(title): escape(cell) for title, cell in each.items()} for each in facts])
    for graphs in zip(*(figures.titled(capture.graphs) for capture in captures.values()), strict=False):
        end_us = max(graph.total_us for _, graph in graphs)
        for name, (title, graph) in zip(captures, graphs, strict=True):
            yield f"<h3>{title}: {escape(name)}</h3>"
            yield _timeline(f"{title} graph, {name}", graph, end_us)
    yield "</section>"


def _part(name: str, prefix: str, capture: CapturedModel) -> Iterator[str]:
    """Yield all of one capture below its name; ``prefix`` tells its graphs from another's."""
    graphs = [(f"{prefix}g{n}", *each) for n, each in enumerate(figures.titled(capture.graphs))]
    links = (({"graph": f"<a href='#{key}'>{title}</a>"}, graph) for key, title, graph in graphs)
    yield f"<section><h2>{escape(name) or 'Summary'}</h2>"
    yield _table([link | figures.graph_facts(graph) for link, graph in links]) or "<p>No graph was compiled.</p>"
    yield f"<h3>Schedule</h3>{_facts(figures.schedule(capture.schedule))}"
    yield f"<h3>Graph breaks: {len(capture.graph_breaks) or 'none'}</h3>{_list(capture.graph_breaks)}"
    yield "</section>"
    for each in graphs:
        yield from _section(*each)


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _colours() -> Iterator[str]:
    """Yield CSS: colours for both surroundings, and for each kind of shape the one that it is painted in."""
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in COLOURS.items()) for i in (0, 1))
    yield f":root {{ color-scheme: light dark; {light} }}"
    yield f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    yield from (f"svg .{kind} {{ --paint: var(--{colour}); }}" for kind, colour in COLOUR_OF.items())


def _section(key: str, title: str, graph: CapturedGraph) -> Iterator[str]:
    yield f"<section id='{key}'><h2>{title}</h2>"
    yield _facts(figures.graph_facts(graph))
    yield _timeline(f"{title} graph", graph)
    yield f"<h3>Collectives: {len(graph.collectives) or 'none'}</h3>"
    yield _table([_cells(key, number, collective) for number, collective in enumerate(graph.collectives)])
    yield _list(figures.verdicts(graph))
    marked = {position for c in graph.collectives for position in (c.launch, c.wait, c.first_use)}
    if graph.before is not None:
        yield _details("Graph before the passes", _listing("", graph.before.graph, set()))
    names = f": {escape(', '.join(graph.passes))}" if graph.passes else ""
    yield _details(f"Graph after the passes{names}", _listing(key, graph.module.graph, marked))
    if graph.code:
        yield _details("Code that Inductor generated", escape(graph.code))
    for region in graph.regions:
        count = figures.counted(len(region.calls), "call")
        blocks = figures.abbreviate(region.calls)
        summary = f"Region {region.name}, {figures.duration(region.estimate_us)} a call, {count}: {blocks}"
        yield _details(escape(summary), _listing("", region.module.graph, set()))
    yield "</section>"


def _timeline(name: str, graph: CapturedGraph, until_us: float = 0.0) -> str:
    width, height, shapes = draw(graph, WIDEST, until_us)
    label = f'role="img" aria-label="Timeline of the {escape(name)}"'
    head = f'<div class="scroll"><svg class="timeline" {label} width="{width:g}" height="{height:g}">'
    return "\n".join([head, *map(_element, shapes), "</svg></div>"])


def _details(summary: str, content: str) -> str:
    return f"<details class='text'><summary>{summary}</summary><pre>{content}</pre></details>"


def _element(shape: Shape) -> str:
    match shape:
        case Box(kind, x, y, width, height, tip):
            more = f' data-tip="{escape(tip)}"' if tip else ""
            return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{more}/>'
        case Text(kind, x, y, text, anchor):
            return f'<text class="{kind} {anchor}" x="{x:g}" y="{y:g}">{escape(text)}</text>'
        case Line(kind, points):
            places = " ".join(f"{x:g},{y:g}" for x, y in points)
            return f'<polyline class="{kind}" points="{places}"/>'


def _cells(key: str, number: int, collective: Collective) -> dict[str, str]:
    """Return a line of the table of collectives; positions lead into the graph's text."""
    cells = figures.collective_facts(number, collective)
    cells["#"] = f"<span id='{key}-c{number}'>{number}</span>"
    for column in ("launch", "wait", "use"):
        cells[column] = f"<a href='#{key}-n{cells[column]}'>{cells[column]}</a>"
    if figures.is_exposed(collective):
        cells["exposed"] = f"<b>{cells['exposed']}</b>"
    names = escape(figures.params(collective.params, NAMES))
    if len(collective.params) > 1 or "…" in names:
        names = f"<details><summary>{names}</summary>{_list(collective.params)}</details>"
    return cells | {"verdict": escape(collective.verdict.removeprefix("exposed: ")), "params": names}


def _listing(key: str, graph: fx.Graph, marked: set[int]) -> str:
    """Return a line for each node with its position; those at ``marked`` positions can be linked to."""
    lines = enumerate(escape(f"{position:>5}  {node.format_node()}") for position, node in enumerate(graph.nodes))
    return "\n".join(f"<b id='{key}-n{n}'>{line}</b>" if n in marked else line for n, line in lines)


def _facts(values: Mapping[str, str]) -> str:
    cells = (f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in values.items())
    return f"<dl>{''.join(cells)}</dl>"


def _table(items: Sequence[Mapping[str, str]]) -> str:
    """Return a line of titles, which are the items' keys and the cells' classes, and a line for each item."""
    if not items:
        return ""
    titles = "".join(f"<th class='{title}'>{title}</th>" for title in items[0])
    lines = ("".join(f"<td class='{title}'>{cell}</td>" for title, cell in item.items()) for item in items)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<div class='scroll'><table><thead><tr>{titles}</tr></thead><tbody>\n{body}\n</tbody></table></div>"


def _list(texts: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"
