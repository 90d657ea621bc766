"""A mixin for ``transformers.Trainer`` that trains a model given to our ``fully_shard`` as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ..module import FSDPModule
from .pretrained import load_pretrained as load_pretrained
from .pretrained import save_pretrained as save_pretrained
from .pretrained import shard_pretrained as shard_pretrained

OPTIMIZER, SCHEDULER = "optimizer_sharded", "scheduler.pt"


class ShardedTrainer:
    """Mixin that comes before ``transformers.Trainer``, or a subclass of it, in a trainer's bases.

    The trainer leaves a sharded model unwrapped, accumulates gradients without communication, compiles the model as a
    whole if ``torch_compile=True``, saves safetensors that ``from_pretrained`` reads (of a PEFT model its adapters),
    and resumes with optimizer and scheduler, on any number of ranks. Do not set ``fsdp`` in the arguments.

    Raises:
        ValueError: the model is not sharded, or ``fsdp`` or ``deepspeed`` is set.
    """

    args: Any
    model: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Let accelerate prepare sharded models without wrapping them."""
        if not isinstance(self.model, FSDPModule):
            raise ValueError(
                f"{type(self.model).__name__}: expected a model given to fully_shard; use shard_pretrained(model) "
                "before, or set fsdp in the arguments and train within as_torch_fsdp() without this mixin"
            )
        if getattr(self.args, "fsdp", None) or getattr(self.args, "deepspeed", None):
            raise ValueError("args: expected neither fsdp nor deepspeed for a model that is sharded already")
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        prepare = self.accelerator.prepare_model

        def prepare_model(model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
            # As for evaluation: autocast and torch.compile, but no DistributedDataParallel.
            return prepare(model, device_placement=False, evaluation_mode=True)

        self.accelerator.prepare_model = prepare_model
        self.accelerator.no_sync = _no_sync

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None:
            adapters = hasattr(self.model, "peft_config")
            options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapters)
            state_dict = get_model_state_dict(self.model, options=options)
        super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = get_optimizer_state_dict(self.model, _inner(self.optimizer))
        state_dict_saver.save({"optimizer": state}, checkpoint_id=Path(output_dir) / OPTIMIZER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_pretrained(self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        load_pretrained(self.model, self.state.best_model_checkpoint)  # type: ignore[attr-defined]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint) / OPTIMIZER
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: expected the optimizer of a ShardedTrainer, found none")
        optimizer = _inner(self.optimizer)
        state = {"optimizer": get_optimizer_state_dict(self.model, optimizer)}
        state_dict_loader.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(self.model, optimizer, state["optimizer"])
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that accelerate's is around."""
    return getattr(optimizer, "optimizer", optimizer)


@contextmanager
def _no_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
