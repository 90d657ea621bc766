"""The switch that makes torch.distributed.fsdp.fully_shard ours."""

from __future__ import annotations

import importlib
import pickle
import sys
from copy import deepcopy
from threading import Barrier, Thread
from types import ModuleType

import pytest
import torch.distributed._composable.fsdp as composable
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import fsdp_compiled
from fsdp_compiled import as_torch_fsdp, disable, enable

TORCHS = torch_fsdp.fully_shard
PLACES = (torch_fsdp, composable)


@pytest.fixture(autouse=True)
def _torchs_again(fake_group):
    yield
    assert all(place.fully_shard is TORCHS for place in PLACES)


def _is_ours(shard):
    module = shard(nn.Linear(4, 4))
    assert isinstance(module, torch_fsdp.FSDPModule)
    return isinstance(module, fsdp_compiled.FSDPModule)


def test_within_a_block():
    with as_torch_fsdp():
        assert all(_is_ours(place.fully_shard) for place in PLACES)
        kept = importlib.import_module("torch.distributed.fsdp").fully_shard
        model = kept(nn.Linear(4, 4), mp_policy=torch_fsdp.MixedPrecisionPolicy(), reshard_after_forward=False)
        assert torch_fsdp.fully_shard.state(model) is model._get_fsdp_state()
        assert pickle.loads(pickle.dumps(kept)) is deepcopy(kept) is kept
    assert not _is_ours(torch_fsdp.fully_shard)
    assert not _is_ours(kept)  # which a library may have kept from inside
    assert not _is_ours(TORCHS)


def test_libraries_that_have_imported_it_before(monkeypatch):
    imported, another = ModuleType("a_library"), ModuleType("another")
    imported.fully_shard, another.fully_shard = TORCHS, nn.Linear
    for module in (imported, another):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for _ in range(2):
        with as_torch_fsdp():
            assert _is_ours(imported.fully_shard)
        assert imported.fully_shard is TORCHS
    assert another.fully_shard is nn.Linear


class _Guarded(ModuleType):
    """Refuses what loads it, as a module does that waits for its first use and lacks what it needs."""

    def __getattribute__(self, name):
        raise ImportError(name)

    def __setattr__(self, name, value):
        raise TypeError(name)


def test_modules_that_refuse_access_are_not_touched(monkeypatch):
    guarded = _Guarded("guarded")
    object.__getattribute__(guarded, "__dict__")["fully_shard"] = TORCHS
    monkeypatch.setitem(sys.modules, "guarded", guarded)
    monkeypatch.setitem(sys.modules, "no_module", None)
    with as_torch_fsdp():
        assert _is_ours(object.__getattribute__(guarded, "__dict__")["fully_shard"])
    assert object.__getattribute__(guarded, "__dict__")["fully_shard"] is TORCHS


def test_a_library_that_imports_it_inside(monkeypatch):
    imported = ModuleType("a_library")
    monkeypatch.setitem(sys.modules, "a_library", imported)
    with as_torch_fsdp():
        imported.fully_shard = torch_fsdp.fully_shard
    assert imported.fully_shard is TORCHS
    with as_torch_fsdp():
        assert _is_ours(imported.fully_shard)


def test_nested_blocks_and_errors():
    with as_torch_fsdp():
        with pytest.raises(KeyError), as_torch_fsdp():
            assert _is_ours(torch_fsdp.fully_shard)
            raise KeyError
        assert _is_ours(torch_fsdp.fully_shard)
    assert not _is_ours(torch_fsdp.fully_shard)


def test_as_decorator():
    @as_torch_fsdp()
    def train():
        return _is_ours(torch_fsdp.fully_shard)

    assert train() and train()


def test_enable_until_disable():
    disable()
    enable()
    enable()
    try:
        with as_torch_fsdp():
            disable()
            assert _is_ours(torch_fsdp.fully_shard)
        assert torch_fsdp.fully_shard is TORCHS
        enable()
        with as_torch_fsdp():
            pass
        assert _is_ours(torch_fsdp.fully_shard)
    finally:
        disable()


def test_a_block_counts_for_its_thread_and_enable_for_all():
    both_inside, found = Barrier(2), []

    def other():
        found.append(_is_ours(torch_fsdp.fully_shard))
        both_inside.wait()

    def run():
        thread = Thread(target=other)
        thread.start()
        both_inside.wait()
        thread.join()

    with as_torch_fsdp():
        run()
        enable()
        run()
        disable()
    assert found == [False, True]


def test_many_threads_leave_torchs_name():
    def work():
        for _ in range(200):
            with as_torch_fsdp():
                assert torch_fsdp.fully_shard is not TORCHS

    threads = [Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_what_someone_else_put_there_is_left_alone():
    def other(*args, **kwargs):
        return TORCHS(*args, **kwargs)

    with as_torch_fsdp():
        torch_fsdp.fully_shard = other
    try:
        assert torch_fsdp.fully_shard is other
    finally:
        torch_fsdp.fully_shard = TORCHS


def test_what_wraps_ours_is_pytorchs_again_after_disable():
    enable()
    ours = torch_fsdp.fully_shard

    def wrapper(*args, **kwargs):
        return ours(*args, **kwargs)

    torch_fsdp.fully_shard = wrapper
    try:
        assert _is_ours(torch_fsdp.fully_shard)
        disable()
        assert torch_fsdp.fully_shard is wrapper and not _is_ours(wrapper)
    finally:
        disable()
        torch_fsdp.fully_shard = TORCHS


def test_what_a_block_left_follows_enable():
    with as_torch_fsdp():
        kept = torch_fsdp.fully_shard
    enable()
    assert _is_ours(kept)
    disable()
    assert not _is_ours(kept)
