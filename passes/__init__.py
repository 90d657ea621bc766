"""When: graph passes that turn per-parameter all-gathers and reductions into scheduled, bucketed collectives.

``install()`` adds them once to Inductor's custom-pass slots, where they return at once on graphs without our
operators; ``uninstall()`` restores the slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import inductor, unalias
from .agree import Agree as Agree
from .cost import CLUSTERS as CLUSTERS
from .cost import Cluster as Cluster
from .cost import Link as Link
from .inductor import Pass as Pass
from .inductor import Pipeline as Pipeline
from .inductor import beside_users_passes as beside_users_passes
from .inductor import mode_options as mode_options
from .inductor import source_hash as source_hash
from .log import observe as observe
from .normalize import Normalize as Normalize
from .pin import Pin as Pin
from .reshard import Reshard as Reshard
from .schedule import Schedule as Schedule
from .schedule_policy import DEFAULT
from .schedule_policy import SchedulePolicy as SchedulePolicy
from .unalias import Expand as Expand
from .unalias import MakePicklable as MakePicklable
from .unalias import Protect as Protect
from .unalias import Unalias as Unalias
from .unalias import region_options as region_options
from .unalias import suits_default as suits_default


def joint(policy: SchedulePolicy) -> tuple[Pass, ...]:
    """Return what runs on the joint forward-backward graph, before AOTAutograd cuts it in two."""
    return (
        Expand(),  # a region's parameters are all-gathered by one operator, which is cheaper to trace
        Unalias(),  # what a region passes through would count as its own result, and be saved
        MakePicklable(),  # torch could not read a backward with regions whose sizes vary from its cache
        Reshard(policy),  # AOTAutograd's partitioner decides next what the forward saves
    )


def post_grad(policy: SchedulePolicy) -> tuple[Pass, ...]:
    """Return what runs on the forward and the backward graph each, before Inductor's own passes."""
    return (
        Normalize(),  # a parameter that is read twice would travel twice
        Schedule(policy),  # every collective costs a launch, and one that is waited for at once is fully exposed
        Agree(policy),  # ranks that differ would hang, or compute with each other's numbers
    )


def slots(policy: SchedulePolicy, core: str = "", more: Sequence[Pass] = ()) -> dict[str, Pipeline]:
    """Return the pipeline for each of Inductor's custom-pass slots.

    ``core`` is a hash of what the operators compute; it enters the compile-cache keys. ``more``: a user's passes.
    """
    # The last runs after Inductor's own passes, from which control dependencies would hide nodes, as from the rules.
    pipelines = {
        "joint_custom_pre_pass": Pipeline(joint(policy), core, "joint", policy),
        "post_grad_custom_pre_pass": Pipeline(post_grad(policy), core, "schedule", policy),
        "post_grad_custom_post_pass": Pipeline((Pin(),), core),  # Inductor's scheduler would undo the order
    }
    return inductor.with_users(pipelines, more)


def install(core: str = "") -> None:
    """Give every later ``torch.compile`` of this process our passes; the user's own passes still run.

    The first ``fully_shard`` calls it, with ``core`` of :func:`slots`. It is the only assignment to torch's
    configuration; ``fsdp_compiled/installed.py`` lists what else the library puts into torch.
    """
    for slot, run in slots(DEFAULT, core).items():
        inductor.install(slot, run)
    unalias.install()


def uninstall() -> None:
    """Restore the slots; :func:`fsdp_compiled.uninstall` also takes out what else the library puts into torch.

    Graphs with our operators then run them one by one. Results are equal, but nothing overlaps, and every
    unsharded parameter is kept from forward to backward.
    """
    for slot in slots(DEFAULT):
        inductor.uninstall(slot)
    unalias.uninstall()


def options(
    policy: SchedulePolicy, core: str = "", given: Mapping[str, Any] | None = None, more: Sequence[Pass] = ()
) -> dict[str, Any]:
    """Return Inductor options to compile by ``policy`` with the user's own passes; ``core`` as in :func:`slots`.

    ``given`` are other options of that compile; a pass of the user's among them runs rather than the one in the slot.
    """
    ours = {slot: beside_users_passes(slot, run, given) for slot, run in slots(policy, core, more).items()}
    return ours | unalias.protected(given or {})
