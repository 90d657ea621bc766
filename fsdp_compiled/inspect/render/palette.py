"""The colours of HTML page and PNG, for light and for dark surroundings, and what is painted in each."""

from __future__ import annotations

_COLOURS = {
    "paper": ("#ffffff", "#14171c"),
    "panel": ("#f6f7f9", "#1c2027"),
    "ink": ("#1b212b", "#e4e7ec"),
    "muted": ("#5a6472", "#9aa4b2"),
    "rule": ("#dde1e7", "#2f3540"),
    "compute": ("#a3acb9", "#5c6675"),
    "copy": ("#d3d8df", "#3b4350"),
    "all-gather": ("#2f6fb3", "#5f9fe4"),
    "reduce-scatter": ("#7b51b3", "#ac8be2"),
    "all-reduce": ("#1c8577", "#43b8a6"),
    "exposed": ("#d9480f", "#ff7b47"),
    "memory": ("#2f6fb3", "#5f9fe4"),
    "on-bar": ("#ffffff", "#10131a"),
}
LIGHT, DARK = ({name: colours[index] for name, colours in _COLOURS.items()} for index in (0, 1))

LEGEND = ("compute", "copy", "all-gather", "reduce-scatter", "all-reduce", "exposed", "stall")  # kinds of bars

_OTHER = {"stall": "exposed", "curve": "memory", "bound": "ink", "note": "ink", "grid": "rule", "caption": "muted"}
COLOUR_OF = {kind: kind for kind in (*LEGEND, "memory", "on-bar")} | _OTHER  # of each kind of shape
