"""The Triton copies, run by Triton's interpreter, against the plain torch ones, bit by bit.

The interpreter cuts fp32 to bf16 where a GPU rounds, so values are such that every dtype holds them exactly.
"""

import importlib.util
import re
import sys
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_compiled.collectives import reference
from fsdp_compiled.sharding.layout import ShardLayout, packed_layout

pytest.importorskip("triton")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@contextmanager
def _loaded(interpreted):
    """The module as a copy of its own, made while TRITON_INTERPRET is set or not."""
    spec = importlib.util.find_spec("fsdp_compiled.collectives.kernels")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def kernels():
    with _loaded(interpreted=True) as module:
        module.BLOCK = 64
        yield module


@st.composite
def layouts(draw):
    world = draw(st.integers(1, 4))

    def layout():
        shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
        dim = draw(st.integers(0, len(shape) - 1))
        if dim:
            shape[dim] *= world  # only the first dimension is cut unevenly
        if draw(st.booleans()):
            shape[-1] *= 8 if dim != len(shape) - 1 else 1
        return ShardLayout(tuple(shape), dim, world)

    return [layout() for _ in range(draw(st.integers(1, 5)))]


dtypes = st.sampled_from(DTYPES)


def _values(shape, dtype):
    return (4 * torch.randint(-16, 16, tuple(shape), dtype=torch.int32)).to(dtype)


def _padded_shape(layout):
    shape = list(layout.shape)
    shape[layout.dim] = layout.chunk * layout.world
    return shape


examples = settings(max_examples=20)


def _packed_numel(layouts):
    return packed_layout(tuple(each.shard_numel for each in layouts)).numel


@examples
@given(layouts(), st.lists(dtypes, min_size=5, max_size=5), dtypes)
def test_packing_of_shards(kernels, layouts, sources, dtype):
    shards = [_values(each.shard_shape, source) for each, source in zip(layouts, sources, strict=False)]
    flat = [shard.view(-1) for shard in shards]
    got, want = (torch.full((1, _packed_numel(layouts)), -1, dtype=dtype) for _ in range(2))
    kernels.pack(flat, got, [0] * len(flat))
    reference.pack(flat, want, [0] * len(flat))
    assert torch.equal(got, want)


@examples
@given(layouts(), dtypes, dtypes)
def test_unpacking_of_parameters(kernels, layouts, sent, dtype):
    output = _values([layouts[0].world, _packed_numel(layouts)], sent)
    dims = [each.dim for each in layouts]
    got, want = ([torch.full(_padded_shape(each), -1, dtype=dtype) for each in layouts] for _ in range(2))
    kernels.unpack(output, got, dims)
    reference.unpack(output, want, dims)
    assert all(map(torch.equal, got, want))


@examples
@given(layouts(), st.lists(dtypes, min_size=5, max_size=5), dtypes, st.sampled_from([1.0, 2.0, 0.5]))
def test_packing_of_gradients(kernels, layouts, sources, dtype, divisor):
    grads = [_values(each.shape, source) for each, source in zip(layouts, sources, strict=False)]
    dims = [each.dim for each in layouts]
    got, want = (torch.full((layouts[0].world, _packed_numel(layouts)), -1, dtype=dtype) for _ in range(2))
    kernels.pack(grads, got, dims, divisor)
    reference.pack(grads, want, dims, divisor)
    assert torch.equal(got, want)


@examples
@given(layouts(), dtypes, st.lists(dtypes, min_size=5, max_size=5), st.sampled_from([1.0, 4.0]))
def test_unpacking_of_gradients(kernels, layouts, reduced, originals, divisor):
    shapes = [each.shard_shape for each in layouts]
    packed = _values([1, _packed_numel(layouts)], reduced)
    got = [_values(shape, dtype) for shape, dtype in zip(shapes, originals, strict=False)]
    want = [out.clone() for out in got]
    kernels.unpack(packed, got, [0] * len(got), divisor)
    reference.unpack(packed, want, [0] * len(got), divisor)
    assert all(map(torch.equal, got, want))


def test_a_division_is_rounded_as_torch_rounds_it(kernels):
    for dtype in (torch.float32, torch.float64):
        grad, (got, want) = torch.randn(40, dtype=dtype), torch.empty(2, 1, 40, dtype=dtype)
        kernels.pack([grad], got, [0], 3.0)
        reference.pack([grad], want, [0], 3.0)
        assert torch.equal(got, want)


def test_what_is_not_computed_with_moves_as_bits(kernels):
    shards = [torch.randn(24).to(torch.float8_e4m3fn), torch.randn(8).to(torch.float8_e4m3fn)]
    got, want = (torch.empty(1, 32 + 16, dtype=torch.float8_e4m3fn) for _ in range(2))
    kernels.pack(shards, got, [0, 0])
    reference.pack(shards, want, [0, 0])
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_gradients_whose_memory_is_not_what_they_hold(kernels):
    """Negated on reading, and zeros without memory: a null pointer on a GPU."""
    grads = [torch.randn(24, dtype=torch.complex64).conj().imag, torch._efficientzerotensor((8,)), torch.randn(8)]
    got, want = torch.full((2, 1, 32 + 16 + 16), -1.0)
    kernels.pack(grads, got, [0, 0, 0])
    reference.pack(grads, want, [0, 0, 0])
    assert grads[0].is_neg() and torch.equal(got, want)


