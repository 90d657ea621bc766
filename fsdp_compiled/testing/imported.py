"""What every process of a rank needs: the server that forks them imports it once for all."""

from __future__ import annotations

import gc
from contextlib import suppress

import torch

# Checked on torch 2.11.0, 2.13.0 and 2.15.0: with more, an import below starts a pool of compilers, with threads.
torch._inductor.config.compile_threads = 1

import torch._dynamo
import torch._inductor.codecache
import torch._inductor.compile_fx
import torch.distributed.tensor

import fsdp_compiled

with suppress(ImportError):
    from triton.runtime.cache import triton_key  # type: ignore[import-untyped]

    triton_key()  # reads triton's sources, for a second: for the keys of Inductor's caches, as does the next line
torch._inductor.codecache.torch_key()

__all__ = ["fsdp_compiled"]

gc.freeze()  # so that a collection in one process does not copy the memory that it shares with the others
