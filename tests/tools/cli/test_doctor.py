"""What is said about machines that are not this one; and that this one can be read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._inductor import config, custom_graph_pass

from fsdp_compiled import passes
from fsdp_compiled.cli.doctor import (
    RULES,
    Finding,
    FoundGpu,
    diagnose,
    judge_backends,
    judge_compiler,
    judge_gpus,
    judge_settings,
    judge_slot,
    judge_threads,
    judge_torch,
    judge_triton,
    read_settings,
)
from fsdp_compiled.passes.cost import CLUSTERS, as_text

H200 = FoundGpu("NVIDIA H200", 150_000_000_000, "H200")
SETTING = "torch._inductor.config"
RESHARD = passes.slots(passes.SchedulePolicy())["joint_custom_pre_pass"]


def _only(found, level, subject, text):
    (found,) = [found] if isinstance(found, Finding) else found
    assert (found.level, found.subject) == (level, subject)
    assert text in found.text


def test_a_good_machine():
    findings = [
        judge_torch("2.13.0+cpu"),
        judge_triton("3.7.1", has_gpus=False),
        judge_compiler("/usr/bin/g++", has_python_headers=True),
        *judge_gpus([], built_for=None),
        judge_backends(["gloo"], has_gpus=False),
        judge_threads(threads=1, cpus=8, omp_threads="1", ranks=None),
        *judge_settings({f"{SETTING}.bucket_all_gathers_fx": "none", f"{SETTING}.fx_graph_cache": True}),
    ]
    assert {found.level for found in findings} == {"ok"}
    assert judge_slot("joint_custom_pre_pass", RESHARD) == (
        "ok",
        "joint_custom_pre_pass",
        "Expand, Unalias, MakePicklable, Reshard",
    )


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0.dev20260101", "1.13.0", "3.0.0"])
def test_versions_of_torch_that_are_not_supported(version):
    text = f"expected 2.11 to 2.15, got {version}; pip install 'torch>=2.11,<2.16'"
    _only(judge_torch(version), "problem", "torch", text)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.15.0a0+git1234567", "2.15.1rc2"])
def test_versions_of_torch_that_are(version):
    assert judge_torch(version).level == "ok"


def test_triton_matters_on_gpus():
    _only(judge_triton(None, has_gpus=False), "note", "triton", "missing; needed to compile for GPUs only")
    _only(judge_triton(None, has_gpus=True), "problem", "triton", "Inductor cannot compile")


def test_compilers():
    _only(judge_compiler(None, True), "problem", "C++ compiler", "without a C++ compiler (install g++")
    _only(judge_compiler("/usr/bin/g++", False), "problem", "C++ compiler", "without Python.h (install")


def test_backends():
    text = "expected gloo for collectives on the CPU, found none"
    _only(judge_backends([], has_gpus=False), "problem", "distributed", text)
    text = "expected nccl for collectives on GPUs, found gloo"
    _only(judge_backends(["gloo"], has_gpus=True), "problem", "distributed", text)


def test_gpus():
    _only(judge_gpus([], "cuda"), "note", "GPU", "torch is built for cuda, so check the driver")
    assert {found.level for found in judge_gpus([H200, H200], "cuda")} == {"ok"}
    other = FoundGpu("NVIDIA L4", 24_000_000_000, "H100")
    _only(judge_gpus([other], "cuda"), "note", "GPU 0", "cluster H100, which it is not: describe yours with")
    assert [found.level for found in judge_gpus([other._replace(cluster="H100, calibrated")], "cuda")] == ["ok"]
    mixed = judge_gpus([H200, H200._replace(name="NVIDIA H100", cluster="H100")], "cuda")
    assert [(found.level, found.subject) for found in mixed if found.level != "ok"] == [("problem", "GPUs")]


def test_threads():
    too_many = "too many for 4 ranks here; set OMP_NUM_THREADS=2"
    _only(judge_threads(8, 8, "1", 4), "note", "threads", too_many)
    _only(judge_threads(1, 8, "1", 16), "note", "threads", "16 ranks here take turns on them")
    _only(judge_threads(8, 8, None, None), "note", "threads", "torchrun sets 1")
    assert judge_threads(8, 8, "8", None).level == "ok"


def test_matplotlib(monkeypatch):
    monkeypatch.setattr("fsdp_compiled.cli.doctor._version", lambda package: None)
    found = {finding.subject: finding for finding in diagnose()}
    _only(found["matplotlib"], "note", "matplotlib", "missing: a capture cannot be saved as .png")


def test_a_users_pass():
    mine, name = UserPass(), "joint_custom_pre_pass"
    assert judge_slot(name, (RESHARD, mine)) == Finding(
        "ok", name, "Expand, Unalias, MakePicklable, Reshard; after ours: UserPass"
    )
    ours = "Expand, Unalias, MakePicklable, Reshard"
    text = f"{ours}; after ours: UserPass, print; print without uuid(): graphs are not cached"
    _only(judge_slot(name, [RESHARD, mine, print]), "note", name, text)
    _only(
        judge_slot(name, RESHARD, False),
        "ok",
        name,
        "empty until the first fully_shard adds Expand, Unalias, MakePicklable, Reshard",
    )


def test_settings():
    bad = {
        f"{SETTING}.bucket_all_gathers_fx": "all",
        f"{SETTING}.aten_distributed_optimizations.enable_overlap_scheduling": True,
        f"{SETTING}.force_disable_caches": True,
        f"{SETTING}.use_post_grad_passes": False,
    }
    assert [(found.level, found.text.split(":")[0]) for found in judge_settings(bad)] == [
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


def test_every_setting_exists_and_has_its_good_value_by_default(monkeypatch):
    settings = read_settings()
    assert list(settings) == [rule.setting for rule in RULES]
    assert not [rule for rule in RULES if rule.is_broken(settings[rule.setting])]
    unknown = RULES[0]._replace(setting="torch._inductor.config.of_another_torch")
    monkeypatch.setattr("fsdp_compiled.cli.doctor.RULES", (unknown,))
    assert read_settings() == {}


def test_this_machine():
    found = {finding.subject: finding for finding in diagnose()}
    assert found["torch"].text.startswith(torch.__version__)
    assert found["threads"].text.startswith(f"{torch.get_num_threads()} in each process on ")
    assert "gloo" in found["distributed"].text
    assert found["C++ compiler"].level == "ok"


def test_the_cluster_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    (tmp_path / "cluster.json").write_text(as_text(replace(CLUSTERS["CPU"], name="CPU, calibrated")))
    monkeypatch.setenv("FSDP_COMPILED_CLUSTER", str(tmp_path / "cluster.json"))
    _only([found for found in diagnose() if found.subject == "GPU"], "ok", "GPU", "for cluster CPU, calibrated")
    monkeypatch.setenv("FSDP_COMPILED_CLUSTER", "V100")
    with pytest.raises(ValueError, match="FSDP_COMPILED_CLUSTER: cluster: expected H100"):
        diagnose()


def _slots(names):
    found = {finding.subject: finding for finding in diagnose()}
    return [(found[name].level, found[name].text) for name in names]


def test_slots_of_this_process():
    names = list(passes.slots(passes.SchedulePolicy()))
    with config.patch(dict.fromkeys(names)):
        assert all(text.startswith("empty until") for _, text in _slots(names))
        setattr(config, names[1], UserPass())
        passes.install()
        slots = _slots(names)
    assert slots == [
        ("ok", "Expand, Unalias, MakePicklable, Reshard"),
        ("ok", "Normalize, Schedule, Agree; after ours: UserPass"),
        ("ok", "Pin"),
    ]
    with config.patch({names[0]: print}):
        assert "; after ours: print; print without uuid()" in _slots(names)[0][1]
