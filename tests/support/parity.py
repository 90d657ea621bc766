"""The features of FSDP2 that must work in every mode, and which tests show that they do.

    @row("uneven shards")
    def test_something(mode): ...

A test's mode is its parameter ``mode``, else what ``row`` says. :mod:`tests.support.parity_plugin` collects the
results; this module turns them into the text of ``PARITY.md`` and back.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

MODES = {"eager": "eager", "full": "full graph", "regions": "with regions", "regional": "regional"}


@dataclass(frozen=True)
class Row:
    """One feature.

    Args:
        name: what tests call it.
        covers: what it consists of.
        eager: what is asked of the eager hooks.
        full: what is asked of one full graph.
        regional: whether compiling each unit alone could make a difference.
        regions: whether it makes sense inside a block, so that regions could make a difference.
    """

    name: str
    covers: str
    eager: str = "yes"
    full: str = "yes"
    regional: bool = True
    regions: bool = True


ROWS = (
    Row("training", "SGD and AdamW against one process and against torch's FSDP2"),
    Row("lengths that differ", "batches of another length on every rank, also where only one rank compiles again"),
    Row(
        "interrupts",
        "an exception at any point of a step, such as Ctrl-C: the model trains on, or an error names "
        "`reset_iter_state`",
        regional=False,
    ),
    Row("copies", "`copy.deepcopy` of a sharded model, `torch.optim.swa_utils.AveragedModel`"),
    Row("complex parameters", "complex64 and complex128, carried as real numbers"),
    Row(
        "reshard",
        "`reshard_after_forward` True / False / int (smaller group) / None (auto root), `set_reshard_after_forward`, "
        "`set_reshard_after_backward`, `set_unshard_in_backward`",
        full="yes: int keeps the small-group shard from forward and gathers over the small group in backward",
    ),
    Row(
        "mixed precision",
        "all four fields of MixedPrecisionPolicy, policies that differ per unit, `model.to(dtype)` after sharding, "
        "`torch.autocast` inside",
    ),
    Row(
        "gradient dtypes",
        "`grad_dtype` of parameters, set before or after `fully_shard`: fp32 gradients of bf16 parameters, kept by "
        "conversions and copies, inherited by loaded parameters",
    ),
    Row("mixed original dtypes", "parameters of different original dtypes in one unit (FSDP2 refuses)"),
    Row(
        "accumulation",
        "`set_requires_gradient_sync`, `set_requires_all_reduce`, `set_is_last_backward`; unsharded accumulation in "
        "`reduce_dtype`; accumulation with a reduce each micro-step; `get_pending_gradients`, "
        "`synchronize_gradients`, `zero_grad` of what is not reduced yet",
        full="yes; fw-fw-bw-bw order too; at most two graph variants, no recompile storm",
    ),
    Row(
        "gradient division",
        "`set_gradient_divide_factor`, `set_force_sum_reduction_for_comms` (also on gloo, which lacks PREMUL_SUM)",
        regions=False,
    ),
    Row(
        "meshes",
        "HSDP (2-D mesh), replicate-only mesh (compiled DDP), `dp_mesh_dims` on a full SPMD mesh",
    ),
    Row(
        "experts",
        "experts sharded over one mesh beside everything else over another; tokens travel in equal parts, or in "
        "parts that data decide",
    ),
    Row(
        "tensor parallel",
        "parameters that are DTensors on a TP mesh already (`parallelize_module`), `_StridedShard`, HSDP + TP",
        regional=False,
    ),
    Row(
        "shard_placement_fn",
        "other dims, per-parameter mesh (`ShardPlacementResult`; experts on another mesh)",
    ),
    Row(
        "frozen and LoRA",
        "frozen parameters, frozen at first and unfrozen later, whole unit frozen, LoRA through `peft` on a Hugging "
        "Face model",
    ),
    Row("tied and shared", "tied parameters inside a unit and across units (torch 2.13 refuses), shared modules"),
    Row(
        "ignored and unused",
        "`ignored_params`; buffers; parameters not used in this step (`set_reduce_scatter_unused_params`); "
        "conditional branches that differ per step",
        full="yes: recompiles, no wrong result",
    ),
    Row(
        "control flow",
        "`torch.cond`, `while_loop`, `scan`, `associative_scan` and `map` that read parameters and call units, also "
        "where ranks take other branches or go round more often",
        full="yes: all-gathers stay outside, once",
    ),
    Row(
        "uneven shards",
        "uneven shards, dims smaller than the world, empty local shards, 1-rank groups (no collective at all)",
    ),
    Row(
        "activation checkpointing",
        "`torch.utils.checkpoint`, `checkpoint_wrapper`, selective policies: no duplicate gathers in backward",
    ),
    Row(
        "tensor-subclass extensions",
        "`fsdp_pre_all_gather` / `fsdp_post_all_gather`: quantised all-gather",
    ),
    Row(
        "custom communication",
        "`Comm` / `AllGather` / `ReduceScatter`, `set_custom_all_gather`, `set_custom_reduce_scatter`, "
        "`set_all_reduce_hook`, separate reduce-scatter group",
        full="an opaque node with the same schedule",
        regional=False,
        regions=False,
    ),
    Row("CPU offload", "`CPUOffloadPolicy`, pinning", regions=False),
    Row(
        "module kinds",
        "list units (chunked loss), nested units, ModuleList / ParameterList / ParameterDict / MultiheadAttention / "
        "RNN modules (`_flat_weights`)",
        full="yes, or a clear refusal where torch.compile itself cannot",
    ),
    Row(
        "methods",
        "`register_fsdp_forward_method`, `unshard(async_op)`, `UnshardHandle`, prefetch lists, `share_comm_ctx`, "
        "`reset_iter_state` after an exception, `set_post_optim_event`, `_set_unshard_async_op`, "
        "`fully_shard.state(module)`",
        full="compile-safe",
        regions=False,
    ),
    Row(
        "optimizers and evaluation",
        "`clip_grad_norm_`, foreach / fused / compiled optimizers, GradScaler, LR schedulers, `inference_mode` / "
        "`no_grad` evaluation and `generate()` between steps",
        regions=False,
    ),
    Row(
        "state dict",
        "`state_dict` / `load_state_dict` of sharded DTensors; `torch.distributed.checkpoint`; checkpoints of "
        "torch's FSDP2 load into ours and back, also onto another world size",
        regions=False,
    ),
    Row(
        "switching",
        "train eager, then compile, then eager again, in one process; some units compiled, others not",
        regions=False,
    ),
    Row("Hugging Face models", "unmodified models from small configs, `fully_shard` per layer and on the model"),
)
NAMES = {row.name for row in ROWS}


def row(*names: str, mode: str | Iterable[str] | None = None) -> pytest.MarkDecorator:
    """Say which features a test shows to work.

    Args:
        names: of rows.
        mode: one or several of ``MODES``; None for the test's parameter ``mode``.

    Raises:
        ValueError: there is no such row or mode.
    """
    modes = None if mode is None else (mode,) if isinstance(mode, str) else tuple(mode)
    if not names or not NAMES.issuperset(names):
        raise ValueError(f"row: expected names out of {sorted(NAMES)}, got {names}")
    if modes is not None and not MODES.keys() >= set(modes):
        raise ValueError(f"row: expected modes out of {list(MODES)}, got {modes}")
    return pytest.mark.row(*names, mode=modes)


@dataclass(frozen=True, order=True)
class Record:
    """One test's result for one row in one mode."""

    row: str
    mode: str
    test: str
    result: str  # passed, failed or skipped


