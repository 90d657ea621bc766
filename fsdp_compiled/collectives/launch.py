"""The two halves of a bucket's collective: launch returns work under way, its ``wait`` the result.

Hooks and graphs share it. On an accelerator, gathers run on one side stream with their copy-in and copy-out,
reduce-scatters on a second and all-reduces over replicas on a third. Hooks move reduced gradients to the host on the
stream that reduces them, graphs on a fourth. The copy-in of gradients, which are to be freed at once, stays on the
compute stream. It knows tensors, layouts and routes; it must not know parameters, units or who waits when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import ShardLayout
from ..passes import cost
from ..passes.route import Route
from . import comm, copies, streams
from .reference import row_numel
from .streams import Pending

GATHERS, SCATTERS, REPLICAS, TO_HOST = "gathers", "scatters", "replicas", "to host"  # side streams
_c10d = torch.ops._c10d_functional


def launch_gather(
    shards: Sequence[Tensor],
    layouts: Sequence[ShardLayout],
    route: Route,
    allocate: Callable[[], Sequence[Tensor]],
    in_place: bool | None = None,
) -> Pending[None]:
    """Start gathering padded ``shards``, cast to ``route.dtype``, as one bucket over the route's shard group.

    Args:
        shards: of this rank.
        layouts: of the parameters.
        route: of them all.
        allocate: returns flat, contiguous tensors of ``world * shard_numel`` elements each, whose first ``numel``
            become the parameter in row-major order. It is called when their memory is needed: now, or in
            ``wait`` where copy-out is done then.
        in_place: gather each parameter straight into its own memory rather than all into one buffer that is copied
            out of; None: where that can be and is estimated to be faster.
    """
    device = torch.device(route.device) if route.device else shards[0].device
    if in_place is None:
        in_place = _goes_into_place(tuple(layouts), route.dtype, device) and not route.gather_comm
    outs = list(allocate()) if in_place or streams.streams_of(device) else []

    def begin() -> _Begun | None:
        sent = [shard.to(device, non_blocking=True) for shard in shards] if route.device else shards
        if route.shard_world == 1:
            _copy(sent, outs or allocate())
            return None
        return _start_into_place(sent, outs, route) if in_place else _start_gather(sent, route)

    def finish(begun: _Begun | None) -> None:
        if begun is None:
            return
        _c10d.wait_tensor(begun.result)
        if not in_place:
            wholes = [out.view(_padded(layout)) for out, layout in zip(outs or allocate(), layouts, strict=True)]
            rows = begun.result.view(route.shard_world, -1)
            copies.copy_out_gathered(rows, wholes, [layout.dim for layout in layouts])

    return streams.launch(GATHERS, device, begin, finish)


@lru_cache(maxsize=1024)
def _goes_into_place(layouts: tuple[ShardLayout, ...], dtype: torch.dtype, device: torch.device) -> bool:
    sizes = [layout.world * layout.shard_numel * dtype.itemsize for layout in layouts]
    return cost.goes_into_place(device, [layout.dim for layout in layouts], sizes)


class _Begun(NamedTuple):
    """An all-gather: the tensor by which it is waited for, and what it reads until then."""

    result: Tensor
    sent: Sequence[Tensor]


def _start_gather(shards: Sequence[Tensor], route: Route) -> _Begun:
    numel, world, group = row_numel([shard.numel() for shard in shards]), route.shard_world, route.shard_group
    if route.gather_comm:
        rows = comm.gather_output(world * numel, route.dtype, shards[0].device, route.gather_comm)
    else:
        rows = shards[0].new_empty(world * numel, dtype=route.dtype)
    if len(shards) == 1 and shards[0].dtype == route.dtype:
        row = shards[0].reshape(-1)
    else:
        row = rows.view(world, numel)[comm.process_group(group).rank()]
        copies.copy_in_shards(shards, row)
    if route.gather_comm:
        rows = comm.all_gather_into(rows, row, group, route.gather_comm)
    else:
        comm.register_work(rows, comm.all_gather_into_tensor(_bits(rows), _bits(row), comm.process_group(group)))
    return _Begun(rows, [row])


def _start_into_place(shards: Sequence[Tensor], outs: Sequence[Tensor], route: Route) -> _Begun:
    group = comm.process_group(route.shard_group)
    if all(shard.dtype == route.dtype for shard in shards):
        sent = [shard.reshape(-1) for shard in shards]
    else:
        sizes = [shard.numel() for shard in shards]
        row = outs[0].view(route.shard_world, -1)[group.rank()] if len(outs) == 1 else outs[0].new_empty(sum(sizes))
        copies.copy_in_shards(shards, row)
        sent = list(row.split(sizes))
    if len(outs) == 1:
        work = comm.all_gather_into_tensor(_bits(outs[0]), _bits(sent[0]), group)
    else:
        work = comm.all_gather_into_tensors([_bits(out) for out in outs], [_bits(each) for each in sent], group)
    comm.register_work(outs[0], work)
    return _Begun(outs[0], sent)


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor whose dtype every backend knows, over the same memory."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def _copy(shards: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(outs), [shard.reshape(-1) for shard in shards])


def _padded(layout: ShardLayout) -> tuple[int, ...]:
    return (*layout.shape[: layout.dim], layout.chunk * layout.world, *layout.shape[layout.dim + 1 :])


def launch_reduction(
    grads: Sequence[Tensor],
    layouts: Sequence[ShardLayout],
    route: Route,
    dtypes: Sequence[torch.dtype],
    carried: Sequence[Tensor | None] = (),
) -> Pending[list[Tensor]]:
    """Start reducing unsharded ``grads`` in ``route.reduce_dtype`` as one bucket.

    Args:
        grads: of the parameters' shapes.
        layouts: of the parameters.
        route: of them all.
        dtypes: of the results.
        carried: what earlier reductions over the shard group left, added before the replicas are reduced.

    Returns:
        Work that ends in the padded sharded gradients, which may share memory. If the route leads to another
        device, the host reads them and has to wait as well.
    """
    rows = _rows(grads, layouts, route)
    follow = _following(layouts, route, dtypes, carried)

    def begin() -> Tensor:
        return _start_scatter(rows.view(-1), route)

    def wait(row: Tensor) -> Tensor:
        row = _c10d.wait_tensor(row) if route.shard_world > 1 else row
        return row[: sum(layout.shard_numel for layout in layouts)]

    if route.replicate_world == 1:
        return streams.launch(SCATTERS, rows.device, begin, lambda row: follow(wait(row)))
    scattered = streams.launch(SCATTERS, rows.device, begin, wait)
    return scattered.then(REPLICAS, rows.device, follow)


def _rows(grads: Sequence[Tensor], layouts: Sequence[ShardLayout], route: Route) -> Tensor:
    """Return what is to be scattered, packed by compute; one gradient may be that already."""
    if len(grads) == 1 and route.reduces_as_it_is(grads[0].dtype, layouts[0].shape, layouts[0].dim):
        return grads[0].reshape(route.shard_world, -1)
    dims = [layout.dim for layout in layouts]
    return copies.copy_in_gradients(grads, dims, route.shard_world, route.reduce_dtype, route.pre_divide)


def launch_replica_reduction(
    parts: Sequence[Tensor], layouts: Sequence[ShardLayout], route: Route
) -> Pending[list[Tensor]]:
    """Start reducing over replicas what the shard group has reduced already: padded shards in reduce dtype."""
    row = parts[0].new_empty(sum(part.numel() for part in parts))
    copies.copy_in_shards(parts, row)
    follow = _following(layouts, route, [route.grad_dtype] * len(parts), ())
    return streams.launch(REPLICAS, row.device, lambda: row, follow)


def _start_scatter(rows: Tensor, route: Route) -> Tensor:
    """Return this rank's row, to be waited for."""
    if route.shard_world == 1:
        return rows
    place = (route.op, route.shard_world, route.scatter_group)
    if route.reduce_comm:
        return comm.reduce_scatter(rows, *place, route.reduce_comm)
    return _c10d.reduce_scatter_tensor(rows, *place)


