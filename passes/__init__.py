"""Graph passes that turn per-parameter gathers and reductions into scheduled, bucketed collectives.

``install()`` adds them once to Inductor's custom-pass slots, where they return at once on graphs without our
operators; ``uninstall()`` restores the slots. The passes import torch only.
"""

from __future__ import annotations

from typing import Any

from . import pipeline
from .bucket import Bucket
from .cost import CLUSTERS, Cluster, Link
from .lower import Lower
from .normalize import Normalize
from .pin import Pin
from .pipeline import Pass, Pipeline
from .pipeline import source_hash as source_hash
from .policy import DEFAULT, SchedulePolicy
from .reorder import Reorder
from .reshard import Reshard

__all__ = [
    "CLUSTERS",
    "Bucket",
    "Cluster",
    "Link",
    "Lower",
    "Normalize",
    "Pass",
    "Pin",
    "Pipeline",
    "Reorder",
    "Reshard",
    "SchedulePolicy",
    "install",
    "joint",
    "options",
    "pinning",
    "post_grad",
    "uninstall",
]


def joint(policy: SchedulePolicy) -> tuple[Pass, ...]:
    """Return what runs on the joint forward-backward graph, before AOTAutograd cuts it in two."""
    return (
        Reshard(policy),  # only here can it still be said what the forward saves
    )


def post_grad(policy: SchedulePolicy) -> tuple[Pass, ...]:
    """Return what runs on the forward and the backward graph each, before Inductor's own passes."""
    return (
        Normalize(),  # what is read twice would travel twice
        Bucket(policy),  # every collective costs a launch, and one that nothing hides costs its whole time
        Lower(),  # Inductor orders the collectives it knows; an opaque operator could move past them
        Reorder(policy),  # a collective that is waited for at once hides behind nothing
    )


def pinning() -> tuple[Pass, ...]:
    """Return what runs after Inductor's own passes, from which control dependencies would hide nodes."""
    return (
        Pin(),  # Inductor's scheduler would undo the order
    )


def slots(policy: SchedulePolicy, core: str = "") -> dict[str, Pipeline]:
    """Return the pipeline for each of Inductor's custom-pass slots.

    Args:
        policy: how to schedule.
        core: a hash of what the operators compute; it enters the compile-cache keys.
    """
    return {
        "joint_custom_pre_pass": Pipeline(joint(policy), core),
        "post_grad_custom_pre_pass": Pipeline(post_grad(policy), core),
        "post_grad_custom_post_pass": Pipeline(pinning(), core),
    }


def install(core: str = "") -> None:
    """Give every later ``torch.compile`` of this process our passes; the user's own passes still run.

    The first ``fully_shard`` calls it. It is the only assignment to torch's global configuration.

    Args:
        core: see :func:`slots`.
    """
    for slot, run in slots(DEFAULT, core).items():
        pipeline.install(slot, run)


def uninstall() -> None:
    """Restore the slots.

    Graphs with our operators then run them one by one. Results are equal, but nothing overlaps, and every
    unsharded parameter is kept from forward to backward.
    """
    for slot in slots(DEFAULT):
        pipeline.uninstall(slot)


def options(policy: SchedulePolicy, core: str = "") -> dict[str, Any]:
    """Return Inductor options by which one compile uses ``policy``, with the passes that the user has installed.

    Args:
        policy: how to schedule.
        core: see :func:`slots`.
    """
    return {slot: pipeline.beside_users_passes(slot, run) for slot, run in slots(policy, core).items()}
