"""What a compilation leaves beside torch's own trace of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
import torch
from torch import nn
from torch._logging import _internal as torch_logging
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compiled import fully_shard
from tests.unit.passes.test_log import three_layers, without_code


@pytest.fixture
def trace(monkeypatch, tmp_path):
    """The folder that TORCH_TRACE would name, while torch writes there."""
    handler = torch_logging.LazyTraceHandler(str(tmp_path))
    handler.setFormatter(torch_logging.TorchLogsFormatter(trace=True))
    monkeypatch.setattr(torch_logging, "LOG_TRACE_HANDLER", handler)
    torch_logging.trace_log.addHandler(handler)
    yield tmp_path
    torch_logging.trace_log.removeHandler(handler)
    handler.close()


def written(folder):
    """Each record of ours, with its payload: torch writes a line for a record and indents what it carries."""
    found = []
    (log,) = folder.glob("*.log")
    for line in log.read_text().splitlines():
        if line.startswith("V"):
            found.append((json.loads(line[line.index("{") :]), []))
        else:
            found[-1][1].append(line.removeprefix("\t"))
    ours = [(record, "\n".join(payload)) for record, payload in found if "fsdp_compiled_" in json.dumps(record)]
    return [each for each in ours if {"artifact", "link"} & set(each[0])]


@pytest.mark.usefixtures("fake_group")
def test_a_trace_has_each_schedule_as_data_as_a_table_and_as_a_page(trace):
    torch._dynamo.reset()
    torch.compile(three_layers(), backend=without_code, fullgraph=True)(torch.ones(2, 4)).sum().backward()
    records = written(trace)
    names = [(*(record.get("artifact") or record["link"]).values(),)[:2] for record, _ in records]
    pages = {
        kind: (trace / "fsdp_compiled" / f"{kind}_rank_0_0_0.html").resolve() for kind in ("forward", "backward")
    }
    assert names == [
        each
        for kind, page in pages.items()
        for each in (
            (f"fsdp_compiled_{kind}", "json"),
            (f"fsdp_compiled_{kind}", "string"),
            (f"fsdp_compiled_{kind}.html", page.as_uri()),
        )
    ]
    data, table = json.loads(records[3][1]), records[4][1]
    assert [each["kind"] for each in data["collectives"]] == ["all_gather", "reduce_scatter"]
    assert data["collectives"][0]["params"] == ["2.weight", "1.weight"]
    assert (data["model"], data["world"], data["bound_bytes"]) == ("Sequential", 4, 64 * 2**20)
    assert table.startswith("Sequential: 48 parameters on 4 ranks") and "reduce-scatter" in table
    for record, _ in records[2::3]:
        page = Path(unquote(urlparse(record["link"]["url"]).path)).read_text()
        assert "Graph after the passes" in page and "Graph before the passes" not in page


@pytest.mark.usefixtures("fake_group")
def test_a_schedule_of_hybrid_sharding_is_one_of_all_its_ranks(trace):
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh)
    torch.compile(model, backend=without_code, fullgraph=True)(torch.ones(2, 4)).sum().backward()
    assert [json.loads(text)["world"] for _, text in written(trace)[::3]] == [4, 4]


@pytest.mark.usefixtures("fake_group")
def test_a_page_that_cannot_be_written_does_not_stop_a_compilation(trace, caplog):
    (trace / "fsdp_compiled").write_text("in the way")
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "fsdp_compiled"):
        torch.compile(three_layers(), backend=without_code, fullgraph=True)(torch.ones(2, 4))
    assert "the page of a schedule was not written" in caplog.text
    assert [next(iter(record)) for record, _ in written(trace)] == ["artifact", "artifact"]
