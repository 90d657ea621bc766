"""Hugging Face models: which modules become units, and safetensors files, of which each rank reads its part."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from copy import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..api import fully_shard, register_fsdp_forward_method
from ..errors import RankFailureError, RankMismatchError
from ..expect import unexpected
from ..hooks.state import states_below
from ..init.arguments import checked_modules
from ..sharding.dtensor import local_of, local_part
from ..tracing.dynamo import module_inside
from ..tracing.sharded_module import user_class
from ..weights import stream_parameters
from ..weights.items import base_of, batches_of, each_once, names_of_tensors

RESHARD = {"free_full_weight": None, "keep_full_weight": False}  # the styles of ``_fsdp_plan``
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER = "adapter_model.safetensors"  # of PEFT


def shard_pretrained(
    model: nn.Module, *, plan: Mapping[str, str] | None = None, **fully_shard_kwargs: Any
) -> nn.Module:
    """Shard a Hugging Face model: the modules that its plan names, and the rest.

    Args:
        model: a ``PreTrainedModel``, or one around it such as PEFT's.
        plan: styles ("free_full_weight" or "keep_full_weight" after forward) by the names of modules, in which ``*``
            stands for a number. None for the model's own ``fsdp_plan``; where it has none, the blocks whose classes
            ``_no_split_modules`` names.
        fully_shard_kwargs: given to :func:`fully_shard`.

    Returns:
        ``model`` itself. Its ``generate`` all-gathers as its forward does.

    Raises:
        ValueError: an entry of ``plan`` matches no module or has another style; or the model has neither a plan nor
            blocks with known classes.
        Others: see :func:`fully_shard`. After an entry that names a module that cannot be sharded, such as an
            ``nn.ModuleList``, the model is as it was.
    """
    for entry, style in (plan or {}).items():
        if style not in RESHARD:
            raise unexpected(f"plan[{entry!r}]", f"one of {list(RESHARD)}", repr(style))
        if not any(_matches(entry, name) for name, _ in model.named_modules()):
            raise unexpected(f"plan[{entry!r}]", f"the name of a module of {type(model).__name__}", "none")
    chosen = _own_plan(model) if plan is None else plan
    planned = list(_planned(model, chosen)) or _blocks(model)
    for module in (model, *(module for module, _ in planned)):
        checked_modules(module)  # raises before any is sharded
    for module, reshard in planned:
        fully_shard(module, **{"reshard_after_forward": reshard, **fully_shard_kwargs})
    fully_shard(model, **fully_shard_kwargs)
    if callable(getattr(model, "generate", None)):
        register_fsdp_forward_method(model, "generate")
    return model


def _own_plan(model: nn.Module) -> dict[str, str]:
    for name, module in model.named_modules():  # the model itself, or the one that PEFT's is around
        if hasattr(type(module), "fsdp_plan") and (found := module.fsdp_plan):
            return {f"{name}.{entry}" if name else entry: style for entry, style in found.items()}
    return {}


def _matches(entry: str, name: str) -> bool:
    return re.fullmatch(re.escape(entry).replace(r"\*", r"\d+"), name) is not None


def _planned(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[nn.Module, bool | None]]:
    """Yield the modules that the plan names, inner ones first; a model's own plan may name some that it lacks."""
    for name, module in reversed(dict(model.named_modules()).items()):
        if styles := [style for entry, style in plan.items() if name and _matches(entry, name)]:
            yield module, RESHARD[styles[0]]


def _blocks(model: nn.Module) -> list[tuple[nn.Module, None]]:
    classes = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    found = [module for module in model.modules() if type(module).__name__ in classes]
    if not found:
        do = 'give a plan, for example {"model.layers.*": "free_full_weight"}'
        raise unexpected(type(model).__name__, "a model with an fsdp_plan or _no_split_modules", "neither", do)
    return [(module, None) for module in reversed(found)]


