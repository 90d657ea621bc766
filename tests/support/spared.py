"""Spares what torch does for every graph or in every process that no test sees.

It times the guards of every graph, for its log, after it has emptied the processor's caches. It prints every graph
that AOTAutograd makes, for logs that nobody keeps. It writes the trace that ``TORCH_TRACE`` asks for, since pytest
gives a handler to each logger that does not propagate. In every process that loads a kernel, the compiler
preprocesses Inductor's headers for nearly 2 seconds, to see whether those that are compiled have changed.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import torch._dynamo.guards
import torch._functorch._aot_autograd.graph_compile as graph_compile
import torch._inductor.codecache as codecache
from torch._logging._internal import trace_log

HEADERS = "FSDP_COMPILED_TESTS_HEADERS"  # a folder of this run, set in conftest.py for all its processes

_precompile_header = codecache._precompile_header


@functools.cache
def precompile_once(header: str, command: str, **options: Any) -> str:
    """Return the path of a compiled header, which one process of a run has looked for."""
    if HEADERS not in os.environ:
        return _precompile_header(header, command, **options)
    name = hashlib.sha256(f"{header}\n{command}".encode()).hexdigest()
    known = Path(os.environ[HEADERS], name)
    if not known.exists():
        written = known.with_suffix(f".{os.getpid()}")
        written.write_text(_precompile_header(header, command, **options))
        written.replace(known)
    return known.read_text()


def spare() -> None:
    """Let torch do without, in this process."""
    torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0
    graph_compile._log_joint_graph = lambda *args: None
    graph_compile._log_fw_bw_graphs = lambda *args: (None, None)
    codecache._precompile_header = precompile_once
    logging.root.manager.loggerDict.pop(trace_log.name, None)  # torch has its own reference
