"""Steps an optimizer of matrices: shards, then round by round to owners, their matrix function, and back to shards.

While owners compute one round, the matrices of the next are sent to them, and the updates of the one before back. At
most two rounds have buffers, and none has any after the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..agreement.ledger import AFTER_A_STEP, agree, note, register_callbacks
from ..collectives import reference
from ..collectives.streams import Pending
from ..expect import expect, shown, unexpected
from ..sharding.dtensor import local_of
from ..sharding.matrices import Part
from .local_parts import local_part_of, names_of
from .matrix_plan import Blocks, MatrixWork, Param, Round, StepPlan, holders_of, plan_step
from .matrix_rules import MatrixRule, NewtonSchulz, State


def matrix_step(
    optimizer: Optimizer, rule: MatrixRule, blocks: Mapping[Tensor, Sequence[int]], newton_schulz: NewtonSchulz | None
) -> MatrixStep:
    """Return how ``optimizer`` steps; raises what :func:`step_on_shards` does."""
    names = names_of(optimizer)
    for param in names:
        holders_of(param, names[param])
    expect("blocks", blocks, Mapping, "a mapping of parameters to the rows of their matrices")
    for param, rows in blocks.items():
        if not isinstance(param, Tensor) or param not in names:
            raise unexpected("blocks", "parameters of the optimizer", shown(param))
        is_right = all(isinstance(count, int) and count > 0 for count in rows) and sum(rows) == param.shape[-2]
        if not is_right:
            expected = f"rows that sum up to {param.shape[-2]}"
            raise unexpected(f"blocks of {names[param]}", expected, shown(tuple(rows)))
    if newton_schulz is not None:
        if not callable(newton_schulz):
            raise unexpected("newton_schulz", "a function or None", shown(newton_schulz), error=TypeError)
        rule = replace(rule, matrix_function=rule.with_newton_schulz(newton_schulz))
    return MatrixStep(rule, {param: tuple(rows) for param, rows in blocks.items()})


class _Held(NamedTuple):
    """A parameter with a gradient, as local tensors without padding."""

    group: Mapping[str, Any]
    shard: Tensor
    grad: Tensor
    state: State


@dataclass(eq=False)
class MatrixStep:
    """How one optimizer steps. It keeps the plan of its last step, and no other tensors than parameters."""

    rule: MatrixRule
    blocks: Blocks
    _known: tuple[Any, ...] = ()  # what the plan is for
    _plan: StepPlan | None = None

    def run(self, optimizer: Optimizer) -> None:
        """Step all parameters that have a gradient.

        Raises:
            ValueError, NotImplementedError: a parameter, gradient or state cannot be stepped; nothing is changed.
            RankMismatchError: ranks differ in what they step; nothing is changed.
        """
        params = [(param, group) for group in optimizer.param_groups for param in group["params"]]
        before, plan = self._plan, self._plan_for(optimizer, params)
        found = {at: (*pair, pair[0].grad) for at, pair in enumerate(params) if pair[0].grad is not None}
        for param, _, grad in found.values():
            if isinstance(param, DTensor):
                local_part_of(grad, param, optimizer)
                for name, value in optimizer.state.get(param, {}).items():
                    if isinstance(value, Tensor):
                        local_part_of(value, param, optimizer, f"state {name!r}")
        if plan.contract.collectives:
            register_callbacks()
            for mesh in plan.meshes:  # as before any step, but also where this process has sharded no model
                note(mesh, "step", AFTER_A_STEP)
            # gloo ends a process that gets other sizes than it expects, so that other gradients are compared before.
            agree(plan.contract, anew=plan is not before)
        held = {at: self._held(optimizer, *each) for at, each in found.items()}
        for _, each in groupby(held.values(), key=lambda one: id(one.group)):
            group, shards, grads, states = zip(*each, strict=True)
            self.rule.begin(group[0], shards, grads, states)
        _Rounds(self.rule, held).run(plan.rounds)

    def _plan_for(self, optimizer: Optimizer, params: Sequence[tuple[Tensor, Mapping[str, Any]]]) -> StepPlan:
        known = tuple((param, param.grad is not None, self.rule.flops(group, (1, 1))) for param, group in params)
        if self._plan is None or not _same(known, self._known):
            names = names_of(optimizer)
            found = [Param(param, names[param], group, param.grad is not None) for param, group in params]
            self._plan, self._known = plan_step(found, self.rule, self.blocks), known
        return self._plan

    def _held(self, optimizer: Optimizer, param: Tensor, group: Mapping[str, Any], grad: Tensor) -> _Held:
        state = optimizer.state[param]
        for name in self.rule.state:
            if name not in state:
                state[name] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        return _Held(group, local_of(param), local_of(grad), [local_of(state[name]) for name in self.rule.state])


def _same(known: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    pairs = zip(known, before, strict=False)
    return len(known) == len(before) and all(a[0] is b[0] and a[1:] == b[1:] for a, b in pairs)


@dataclass(frozen=True, eq=False)
class _Rounds:
    rule: MatrixRule
    held: Mapping[int, _Held]

    def run(self, rounds: Sequence[Round]) -> None:
        incoming = self._send(rounds[0]) if rounds else None
        before: tuple[Round, Pending[list[Tensor]]] | None = None
        for this, following in zip_longest(rounds, rounds[1:]):
            for item, part in this.local:
                self._step_alone(item, part)
            arrived = incoming.wait() if incoming is not None else []
            incoming = self._send(following) if following is not None else None
            updates = self._updates(this, arrived)
            del arrived
            if this.back is not None:
                returning = self._send_back(this, updates)
                del updates
                if before is not None:
                    self._apply(*before)
                before = this, returning
        if before is not None:
            self._apply(*before)

    def _send(self, this: Round) -> Pending[list[Tensor]] | None:
        if this.there is None:
            return None
        pairs = [(this.items[move.matrix], move.part) for move in this.there.sent.moves]
        parts = [self._sent(self.held[item.param], part.of_shard) for item, part in pairs]
        return this.there.launch(parts, self._device(this))

    def _sent(self, held: _Held, part_of: Any) -> Tensor:
        return self.rule.sent(held.group, part_of(held.grad), [part_of(each) for each in held.state])

    def _device(self, this: Round) -> torch.device:
        return self.held[this.items[0].param].shard.device

    def _step_alone(self, item: MatrixWork, part: Part) -> None:
        """Step a matrix that this rank has and needs alone."""
        held = self.held[item.param]
        matrix = torch.empty(item.matrix.shape, dtype=self.rule.dtype, device=held.shard.device)
        update = self._update(item, matrix.copy_(self._sent(held, part.of_shard)))
        self.rule.apply(held.group, part.of_shard(held.shard), update, item.matrix.shape)

    def _update(self, item: MatrixWork, matrix: Tensor) -> Tensor:
        update = self.rule.matrix_function(self.held[item.param].group, matrix)
        if update.shape != item.matrix.shape:
            name, shape = item.matrix.param.name, tuple(update.shape)
            raise unexpected(f"newton_schulz of {name}", f"an update of shape {item.matrix.shape}", shape)
        return update

    def _updates(self, this: Round, arrived: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the updates of the matrices that this rank owns, by their place in the round."""
        if this.there is None:
            return {}
        moves, device = this.there.received.moves, self._device(this)
        matrices = {
            at: torch.empty(this.items[at].matrix.shape, dtype=self.rule.dtype, device=device)
            for at in dict.fromkeys(move.matrix for move in moves)
        }
        reference.copy_each(arrived, [move.part.of_matrix(matrices[move.matrix]) for move in moves])
        return {at: self._update(this.items[at], matrices.pop(at)) for at in list(matrices)}

    def _send_back(self, this: Round, updates: Mapping[int, Tensor]) -> Pending[list[Tensor]]:
        assert this.back is not None
        parts = [move.part.of_matrix(updates[move.matrix]) for move in this.back.sent.moves]
        return this.back.launch(parts, self._device(this))

    def _apply(self, this: Round, returning: Pending[list[Tensor]]) -> None:
        assert this.back is not None
        for move, update in zip(this.back.received.moves, returning.wait(), strict=True):
            item = this.items[move.matrix]
            held = self.held[item.param]
            self.rule.apply(held.group, move.part.of_shard(held.shard), update, item.matrix.shape)