def load_pretrained(model: nn.Module, folder: str | Path, device: torch.device | str | None = None) -> nn.Module:
    """Load safetensors files, as the Hub has them, into a sharded model; each rank reads only its shards.

    Args:
        model: sharded or not, which may be compiled, on a device or, as ``torch.device("meta")`` made it, without
            memory. Then non-persistent buffers, such as those of rotary embeddings, are computed by the model's own
            ``_init_weights``.
        folder: with ``model.safetensors``, or ``model.safetensors.index.json`` and the files that it names. A PEFT
            model can also read ``adapter_model.safetensors``, which has its active adapter; the rest stays as it is.
        device: where a model on the meta device goes; None for the CPU or the accelerator of its mesh, and for the
            CPU if it has none.

    Returns:
        ``model`` itself. Where names or shapes do not fit, it is left as it was.

    Raises:
        FileNotFoundError: neither file is there.
        KeyError: the files lack a parameter or persistent buffer of the model.
        ValueError: one has another shape there; or adapters alone are to fill a model on meta.
        NotImplementedError: a parameter has other placements than ``Shard`` and ``Replicate``; PEFT saves other
            tensors of the adapter than its parameters, as for prompts; or a model on meta has non-persistent buffers
            and no ``_init_weights``.
    """
    from safetensors import safe_open

    inner = module_inside(model)
    active: Any = getattr(inner, "active_adapter", None)  # of a PEFT model
    adapter = active if isinstance(active, str) and (Path(folder) / ADAPTER).is_file() else None
    opened = cache(partial(safe_open, framework="pt"))
    files = _files(Path(folder), SINGLE if adapter is None else ADAPTER, opened)
    is_meta = any(tensor.is_meta for tensor in (*inner.parameters(), *inner.buffers()))
    if is_meta and adapter is not None:
        raise ValueError(f"{folder}: has adapters alone, and the model is on meta; load what they adapt before")

    def stored() -> Iterator[tuple[Tensor, Any]]:
        for names, tensor in names_of_tensors(inner) if adapter is None else _adapted(inner, adapter):
            name = next((each for each in names if each in files), None)
            if name is None:
                do = "load it by from_pretrained, and load what its save_pretrained(save_original_format=False) saves"
                do = f"if the checkpoint has other names than the model, {do}"
                raise unexpected(names[0], f"it in {folder}", "none", do, KeyError)
            part = opened(str(files[name])).get_slice(name)
            _check_fits(name, tensor, part)
            yield tensor, part

    list(stored())  # raises before anything is changed
    if is_meta:
        _materialize(inner, device)
    for state in states_below([inner]):
        state.reshard()  # or the next call within unsharded() would read what was there before
    with torch.no_grad():
        for tensor, part in stored():
            _read(tensor, part)
    return model


