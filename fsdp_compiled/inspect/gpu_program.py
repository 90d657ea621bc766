"""The program of a GPU, generated and assembled on a machine without one: its wrapper and its kernels.

A graph that was traced on the CPU moves to a fake GPU. Inductor and Triton generate its kernels, and the ``ptxas`` of
triton's wheel assembles them; nothing is run. Meanwhile torch takes this machine for one with that GPU:
:func:`replacements` and :meth:`_Program.replacing` say what is replaced, and all of it is restored. No other thread
may use a GPU or compile meanwhile.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from operator import attrgetter
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, fx

# Checked on torch 2.11.0, 2.13.0 and 2.15.0.
from torch._guards import detect_fake_mode
from torch._inductor import codecache, ir, scheduler
from torch._inductor import utils as inductor_utils
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx.node import map_aggregate
from torch.utils import _triton

from ..expect import unexpected
from ..passes.cost import CLUSTERS, Cluster
from ..passes.cost.compute import Work, node_us, work_of
from ..passes.graph import nodes
from .records import Kernel

aten = torch.ops.aten
GPU = torch.device("cuda", 0)
REGISTERS = 65_536  # of a multiprocessor
# Inductor's own launcher loads CUDA's library, other processes do not know of the GPU, and nothing can be timed.
OPTIONS = {"use_static_cuda_launcher": False, "compile_threads": 1, "triton.autotune_pointwise": False}


class Gpu(NamedTuple):
    """What code generation asks of a GPU.

    *Source:* NVIDIA's datasheets of the SXM parts; the table of compute capabilities in its CUDA programming guide.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_kib: int  # that one block may use


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", (8, 0), 108, 163),
        Gpu("H100", (9, 0), 132, 227),
        Gpu("H200", (9, 0), 132, 227),
        Gpu("B200", (10, 0), 148, 227),
    )
}


def gpu_of(device: str | None) -> Gpu | None:
    """Return the GPU of this name, None without a name; raise if there is no such GPU, or no triton."""
    if device is None:
        return None
    if device not in GPUS:
        raise unexpected("device", f"one of {', '.join(GPUS)}", repr(device))
    if not _triton.has_triton_package():
        do = "run pip install triton (on Linux; its wheel has the assembler)"
        raise unexpected("device", "triton, which generates kernels", "none", do, ImportError)
    return GPUS[device]


def generate(
    module: fx.GraphModule, inputs: Sequence[Any], gpu: Gpu, cluster: Cluster, **kwargs: Any
) -> tuple[str, tuple[Kernel, ...]]:
    """Move a graph to the GPU; return its wrapper and its kernels, in order of launch, with times on ``cluster``.

    ``kwargs`` go to Inductor, whose configuration must have :data:`OPTIONS`.
    """
    program = _Program(gpu, cluster)
    with program.replacing():
        compiled: Any = compile_fx_inner(module, _moved(module, inputs), **kwargs)
    return compiled.source_code, program.kernels()


# ---- the GPU that is not there ----


