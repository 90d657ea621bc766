"""Graph passes that turn per-parameter gathers and reductions into bucketed collectives.

``install()`` adds them once to Inductor's custom-pass slots, where they return at once on graphs without our
operators; ``uninstall()`` restores the slots. The passes import torch only.
"""

from __future__ import annotations

from .lower import Lower
from .normalize import Normalize
from .pin import Pin
from .pipeline import Pass, Pipeline
from .pipeline import install as _install
from .pipeline import source_hash as source_hash
from .pipeline import uninstall as _uninstall
from .reorder import Reorder
from .reshard import Reshard

__all__ = [
    "FINAL",
    "JOINT",
    "POST_GRAD",
    "Lower",
    "Normalize",
    "Pass",
    "Pin",
    "Pipeline",
    "Reorder",
    "Reshard",
    "install",
    "uninstall",
]

# On the joint forward-backward graph, before AOTAutograd cuts it in two.
JOINT: tuple[Pass, ...] = (
    Reshard(),  # only here can it still be said what the forward saves
)
# On the forward and the backward graph each, before Inductor's own passes.
POST_GRAD: tuple[Pass, ...] = (
    Normalize(),  # what is read twice would travel twice
    Lower(),  # Inductor orders the collectives it knows; an opaque operator could move past them
    Reorder(),  # a collective that is waited for at once hides behind nothing
)
# On the same graphs after Inductor's own passes: control dependencies would hide nodes from them.
FINAL: tuple[Pass, ...] = (
    Pin(),  # Inductor's scheduler would undo the order
)

_SLOTS = {
    "joint_custom_pre_pass": JOINT,
    "post_grad_custom_pre_pass": POST_GRAD,
    "post_grad_custom_post_pass": FINAL,
}


def install(core: str = "") -> None:
    """Give every later ``torch.compile`` of this process our passes; the user's own passes still run.

    The first ``fully_shard`` calls it. It is the only assignment to torch's global configuration.

    Args:
        core: a hash of what the operators compute; it enters the compile-cache keys.
    """
    for slot, run in _SLOTS.items():
        _install(slot, Pipeline(run, core))


def uninstall() -> None:
    """Restore the slots.

    Graphs with our operators then run them one by one. Results are equal, but nothing overlaps, and every
    unsharded parameter is kept from forward to backward.
    """
    for slot in _SLOTS:
        _uninstall(slot)
