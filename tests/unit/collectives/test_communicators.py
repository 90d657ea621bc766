"""Communicators with memory of their own, on stand-ins for the GPUs' interfaces."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fsdp_compiled import fully_shard
from fsdp_compiled.collectives import communicators


class _Memory:
    """Symmetric memory of two ranks in one process; the other rank's buffer is there to be written to.

    Its default backend cannot be chosen by name, as in builds of PyTorch that have it as their default alone.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.buffers: dict[int, list[torch.Tensor]] = {}
        self.rank = 0

    def get_backend(self, device: torch.device) -> str:
        return "CUDA"

    def set_backend(self, name: str) -> None:
        assert name != "CUDA"
        self.log.append(name)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.log.append(f"empty {numel}")
        mine, theirs = torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
        self.buffers[mine.data_ptr()] = [mine, theirs] if self.rank == 0 else [theirs, mine]
        return mine

    def rendezvous(self, tensor: torch.Tensor, group: str) -> SimpleNamespace:
        def buffer(peer: int, sizes: tuple[int], dtype: torch.dtype, offset: int) -> torch.Tensor:
            return self.buffers[tensor.data_ptr()][peer][offset : offset + sizes[0]]

        return SimpleNamespace(
            rank=self.rank, world_size=2, get_buffer=buffer, barrier=lambda channel: self.log.append("barrier")
        )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_symmetric_all_gather_writes_this_ranks_part_to_every_rank(monkeypatch, rank):
    memory = _Memory()
    memory.rank = rank
    monkeypatch.setattr(communicators.backend, "symmetric_memory", lambda: memory)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: memory.log.append("synchronize"))
    gather = communicators.symmetric_all_gather(torch.device("cuda"), "CUDA", ("0",))
    assert gather is communicators.symmetric_all_gather(torch.device("cuda"), "CUDA", ("0",))
    group = SimpleNamespace(group_name="0")
    for value in (1.0, 2.0):
        out = gather.allocate([6], dtype=torch.float32, device=torch.device("cpu"))
        assert gather(out, torch.full((3,), value), group) is None
        for buffer in memory.buffers[out.data_ptr()]:
            assert buffer.tolist() == ([value] * 3 + [0.0] * 3)[:: 1 if rank == 0 else -1]
    # one buffer serves both; what makes it known to all ranks is not in order on the streams of collectives
    assert memory.log == ["empty 6", *["synchronize"] * 3, *["barrier"] * 4]


def test_nccl_gathers_into_symmetric_memory_that_its_ranks_have_met_in(monkeypatch):
    memory = _Memory()
    log = memory.log
    monkeypatch.setattr(memory, "rendezvous", lambda tensor, group: log.append(f"rendezvous in {group}"))
    monkeypatch.setattr(communicators.backend, "symmetric_memory", lambda: memory)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: log.append("synchronize"))
    monkeypatch.setattr(communicators.dist, "barrier", lambda group, device_ids: log.append("barrier"))
    monkeypatch.setattr(communicators.backend, "all_gather", lambda out, packed, group: log.append("all-gather"))
    gather = communicators.symmetric_all_gather(torch.device("cuda"), "NCCL", ("0",))
    for _ in range(2):
        out = gather.allocate([6], dtype=torch.float32, device=torch.device("cpu"))
        gather(out, torch.ones(3), SimpleNamespace(group_name="0"))
    assert log == ["NCCL", "empty 6", "synchronize", "barrier", "rendezvous in 0", "all-gather", "all-gather"]


def test_what_a_cpu_is_told(fake_group):
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="symmetric memory: expected GPUs, got cpu"):
        model.set_symm_mem_for_comm()
    with pytest.raises(ValueError, match="backend: expected 'NCCL' or 'CUDA', got 'MPI'"):
        model.set_symm_mem_for_comm("MPI")
    with pytest.raises(RuntimeError, match="expected a backend that allocates tensors on cpu, as NCCL does"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(TypeError, match="enable: expected True or False, got 1"):
        model.set_allocate_memory_from_process_group_for_comm(1)
    model.set_allocate_memory_from_process_group_for_comm(False)
    assert model._get_fsdp_state().unit.config.all_gather_comm == ""