def replacements(gpu: Gpu) -> dict[str, Callable[..., Any]]:
    """Return what stands in for names of torch: functions that answer as with one GPU."""
    facts = dict[str, Any](name=f"NVIDIA {gpu.name}", gcnArchName="", warp_size=32)
    facts["major"], facts["minor"] = gpu.capability
    facts |= {"multi_processor_count": gpu.multiprocessors, "regs_per_multiprocessor": REGISTERS}
    facts |= {"max_threads_per_block": 1024, "max_threads_per_multi_processor": 2048}
    facts |= {"shared_memory_per_block": 48 << 10, "shared_memory_per_block_optin": gpu.shared_kib << 10}
    properties = SimpleNamespace(**facts)
    of_both = dict[str, Any](current_device=0, device_count=1, get_device_properties=properties, synchronize=None)
    of_cuda = dict[str, Any](is_available=True, get_device_name=properties.name, _lazy_init=None)
    of_cuda |= {"get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None}
    of_cuda |= {"get_device_capability": gpu.capability, "_exchange_device": 0, "_maybe_exchange_device": 0}
    of_interface = dict[str, Any](exchange_device=0, maybe_exchange_device=0, get_raw_stream=0)
    of_interface |= {"Worker.current_device": 0, "Worker.get_device_properties": properties}
    values = {f"torch.cuda.{name}": value for name, value in (of_both | of_cuda).items()}
    interface = "torch._dynamo.device_interface.CudaInterface"
    values |= {f"{interface}.{name}": value for name, value in (of_both | of_interface).items()}
    values |= {"torch._inductor.compile_fx._warn_tf32_disabled": None}
    values |= {"torch._subclasses.fake_tensor.init_gpu_context": None}  # of a build for CUDA: it wants a driver
    functions = {name: _always(value) for name, value in values.items()}
    # These ask for the device's guard, which a CPU build lacks before torch 2.15.
    functions["torch.Tensor.__invert__"] = lambda tensor: torch.bitwise_not(tensor)
    functions["torch.Tensor.copy_"] = lambda tensor, source, _=False: aten.copy_.default(tensor, source)
    return functions | {"torch.Tensor.__getitem__": _getitem}


MISSING = "torch._C._cuda_getCurrentRawStream"  # which wrappers import, and a CPU build lacks


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _getitem(tensor: Tensor, index: Any, own: Callable[..., Tensor] = Tensor.__getitem__) -> Tensor:
    if not isinstance(tensor, FakeTensor) or tensor.device != GPU:
        return own(tensor, index)
    with in_kernel_invocation_manager(tensor.fake_mode):  # as of a meta tensor
        return FakeTensor(tensor.fake_mode, own(tensor, index), GPU)


def _forget_devices() -> None:
    """Clear what torch and Triton remember of the machine's devices."""
    remembered = [DeviceProperties.create, codecache.CacheBase.get_system]
    remembered.append(import_module("torch._dynamo.debug_utils")._cuda_system_info_comment)
    remembered.append(import_module("triton.compiler.compiler").max_shared_mem)
    for each in (*remembered, *vars(_triton).values(), *vars(inductor_utils).values()):
        if hasattr(each, "cache_clear"):
            each.cache_clear()


# ---- what is launched ----


@dataclass(frozen=True)
class _Program:
    """Records what Inductor launches while it generates code, and what Triton assembles."""

    gpu: Gpu
    cluster: Cluster
    # by the graph that code is generated for; that of a region is launched wherever it stands in another's list
    launches: dict[Any, list[Any]] = field(default_factory=lambda: defaultdict(list))
    assembled: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Let torch and Triton take this machine for one with the GPU."""
        from triton.runtime import driver  # type: ignore[import-untyped]

        with ExitStack() as stack:
            stack.callback(_forget_devices)
            for name, value in replacements(self.gpu).items():
                stack.enter_context(patch(name, value))
            stack.enter_context(patch(MISSING, _always(0), create=True))
            stack.enter_context(patch.object(driver, "_active", self._driver()))
            stack.enter_context(_noting(TritonKernel, "call_kernel", self._note_kernel))
            stack.enter_context(_noting(scheduler.Scheduler, "codegen_extern_call", self._note_extern))
            stack.enter_context(patch.dict("os.environ"))  # Inductor may set which ptxas to use
            _forget_devices()
            yield

    def _driver(self) -> Any:
        """Return Triton's driver for NVIDIA's GPUs, but that it loads no library and launches nothing."""
        from triton.backends import backends  # type: ignore[import-untyped]
        from triton.backends.driver import GPUDriver  # type: ignore[import-untyped]

        driver = backends["nvidia"].driver.__new__(backends["nvidia"].driver)
        GPUDriver.__init__(driver)  # not its own, which loads CUDA's library
        width = 8192  # of the memory bus, bits; only its product with the clock counts
        clock = int(CLUSTERS[self.gpu.name].memory_bytes_per_s * 8 / 2 / width / 1e3)
        limits = {"max_shared_mem": self.gpu.shared_kib << 10, "mem_bus_width": width, "mem_clock_rate": clock}
        limits |= {"max_num_regs": REGISTERS, "multiprocessor_count": self.gpu.multiprocessors, "warpSize": 32}
        driver.utils = SimpleNamespace(load_binary=self._load, get_device_properties=_always(limits))
        driver.launcher_cls = _always(None)
        return driver

    def _load(self, name: str, binary: bytes, shared_bytes: int, device: int) -> tuple[None, int, int, int, int]:
        """Return module, function, registers, spills and the most threads of a block, as CUDA does for a kernel."""
        registers, spills = _resources(binary)
        found = {"registers": registers, "spills": spills, "shared_bytes": shared_bytes}
        self.assembled.setdefault(name, found)  # of the configurations that a GPU would try, the first one
        return None, 0, registers, spills, 1024

    def _note_kernel(self, kernel: Any, name: str, *_: Any) -> None:
        graph: Any = V.graph
        self.launches[graph].append(self._kernel(name, kernel.estimate_kernel_num_bytes()))
        for partial in kernel.saved_partial_accumulate:  # a sum by torch completes each
            size = graph.get_dtype(partial.buffer_name).itemsize * graph.get_numel(partial.buffer_name)
            self.launches[graph].append(self._kernel("aten.sum", int(size)))

    def _note_extern(self, _: Any, scheduled: Any) -> None:
        node = scheduled.node
        if isinstance(node, ir.InvokeSubgraph):
            self.launches[V.graph].append(node.subgraph.graph)  # type: ignore[union-attr]
        elif name := _extern_name(node):
            origin, size = node.get_origin_node(), scheduled.get_read_write_buffers_sizes()
            self.launches[V.graph].append(self._kernel(name, size, origin))

    def _kernel(self, name: str, size_bytes: int, origin: fx.Node | None = None) -> Kernel:
        us = node_us(origin, self.cluster) if origin else self.cluster.memory_us(size_bytes)
        work: Work = work_of(origin) if origin else "fused kernels"
        return Kernel(name, size_bytes, max(us, self.cluster.kernel_us), work)

    def kernels(self) -> tuple[Kernel, ...]:
        """Return what the outermost graph launches, which is the first that launched anything."""
        return tuple(self._launched_by(next(iter(self.launches), None)))

    def _launched_by(self, graph: Any) -> Iterator[Kernel]:
        for each in self.launches.get(graph, ()):
            if isinstance(each, Kernel):
                yield replace(each, **self.assembled.get(each.name, {}))
            else:
                yield from self._launched_by(each)


def _noting(owner: type, name: str, note: Callable[..., Any]) -> Any:
    """Let ``note`` see the arguments of each call of a method, before it runs."""
    run = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **kwargs: (note(*args), run(*args, **kwargs))[1])


def _extern_name(node: Any) -> str:
    """Return the name of the kernel that a node calls; "" for a collective, or if it launches nothing."""
    operator = getattr(node, "op_overload", None)
    if isinstance(node, ir.MultiOutput) or getattr(operator, "namespace", "") == "fsdp_compiled":
        return ""
    name = getattr(node, "python_kernel_name", None) or operator or ""
    return str(name).removeprefix("extern_kernels.").removeprefix("torch.ops.").removesuffix(".default")


def _resources(binary: bytes) -> tuple[int, int]:
    """Return registers of a thread, and registers' worth of local memory into which it spills, of a kernel."""
    from triton import knobs  # type: ignore[import-untyped]

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], max(found["STACK"], found["LOCAL"]) // 4


