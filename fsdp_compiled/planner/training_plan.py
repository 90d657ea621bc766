"""What was tried on each number of ranks, what each try costs, what fits and is fastest: as text and as a page.

It must not know a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..expect import unexpected
from ..inspect.lifetimes import Part
from ..inspect.memory import ALLOCATOR_FRACTION
from ..inspect.render.figures import counted, duration, size
from ..inspect.render.html import page
from ..inspect.render.text import joined, table
from ..passes.cost import Cluster
from .chart import HEIGHT, LEFT, WIDTH, chart

Checkpointing = Literal["none", "selective", "blocks"]
CHECKPOINTING: Mapping[Checkpointing, str] = {
    "none": "no activation checkpointing",
    "selective": "attention and every second matrix product of a block saved",
    "blocks": "blocks recomputed",
}
GIB = 2**30
_REMEDIES = {
    "waits for collectives": "hiding all collectives: more tokens for each rank, or faster links",
    "optimizer": "a cheaper optimizer step: more shards, or more tokens in a step",
    "copies of buffers": "collectives without copies of their buffers",
}


@dataclass(frozen=True)
class Layout:
    """How ranks share the model: ``shards`` of them have a part each, and ``replicas`` of those groups the same."""

    shards: int
    replicas: int = 1

    @property
    def mesh(self) -> str:
        return f"{self.replicas} x {self.shards}" if self.replicas > 1 else str(self.shards)


@dataclass(frozen=True)
class Option:
    """How to train on ``ranks`` ranks, by estimate.

    Args:
        ranks: all of them.
        layout: how they share the model.
        checkpointing: see :data:`CHECKPOINTING`.
        reshard_after_forward: as of ``fully_shard``, for the blocks.
        batch: sequences of a rank at a time.
        accumulation: such batches in a step.
        tokens: of all ranks in a step.
        parts_us: what a step takes: compute, waits for collectives, copies of their buffers, the optimizer, the host.
        parts_bytes: of a rank's memory at its peak.
        flops: that a rank's step needs, without what is computed again.
    """

    ranks: int
    layout: Layout
    checkpointing: Checkpointing
    reshard_after_forward: bool
    batch: int
    accumulation: int
    tokens: int
    parts_us: Mapping[str, float]
    parts_bytes: Mapping[Part, int]
    flops: float

    @property
    def step_us(self) -> float:
        return sum(self.parts_us.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens that all ranks together train on in a second."""
        return 1e6 * self.tokens / self.step_us

    @property
    def peak_bytes(self) -> int:
        """The peak of live bytes with the allocator's share, see :data:`ALLOCATOR_FRACTION`."""
        return int((1 + ALLOCATOR_FRACTION) * sum(self.parts_bytes.values()))

    @property
    def how(self) -> str:
        """Batch, checkpointing and ``reshard_after_forward`` in a few words."""
        unsharded = "" if self.reshard_after_forward else ", kept unsharded until backward"
        return f"batch {self.batch} x {self.accumulation}, {CHECKPOINTING[self.checkpointing]}{unsharded}"

    def mfu(self, cluster: Cluster) -> float:
        """Return which share of the peak FLOP/s of bf16 products the needed FLOPs take."""
        return self.flops / (self.step_us / 1e6) / cluster.flops_16bit

    def code(self) -> str:
        """Return what to write to get it."""
        made, given = "", f"reshard_after_forward={self.reshard_after_forward}, mp_policy=policy"
        if self.layout.replicas > 1:
            sizes = f"({self.layout.replicas}, {self.layout.shards})"
            made = f'mesh = init_device_mesh(device_type, {sizes}, mesh_dim_names=("replicate", "shard"))\n'
            given = f"mesh=mesh, {given}"
        root = given.replace("reshard_after_forward=True, ", "")  # the root stays unsharded unless told otherwise
        wrap = {"none": "block", "blocks": "checkpoint_wrapper(block)"}.get(self.checkpointing)
        wrap = wrap or "checkpoint_wrapper(block, context_fn=save_some)"
        return (
            f"{made}for index, block in enumerate(blocks):\n    blocks[index] = fully_shard({wrap}, {given})\n"
            f"model = fsdp_compiled.compile(fully_shard(model, {root}), fullgraph=True)\n"
            f"# batch {self.batch} x {self.accumulation} a rank"
        )