def test_one_launch_whatever_the_number_of_parameters(kernels, monkeypatch):
    launched = []
    run = kernels._copy.run
    monkeypatch.setattr(kernels._copy, "run", lambda *args, **options: launched.append(1) or run(*args, **options))
    for length, launches in ((lambda n: 4 * n, 1), (lambda n: 5, 1), (lambda n: 4 * n if n < 40 else 5, 2)):
        launched.clear()
        shards = [torch.ones(length(n)) for n in range(60)]
        kernels.pack(shards, torch.empty(1, packed_layout(tuple(map(len, shards))).numel), [0] * 60)
        assert len(launched) == launches


def test_an_odd_parameter_does_not_narrow_the_others_on_any_rank(kernels):
    layouts = tuple(ShardLayout(shape, 0, 64) for shape in ((5,), (128,), (512, 24)))
    packed = packed_layout(tuple(each.shard_numel for each in layouts))
    assert (packed.numels, packed.offsets, packed.numel) == ((1, 2, 192), (0, 16, 32), 224)

    def launches(dtypes, is_packing=True):
        kinds = tuple((torch.Size(each.shape), dtype, 0) for each, dtype in zip(layouts, dtypes, strict=True))
        return kernels._launches(kinds, 64, torch.float32, 1.0, is_packing, torch.device("cpu"), 0)

    apart, alike = (torch.float16, torch.bfloat16, torch.float32), (torch.float32,) * 3
    assert [launch.granularity for launch in launches(apart)] == [1, 2, 16]
    widths = {launch.chosen: launch.granularity for launch in launches(alike)}
    assert widths == {(True, True, False): 1, (False, False, True): 16}
    gaps = [block for block in kernels._blocks(layouts) if block[2] == 0]
    filled, copied = (sum(len(launch.table) for launch in launches(alike, packs)) for packs in (True, False))
    assert filled - copied == len(gaps) > 0  # gaps are filled with zeros, and not read


def test_the_width_follows_what_every_address_and_length_divide_by(kernels, monkeypatch):
    launched, run = [], kernels._copy.run
    monkeypatch.setattr(
        kernels._copy, "run", lambda *args, **options: launched.append(options) or run(*args, **options)
    )

    def moved(tensor, dtype):
        packed = torch.empty(1, packed_layout((tensor.numel(),)).numel, dtype=dtype)
        kernels.pack([tensor], packed, [0])
        return launched[-1]["WIDTH"], launched[-1]["ALIGNED_BYTES"]

    assert moved(torch.ones(64), torch.float32) == (4, 16)
    assert moved(torch.ones(64), torch.bfloat16) == (8, 16)
    assert moved(torch.ones(6), torch.bfloat16) == (2, 16)
    numbers = torch.ones(128, dtype=torch.bfloat16)
    for start, width in ((0, 8), (1, 1), (2, 2), (8, 8)):  # what is known of the launch does not depend on addresses
        assert moved(numbers[start : start + 64], torch.bfloat16) == (width, 2 * width)


@pytest.mark.parametrize(
    "packed, tensor, width, options",
    [
        ("bf16", "float32", 8, {"IS_PACKING": True}),  # shards, with a cast
        ("i16", "int16", 8, {"IS_PACKING": True}),  # and without
        ("i16", "int16", 8, {"IS_PACKING": False}),  # parameters
        ("fp32", "bfloat16", 8, {"IS_PACKING": True}),  # gradients
        ("fp32", "bfloat16", 8, {"IS_PACKING": True, "DIVISOR": 8.0}),
        ("i32", "int32", 4, {"IS_PACKING": False}),  # reduced gradients
        ("fp32", "bfloat16", 8, {"IS_PACKING": False, "DIVISOR": 8.0}),
    ],
)
def test_aligned_copies_compile_to_16_byte_reads_and_writes_and_no_division(
    packed, tensor, width, options, monkeypatch
):
    """Triton compiles for an H100 without one."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not set
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    with _loaded(interpreted=False) as kernels:
        copy = kernels._copy
    constants = {
        "TENSOR": getattr(triton.language, tensor),
        "DIVISOR": 1.0,
        "IS_POWER_OF_2": True,
        "WIDTH": width,
        "ALIGNED_BYTES": 16,
        "COLUMNS": kernels._COLUMNS,
        "BLOCK": kernels.BLOCK,
        **options,
    }
    pointers = {"addresses": "*i64", "blocks": "*i64", "packed": f"*{packed}"}
    source = triton.compiler.ASTSource(
        fn=copy,
        signature=pointers | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in range(3)},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    reads, writes = (re.findall(rf"{verb}\.global\.([\w.]+)", ptx) for verb in ("ld", "st"))
    assert set(writes) == {"v4.b32"}
    assert set(reads) == {"v4.b32", "b64"}  # and the latter only from the tables
    assert reads.count("b64") <= kernels._COLUMNS + 1
    assert not re.search(r"(div|rem)\.([su]64|rn)", ptx)  # long subroutines