# ---- from the CPU to the GPU ----


def _moved(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Move a graph, and the graphs that it calls, to the GPU; return its inputs there."""
    for part in (part for part in module.modules() if isinstance(part, fx.GraphModule)):
        graph = part.graph
        for node in graph.nodes:
            _expect_no_constant(node)
            node.args, node.kwargs = map_aggregate(node.args, _device), map_aggregate(node.kwargs, _device)
            for key in {"val", "eager_input_vals"} & node.meta.keys():
                node.meta[key] = map_aggregate(node.meta[key], _value)
        with detect_fake_mode(inputs) or nullcontext():
            for node in list(graph.nodes):
                if node.target is aten._scaled_dot_product_flash_attention_for_cpu.default:
                    _replace_attention(node)
                elif node.target is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
                    _replace_attention_backward(node)
        part.recompile()  # torch runs the code of regions, too
    return [_value(each) for each in inputs]


def _expect_no_constant(node: fx.Node) -> None:
    """A number may stay on the CPU; larger tensors that a graph holds would have to be on the GPU."""
    value = attrgetter(str(node.target))(node.graph.owning_module) if node.op == "get_attr" else None
    if isinstance(value, Tensor) and value.dim():
        shape = tuple(value.shape)
        raise NotImplementedError(f"device: a constant of shape {shape} in the graph; make it a buffer of the model")


def _device(value: Any) -> Any:
    return GPU if isinstance(value, torch.device) and value.type == "cpu" else value


def _value(value: Any) -> Any:
    """Return a fake tensor on the GPU, over the same storage, so that what shares memory still does."""
    if not isinstance(value, FakeTensor) or value.device.type != "cpu":
        return value
    with in_kernel_invocation_manager(value.fake_mode):
        return FakeTensor(value.fake_mode, value.detach(), GPU)  # autograd would ask for CUDA


def _is_flash(query: fx.Node, mask: Any) -> bool:
    """Tell whether a GPU has flash attention for it; else it has one that needs little memory as well."""
    return mask is None and query.meta["val"].element_size() == 2


def _replace_attention(node: fx.Node) -> None:
    given: Any = (*node.args, *(0.0, False)[len(node.args) - 3 :])
    query, key, value, dropout, causal = given
    mask, scale = node.kwargs.get("attn_mask"), {"scale": node.kwargs.get("scale")}
    if _is_flash(query, mask):
        _become(node, aten._scaled_dot_product_flash_attention.default, query, key, value, dropout, causal, **scale)
        return
    operator = aten._scaled_dot_product_efficient_attention.default
    with node.graph.inserting_before(node):
        length = _length(query)
    _become(node, operator, query, key, value, mask, True, dropout, causal, **scale)
    for item in [user for user in node.users if user.args[1] == 1]:
        with node.graph.inserting_after(item):  # sums of exponentials, which this operator pads
            cut = node.graph.call_function(aten.slice.Tensor)
        item.replace_all_uses_with(cut)
        _become(cut, aten.slice.Tensor, item, 2, 0, length)


def _replace_attention_backward(node: fx.Node) -> None:
    """No random state comes from forward: it is read where there is dropout only, which the CPU's operator lacks."""
    given: Any = node.args
    grad, query, key, value, out, sums, dropout, causal = given
    mask, scale = node.kwargs.get("attn_mask"), {"scale": node.kwargs.get("scale")}
    is_flash = _is_flash(query, mask)
    with node.graph.inserting_before(node):
        dtype = torch.uint64 if is_flash else torch.int64
        state = [_new(node.graph, aten.empty.memory_format, [2], dtype=dtype, device=GPU)] * 2
        if is_flash:
            lengths = (None, None, _length(query), _length(key))
            operator = aten._scaled_dot_product_flash_attention_backward.default
            args = (grad, query, key, value, out, sums, *lengths, dropout, causal, *state)
        else:
            operator = aten._scaled_dot_product_efficient_attention_backward.default
            needed = [True, True, True, False]
            args = (grad, query, key, value, mask, out, sums, *state, dropout, needed, causal)
    _become(node, operator, *args, **scale)


def _length(heads: fx.Node) -> Any:
    """Return the length of queries, keys or values: a number, or a new node where it varies."""
    length = heads.meta["val"].shape[2]
    return length if isinstance(length, int) else _new(heads.graph, aten.sym_size.int, heads, 2)


def _new(graph: fx.Graph, operator: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return _become(graph.call_function(operator), operator, *args, **kwargs)


def _become(node: fx.Node, operator: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Let a node call ``operator``, and compute the fake values of it and of what is taken from it."""
    node.target, node.args, node.kwargs = operator, args, kwargs
    given = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
    node.meta["val"] = operator(*given[0], **given[1])
    for item in filter(nodes.is_getitem, node.users):
        item.meta["val"] = node.meta["val"][nodes.index_of(item)]
    return node