@dataclass(frozen=True)
class TrainingPlan:
    """What was tried on each number of ranks. ``print`` shows a table, advice and the code to write.

    Args:
        model: its class name.
        parameters: number of elements of all of them.
        cluster: that it is estimated for.
        memory_bytes: of each rank.
        tokens_per_sequence: of the inputs.
        tokens_per_step: that were asked for.
        options: by number of ranks, the fastest first, whether they fit or not.
    """

    model: str
    parameters: int
    cluster: Cluster
    memory_bytes: int
    tokens_per_sequence: int
    tokens_per_step: int
    options: Mapping[int, tuple[Option, ...]]

    def _tried(self, ranks: int) -> tuple[Option, ...]:
        """Return what was tried on so many ranks. ValueError: nothing was."""
        if ranks not in self.options:
            raise unexpected("ranks", f"one of {', '.join(map(str, self.options))}, as planned", ranks)
        return self.options[ranks]

    def fits(self, option: Option) -> bool:
        return option.peak_bytes <= self.memory_bytes

    def best(self, ranks: int, count: int = 3) -> list[Option]:
        """Return the fastest options that fit, those with the best batch for each mesh and checkpointing."""
        found = dict[tuple[Layout, Checkpointing, bool], Option]()
        for option in filter(self.fits, self._tried(ranks)):
            found.setdefault((option.layout, option.checkpointing, option.reshard_after_forward), option)
        return list(found.values())[:count]

    def smallest(self, ranks: int) -> Option:
        """Return what needs the least memory."""
        return min(self._tried(ranks), key=lambda option: option.peak_bytes)

    def advice(self, ranks: int) -> str:
        """Return what would help most, or what is missing where nothing fits."""
        if not (best := self.best(ranks, 1)):
            missing = (self.smallest(ranks).peak_bytes - self.memory_bytes) / GIB
            return f"nothing fits: at least {missing:.1f} GiB too much for each rank; shard over more ranks"
        now, gains = best[0], list[tuple[float, str]]()
        larger = max(self._tried(ranks), key=lambda option: option.tokens_per_s)
        if not self.fits(larger):
            more = (larger.peak_bytes - self.memory_bytes) / GIB
            what = f"{more:.1f} GiB more memory, for {larger.how}"
            gains.append((1 - now.tokens_per_s / larger.tokens_per_s, what))
        for part, what in _REMEDIES.items():
            gains.append((now.parts_us[part] / now.step_us, what))
        gain, what = max(gains)
        saved = f"{gain:.0%} of the time could be saved at most by {what}"
        return saved if gain >= 0.01 else "nothing: the rest is compute"

    def __str__(self) -> str:
        lines = table([self.facts(option) for ranks in self.options for option in self.shown(ranks)])
        notes = [f"{ranks} ranks: {note}" for ranks in self.options for note in self.notes(ranks)]
        code = ([f"{option.ranks} ranks:\n{option.code()}"] for option in self._fastest())
        return joined([f"{self.model}: {self.about}", *lines], notes, *code)

    def _fastest(self) -> list[Option]:
        """Return the best option for each number of ranks on which one fits."""
        return [options[0] for ranks in self.options if (options := self.best(ranks, 1))]

    def save(self, path: str | Path) -> Path:
        """Write the plan as one page that needs nothing else, and return its path, which ends in ``.html``."""
        path = Path(path)
        if path.suffix != ".html":
            raise ValueError(f"{path}: a plan is saved as .html, not as {path.suffix!r}; rename the file")
        best = self._fastest()
        # What all ranks together spend on a million tokens.
        costs = {str(o.ranks): {part: us * o.ranks * 1e6 / o.tokens for part, us in o.parts_us.items()} for o in best}
        memory = {str(o.ranks): {part: count / GIB for part, count in o.parts_bytes.items()} for o in best}
        charts = [
            chart("What all ranks together take for a million tokens", costs, duration),
            chart("Memory of a rank at its peak", memory, lambda gib: f"{gib:.3g} GiB", self.memory_bytes / GIB),
        ]
        template = Path(__file__).with_name("plan.html")
        source = page(template, plan=self, charts=charts, left=LEFT, WIDTH=WIDTH, HEIGHT=HEIGHT)
        path.write_text(source, encoding="utf-8")  # as it says, whatever the machine's encoding is
        return path

    @property
    def about(self) -> str:
        return (
            f"{self.parameters / 1e9:.3g} billion parameters, {self.tokens_per_sequence} tokens a sequence, "
            f"{self.tokens_per_step:,} tokens a step, {self.cluster.name} with {size(self.memory_bytes)} a rank"
        )

    def notes(self, ranks: int) -> list[str]:
        """Return how many tokens a step has, if not about as many as were asked for, parts of memory, and advice."""
        notes, tokens = list[str](), min(option.tokens for option in self._tried(ranks))
        if abs(tokens / self.tokens_per_step - 1) > 0.01:
            each = tokens // (ranks * self.tokens_per_sequence)
            notes.append(f"{counted(each, 'sequence')} of each rank: {tokens:,} tokens a step")
        first = self.shown(ranks)[0]
        parts = ", ".join(f"{part} {size(count)}" for part, count in first.parts_bytes.items() if count)
        notes.append(f"memory of the first: {parts}, and {ALLOCATOR_FRACTION:.0%} for the allocator")
        return [*notes, ("what would help most: " if self.best(ranks) else "") + self.advice(ranks)]

    def shown(self, ranks: int) -> list[Option]:
        """Return the best options, or what needs the least memory where nothing fits."""
        return self.best(ranks) or [self.smallest(ranks)]

    def facts(self, option: Option) -> dict[str, str]:
        return {
            "ranks": str(option.ranks),
            "mesh": option.layout.mesh,
            "step": duration(option.step_us),
            "tokens/s": f"{option.tokens_per_s:,.0f}",
            "MFU": f"{option.mfu(self.cluster):.1%}",
            "waits": f"{option.parts_us['waits for collectives'] / option.step_us:.1%}",
            "memory": size(option.peak_bytes) + ("" if self.fits(option) else ", too much"),
            "how": option.how,
        }