def _files(folder: Path, single: str, opened: Callable[[str], Any]) -> dict[str, Path]:
    """Return where each tensor is; what an index names comes before the single file of a whole model."""
    if single == SINGLE and (folder / INDEX).is_file():
        weights = json.loads((folder / INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in weights.items()}
    if not (folder / single).is_file():
        raise FileNotFoundError(f"{folder}: expected {SINGLE} or {INDEX}, found neither")
    return dict.fromkeys(opened(str(folder / single)).keys(), folder / single)


def _adapted(model: nn.Module, adapter: str) -> Iterable[tuple[list[str], Tensor]]:
    """Return the adapter's tensors, trained or frozen, and what else is trained, with their names in PEFT's files."""
    from peft import get_peft_model_state_dict

    tensors = model.state_dict(keep_vars=True)
    found = get_peft_model_state_dict(model, tensors, adapter, save_embedding_layers=False)
    ids = set(map(id, found.values()))
    if not ids or not ids.issubset(map(id, tensors.values())):
        expected, got = "an adapter whose parameters PEFT saves as they are", "others" if ids else "none"
        raise unexpected(adapter, expected, got, "load it by PEFT before the model is sharded", NotImplementedError)
    rest = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    return each_once(found | {name: tensor for name, tensor in rest.items() if id(tensor) not in ids})


def _materialize(model: nn.Module, device: torch.device | str | None) -> None:
    """Give the model memory, and its non-persistent buffers their values."""
    computed = list(_computed(model))
    for name, module, initialize in computed:
        if initialize is None:
            buffers = sorted(module._non_persistent_buffers_set)
            expected = f"a model with _init_weights, which computes the non-persistent buffers {buffers}"
            do = "make the model on the CPU rather than on meta"
            raise unexpected(name or user_class(module).__name__, expected, "none", do, NotImplementedError)
    kinds = (param.device_mesh.device_type for param in model.parameters() if isinstance(param, DTensor))
    model.to_empty(device=next(kinds, "cpu") if device is None else device)
    for _, module, initialize in computed:
        initialize(module)


def _computed(module: nn.Module, initialize: Any = None, name: str = "") -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield the modules with non-persistent buffers, with their names and ``_init_weights`` of the nearest model."""
    initialize = getattr(module, "_init_weights", initialize)  # a vision tower has its own
    if module._non_persistent_buffers_set:
        yield name, module, initialize
    for below, child in module.named_children():
        yield from _computed(child, initialize, f"{name}.{below}" if name else below)


def _check_fits(name: str, tensor: Tensor, stored: Any) -> None:
    shape = tuple(stored.get_shape())
    if shape != tuple(tensor.shape):
        raise ValueError(f"{name}: expected shape {tuple(tensor.shape)} as the model has it, the file has {shape}")
    if isinstance(tensor, DTensor) and not all(type(each) in (Shard, Replicate) for each in tensor.placements):
        raise unexpected(name, "Shard and Replicate only", tensor.placements, "load by DCP", NotImplementedError)


def _read(tensor: Tensor, stored: Any) -> None:
    """Copy this rank's part of what is stored in a file."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(stored[:] if stored.get_shape() else stored[...])
    elif local_of(tensor).numel():
        local_of(tensor).copy_(stored[local_part(tensor)])


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
    merge_adapters: bool = False,
) -> None:
    """Write a sharded model as safetensors files, which ``from_pretrained`` and :func:`load_pretrained` read.

    Call it on all ranks; rank 0 writes, and holds the tensors of one file, and the first of the next, in its host's
    memory. If the model has a ``config`` and a ``generation_config``, they are written too, with the dtype of the
    files.

    Args:
        model: as :func:`fsdp_compiled.stream_parameters` takes it, and ``dtype`` and ``merge_adapters``.
        folder: made if it is not there. An older save there is replaced.
        max_file_bytes: of one file's tensors; a larger tensor has a file of its own.

    Raises:
        RankFailureError: rank 0 could not write, and raises its own error.
        Others: see :func:`fsdp_compiled.stream_parameters`.
    """
    from safetensors.torch import save_file

    folder, files, total_bytes = Path(folder), list[list[str]](), 0
    stream = stream_parameters(model, dtype=dtype, ranks=[0], merge_adapters=merge_adapters)
    with _ended_by_rank_0(), closing(stream):  # type: ignore[type-var]
        for taken in batches_of(map(_on_host, stream), lambda named: named[1].nbytes, max_file_bytes):
            folder.mkdir(parents=True, exist_ok=True)
            files.append([name for name, _ in taken])
            total_bytes += sum(tensor.nbytes for _, tensor in taken)
            save_file(dict(taken), folder / f"{len(files)}.incomplete", metadata={"format": "pt"})
            del taken  # before the next file's tensors come
        if files:
            _finish(folder, files, total_bytes)
            _write_configs(model, folder, dtype)


def _on_host(named: tuple[str, Tensor]) -> tuple[str, Tensor]:
    name, tensor = named
    return name, tensor.to("cpu", copy=tensor.device.type == "cpu").contiguous()


@contextmanager
def _ended_by_rank_0() -> Iterator[None]:
    """Wait at the end for rank 0, whose files others may read at once; RankFailureError if it has failed."""
    own = None
    try:
        yield
    except RankFailureError:  # a rank is gone, and the others would wait for it
        raise
    except Exception as error:
        own = error
    texts = [f"{type(own).__name__}: {own}" if own is not None else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(texts, src=0)
        # Where rank 0 stopped in the middle, others know of it by the stream.
        if texts[0] and dist.get_rank() > 0 and isinstance(own, RankMismatchError | None):
            raise RankFailureError(f"save_pretrained: rank 0, which writes the files, raised {texts[0]}") from own
    if own is not None:
        raise own


def _finish(folder: Path, files: list[list[str]], total_bytes: int) -> None:
    """Give the files their names, write the index, and delete other files of an older save."""
    count, names = len(files), [SINGLE]
    if count > 1:
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    for number, name in enumerate(names, 1):
        (folder / f"{number}.incomplete").replace(folder / name)
    if count > 1:
        weight_map = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}))
    listed = {*names, INDEX} if count > 1 else {SINGLE}
    for old in (folder / SINGLE, folder / INDEX, *folder.glob("model-?????-of-?????.safetensors")):
        if old.name not in listed:
            old.unlink(missing_ok=True)


def _write_configs(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the model's configurations, with the dtype of what was written and the model's class, as HF does."""
    base = base_of(model)
    config: Any = getattr(base, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy(config)
        own = (param.dtype for param in base.parameters() if param.is_floating_point())
        config.dtype, config.architectures = dtype or next(own, None), [user_class(base).__name__]
        config.save_pretrained(folder)
    config = getattr(base, "generation_config", None)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)