def _following(
    layouts: Sequence[ShardLayout], route: Route, dtypes: Sequence[torch.dtype], carried: Sequence[Tensor | None]
) -> Callable[[Tensor], list[Tensor]]:
    """Return what follows the reduction over the shard group: replicas, hook, division, copy-out."""

    def follow(row: Tensor) -> list[Tensor]:
        if any(part is not None for part in carried):
            row = row + _row_of(carried, layouts, row)
        if route.replicate_world > 1:
            row = _c10d.wait_tensor(_c10d.all_reduce(row, route.op, route.replicate_group))
        if route.reduce_hook:
            row = comm.reduce_hook(row, route.reduce_hook)
        copy_out = _copied_out_to_host if route.device else _copied_out
        return copy_out(row, layouts, dtypes, route.post_divide)

    return follow


def _copied_out(
    row: Tensor, layouts: Sequence[ShardLayout], dtypes: Sequence[torch.dtype], divisor: float
) -> list[Tensor]:
    if divisor == 1.0 and all(dtype == row.dtype for dtype in dtypes):
        return _pieces(row, layouts)
    outs = [row.new_empty(layout.shard_shape, dtype=dtype) for layout, dtype in zip(layouts, dtypes, strict=True)]
    copies.copy_out_reduced(row, outs, divisor, accumulate=False)
    return outs


def _copied_out_to_host(
    row: Tensor, layouts: Sequence[ShardLayout], dtypes: Sequence[torch.dtype], divisor: float
) -> list[Tensor]:
    if len(set(dtypes)) > 1:
        return [copies.to_host(out) for out in _copied_out(row, layouts, dtypes, divisor)]
    if divisor != 1.0 or dtypes[0] != row.dtype:
        source, row = row, row.new_empty(row.shape, dtype=dtypes[0])
        copies.copy_out_reduced(source, [row], divisor, accumulate=False)
    return _pieces(copies.to_host(row), layouts)


def _pieces(row: Tensor, layouts: Sequence[ShardLayout]) -> list[Tensor]:
    pieces = row.split([layout.shard_numel for layout in layouts])
    return [piece.view(layout.shard_shape) for piece, layout in zip(pieces, layouts, strict=True)]


def _row_of(parts: Sequence[Tensor | None], layouts: Sequence[ShardLayout], like: Tensor) -> Tensor:
    pieces = [
        like.new_zeros(layout.shard_numel) if part is None else part.reshape(-1)
        for part, layout in zip(parts, layouts, strict=True)
    ]
    return torch.cat(pieces)
