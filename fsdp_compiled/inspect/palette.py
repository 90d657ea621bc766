"""The colours of page and picture: each named for what it shows, for light and for dark surroundings."""

from __future__ import annotations

LIGHT = {
    "paper": "#ffffff",
    "panel": "#f6f7f9",
    "ink": "#1b212b",
    "muted": "#5a6472",
    "rule": "#dde1e7",
    "compute": "#a3acb9",
    "copy": "#d3d8df",
    "all-gather": "#2f6fb3",
    "reduce-scatter": "#7b51b3",
    "all-reduce": "#1c8577",
    "exposed": "#d9480f",
    "memory": "#2f6fb3",
    "on-bar": "#ffffff",
}

DARK = {
    "paper": "#14171c",
    "panel": "#1c2027",
    "ink": "#e4e7ec",
    "muted": "#9aa4b2",
    "rule": "#2f3540",
    "compute": "#5c6675",
    "copy": "#3b4350",
    "all-gather": "#5f9fe4",
    "reduce-scatter": "#ac8be2",
    "all-reduce": "#43b8a6",
    "exposed": "#ff7b47",
    "memory": "#5f9fe4",
    "on-bar": "#10131a",
}
