"""Which sizes estimates are made from: the model's as they are, all others in coarse classes.

It puts no guard on sizes that vary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from math import prod

import torch
from torch import fx

_UNKNOWN = 8192  # a size that depends on data. *Source:* Inductor's unbacked_symint_fallback.
_VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default}
PADDED_BYTES = 16  # Inductor may pad the extents of a product to multiples of so many. *Source:* its pad_mm.


def counted(size: int | torch.SymInt, model: Set[int], step: int = 1) -> int:
    """Return the extent that estimates are made from.

    Ranks must decide alike and cannot ask each other while they compile, though one may see 512 tokens and another
    520. So an extent that is not the model's counts as the nearest, by ratio, of 2^k and 1.5 * 2^k. Usual sizes
    (512, 768, 4096) lie in the middle of such a class and count as they are, as does everything up to 4. The classes
    meet at 1.22 and 1.73 times a power of two (443, 627, 887, 1254, ...): extents on two sides of that, or of which
    one happens to equal an extent of the model, still count differently.

    Args:
        size: one that varies between calls counts as in the first.
        model: extents that count as they are, being equal on all ranks; see :func:`model_extents`.
        step: round up to a multiple of it first, unless ``size`` is 1.
    """
    hint = size if isinstance(size, int) else size.node.hint
    extent = _UNKNOWN if hint is None else int(hint)
    padded = extent if extent == 1 else -(-extent // step) * step
    return padded if padded in model else _nearest(padded)


def _nearest(size: int) -> int:
    """Return the power of two, or 1.5 times one, with the smallest ratio to ``size``; what is not positive stays."""
    if size <= 0:
        return size
    power = 1 << (size.bit_length() - 1)
    if 2 * size**2 < 3 * power**2:
        return power
    return power * 3 // 2 if size**2 < 3 * power**2 else 2 * power


def model_extents(params: Iterable[Sequence[int]], graph: fx.Graph) -> frozenset[int]:
    """Return the extents that are the model's.

    These are the dimensions of its parameters, which have the shapes ``params``, the two extents that a view splits
    one of them into or merges into one of them (heads and their width), and what Inductor may pad each to.
    """
    dims = {extent for shape in params for extent in shape}
    split = {extent for node in graph.nodes for pair in _split_by(node, dims) for extent in pair}
    return frozenset(-(-extent // step) * step for extent in dims | split for step in (1, 2, 4, 8, PADDED_BYTES))


def _split_by(node: fx.Node, dims: Set[int]) -> Iterable[tuple[int, int]]:
    """Yield the last two extents on one side of a view where their product, in ``dims``, is the last on the other."""
    values = [each.meta.get("val") for each in (*node.all_input_nodes[:1], node)] if node.target in _VIEWS else []
    shapes = [list(value.shape) for value in values if isinstance(value, torch.Tensor)]
    if len(shapes) < 2:
        return
    before, after = shapes
    for split, merged in ((after[-2:], before[-1:]), (before[-2:], after[-1:])):
        is_fixed = all(isinstance(extent, int) for extent in (*split, *merged))
        if is_fixed and len(split) == 2 and merged == [prod(split)] and merged[0] in dims:
            yield split[0], split[1]
