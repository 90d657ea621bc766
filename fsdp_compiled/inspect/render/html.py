"""A capture as one HTML page that needs nothing else: summary, timelines, tables and the text of the graphs.

``page.html`` has a policy that lets it load nothing, and the hatch that drawings refer to; ``page.css`` styles the
kinds of shapes, which are classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from importlib.resources import files

from torch import fx

from ..records import CapturedGraph, CapturedModel, Collective
from . import facts
from .drawing import COLOUR_OF, COLOURS, Box, Line, Shape, Text, draw

NAMES = 30  # characters of a table cell's names; they unfold
WIDEST = 8000  # pixels of a timeline


def html(capture: CapturedModel) -> str:
    """Return the page's source."""
    graphs = enumerate(facts.titled(capture.graphs))
    sections = [line for number, (title, graph) in graphs for line in _section(f"g{number}", title, graph)]
    return _resource("page.html").format(
        title=escape(f"{capture.model}: collectives"),
        style="\n".join([*_colours(), _resource("page.css").rstrip()]),
        body="\n".join([*_head(capture), *sections]),
        script=_resource("page.js").rstrip(),
    )


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _colours() -> Iterator[str]:
    """Yield CSS: colours for both surroundings, and for each kind of shape the one that it is painted in."""
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in COLOURS.items()) for i in (0, 1))
    yield f":root {{ {light} }}"
    yield f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    yield from (f"svg .{kind} {{ --paint: var(--{colour}); }}" for kind, colour in COLOUR_OF.items())


# ---- summary ----


def _head(capture: CapturedModel) -> Iterator[str]:
    yield f"<header><h1>{escape(capture.model)}</h1><p class='about'>{escape(facts.about(capture))}</p></header>"
    yield "<section><h2>Summary</h2>"
    yield _summary(capture.graphs)
    yield f"<h3>Schedule</h3>{_facts(facts.schedule(capture.schedule))}"
    yield f"<h3>Graph breaks: {len(capture.graph_breaks) or 'none'}</h3>"
    if capture.graph_breaks:
        yield _list(capture.graph_breaks, "breaks")
    yield "</section>"


def _summary(graphs: tuple[CapturedGraph, ...]) -> str:
    """Return a table with a line for each graph."""
    if not graphs:
        return "<p>No graph was compiled.</p>"
    labels = "".join(_tag("th", label, "right") for label in facts.graph_facts(graphs[0]))
    lines = []
    for number, (title, graph) in enumerate(facts.titled(graphs)):
        cells = "".join(_tag("td", escape(value), "right") for value in facts.graph_facts(graph).values())
        lines.append(f"<tr><td><a href='#g{number}'>{escape(title)}</a></td>{cells}</tr>")
    return _table(f"<th>graph</th>{labels}", lines)


# ---- one graph ----


def _section(key: str, title: str, graph: CapturedGraph) -> Iterator[str]:
    yield f"<section id='{key}'><h2>{escape(title)}</h2>"
    yield _facts(facts.graph_facts(graph))
    yield f"<div class='scroll'>{_svg(graph, f'Timeline of the {title} graph')}</div>"
    if graph.collectives:
        labels = facts.collective_facts(0, graph.collectives[0])
        titles = "".join(_tag("th", label, "" if label in facts.LEFT else "right") for label in labels)
        lines = (_line(key, number, collective) for number, collective in enumerate(graph.collectives))
        yield f"<h3>Collectives</h3>{_table(titles + '<th>verdict</th><th>params</th>', lines)}"
    if reasons := facts.verdicts(graph):
        yield _list(reasons, "reasons")
    marked = {n for c in graph.collectives for n in (c.launch, c.wait, c.first_use)}
    for summary, content in (
        ("Graph before the passes", _listing(graph.before.graph, {})),
        ("Graph after the passes", _listing(graph.module.graph, {n: f"{key}-n{n}" for n in marked})),
        ("Code that Inductor generated", escape(graph.code)),
    ):
        yield f"<details class='text'><summary>{summary}</summary><pre>{content}</pre></details>"
    yield "</section>"


def _svg(graph: CapturedGraph, label: str) -> str:
    """Return a drawing; ``label`` says what it shows to those who cannot see it."""
    width, height, shapes = draw(graph, WIDEST)
    head = f'<svg class="timeline" role="img" aria-label="{escape(label)}" {_sized(width, height)}>'
    return "\n".join([head, *map(_element, shapes), "</svg>"])


def _element(shape: Shape) -> str:
    match shape:
        case Box(kind, x, y, width, height, tip):
            explained = f' data-tip="{escape(tip)}"' if tip else ""
            return f'<rect class="{kind}" x="{_pixels(x)}" y="{_pixels(y)}" {_sized(width, height)}{explained}/>'
        case Text(kind, x, y, text, anchor):
            return f'<text class="{kind} {anchor}" x="{_pixels(x)}" y="{_pixels(y)}">{escape(text)}</text>'
        case Line(kind, points):
            places = " ".join(f"{_pixels(x)},{_pixels(y)}" for x, y in points)
            return f'<polyline class="{kind}" points="{places}"/>'


def _sized(width: float, height: float) -> str:
    return f'width="{_pixels(width)}" height="{_pixels(height)}"'


def _pixels(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _line(key: str, number: int, collective: Collective) -> str:
    """Return a line of the table of collectives; positions lead into the graph's text."""
    cells = []
    for label, text in facts.collective_facts(number, collective).items():
        link = f"<a href='#{key}-n{text}'>{text}</a>" if label in ("launch", "wait", "use") else escape(text)
        late = " late" if label == "exposed" and facts.is_exposed(collective) else ""
        cells.append(_tag("td", link, "" if label in facts.LEFT else f"right{late}"))
    cells.append(_tag("td", escape(collective.verdict.removeprefix("exposed: ")), "wide"))
    names = escape(facts.params(collective.params, NAMES))
    if len(collective.params) > 1 or "…" in names:
        names = f"<details><summary>{names}</summary>{_list(collective.params)}</details>"
    return f"<tr id='{key}-c{number}'>{''.join(cells)}{_tag('td', names, 'wide params')}</tr>"


def _listing(graph: fx.Graph, ids: Mapping[int, str]) -> str:
    """Return a line for each node with its position; those in ``ids`` can be linked to."""
    lines = enumerate(escape(f"{position:>5}  {node.format_node()}") for position, node in enumerate(graph.nodes))
    return "\n".join(f"<b id='{ids[position]}'>{line}</b>" if position in ids else line for position, line in lines)


# ---- elements ----


def _facts(values: Mapping[str, str]) -> str:
    cells = (f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in values.items())
    return _tag("dl", "".join(cells), "facts")


def _table(head: str, lines: Iterable[str]) -> str:
    body = "\n".join(lines)
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>"


def _list(texts: Iterable[str], kind: str = "") -> str:
    return _tag("ul", "".join(_tag("li", escape(text)) for text in texts), kind)


def _tag(name: str, content: str, kind: str = "") -> str:
    return f"<{name} class='{kind}'>{content}</{name}>" if kind else f"<{name}>{content}</{name}>"
