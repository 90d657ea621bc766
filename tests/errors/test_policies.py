"""Policies and descriptions that are wrong when they are made."""

from __future__ import annotations

import pytest
import torch

from fsdp_compiled import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, SchedulePolicy
from fsdp_compiled.passes.cost import Cluster, Link

LINK = {"latency_us": 1.0, "hop_us": 1.0, "bytes_per_s": 1e9}
CLUSTER = {
    "name": "ours",
    "flops_16bit": 1e12,
    "flops_32bit": 1e12,
    "memory_bytes_per_s": 1e11,
    "kernel_us": 1.0,
    "intra": Link(**LINK),
    "inter": Link(**LINK),
}
BUCKET = "'auto' or 'unit' or 'none' or an integer of at least 1"


def _wrong(cls, field, value, error, expected, **others):
    name = f"{cls.__name__}.{field}"
    return pytest.param(cls, {**others, field: value}, error, f"{name}: expected {expected}", id=f"{name}={value!r}")


@pytest.mark.parametrize(
    ("cls", "fields", "error", "message"),
    [
        *(
            _wrong(MixedPrecisionPolicy, field, value, error, expected)
            for field in ("param_dtype", "reduce_dtype", "output_dtype")
            for value, error, expected in (
                (torch.int32, ValueError, "a floating-point dtype, got torch.int32; use for example torch.bfloat16"),
                ("bf16", TypeError, "torch.dtype or None, got 'bf16' of str; use for example torch.bfloat16"),
            )
        ),
        *(
            _wrong(MixedPrecisionPolicy, "cast_forward_inputs", value, TypeError, f"True or False, got {value!r} of")
            for value in (1, None)
        ),
        _wrong(MixedPrecisionPolicy, "param_dtype_override_fn", 3, TypeError, "a function or None, got 3"),
        *(
            _wrong(CPUOffloadPolicy, "pin_memory", value, TypeError, f"True or False, got {value!r} of")
            for value in (1, None)
        ),
        _wrong(SchedulePolicy, "bucket", "units", ValueError, f"{BUCKET}, got 'units'"),
        _wrong(SchedulePolicy, "bucket", 0, ValueError, f"{BUCKET}, got 0"),
        *(_wrong(SchedulePolicy, "bucket", value, TypeError, f"{BUCKET}, got {value!r} of") for value in (2.5, True)),
        _wrong(SchedulePolicy, "prefetch", "many", ValueError, "'auto' or an integer of at least 0, got 'many'"),
        _wrong(SchedulePolicy, "prefetch", -1, ValueError, "'auto' or an integer of at least 0, got -1"),
        _wrong(
            SchedulePolicy, "prefetch", None, TypeError, "'auto' or an integer of at least 0, got None of NoneType"
        ),
        _wrong(SchedulePolicy, "in_flight_bytes", "all", ValueError, "'auto' or an integer of at least 1, got 'all'"),
        _wrong(SchedulePolicy, "in_flight_bytes", 0, ValueError, "'auto' or an integer of at least 1, got 0"),
        _wrong(
            SchedulePolicy, "in_flight_bytes", 1e9, TypeError, "'auto' or an integer of at least 1, got 1000000000.0"
        ),
        _wrong(
            SchedulePolicy, "keep_unsharded_bytes", "all", ValueError, "'auto' or an integer of at least 0, got 'all'"
        ),
        _wrong(SchedulePolicy, "keep_unsharded_bytes", -1, ValueError, "'auto' or an integer of at least 0, got -1"),
        _wrong(
            SchedulePolicy,
            "keep_unsharded_bytes",
            None,
            TypeError,
            "'auto' or an integer of at least 0, got None of NoneType",
        ),
        _wrong(SchedulePolicy, "cluster", 8, TypeError, "a Cluster, a name, a file or None, got 8 of int"),
        *(
            _wrong(Link, field, value, error, f"{expected}, got {value!r}", **LINK)
            for field, expected in (
                ("latency_us", "0 or more"),
                ("hop_us", "0 or more"),
                ("bytes_per_s", "more than 0"),
                ("reduce_factor", "more than 0"),
            )
            for value, error in ((-1, ValueError), (float("nan"), ValueError), ("1", TypeError), (True, TypeError))
        ),
        _wrong(Link, "bytes_per_s", 0, ValueError, "more than 0, got 0", **LINK),
        _wrong(Link, "knee_bytes", 0.5, TypeError, "an integer, 0 or more, got 0.5", **LINK),
        *(
            _wrong(Cluster, field, value, error, f"more than 0, got {value!r}", **CLUSTER)
            for field in ("flops_16bit", "flops_32bit", "memory_bytes_per_s", "host_bytes_per_s")
            for value, error in ((0, ValueError), ("1", TypeError))
        ),
        _wrong(Cluster, "ranks_per_node", 1.5, TypeError, "an integer, more than 0, got 1.5", **CLUSTER),
        _wrong(Cluster, "ranks_per_node", 0, ValueError, "more than 0, got 0", **CLUSTER),
        _wrong(Cluster, "kernel_us", -1, ValueError, "0 or more, got -1", **CLUSTER),
        _wrong(Cluster, "piece_us", None, TypeError, "0 or more, got None", **CLUSTER),
        _wrong(Cluster, "compute_blocked_fraction", 1.5, ValueError, "0 to 1, got 1.5", **CLUSTER),
        *(
            _wrong(Cluster, field, 25e9, TypeError, "a Link, got 25000000000.0", **CLUSTER)
            for field in ("intra", "inter")
        ),
    ],
)
def test_fields(cls, fields, error, message):
    with pytest.raises(error) as raised:
        cls(**fields)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({}, ValueError, "dp_mesh_dims: at least one of shard and replicate must be given, got neither"),
        ({"shard": ()}, ValueError, "dp_mesh_dims: at least one of shard and replicate must be given, got neither"),
        ({"shard": 3}, TypeError, "dp_mesh_dims.shard: expected a name, a tuple of names or None, got 3"),
        ({"shard": ["a"]}, TypeError, "dp_mesh_dims.shard: expected a name, a tuple of names or None, got ['a']"),
        (
            {"replicate": ("a", 3)},
            TypeError,
            "dp_mesh_dims.replicate: expected a name, a tuple of names or None, got (",
        ),
        (
            {"shard": ("a", "b"), "replicate": "b"},
            ValueError,
            "dp_mesh_dims: expected each dimension once, got ['b'] for shard and replicate",
        ),
    ],
)
def test_data_parallel_dimensions(fields, error, message):
    with pytest.raises(error) as raised:
        DataParallelMeshDims(**fields)
    assert str(raised.value).startswith(message)
