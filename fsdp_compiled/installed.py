"""All that sharding a model puts into torch and the interpreter, and how each is taken out again.

Besides, the library defines operators in a namespace of its own, and ``as_torch_fsdp`` and ``enable`` replace the
name ``torch.distributed.fsdp.fully_shard`` until they are ended. It must not know what any of these is for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from . import agreement, passes
from .hooks import optimizers
from .passes import log
from .regions import block
from .tracing import root_call


class Installed(NamedTuple):
    """One thing in torch. Putting it in, or taking it out, a second time does nothing."""

    what: str
    put_in: Callable[[], object]
    take_out: Callable[[], None]


INSTALLED = (
    Installed("the logger's name in torch's logging", log.register, log.unregister),
    Installed("callbacks of Dynamo around compilations", root_call.watch_compiles, root_call.ignore_compiles),
    Installed("sys.excepthook", agreement.register_callbacks, agreement.restore_excepthook),
    Installed("a hook before the steps of optimizers", optimizers.hook_steps, optimizers.unhook_steps),
    Installed("invoke_subgraph.gen_schema remembers", block.derive_schemas_once, block.derive_schemas_always),
)


def install(core: str) -> None:
    """Put all of it in, and the passes in Inductor's slots, with ``core`` of :func:`passes.slots`."""
    passes.install(core)
    for each in INSTALLED:
        each.put_in()


def uninstall() -> None:
    """Leave torch as it was before the first ``fully_shard``, which puts everything in again.

    Models that are sharded already stay so. Their graphs then run collectives one by one, see
    :func:`fsdp_compiled.passes.uninstall`, and a call of one lets others hear of its failures again.
    """
    for each in reversed(INSTALLED):
        each.take_out()
    passes.uninstall()