def render(records: Iterable[Record]) -> str:
    """Return the text of ``PARITY.md``."""
    records = sorted(set(records), key=lambda r: (list(MODES).index(r.mode), r))
    lines = [
        "# Everything FSDP2 does, in every mode",
        "",
        "Written by `python -m pytest --write-parity` from the results of a run of the whole suite, never by hand.",
        "*Eager* is the hooks, *full graph* is `torch.compile(model, fullgraph=True)`, *with regions* is the same "
        "with blocks as regions, *regional* is `fully_shard_with_compiled_compute`. Cells count tests; *none* is a "
        "gap.",
        "",
        f"| feature | {' | '.join(MODES.values())} |",
        f"|---|{'---|' * len(MODES)}",
    ]
    for feature in ROWS:
        cells = [_cell(feature, mode, records) for mode in MODES]
        lines.append(f"| {feature.name} | {' | '.join(cells)} |")
    for feature in ROWS:
        lines += ["", f"## {feature.name}", "", f"Covers {feature.covers}."]
        lines.append(f"Asked: eager {feature.eager}; full graph {feature.full}.")
        lines += [""] if any(r.row == feature.name for r in records) else []
        lines += [f"- {r.mode}, {r.result}: `{r.test}`" for r in records if r.row == feature.name]
    return "\n".join(lines) + "\n"


def _cell(feature: Row, mode: str, records: list[Record]) -> str:
    results = Counter(r.result for r in records if (r.row, r.mode) == (feature.name, mode))
    others = [f"{results[result]} {result}" for result in ("failed", "skipped") if results[result]]
    if (mode == "regional" and not feature.regional) or (mode == "regions" and not feature.regions):
        return ", ".join(others) or "-"
    return ", ".join([f"{results['passed']} passed" if results["passed"] else "none", *others])


def read(text: str) -> set[Record]:
    """Return the records that ``render`` wrote."""
    records, name = set(), ""
    for line in text.splitlines():
        if line.startswith("## "):
            name = line[3:]
        elif found := re.fullmatch(r"- (\w+), (\w+): `(.+)`", line):
            mode, result, test = found.groups()
            records.add(Record(name, mode, test, result))
    return records


def with_skipped_from(records: Iterable[Record], committed: Iterable[Record], left_out: Iterable[str]) -> set[Record]:
    """Let what this environment could not run keep its committed result.

    Args:
        records: of this run.
        committed: of an earlier one.
        left_out: test files that were skipped as a whole.
    """
    known = {(r.row, r.mode, r.test): r for r in committed}
    merged = {known.get((r.row, r.mode, r.test), r) if r.result == "skipped" else r for r in records}
    return merged | {r for r in known.values() if r.test.split("::")[0] in set(left_out)}
