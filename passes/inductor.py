"""Runs passes inside Inductor's custom-pass slots, with whatever the user put there."""

from __future__ import annotations

import hashlib
import inspect
import pickle
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import fx

from ..expect import expect, shown, unexpected
from . import cost, log
from .graph import nodes
from .rules import verify
from .schedule_policy import DEFAULT, SchedulePolicy
from .torch_internals import config, custom_graph_pass, get_donated_idxs, list_mode_options


class Pass(Protocol):
    """Rewrites a graph in place; its fields and its source are all of its configuration.

    A user's may say by a class attribute ``before`` or ``after`` which pass it stands next to, by name; by default it
    comes after ``Schedule``.
    """

    def __call__(self, graph: fx.Graph) -> None: ...


def name_of(run: Pass) -> str:
    """Return the name of a pass in the log, in captures and in errors."""
    return getattr(run, "__name__", type(run).__name__)


@dataclass(frozen=True)
class Pipeline(custom_graph_pass.CustomGraphPass):
    """Passes that run in order on a graph that holds our operators, and leave every other graph alone.

    Where a slot held a single pass of the user's, that runs afterwards: on torch 2.11 the slot can hold no more.
    """

    passes: tuple[Pass, ...]  # frozen records, so that ``repr`` is their configuration
    core: str = ""  # a hash of what the operators in the graphs compute: the caches do not look into operators
    slot: log.Slot = ""  # by which progress is told
    policy: SchedulePolicy = DEFAULT  # of the passes; a user's own are verified whatever it says
    user: Callable[[fx.Graph], None] | None = None  # the pass that the slot held

    def __call__(self, graph: fx.Graph) -> None:
        if nodes.has_ours(graph):
            self._run(graph)
        if self.user is not None:
            self.user(graph)

    def _run(self, graph: fx.Graph) -> None:
        with log.during(self.slot, graph):
            for run in self.passes:
                began, is_ours = time.perf_counter(), _is_ours(run)
                run(graph)
                if not is_ours:
                    log.ran(name_of(run), time.perf_counter() - began)
                if (self.policy.verify or not is_ours) and not nodes.is_pinned(graph):
                    verify(graph, name_of(run))
            graph.lint()
        if self.slot.startswith("schedule"):
            log.scheduled(graph, self.policy)

    def uuid(self) -> str | None:
        """Return what a compiled graph depends on besides its input: sources, the passes' fields, the machines.

        None, which turns compile caches off, where a user's pass has None as its uuid, or none in the slot, or no
        source or fields to be found.
        """
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        machine = cost.detect(accelerator or torch.device("cpu"))
        runs = [repr(run) if _is_ours(run) else _content_of(run) for run in self.passes]
        if self.user is not None:
            runs.append(getattr(self.user, "uuid", lambda: None)() or None)
        if None in runs:
            return None
        library = f"{source_hash(Path(__file__).parent)}:{self.core}"
        # Torch's own keys lack what backward may write over: one model may return what another only saves.
        return f"{library}:{runs}:{machine!r}:{cost.group_places()}:{get_donated_idxs()}"


def _content_of(run: Pass) -> Any:
    """Return a user's pass's uuid, or its fields and its classes' files; None if one of these is not to be found."""
    if hasattr(run, "uuid"):
        return run.uuid()
    try:
        classes = (each for each in type(run).__mro__ if each is type(run) or each.__module__ != "builtins")
        files = dict.fromkeys(str(inspect.getsourcefile(each)) for each in classes)
        shown, fields, sources = repr(run), pickle.dumps(run), [Path(file).read_text() for file in files]
    except Exception:  # whatever its class raises where it cannot be shown or pickled, or has no source
        return None
    # An address stands for an object of unknown content, or for a function in any file.
    return None if re.search(r" at 0x[0-9a-f]+", shown) else (shown, fields, sources)


def _is_ours(run: Pass) -> bool:
    return str(getattr(run, "__module__", "")).startswith(__name__.partition(".")[0] + ".")


def with_users(pipelines: Mapping[str, Pipeline], runs: Sequence[Pass]) -> dict[str, Pipeline]:
    """Return the pipelines with the user's passes where each says that it belongs.

    Raises:
        TypeError: one is no function of a graph.
        ValueError: one names a pass that there is not, or two places.
    """
    found = dict(pipelines)
    expect("passes", runs, list | tuple, "a list of functions of a graph")
    for run in runs:
        if not callable(run):
            raise unexpected("passes", "functions of a graph", shown(run), error=TypeError)
        before, after = getattr(run, "before", None), getattr(run, "after", None)
        if before and after:
            raise unexpected(name_of(run), "before or after, one of them", f"{before!r} and {after!r}")
        name, where = before or after or "Schedule", f"{name_of(run)}.{'before' if before else 'after'}"
        places = [(name_of(p), slot, at) for slot, each in found.items() for at, p in enumerate(each.passes)]
        slot, at = next(((slot, at) for other, slot, at in places if other == name), ("", 0))
        if not slot:
            raise unexpected(where, f"a pass among {', '.join(each for each, _, _ in places)}", repr(name))
        passes = found[slot].passes
        at += 0 if before else 1
        while not before and at < len(passes) and not _is_ours(passes[at]):
            at += 1  # behind those that were given earlier
        found[slot] = replace(found[slot], passes=(*passes[:at], run, *passes[at:]))
    return found


@cache
def source_hash(folder: Path) -> str:
    """Return a hash of the Python files in ``folder`` and below."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def mode_options(mode: str | None) -> dict[str, Any]:
    """Return the options that a mode of ``torch.compile`` stands for; RuntimeError for an unknown one."""
    return {} if mode is None else list_mode_options(mode)


def installed(slot: str) -> bool:
    """Tell whether a pipeline of ours is in ``slot``, the name of a field of ``torch._inductor.config``."""
    value = getattr(config, slot)
    return _without_ours(value) is not value


def install(slot: str, pipeline: Pipeline) -> None:
    """Put ``pipeline`` in ``slot`` before what the user has there; a second call changes nothing."""
    if not installed(slot):
        setattr(config, slot, _joined(pipeline, getattr(config, slot)))


def beside_users_passes(slot: str, pipeline: Pipeline, given: Mapping[str, Any] | None = None) -> Any:
    """Return what ``slot`` would hold with ``pipeline`` in place of any other of ours.

    The user's passes are those in ``given``, options of one compile, and those in the slot where it names none.
    """
    return _joined(pipeline, _without_ours((given or {}).get(slot, getattr(config, slot))))


def uninstall(slot: str) -> None:
    """Take our pipeline out of ``slot`` and leave what the user put there as it was."""
    setattr(config, slot, _without_ours(getattr(config, slot)))


def _without_ours(value: Any) -> Any:
    if isinstance(value, Pipeline):
        return value.user
    if isinstance(value, (list, tuple)) and any(isinstance(entry, Pipeline) for entry in value):
        return type(value)(entry for entry in value if not isinstance(entry, Pipeline))
    return value


def _joined(pipeline: Pipeline, user: Any) -> Any:
    return type(user)((pipeline, *user)) if isinstance(user, (list, tuple)) else replace(pipeline, user=user)
