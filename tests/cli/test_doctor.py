"""What is said about machines that are not this one; and that this one can be read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._inductor import config, custom_graph_pass

from fsdp_compiled import passes
from fsdp_compiled.cli.doctor import RULES, Finding, diagnose
from fsdp_compiled.cli.machine import Gpu, Machine, Slot, look

H200 = Gpu("NVIDIA H200", 150_000_000_000, "H200")
SETTING = "torch._inductor.config"
MACHINE = Machine(
    package="0.1.0 in /here",
    python="3.11.7",
    torch="2.13.0+cpu",
    triton="3.7.1",
    matplotlib="3.11.2",
    compiler="/usr/bin/g++",
    python_headers=True,
    cuda_build=None,
    backends=("gloo",),
    gpus=(),
    cpus=8,
    threads=1,
    omp_num_threads="1",
    ranks_here=None,
    slots=(Slot("joint_custom_pre_pass", ("Reshard",), installed=True),),
    settings={f"{SETTING}.bucket_all_gathers_fx": "none", f"{SETTING}.fx_graph_cache": True},
)


def _unusual(**changes):
    """What is not ok about a machine that differs from a good one."""
    return [found for found in diagnose(replace(MACHINE, **changes)) if found.level != "ok"]


def _only(level, subject, text, **changes):
    (found,) = _unusual(**changes)
    assert (found.level, found.subject) == (level, subject)
    assert text in found.text


def test_a_good_machine():
    assert _unusual() == []
    assert Finding("ok", "joint_custom_pre_pass", "Reshard") in diagnose(MACHINE)


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0.dev20260101", "1.13.0", "3.0.0"])
def test_versions_of_torch_that_are_not_supported(version):
    _only("problem", "torch", f"expected 2.11 to 2.15, got {version}; pip install 'torch>=2.11,<2.16'", torch=version)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.15.0a0+git1234567", "2.15.1rc2"])
def test_versions_of_torch_that_are(version):
    assert _unusual(torch=version) == []


def test_python():
    _only("problem", "Python", "expected 3.11 or later, got 3.10.9", python="3.10.9")


def test_triton_matters_on_gpus():
    _only("note", "triton", "missing; needed to compile for GPUs only", triton=None)
    _only("problem", "triton", "Inductor cannot compile", triton=None, gpus=(H200,), backends=("nccl",))


def test_compilers():
    _only("problem", "C++ compiler", "without a C++ compiler (install g++", compiler=None)
    _only("problem", "C++ compiler", "without Python.h (install", python_headers=False)


def test_backends():
    _only("problem", "distributed", "expected gloo for collectives on the CPU, found none", backends=())
    _only("problem", "distributed", "expected nccl for collectives on GPUs, found gloo", gpus=(H200,))


def test_gpus():
    _only("note", "GPU", "torch is built for CUDA 13.0, so check the driver", cuda_build="13.0")
    with_nccl = {"backends": ("gloo", "nccl"), "cuda_build": "13.0"}
    assert _unusual(gpus=(H200, H200), **with_nccl) == []
    other = Gpu("NVIDIA L4", 24_000_000_000, "H100")
    _only("note", "GPU 0", "cluster H100, which it is not: describe yours with", gpus=(other,), **with_nccl)
    mixed = _unusual(gpus=(H200, replace(H200, name="NVIDIA H100", cluster="H100")), **with_nccl)
    assert [(found.level, found.subject) for found in mixed] == [("problem", "GPUs")]


def test_threads():
    _only("note", "threads", "too many for 4 ranks here; set OMP_NUM_THREADS=2", threads=8, ranks_here=4)
    _only("note", "threads", "16 ranks here take turns on them", ranks_here=16)
    _only("note", "threads", "torchrun sets 1", threads=8, omp_num_threads=None)
    assert _unusual(threads=8, omp_num_threads="8") == []


def test_a_users_pass():
    slot = Slot("joint_custom_pre_pass", ("Reshard",), installed=True, users=(("Mine", True),))
    assert Finding("ok", slot.name, "Reshard; after ours: Mine") in diagnose(replace(MACHINE, slots=(slot,)))
    raw = replace(slot, users=(("Mine", True), ("fuse", False)))
    _only("note", slot.name, "fuse without uuid(): graphs are not cached", slots=(raw,))
    assert "empty until the first fully_shard adds Reshard" in str(
        diagnose(replace(MACHINE, slots=(replace(slot, installed=False),)))
    )


def test_settings():
    bad = {
        f"{SETTING}.bucket_all_gathers_fx": "all",
        f"{SETTING}.aten_distributed_optimizations.enable_overlap_scheduling": True,
        f"{SETTING}.force_disable_caches": True,
        f"{SETTING}.use_post_grad_passes": False,
    }
    assert [(found.level, found.text.split(":")[0]) for found in _unusual(settings=bad)] == [
        ("note", f"{SETTING}.bucket_all_gathers_fx='all'"),
        ("problem", f"{SETTING}.aten_distributed_optimizations.enable_overlap_scheduling=True"),
        ("problem", f"{SETTING}.use_post_grad_passes=False"),
        ("note", f"{SETTING}.force_disable_caches=True"),
    ]


# ---- this machine ----


class UserPass(custom_graph_pass.CustomGraphPass):
    def __call__(self, graph):
        pass

    def uuid(self):
        return "user"


def _look():
    return look(rule.setting for rule in RULES)


def test_every_setting_exists_and_has_its_good_value_by_default():
    machine = _look()
    assert list(machine.settings) == [rule.setting for rule in RULES]
    assert not [rule for rule in RULES if rule.is_bad(machine.settings[rule.setting])]


def test_this_machine():
    machine = _look()
    assert (machine.torch, machine.threads) == (torch.__version__, torch.get_num_threads())
    assert "gloo" in machine.backends
    assert machine.compiler
    assert machine.cpus >= 1
    assert look(["torch._inductor.config.no_such_setting"]).settings == {}


def test_slots_of_this_process():
    names = [slot.name for slot in _look().slots]
    with config.patch(dict.fromkeys(names)):
        assert not any(slot.installed for slot in _look().slots)
        setattr(config, names[1], UserPass())
        passes.install()
        slots = _look().slots
    assert all(slot.installed for slot in slots)
    assert slots[1].ours == ("Normalize", "Bucket", "Lower", "Reorder")
    assert [slot.users for slot in slots] == [(), (("UserPass", True),), ()]
    with config.patch({names[0]: print}):
        assert _look().slots[0].users == (("print", False),)
