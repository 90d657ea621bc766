"""What a user decides about the schedule of collectives in a graph: a frozen record, checked when made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..expect import expect, expect_bool, unexpected
from ..sharding.spec import CommSpec
from .cost import Cluster, detect, named

MIB = 2**20
_KEPT_BYTES = 16 * MIB
_TOKENS, _TOKENS_ON_HOST = 8192, 1024


@dataclass(frozen=True)
class SchedulePolicy:
    """How collectives are bucketed, how early they start, and how much memory that may take.

    All ranks must decide alike, from estimated times, though their inputs may differ in size. So only the model's own
    dimensions count, with one nominal number of tokens.

    Args:
        bucket: "auto": buckets whose estimated step is nearly the shortest for ``tokens``, and for fewer down to an
            eighth of them; "unit": one bucket per ``fully_shard`` call and dtype; "none": every parameter alone; an
            integer: full buckets of at most that many bytes. Where ``in_flight_bytes`` has no room for a bucket, it
            is cut.
        prefetch: how many all-gathers may be launched before the first of them is needed, besides the one in use;
            "auto": as many as hide their time behind half of the estimated compute, at least one.
        in_flight_bytes: the hard bound on unsharded bytes not yet freed plus gradients waiting to be reduced,
            in each graph. "auto": the largest of 64 MiB, of what PyTorch's FSDP2 holds (two of the largest units,
            and in backward the gradients of two more), and of what the graph cannot do without.
        keep_unsharded_bytes: so many bytes of parameters, those with the largest all-gather time per byte, stay
            unsharded from forward to backward rather than travel twice; besides ``in_flight_bytes``. "auto": 16 MiB,
            where launching collectives costs more than the memory is worth, but none of units whose
            ``reshard_after_forward`` the user has set.
        cluster: the machine that times are estimated for: a record, the name of one that ships, or a file that
            ``python -m fsdp_compiled calibrate`` has written, which is read here; None: what the first rank finds.
        tokens: how many of them (or pixels, samples: whatever meets each weight once) a rank's batch is taken to
            hold at most, in sequences of up to 4096, where times are estimated. It need not be exact, see
            passes/README.md. "auto": 8192, and 1024 where ranks compute on the host.
        verify: check after every pass that the graph keeps the rules of ``passes/rules.py``, which takes some time; a
            pass that breaks one raises GraphError with its name. A user's passes are always checked.

    Raises:
        TypeError: a field has another type.
        ValueError: a number is out of range, or a word is unknown, or there is no such cluster file.
    """

    bucket: Literal["auto", "unit", "none"] | int = "auto"
    prefetch: Literal["auto"] | int = "auto"
    in_flight_bytes: Literal["auto"] | int = "auto"
    keep_unsharded_bytes: Literal["auto"] | int = "auto"
    cluster: Cluster | str | None = None
    tokens: Literal["auto"] | int = "auto"
    verify: bool = False

    def __post_init__(self) -> None:
        _check("bucket", self.bucket, ("auto", "unit", "none"), least=1)
        _check("prefetch", self.prefetch, ("auto",), least=0)
        _check("in_flight_bytes", self.in_flight_bytes, ("auto",), least=1)
        _check("keep_unsharded_bytes", self.keep_unsharded_bytes, ("auto",), least=0)
        _check("tokens", self.tokens, ("auto",), least=1)
        expect_bool("SchedulePolicy.verify", self.verify)
        expect("SchedulePolicy.cluster", self.cluster, Cluster | str | None, "a Cluster, a name, a file or None")
        if isinstance(self.cluster, str):
            object.__setattr__(self, "cluster", named(self.cluster))

    def cluster_for(self, device: torch.device) -> Cluster:
        """Return the cluster that times are estimated for where graphs compute on ``device``."""
        return self.cluster if isinstance(self.cluster, Cluster) else detect(device)

    def tokens_on(self, cluster: Cluster) -> int:
        """Return how many tokens a rank's batch is taken to hold."""
        if self.tokens == "auto":
            return _TOKENS_ON_HOST if cluster.on_host else _TOKENS
        return self.tokens

    @property
    def kept_bytes(self) -> int:
        """How many bytes of parameters stay unsharded from forward to backward, at most."""
        return _KEPT_BYTES if self.keep_unsharded_bytes == "auto" else self.keep_unsharded_bytes

    def may_keep(self, spec: CommSpec) -> bool:
        """Tell whether a parameter that backward would all-gather again may be among them."""
        return spec.reshard and not (spec.reshard_is_set and self.keep_unsharded_bytes == "auto")


def _check(field: str, value: Any, words: tuple[str, ...], least: int) -> None:
    expected = " or ".join([*(repr(word) for word in words), f"an integer of at least {least}"])
    expect(f"SchedulePolicy.{field}", value, int | str, expected)
    if value not in words if isinstance(value, str) else value < least:
        raise unexpected(f"SchedulePolicy.{field}", expected, repr(value))


DEFAULT = SchedulePolicy()  # what plain ``torch.compile`` uses
