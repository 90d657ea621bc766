"""Estimates held against a trace: of a run on this CPU, and of traces made by hand, also of a GPU."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import fsdp_compiled
from fsdp_compiled import SchedulePolicy, fully_shard, step_on_shards
from fsdp_compiled.inspect import capture
from fsdp_compiled.inspect.records import Kernel
from fsdp_compiled.testing.llama import Config, Llama
from tests.tools.inspect.test_report import _capture, _collective, _graph

MADE = _capture(
    replace(
        _graph([_collective(0.0, 100.0, 60.0)]),
        kernels=(Kernel("aten::mm 4x8 8x2", 0, 50.0, "matrix products"), Kernel("add", 0, 5.0)),
    ),
    replace(
        _graph([_collective(10.0, 90.0, kind="reduce_scatter")], kind="backward"), kernels=(Kernel("mul", 0, 7.0),)
    ),
)


def _event(name, start, length, cat="cpu_op", tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": start, "dur": length, "args": args}


def _save(events, path):
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def _step(at, waited_us=70):
    """Return the events of a step of 1000 us on the CPU."""
    yield _event(f"ProfilerStep#{at}", at, 1000, "user_annotation")
    yield _event("FSDP::all_gather (a, b)", at + 10, 30, "user_annotation")
    yield _event("FSDP::all_gather_wait (a, b)", at + 50, 100, "user_annotation")
    yield _event("FSDP::all_gather_copy_out (a, b)", at + 120, 20, "user_annotation")
    yield _event("gloo:all_gather", at + 30, 110, "user_annotation", tid=2)
    yield _event("aten::mm", at + 200, 40, **{"Input Dims": [[4, 8], [8, 2], [4, 2]], "External id": at})
    yield _event("graph_0_cpp_fused_add_1", at + 300, 9)
    yield _event("FSDP::reduce_scatter (a, b)", at + 400, 50, "user_annotation", tid=3)
    yield _event("FSDP::gradient_copy_in (a, b)", at + 410, 10, "user_annotation", tid=3)
    yield _event("FSDP::reduce_scatter_wait (a, b)", at + 500, waited_us, "user_annotation", tid=3)
    yield _event("gloo:all_reduce", at + 450, 120, "user_annotation", tid=2)
    yield _event("gloo:barrier", at + 580, 10, "user_annotation", tid=2)
    yield _event("Optimizer.step#AdamW.step", at + 700, 200, "user_annotation")
    yield _event("aten::mm", at + 750, 15, **{"Input Dims": [[4, 8], [8, 2], [4, 2]]})


def _measured(compared):
    return {(line.part, line.name): line.measured_us for line in compared.lines}


def test_a_trace_of_a_cpu(tmp_path):
    compared = MADE.compare(_save([*_step(0), *_step(2000)], tmp_path / "trace.json"))
    assert compared.steps == 2
    assert (compared.step.estimate_us, compared.step.measured_us) == (MADE.step_us, 1000)
    assert _measured(compared) == {
        ("waits for collectives", "forward #0 all_gather"): 80,  # without the copy, which lies in the wait
        ("transfers", "forward #0 all_gather"): 110,
        ("waits for collectives", "backward #0 reduce_scatter"): 70,
        ("transfers", "backward #0 reduce_scatter"): 120,
        ("matrix products", "aten::mm 4x8 8x2"): 40,  # that of the optimizer is the optimizer's
        ("fused kernels", ""): 9,
    }
    assert {part.part: part.measured_us for part in compared.parts} == {
        "matrix products": 40,
        "attention": None,
        "fused kernels": 9,
        "waits for collectives": 150,
        "copies of buffers": 100,
        "optimizer": 200,
        "host": 501,
    }
    differences = [line.difference_us for line in compared.lines]
    assert differences == sorted(differences, reverse=True)
    assert differences[0] == 70  # the wait that was expected to be hidden


def test_what_compute_waits_for_is_the_mean_of_all_steps(tmp_path):
    compared = MADE.compare(_save([*_step(0), *_step(2000, waited_us=30)], tmp_path / "trace.json"))
    assert _measured(compared)["waits for collectives", "backward #0 reduce_scatter"] == 50


def test_a_trace_of_a_gpu(tmp_path):
    ours = (
        "FSDP::all_gather (a)",
        "FSDP::all_gather_wait (a)",
        "FSDP::reduce_scatter (a)",
        "FSDP::reduce_scatter_wait (a)",
    )
    host = [_event(name, 10 * at, 5, "user_annotation") for at, name in enumerate(ours, start=1)]
    host.append(_event("aten::mm", 60, 4, **{"Input Dims": [[4, 8], [8, 2]], "External id": 7}))
    host.append(_event("triton_poi_fused_add_0", 70, 4, **{"External id": 8}))
    host.append(_event("Optimizer.step#AdamW.step", 80, 9, "user_annotation"))
    host.append(_event("aten::_fused_adamw_", 81, 4, **{"External id": 9}))
    device = [
        _event("ncclDevKernel_AllGather_RING_LL", 100, 50, "kernel", tid="stream 2"),
        _event("sm90_gemm", 120, 60, "kernel", tid="stream 1", **{"External id": 7}),
        _event("triton_poi_fused_add_0", 190, 11, "kernel", tid="stream 1", **{"External id": 8}),
        _event("ncclDevKernel_ReduceScatter_RING_LL", 185, 40, "kernel", tid="stream 3"),
        _event("multi_tensor_apply", 300, 33, "kernel", tid="stream 1", **{"External id": 9}),
    ]
    path = _save([*host, *device], tmp_path / "trace.json")
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    compared = MADE.compare(tmp_path / "trace.json.gz")
    assert _measured(compared) == {
        ("waits for collectives", "forward #0 all_gather"): 20,  # until the product begins
        ("transfers", "forward #0 all_gather"): 50,
        ("waits for collectives", "backward #0 reduce_scatter"): 29,  # before the fused kernel, and after it
        ("transfers", "backward #0 reduce_scatter"): 40,
        ("matrix products", "aten::mm 4x8 8x2"): 60,
        ("fused kernels", ""): 11,
    }
    assert compared.step.measured_us == 323  # from the first event to the last
    assert {part.part: part.measured_us for part in compared.parts}["optimizer"] == 33


@pytest.mark.usefixtures("fake_group")
def test_a_run_on_this_cpu(tmp_path):
    torch.manual_seed(0)
    model = Llama(Config(width=64, layers=2, heads=2, kv_heads=1, hidden=96, max_seq=16))
    for block in model.blocks:
        fully_shard(block)
    policy = SchedulePolicy(bucket="unit")
    call = fsdp_compiled.compile(fully_shard(model), schedule=policy, fullgraph=True)
    optimizer = step_on_shards(torch.optim.AdamW(model.parameters()))
    batch = (torch.zeros(1, 16, dtype=torch.int64),) * 2

    def step():
        call(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as run:
        step()
        step()
    run.export_chrome_trace(str(tmp_path / "trace.json"))
    captured = capture(model, *batch, schedule=policy, code=False)
    compared = captured.compare(tmp_path / "trace.json")
    assert compared.steps == 2
    products = [line for line in compared.lines if line.part in ("matrix products", "attention")]
    assert products
    for line in products:
        assert line.estimate_us > 0, line
        assert line.measured_us > 0, line
        assert line.count == sum(k.name == line.name for graph in captured.graphs for k in graph.kernels), line
    waits = [line for line in compared.lines if line.part == "waits for collectives"]
    assert len(waits) == sum(len(graph.collectives) for graph in captured.graphs)
    assert all(line.measured_us > 0 for line in waits)
    parts = {part.part: part.measured_us for part in compared.parts}
    assert parts["optimizer"] > 0
    assert parts["copies of buffers"] > 0
    assert sum(us or 0 for us in parts.values()) == pytest.approx(compared.step.measured_us)
    with pytest.raises(ValueError, match="expected as captured, .*, got .*; give the trace of"):
        capture(model, *batch, schedule=SchedulePolicy(bucket="none"), code=False).compare(tmp_path / "trace.json")


def test_what_is_no_trace(tmp_path):
    (tmp_path / "text.json").write_text("{")
    for events in ([], [{"ph": "X"}], [_event("FSDP::all_gather (a)", 0, 1, "user_annotation")]):
        with pytest.raises(ValueError, match=r"trace\.json: expected events of operators, got none; profile with"):
            MADE.compare(_save(events, tmp_path / "trace.json"))
    for content in ("{", "[]", '{"traceEvents": 3}'):
        (tmp_path / "text.json").write_text(content)
        with pytest.raises(ValueError, match=r"text\.json: expected a trace by torch\.profiler, got another file"):
            MADE.compare(tmp_path / "text.json")
    (tmp_path / "text.json").write_bytes(gzip.compress(b"{}" * 100)[:-9])  # as a job leaves it that was killed
    with pytest.raises(ValueError, match=r"text\.json: expected a trace by torch\.profiler, got another file"):
        MADE.compare(tmp_path / "text.json")
    with pytest.raises(FileNotFoundError):
        MADE.compare(tmp_path / "none.json")


def test_how_it_is_shown(tmp_path):
    compared = MADE.compare(_save([*_step(0), *_step(2000)], tmp_path / "trace.json"))
    text = str(compared)
    assert text.startswith("one step, the mean of 2 steps of a run\n")
    assert re.search(r"^matrix products +50 µs +40 µs +\+25%$", text, re.MULTILINE)
    assert re.search(r"^matrix products +50 µs +40 µs +\+25% +1  aten::mm 4x8 8x2$", text, re.MULTILINE)
    page = MADE.save(tmp_path / "page.html", measured=compared).read_text()
    assert "aten::mm 4x8 8x2" in page
    assert "Estimated and measured" in page
    assert "Estimated and measured" not in MADE.save(tmp_path / "page.html").read_text()
    with pytest.raises(ValueError, match=r"page\.json: captures and runs are compared in an \.html file"):
        MADE.save(tmp_path / "page.json", measured=compared)
