"""Every private name of torch that the library uses exists in the installed torch.

``python -m tests.unit.test_private_names`` prints them as a table, by file. A new torch that lacks one, or a new use
of one that has no owner here, fails.
"""

from __future__ import annotations

import importlib
import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_compiled.inspect.gpu_program import GPUS, replacements
from tests.support.private_names import ROOT, attributes_used, library_files, names_used

# Attributes of objects, by the class that has them. What is no attribute of the class is set on its instances.
MODULE, GROUP = "torch.nn.Module", "torch._C._distributed_c10d.ProcessGroup"
OWNERS = {
    "_allgather_base": GROUP,
    "_backward_hooks": "torch.Tensor",
    "_base": "torch.Tensor",
    "_buffers": MODULE,
    "_call_impl": MODULE,
    "_cdata": "torch.Tensor",
    "_cuda_system_info_comment": "torch._dynamo.debug_utils",
    "_device_types": GROUP,
    "_flatten": "torch.distributed.device_mesh.DeviceMesh",
    "_forward_pre_hooks": MODULE,
    "_get_backend": GROUP,
    "_get_memo": "torch._subclasses.fake_tensor.FakeTensorConverter",
    "_i_will_not_complain_if_bc_breaks_InstructionTranslator": "torch._dynamo.comptime.ComptimeContext",
    "_initialize": "torch._dynamo.OptimizedModule",
    "_modules": MODULE,
    "_non_persistent_buffers_set": MODULE,
    "_orig_mod": "torch._dynamo.OptimizedModule",
    "_parameters": MODULE,
    "_reduce_scatter_base": GROUP,
    **dict.fromkeys(
        (
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        ),
        "torch.ops.aten",
    ),
    "_spec": "torch.distributed.tensor.DTensor",
    "_timeout": "torch._C._distributed_c10d.Backend.Options",
    "_torchdynamo_orig_backend": "torch._dynamo.convert_frame.ConvertFrame",
}
NOT_TORCHS = {
    "_asdict",
    "_fsdp_user_class",
    "_getframe",
    "_init_weights",
    "_replace",
}  # Python's, ours, Transformers'

# What tracing/dynamo.py reads of Dynamo's objects under names without an underscore.
TRANSLATOR, OUTPUT = (
    "torch._dynamo.symbolic_convert.InstructionTranslatorBase",
    "torch._dynamo.output_graph.OutputGraph",
)
READ_BY_DYNAMO_PY = (
    f"{TRANSLATOR}.output",
    f"{TRANSLATOR}.symbolic_locals",
    f"{OUTPUT}.add_cleanup_hook",
    f"{OUTPUT}.compiler_fn",
    f"{OUTPUT}.current_tracer",
    f"{OUTPUT}.fake_mode",
    f"{OUTPUT}.guard_on_key_order",
    f"{OUTPUT}.root_tx",
    f"{OUTPUT}.side_effects",
    f"{OUTPUT}.tracing_context",
    "torch._dynamo.output_graph.SubgraphTracer.parent",
    "torch._dynamo.side_effects.SideEffects.id_to_variable",
    "torch._dynamo.variables.ConstantVariable.as_python_constant",
    "torch._dynamo.variables.ConstantVariable.create",
    "torch._dynamo.variables.ConstantVariable.is_literal",
    "torch._dynamo.variables.ConstantVariable.value",
    "torch._dynamo.variables.LazyVariableTracker.is_realized",
    "torch._dynamo.variables.LazyVariableTracker.peek_value",
    "torch._dynamo.variables.LazyVariableTracker.realize",
    "torch._dynamo.variables.base.VariableTracker.python_type",
    "torch._dynamo.variables.base.VariableTracker.source",
    "torch._dynamo.variables.tensor.TensorVariable.as_proxy",
    "torch._guards.Guard.create_fn",
    "torch._guards.Guard.create_fn_name",
    "torch._guards.TracingContext.hop_dispatch_set_cache",
    "torch._subclasses.fake_tensor.FakeTensorMode.fake_tensor_converter",
)
# Only where torch reuses traces of regions: ``block.py`` asks for them there alone.
READ_FOR_REUSE = (
    "torch._dynamo.source.LocalSource.clone",
    "torch._dynamo.source.LocalSource.get_value",
    "torch._dynamo.source.LocalSource.make_guard",
    "torch._guards.InvokeSubgraphCache.subgraph_reuse_cache",
)
REUSES = "max_reuse_entries" in inspect.signature(torch.compiler.nested_compile_region).parameters


