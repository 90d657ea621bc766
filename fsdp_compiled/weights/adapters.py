"""PEFT's LoRA weights, merged into what they adapt: which tensors make which, under the base model's names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..expect import unexpected
from ..tracing.sharded_module import user_class
from .items import Item, base_of, name_in_state, names_of_tensors


def merged_items(model: nn.Module) -> list[Item]:
    """Return the items of the model that PEFT adapts, with the active adapters merged.

    Raises:
        ValueError: ``model`` has no adapters.
        NotImplementedError: an active adapter is another than LoRA of a linear layer or embedding in floating point;
            or adapters change a tied weight under some of its names.
    """
    base = base_of(model)
    modules = {name_in_state(name): each for name, each in base.named_modules(remove_duplicate=False)}
    adapted = {name: each for name, each in modules.items() if hasattr(each, "base_layer")}
    replaced = {name: each for name, each in modules.items() if hasattr(each, "modules_to_save")}
    if not adapted and not replaced:
        raise unexpected("merge_adapters", "a model with adapters of PEFT", user_class(model).__name__)
    for name, each in modules.items():
        if hasattr(each, "parameter_name") or (hasattr(each, "original_module") and name not in replaced):
            raise _refused(name, f"a {user_class(each).__name__}")  # LoRA of a parameter, or of some tokens
    items = list[Item]()
    for names, tensor in names_of_tensors(base):
        found = [_item(name, tensor, adapted, replaced) for name in names]
        if len({each and tuple(map(id, each.sources)) for each in found}) > 1:
            expected, got = "the same adapters for all names of a tied weight", "others for each"
            do = "untie the weight before it is adapted"
            raise unexpected(f"merge_adapters: {', '.join(names)}", expected, got, do, NotImplementedError)
        if found[0] is not None:
            items.append(found[0])
    return items


def _item(
    name: str, tensor: Tensor, adapted: Mapping[str, nn.Module], replaced: Mapping[str, nn.Module]
) -> Item | None:
    """Return what becomes of a tensor of the model under one of its names; None for what belongs to adapters."""
    owner = next((each for each in (*adapted, *replaced) if name.startswith(f"{each}.")), None)
    if owner is None:
        return Item(name, (tensor,))
    layer: Any = adapted.get(owner, replaced.get(owner))
    kept = "base_layer." if owner in adapted else _chosen_of(layer)
    attribute = name.removeprefix(f"{owner}.")
    if not attribute.startswith(kept):
        return None
    attribute = attribute.removeprefix(kept)
    name = f"{owner}.{attribute}"
    is_merged = owner in adapted and attribute == "weight"
    return _merged(name, tensor, layer) if is_merged else Item(name, (tensor,))


def _refused(name: str, got: str) -> Exception:
    expected = "LoRA of a linear layer or an embedding in floating point, without DoRA and lora_bias"
    return unexpected(f"merge_adapters: {name}", expected, got, "merge it by PEFT", NotImplementedError)


def _chosen_of(layer: Any) -> str:
    """Return where a module of ``modules_to_save`` has what is in use."""
    is_original = layer.disable_adapters or not layer.active_adapters
    return "original_module." if is_original else f"modules_to_save.{layer.active_adapters[0]}."


def _merged(name: str, base: Tensor, layer: Any) -> Item:
    """Return a layer's weight with what its active adapters add."""
    is_off = layer.merged or layer.disable_adapters
    tensors, factors = [base], list[float]()
    own = dict(layer.named_parameters())
    for adapter in [] if is_off else layer.active_adapters:
        if not any(f".{adapter}." in f".{each}." for each in own):
            continue  # it adapts other layers
        names = [f"lora_{side}.{adapter}.weight" for side in "AB"]
        embedding = [f"lora_embedding_{side}.{adapter}" for side in "AB"]
        pair = names if names[0] in own else embedding
        is_plain = all(each in own for each in pair) and adapter not in getattr(layer, "lora_variant", {})
        if (
            not is_plain
            or getattr(layer, "lora_bias", {}).get(adapter)
            or base.dim() != 2
            or not base.is_floating_point()
        ):
            raise _refused(name, f"adapter {adapter!r} of a {user_class(layer).__name__} on {base.dtype}")
        tensors += [own[each] for each in pair]
        factors.append(layer.scaling[adapter])
    is_transposed = any(each.startswith("lora_embedding_A") for each in own) or getattr(
        layer, "fan_in_fan_out", False
    )
    join = partial(_add, factors=factors, is_transposed=is_transposed) if factors else None
    return Item(name, tuple(tensors), join)


def _add(base: Tensor, *pairs: Tensor, factors: list[float], is_transposed: bool) -> Tensor:
    """Return ``base`` plus the product of each pair (A, B) times its factor, as PEFT merges them."""
    for a, b, factor in zip(pairs[::2], pairs[1::2], factors, strict=True):
        delta = (b.float() @ a.float() if a.itemsize < 4 else b @ a) * factor
        base = (base + (delta.T if is_transposed else delta).to(b.dtype)).to(base.dtype)
    return base
