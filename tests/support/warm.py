"""What the server that forks the ranks imports: it has compiled once, so that a rank's first compilation is short."""

from __future__ import annotations

import gc

import torch
from torch._dynamo.utils import counters

import fsdp_compiled.testing.imported  # noqa: F401, what every rank needs

from .training import llama, llama_loss, token_batches, without_codegen


def warm() -> None:
    """Fill what torch's compilers keep in a process; no backward, or no process forked afterwards could run one."""
    (tokens,) = token_batches(1)
    with torch.no_grad():
        llama_loss(torch.compile(llama(), backend=without_codegen, fullgraph=True), tokens)
    torch.compiler.reset()
    counters.clear()
    gc.collect()
    gc.freeze()


if not torch.accelerator.is_available():  # Dynamo would initialize it, and no process forked afterwards could
    warm()