def uses() -> list[tuple[str, str]]:
    """Where a private name is used, and the name."""
    files = library_files()
    found = [(str(path.relative_to(ROOT)), name) for path in files for name in sorted(names_used(path))]
    for attribute, paths in attributes_used(files).items():
        if attribute not in NOT_TORCHS:
            owner = OWNERS.get(attribute, "(no owner in tests/unit/test_private_names.py)")
            found += [(str(path.relative_to(ROOT)), f"{owner}.{attribute}") for path in paths]
    found += [("fsdp_compiled/inspect/gpu_program.py", name) for name in replacements(GPUS["H100"])]
    dynamo = "fsdp_compiled/tracing/dynamo.py"
    return sorted(found + [(dynamo, name) for name in (*READ_BY_DYNAMO_PY, *(READ_FOR_REUSE if REUSES else ()))])


def exists(name: str) -> bool:
    """Tell whether the installed torch has a name: a module, an attribute, or what a class sets on its instances."""
    value, rest = _module(name.split("."))
    for index, part in enumerate(rest, start=1):
        if not hasattr(value, part):
            return inspect.isclass(value) and index == len(rest) and _is_set_on_instances(value, part)
        value = getattr(value, part)
    return True


def _module(parts: list[str]) -> tuple[Any, list[str]]:
    """The innermost module on the way to a name, which an attribute of the same name may hide, and what follows."""
    for length in range(len(parts), 1, -1):
        with suppress(ImportError):
            return importlib.import_module(".".join(parts[:length])), parts[length:]
    return torch, parts[1:]


def _is_set_on_instances(cls: type, name: str) -> bool:
    bases = [base for base in cls.__mro__ if base.__module__.startswith("torch")]
    annotated = any(name in vars(base).get("__annotations__", {}) for base in bases)
    texts = (inspect.getsource(base) for base in bases if not annotated)
    return annotated or any(f"self.{name}" in text or f'"{name}"' in text for text in texts)


def table() -> str:
    lines = [f"private names of torch, checked on {torch.__version__}"]
    file = ""
    for path, name in uses():
        if path != file:
            file = path
            lines += ["", path]
        lines.append(f"  {'   ' if exists(name) else 'NO '} {name}")
    return "\n".join(lines)


def test_the_installed_torch_has_every_private_name():
    missing = [f"{path}: {name}" for path, name in uses() if not exists(name)]
    assert not missing, "\n".join(missing)


def test_a_name_that_does_not_exist_is_found():
    assert not exists("torch._dynamo.guards.install_guards_of_another_torch")
    assert not exists("torch._dynamo.no_such_module.name")
    assert not exists(f"{MODULE}._no_such_attribute")


def test_dynamos_names_stand_in_one_file():
    """But for configurations, which ``doctor`` reads, and what stands in for a GPU that is not there."""
    files = {path for path, name in uses() if name.startswith(("torch._dynamo", "torch._C._dynamo"))}
    others = {path for path, name in uses() if name.endswith("_dynamo.config")}
    assert files - others - {"fsdp_compiled/inspect/gpu_program.py"} == {"fsdp_compiled/tracing/dynamo.py"}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._C._x(torch.y)", {"torch._C._x"}),
        ("from torch._a import b as c\nc.d.e", {"torch._a.b.d.e"}),
        ("from torch.a import _b, c\nimport numpy._d", {"torch.a._b"}),
        ("import torch\ntorch.nn.Linear.__init__", set()),
    ],
)
def test_names_are_found(tmp_path: Path, source: str, names: set[str]):
    (tmp_path / "file.py").write_text(source)
    assert names_used(tmp_path / "file.py") == names


if __name__ == "__main__":
    print(table())
