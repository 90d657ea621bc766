"""All that sharding a model puts into torch and the interpreter, and how each is taken out again.

Besides, the library defines operators in a namespace of its own, and ``as_torch_fsdp`` and ``enable`` replace
PyTorch's ``fully_shard`` in all modules that have it until they are ended. It must not know what any of these is for.
"""

from __future__ import annotations

from . import passes
from .agreement import ledger, peers
from .hooks import optimizers
from .passes import log, products
from .regions import block
from .tracing import root_call

# What puts in one thing, and what takes it out; a second call of either does nothing.
INSTALLED = (
    (products.keep_whole, products.decompose),  # entries of Inductor's table of decompositions
    (log.register, log.unregister),  # the logger's name in torch's logging
    (root_call.watch_compiles, root_call.ignore_compiles),  # callbacks of Dynamo around compilations
    (ledger.register_callbacks, peers.restore_excepthook),  # sys.excepthook
    (optimizers.hook_steps, optimizers.unhook_steps),  # hooks before and after the steps of optimizers
    (block.derive_schemas_once, block.derive_schemas_always),  # invoke_subgraph.gen_schema remembers
    (block.take_conjugates, block.refuse_conjugates),  # invoke_subgraph's dispatch keys
)


def install(core: str) -> None:
    """Put all of it in, and the passes in Inductor's slots, with ``core`` of :func:`passes.slots`."""
    passes.install(core)
    for put_in, _ in INSTALLED:
        put_in()


def uninstall() -> None:
    """Leave torch as it was before the first ``fully_shard``, which puts everything in again.

    Models that are sharded already stay so. Their graphs then run collectives one by one, see
    :func:`fsdp_compiled.passes.uninstall`, and a call of one reports its failures to others again.
    """
    for _, take_out in reversed(INSTALLED):
        take_out()
    passes.uninstall()
