"""What the logger ``fsdp_compiled`` says of a compilation, on which rank, and how torch's settings reach it."""

from __future__ import annotations

import logging
import re
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.compile_fx import compile_fx

from fsdp_compiled import fully_shard
from tests.support.graphs import after_inductors_passes

LOG = "fsdp_compiled"


def without_code(gm, inputs, **_):
    """Inductor with its passes and the installed ones, but for code and for what torch 2.11 cannot run without it."""
    patches = {"force_disable_caches": True, "post_grad_custom_post_pass": None}
    return compile_fx(gm, inputs, inner_compile=after_inductors_passes, config_patches=patches)


def three_layers():
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    return fully_shard(model)


def lines(caplog):
    """What was logged, without seconds."""
    said = [record.getMessage() for record in caplog.records if record.name == LOG]
    return [re.sub(r"\d+\.\d s", "S s", line) for line in said]


@pytest.fixture(params=[0, 1])
def rank(request):
    dist.init_process_group("fake", rank=request.param, world_size=4)
    yield request.param
    dist.destroy_process_group()


def test_each_phase_of_a_compilation_is_a_line_on_rank_0(rank, caplog):
    torch._dynamo.reset()
    model = three_layers()
    with caplog.at_level(logging.DEBUG, LOG):
        torch.compile(model, backend=without_code, fullgraph=True)(torch.ones(2, 4)).sum().backward()
    assert lines(caplog) == [
        "tracing",
        "tracing took S s",
        "partitioning into forward and backward took S s",
        "forward: scheduled 3 all-gathers in 1 bucket in S s; generating code",
        "forward: code generation took S s",
        "compilation took S s",
        "compiling backward",
        "backward: scheduled 2 all-gathers in 1 bucket, 3 reductions in 1 bucket in S s; generating code",
        "backward: code generation took S s",
        "compilation took S s",
    ]
    levels = {record.levelno for record in caplog.records if record.name == LOG}
    assert levels == {logging.DEBUG if rank else logging.INFO}


@pytest.mark.usefixtures("fake_group")
def test_a_compilation_without_collectives_says_so(caplog):
    torch._dynamo.reset()
    fully_shard(nn.Linear(4, 4))
    with caplog.at_level(logging.INFO, LOG):
        torch.compile(torch.sin, backend="eager")(torch.ones(2))
    why = "no graph was scheduled: it has no collectives or came from a compile cache"
    assert lines(caplog) == ["tracing", "tracing took S s", f"compilation took S s; {why}"]


def test_torchs_settings_of_logs_know_the_name(capfd):
    assert torch._logging._internal.log_registry.is_log(LOG)
    try:
        torch._logging.set_logs(modules={LOG: logging.INFO})
        logging.getLogger(LOG).info("a line")
        logging.getLogger(LOG).debug("of another rank")
        sys.stderr.flush()
    finally:
        torch._logging.set_logs()
    written = capfd.readouterr().err
    assert "a line" in written and "of another rank" not in written
