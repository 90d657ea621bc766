"""Models, policies and schedules that hypothesis draws.

A drawn :class:`Case` is plain data: it goes to the ranks as it is, and as a line of text to whoever replays it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields
from typing import Any

import torch
from hypothesis import strategies as st

from fsdp_compiled import MixedPrecisionPolicy, SchedulePolicy
from fsdp_compiled.passes import CLUSTERS

POLICIES = {
    "none": MixedPrecisionPolicy(),
    "fp64": MixedPrecisionPolicy(torch.float64),
    "fp64, reduced in fp32": MixedPrecisionPolicy(torch.float64, torch.float32),
    "reduced in fp64": MixedPrecisionPolicy(reduce_dtype=torch.float64),
    "bf16": MixedPrecisionPolicy(torch.bfloat16),
    "bf16, reduced in fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}
MODES = ("eager", "regional", "full", "regions", "switching")


@dataclass(frozen=True)
class Node:
    """One module: a scale, a pair of linear maps around a nonlinearity, and modules below."""

    hidden: int = 3  # between the two maps; 0 for none
    bias: bool = False
    scaled: int = 0  # how often forward reads its scale
    tied: bool = False  # its first map has the weight of an earlier node's, if one is of this size
    frozen: str = ""  # what does not train: "all", or one of its maps
    unit: bool = True
    reshard: bool | None = None
    runs: int = 1  # how often the module above calls it
    rests: int = -1  # a step in which it is not called
    checkpointed: bool = False
    below: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Case:
    """What one example trains, and how."""

    mode: str = "eager"
    width: int = 2
    root: Node = Node()
    policy: str = "none"
    output_dtype: str = ""
    wide: str = ""  # which gradients are fp64: those of "all" parameters, or of one of the maps
    replicas: bool = False  # ranks hold replicas, not shards
    on_shards: bool = False  # the optimizer steps on plain local shards
    last_dim: bool = False  # shard the last dimension of what it divides
    micro: int = 1  # batches that a step accumulates
    evaluates: bool = False  # without gradients, between steps
    lengths: tuple[int, ...] = (4, 4, 4)  # of the first rank's batch in each step; the others share the rest of 8
    bucket: str | int = "auto"
    prefetch: str | int = "auto"
    in_flight_bytes: str | int = "auto"
    keep_unsharded_bytes: str | int = 0
    cluster: str = ""

    @property
    def schedule(self) -> SchedulePolicy:
        """The case's, on one of the known machines or the present one."""
        return SchedulePolicy(
            self.bucket, self.prefetch, self.in_flight_bytes, self.keep_unsharded_bytes, CLUSTERS.get(self.cluster)
        )

    def __str__(self) -> str:
        return repr(_differences(self))


def _differences(record: Any) -> dict[str, Any]:
    """Return the fields that are not as by default."""
    found = {f.name: getattr(record, f.name) for f in fields(record) if getattr(record, f.name) != f.default}
    if "root" in found:
        found["root"] = _differences(found["root"])
    if "below" in found:
        found["below"] = [_differences(each) for each in found["below"]]
    return found


def parse(text: str) -> Case:
    """Return the case that ``str`` wrote."""
    found = ast.literal_eval(text)
    return Case(**{**found, "root": _node(found.get("root", {}))})


def _node(found: dict[str, Any]) -> Node:
    return Node(**{**found, "below": tuple(map(_node, found.get("below", ())))})


# ---- drawing ----


@st.composite
def nodes(draw: Any, depth: int = 0) -> Node:
    below = () if depth == 2 else tuple(draw(st.lists(nodes(depth=depth + 1), max_size=3 - depth)))
    return Node(
        hidden=draw(st.sampled_from([1, 2, 3, 4, 7, 0] if depth else [1, 2, 3, 4, 7])),
        bias=draw(st.booleans()),
        scaled=draw(st.sampled_from([0, 1, 2])),
        tied=draw(st.booleans()),
        frozen=draw(st.sampled_from(["", "", "all", "up", "down"])),
        unit=draw(st.booleans()) if depth else True,
        reshard=draw(st.sampled_from([None, True, False])),
        runs=draw(st.sampled_from([1, 1, 1, 0, 2])) if depth else 1,
        rests=draw(st.sampled_from([-1, -1, 1, 2])) if depth else -1,
        checkpointed=draw(st.sampled_from([False, False, True])) if depth else False,
        below=below,
    )


CASES = st.builds(
    Case,
    mode=st.sampled_from(MODES),
    width=st.integers(1, 6),
    root=nodes(),
    policy=st.sampled_from(list(POLICIES)),
    output_dtype=st.sampled_from(["", "float32", "float64"]),
    wide=st.sampled_from(["", "", "all", "up"]),
    replicas=st.sampled_from([False, False, True]),
    on_shards=st.booleans(),
    last_dim=st.booleans(),
    micro=st.sampled_from([1, 1, 2]),
    evaluates=st.booleans(),
    lengths=st.sampled_from([(4, 4, 4), (4, 4, 4), (3, 3, 3), (1, 6, 2), (5, 2, 5)]),
    bucket=st.sampled_from(["auto", "unit", "none", 1, 100, 1000]),
    prefetch=st.sampled_from(["auto", 0, 1, 3]),
    in_flight_bytes=st.sampled_from(["auto", "auto", 300, 1000, 3000]),
    keep_unsharded_bytes=st.sampled_from(["auto", 0, 100, 10_000]),
    cluster=st.sampled_from(["", "CPU", "H100"]),
)
