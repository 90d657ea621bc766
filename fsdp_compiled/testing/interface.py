"""What the test models with inputs and losses of their own have in common. It knows no particular model."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import fully_shard

_seeding = threading.RLock()  # torch has one generator for all threads


class RankAndSize(Protocol):
    """What a model asks of a process group when it shards nothing; ``DummyProcessGroup`` answers too."""

    def rank(self) -> int:
        """This rank."""

    def size(self) -> int:
        """The number of ranks."""


class FSDPInitMode(Enum):
    """Whether ``init`` shards.

    NO_FSDP: it does not.
    RECURSIVE: it shards the model's units.
    """

    NO_FSDP = auto()
    RECURSIVE = auto()


class DEVICEInitMode(Enum):
    """When ``init`` moves the model to the accelerator, if there is one.

    DEVICE_BEFORE: before it shards.
    DEVICE_AFTER: after it sharded.
    DEVICE_NEVER: not at all; ``fully_shard`` still moves what it shards to the device of its mesh.
    """

    DEVICE_BEFORE = auto()
    DEVICE_AFTER = auto()
    DEVICE_NEVER = auto()


class FSDPTestModel(nn.Module, ABC):
    """A model that brings its own input and loss."""

    @abstractmethod
    def get_input(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return this rank's input; the same at every call."""

    @abstractmethod
    def get_loss(self, input: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the scalar loss."""

    def run_backward(self, loss: Tensor) -> None:
        """Run backward, and whatever an unsharded model needs to average gradients by itself."""
        loss.backward()

    @staticmethod
    @abstractmethod
    def init(*args: Any, **kwargs: Any) -> nn.Module:
        """Make an instance."""


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed torch's CPU generator for the block and put its state back after; None leaves it alone.

    Ranks that are threads enter one after another, so that each gets the numbers of ``seed``.
    """
    if seed is None:
        yield
        return
    with _seeding, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def default_device() -> torch.device:
    """Return the accelerator, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def random_input(rank: int, *shape: int, device: torch.device) -> Tensor:
    """Return float32 numbers in [0, 1) of ``shape`` that depend on ``rank`` alone."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(1 + rank)).to(device)


def shard_units(units: Sequence[nn.Module], group: RankAndSize, fsdp_kwargs: Mapping[str, Any]) -> None:
    """Give each unit to ``fully_shard``, inner ones first, over ``group`` unless ``fsdp_kwargs`` has a mesh.

    Raises:
        TypeError: there is no mesh, and ``group`` is no process group.
    """
    kwargs = dict(fsdp_kwargs)
    if kwargs.get("mesh") is None:
        kwargs["mesh"] = mesh_of(group)
    for unit in units:
        fully_shard(unit, **kwargs)


def mesh_of(group: RankAndSize) -> DeviceMesh:
    """Return the 1-D mesh of a process group.

    Raises:
        TypeError: ``group`` is no process group.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup to shard over, got {type(group).__name__}; use NO_FSDP")
    return DeviceMesh.from_group(group, default_device().type)


def checked_mode(mode: FSDPInitMode) -> bool:
    """Return whether ``mode`` shards.

    Raises:
        TypeError: ``mode`` is no FSDPInitMode.
    """
    if not isinstance(mode, FSDPInitMode):
        raise TypeError(f"fsdp_init_mode: expected an FSDPInitMode, got {mode!r}")
    return mode is FSDPInitMode.RECURSIVE
