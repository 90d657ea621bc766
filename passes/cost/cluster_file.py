"""Clusters as files: what ``python -m fsdp_compiled calibrate`` writes, and ``SchedulePolicy(cluster=...)`` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from ...expect import unexpected
from .cluster import Cluster, Link, Measured
from .shipped import CLUSTERS

FORMAT = 1  # of the files; one of another format is refused
_DO = "write it anew with python -m fsdp_compiled calibrate"


def as_text(cluster: Cluster, machine: Mapping[str, Any] | None = None) -> str:
    """Return a cluster as JSON, with a description of the machine for those who read it."""
    return json.dumps({"format": FORMAT, "machine": machine or {}, "cluster": asdict(cluster)}, indent=1)


def parse(text: str, name: str) -> Cluster:
    """Return the cluster that :func:`as_text` wrote; ``name`` says in errors where the text is from.

    Raises:
        ValueError: it is no JSON, of another format, or a field is missing, unknown or out of range.
        TypeError: a field has another type.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise unexpected(name, "JSON", f"an error: {error}", _DO) from error
    version = found.get("format") if isinstance(found, dict) else None
    if version != FORMAT:
        raise unexpected(name, f"a cluster file of format {FORMAT}", f"format {version!r}", _DO)
    return _record(Cluster, found.get("cluster"), f"{name}: cluster")


def named(given: str) -> Cluster:
    """Return the cluster that ships under this name, or that lies in this file.

    Raises:
        ValueError: there is neither, or the file is none of ours; see :func:`parse`.
    """
    if given in CLUSTERS:
        return CLUSTERS[given]
    try:
        text = Path(given).read_text()
    except (OSError, UnicodeDecodeError) as error:
        expected = f"{', '.join(CLUSTERS)} or a cluster file"
        raise unexpected("cluster", expected, f"{given!r} ({error})", "use one of those") from error
    return parse(text, given)


def _record(cls: type[Any], values: Any, name: str) -> Any:
    """Return a record from its fields, with tuples and records in place of JSON's lists and dicts."""
    if not isinstance(values, dict):
        raise unexpected(name, "a dict of fields", repr(values), _DO)
    known = {field.name: field for field in fields(cls)}
    missing = [n for n, f in known.items() if n not in values and f.default is MISSING]
    if wrong := sorted(set(values) - set(known)) or missing:
        raise unexpected(name, f"the fields {', '.join(known)}", f"{'no ' if missing else ''}{wrong[0]!r}", _DO)
    made = {key: _tuples(value) for key, value in values.items()}
    for key in {"intra", "inter"} & set(made):
        made[key] = _record(Link, values[key], f"{name}.{key}")
    if "measured" in made and isinstance(made["measured"], tuple):
        each = enumerate(values["measured"])
        made["measured"] = tuple(_record(Measured, value, f"{name}.measured[{n}]") for n, value in each)
    return cls(**made)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
