from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from fsdp_compiled.hooks.forward import cast_floating, map_tensors, tensors_in

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    value: torch.Tensor
    label: str = "kept"


@dataclass
class Late:
    value: torch.Tensor
    derived: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.derived = self.value * 2


@dataclass(init=False)
class Given:
    value: torch.Tensor

    def __init__(self, values: list[torch.Tensor]) -> None:
        self.value = values[0]


class Items(list):
    pass


def _leaf():
    return torch.ones(2)


@pytest.mark.parametrize(
    "value",
    [
        (_leaf(), [_leaf()]),
        Pair(_leaf(), {"deep": _leaf()}),
        OrderedDict(a=_leaf(), b=(_leaf(),)),
        Record(_leaf()),
        Late(_leaf()),
        Given([_leaf()]),
        torch.max(torch.ones(2, 2), 1),
        Items([_leaf()]),
    ],
)
def test_containers_keep_their_type_and_cast_their_tensors(value):
    changed = cast_floating(value, torch.bfloat16)
    assert type(changed) is type(value)
    assert {tensor.dtype for tensor in tensors_in(changed)} - {torch.int64} == {torch.bfloat16}
    assert {tensor.dtype for tensor in tensors_in(value)} - {torch.int64} == {torch.float32}
    assert len(tensors_in(changed)) == len(tensors_in(value))


def test_what_is_left_alone():
    marker = object()
    integers, text, other = cast_floating((torch.ones(2, dtype=torch.int64), "text", marker), torch.bfloat16)
    assert (integers.dtype, text, other) == (torch.int64, "text", marker)


@pytest.mark.parametrize("value", [[], [_leaf()], {"a": _leaf()}, Record(_leaf()), Given([_leaf()]), Items()])
def test_a_container_in_which_nothing_changes_is_itself(value):
    assert cast_floating(value, torch.float32) is value
    assert cast_floating([value, _leaf().double()], torch.float32)[0] is value


def test_a_packed_sequence_keeps_its_batch_sizes_on_the_cpu():
    packed = pack_sequence([torch.ones(2, 3), torch.ones(4, 3)], enforce_sorted=False)
    moved = cast_floating(packed, torch.bfloat16, torch.device("meta"))
    assert type(moved) is PackedSequence
    assert (moved.data.dtype, moved.data.device.type) == (torch.bfloat16, "meta")
    assert moved.sorted_indices.is_meta and moved.unsorted_indices.is_meta
    assert moved.batch_sizes is packed.batch_sizes
    assert cast_floating(packed, torch.float32) is packed


def test_what_refers_to_itself():
    record = Record(_leaf())
    record.label = [record, {"tensor": _leaf()}]
    assert cast_floating(record, torch.float32) is record
    assert len(tensors_in(record)) == 2
    changed = cast_floating(record, torch.bfloat16)
    assert changed.value.dtype == changed.label[1]["tensor"].dtype == torch.bfloat16
    assert changed.label[0] is record


def test_hugging_face_outputs_are_cast():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    out = outputs.CausalLMOutput(logits=_leaf())
    cast = cast_floating(out, torch.bfloat16)
    assert type(cast) is outputs.CausalLMOutput
    assert cast.logits.dtype == cast["logits"].dtype == torch.bfloat16


def test_the_order_of_finding_is_the_order_of_changing():
    tensors = [torch.tensor(float(i)) for i in range(3)]
    value = {"a": tensors[0], "b": Pair(tensors[1], [tensors[2]])}
    changed = map_tensors(lambda t: t + 1, value)
    assert [t.item() for t in tensors_in(changed)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("value", [Record(_leaf()), Pair(_leaf(), [_leaf()]), {"a": (_leaf(),)}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dynamo_traces_what_changes_and_what_does_not(value, dtype):
    @torch.compile(backend="eager", fullgraph=True)
    def call(x):
        changed = cast_floating(value, dtype)
        return [tensor * x for tensor in tensors_in(changed)]

    assert {tensor.dtype for tensor in call(torch.ones((), dtype=dtype))} == {dtype}


@pytest.mark.parametrize("other", [None, "text", 3, True])
def test_dynamo_traces_what_is_left_alone(other):
    @torch.compile(backend="eager", fullgraph=True)
    def call(x):
        return cast_floating(Record(x * 2, other), torch.bfloat16)

    changed = call(_leaf())
    assert changed.value.dtype == torch.bfloat16 and changed.label == other


def test_dicts_within_dicts_in_a_graph():
    cast = torch.compile(lambda value: cast_floating(value, torch.bfloat16), fullgraph=True, backend="eager")
    assert cast({"a": {"b": torch.ones(2)}})["a"]["b"].dtype == torch.bfloat16
