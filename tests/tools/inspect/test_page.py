"""What a capture's page says first, how it compares two captures, and the scale of its memory curve."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compiled import SchedulePolicy, fully_shard
from fsdp_compiled.inspect import capture
from fsdp_compiled.inspect.records import MemoryStep, Verdict
from fsdp_compiled.inspect.render.drawing import CURVE, HEADROOM, Box, Label, Line, draw
from fsdp_compiled.inspect.render.figures import headline, side_by_side
from fsdp_compiled.passes import CLUSTERS
from fsdp_compiled.testing.llama import Config, Llama
from tests.tools.inspect.test_report import MIB, _backward, _capture, _forward, _graph

PAIR = (_capture(_forward(), _backward()), _capture(_forward(), schedule=SchedulePolicy(bucket="unit")))


# ---- headline ----


def test_the_headline_says_how_long_a_step_takes_and_waits():
    said = "Forward and backward take 13.4 ms by estimate, of which compute waits 600 µs (4.5%) for collectives."
    assert headline(PAIR[0]).startswith(said)
    assert headline(_capture(_forward())).startswith("Forward takes 12.3 ms by estimate")
    assert headline(_capture()) == ""


def test_the_headline_advises_against_what_costs_most():
    forward, backward = _forward(), _backward()
    (late, *others) = backward.collectives
    for verdict in Verdict:
        worst = replace(late, exposed_us=10_000.0, verdict=verdict)
        costly = replace(backward, collectives=(worst, *others))
        assert headline(_capture(forward, costly)).endswith(f"To try: {verdict.trial}.")


def test_there_is_nothing_to_try_where_little_is_exposed():
    hidden = replace(_forward(), collectives=_forward().collectives[1:])
    assert headline(_capture(hidden)).endswith("To try: nothing: 0.0% of the step is too little to gain.")


@pytest.fixture
def ranks_64():
    dist.init_process_group("fake", rank=0, world_size=64)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("ranks_64")
def test_every_verdict_of_a_real_schedule_has_its_advice():
    found = set()
    for schedule in (SchedulePolicy(bucket="none", in_flight_bytes=5000), SchedulePolicy(bucket="unit")):
        for cluster in ("CPU", "H100"):
            model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
            for layer in model:
                fully_shard(layer)
            policy = replace(schedule, cluster=CLUSTERS[cluster])
            captured = capture(fully_shard(model), torch.ones(2, 16), schedule=policy, code=False)
            found |= {collective.verdict for graph in captured.graphs for collective in graph.collectives}
    assert len(found - {Verdict.HIDDEN}) > 2
    assert found <= set(Verdict)
    assert all(verdict.trial for verdict in Verdict)


def test_the_page_opens_with_the_headline(tmp_path):
    page = PAIR[0].save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.index(headline(PAIR[0])) < page.index("<h2>")
    assert "No graph was compiled." in _capture().save(tmp_path / "none.html").read_text(encoding="utf-8")


# ---- two captures ----


def test_two_captures_are_named_by_what_tells_them_apart():
    names, rows = side_by_side(PAIR)
    assert names == ["bucket auto, in flight 64 MiB", "bucket unit, in flight auto"]
    assert rows[1] == {"figure": "exposed", names[0]: "600 µs (4.5%)", names[1]: "500 µs (4.1%)"}
    assert side_by_side([PAIR[0], PAIR[0]])[0] == ["capture 1", "capture 2"]
    assert side_by_side([PAIR[0], replace(PAIR[0], world=8)])[0] == ["ranks 4", "ranks 8"]


def test_a_page_compares_two_captures_on_one_time_axis(tmp_path):
    slow = replace(_forward(), compute=(replace(_forward().compute[0], end_us=24_600.0),))
    other = _capture(slow, _backward(), schedule=SchedulePolicy(bucket="unit"))
    page = PAIR[0].save(tmp_path / "page.html", beside=other).read_text(encoding="utf-8")
    comparison, _, rest = page.partition("</section>")
    assert "Side by side" in comparison and "<td class='figure'>peak unsharded</td>" in comparison
    drawings = re.findall(r'aria-label="Timeline of the (.*?)"(.*?)</svg>', comparison, re.DOTALL)
    assert [title for title, _ in drawings] == [
        f"{kind} graph, {name}" for kind in ("forward", "backward") for name in side_by_side([PAIR[0], other])[0]
    ]
    # In the first drawing, time ends with the second's: its last compute ends half way.
    ends = [
        max(float(x) + float(width) for x, width in re.findall(r'class="compute" x="(\S+)" y="\S+" width="(\S+)"', d))
        for _, d in drawings[:2]
    ]
    assert ends[0] == pytest.approx(ends[1] / 2, rel=0.01)
    assert rest.count("Graph after the passes") == 4
    ids = re.findall(r"id='([^']+)'", page)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("suffix", [".json", ".png", ".trace.json"])
def test_only_a_page_compares(tmp_path, suffix):
    with pytest.raises(ValueError, match="captures and runs are compared in an .html file"):
        PAIR[0].save(tmp_path / f"file{suffix}", beside=PAIR[1])


# ---- the memory curve ----


def _memory_of(graph):
    shapes = draw(graph).shapes
    heights = [shape.height for shape in shapes if isinstance(shape, Box) and shape.kind == "memory"]
    return max(heights), [shape for shape in shapes if isinstance(shape, Line) and shape.kind == "bound"], shapes


def test_a_bound_near_the_peak_is_drawn():
    graph = _graph(memory=[MemoryStep(0, 40 * MIB), MemoryStep(1, 0)])  # of 64 MiB
    height, bounds, _ = _memory_of(graph)
    assert len(bounds) == 1
    assert height == pytest.approx(CURVE / HEADROOM * 40 / 64)


def test_a_distant_bound_does_not_flatten_the_curve():
    graph = _graph(memory=[MemoryStep(0, MIB), MemoryStep(1, 0)])
    height, bounds, shapes = _memory_of(graph)
    assert not bounds
    assert height == pytest.approx(CURVE / HEADROOM)
    assert any(isinstance(shape, Label) and shape.text == "bound 64 MiB" for shape in shapes)


# ---- without code ----


@pytest.mark.usefixtures("ranks_64")
def test_a_model_that_this_machine_could_not_run_is_captured_without_code():
    with torch.device("meta"):
        model = Llama(Config(vocab=128_256, width=4096, layers=1, heads=32, kv_heads=8, hidden=14_336, max_seq=8192))
    fully_shard(model.blocks[0])
    fully_shard(model)
    model.to_empty(device="cpu")
    tokens = torch.zeros(1, 8192, dtype=torch.int64)
    captured = capture(model, tokens, tokens, schedule=SchedulePolicy(cluster=CLUSTERS["H100"]), code=False)
    forward, backward = captured.graphs
    assert sum(each.bytes for each in forward.collectives) == 4 * captured.parameters
    assert {each.kind for each in backward.collectives} == {"all_gather", "reduce_scatter"}
    assert forward.code == backward.code == ""
    assert all(param.grad is None for param in model.parameters())
