"""Every private name of Dynamo that this library uses, each as a small function or under its own name.

Checked on torch 2.11.0, 2.13.0 and 2.15.0; ``tests/unit/test_private_names.py`` lists what another torch lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import takewhile
from types import CodeType, FunctionType
from typing import Any, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary, ref

import torch
from torch import fx
from torch._C._dynamo.eval_frame import get_eval_frame_callback as get_eval_frame_callback
from torch._dynamo import OptimizedModule, trace_rules, utils
from torch._dynamo import compiled_autograd as compiled_autograd
from torch._dynamo.callback import callback_handler as callback_handler

# Not wrapped: Dynamo recognises the object, and gives the frame of whoever calls it. What it calls while it traces
# leaves nothing in the graph, and no guard. In uncompiled code it does nothing.
from torch._dynamo.comptime import comptime as comptime
from torch._dynamo.eval_frame import set_eval_frame as set_eval_frame  # type: ignore[attr-defined]
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
from torch._dynamo.exc import Unsupported
from torch._dynamo.guards import install_guard
from torch._dynamo.source import DictGetItemSource, GetItemSource, LocalSource, UnspecializedNNModuleSource
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, NewGlobalVariable, UserFunctionVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._guards import Source, TracingContext

counters, is_parameter_freezing = utils.counters, utils.is_parameter_freezing
is_skipped = trace_rules.check  # whether Dynamo skips a function, as it does torch's own
attention_backends = torch.nn.attention._cur_sdpa_kernel_backends  # those that are enabled where it is called

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

# Operators whose bodies run, or run once more, as data say; ranks could not communicate there.
_BRANCHES = {"cond", "while_loop", "scan", "associative_scan", "map_impl", "flex_attention"}
_FOREACH = [getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")]
# What belongs to a trace, by its kind; weak, so that it ends with the trace.
_of_traces: WeakKeyDictionary[TracingContext, dict[Any, Any]] = WeakKeyDictionary()


def module_inside(module: Any) -> Any:
    """Return the module that ``torch.compile`` wrapped as ``module``, or anything else as it is."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def renew_compiled(module: object) -> None:
    """Let what ``torch.compile`` made of a module call the ``__call__`` of its new class."""
    if isinstance(module, OptimizedModule):
        module._initialize()


def skipped(function: F) -> F:
    """Let Dynamo run this function uncompiled when it would begin to compile with it.

    Unlike ``torch.compiler.disable`` it still lets Dynamo inline the function into a caller that it traces.
    """
    skip_code(function.__code__)  # type: ignore[attr-defined]
    return function


def saves_packages() -> bool:
    """Tell whether torch is to save what it compiles with its guards, by ``caching_precompile``."""
    return torch._dynamo.config.caching_precompile


def with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function under another code object.

    Dynamo keeps what it compiled, and counts it against its recompile limit, by code object. Equal ones count
    together, so a constant that nothing reads makes this one differ.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_consts=(*function.__code__.co_consts, uuid4().hex))
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def of_trace(kind: Callable[[], T], context: Any = None) -> T:
    """Return what ``kind()`` gave when first asked for in the current trace; between traces, another each time.

    Torch keeps a trace as long as its graph. What leads to the model, and would keep that too, is asked for with a
    ``context`` first: it ends when Dynamo has traced.
    """
    trace = TracingContext.try_get()
    found: dict[Any, T] = {} if trace is None else _of_traces.setdefault(trace, {})
    if kind not in found:
        found[kind] = kind()
        if context is not None:
            _tracer(context).output.add_cleanup_hook(partial(found.pop, kind, None))
    return found[kind]


def check_graph(context: Any, check: Callable[[fx.GraphModule], None]) -> None:
    """Let ``check`` see the graph of the current trace once it is complete; a second call changes nothing."""
    output = _tracer(context).output
    if check not in output.register_finalizer_fns:
        output.add_graph_finalizer(check)


def written_in_lists(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield what operators on lists write to: their fakes' versions do not count it."""
    for operator in _FOREACH:
        for call in graph.find_nodes(op="call_function", target=operator):
            yield from call.args[0]  # type: ignore[misc]


def _tracer(context: Any) -> Any:
    """Return Dynamo's interpreter of the frame that called ``comptime``, which gave ``context``."""
    return context._i_will_not_complain_if_bc_breaks_InstructionTranslator()


def local_variable(context: Any, name: str) -> Any:
    """Return Dynamo's record of a local variable of the caller's."""
    return _tracer(context).symbolic_locals[name]


def fake_input(context: Any, tensor: torch.Tensor) -> Any:
    """Return the fake of a tensor that the trace has as input, or None; its version counts what it writes there."""
    return _tracer(context).output.fake_mode.fake_tensor_converter._get_memo(tensor)


def is_variable_of(context: Any, variable: Any, tensor: torch.Tensor) -> bool:
    """Tell whether Dynamo's record of a value is that of ``tensor``."""
    if isinstance(variable, LazyVariableTracker) and not variable.is_realized():
        return variable.peek_value() is tensor
    value, fake = variable.realize(), fake_input(context, tensor)
    return isinstance(value, TensorVariable) and value.proxy.node.meta["example_value"] is fake


def local_value(context: Any, name: str) -> Any:
    """Return the object that a local variable of the caller's stands for, without a guard on it."""
    variable = local_variable(context, name)
    if isinstance(variable, LazyVariableTracker) and not variable.is_realized():
        return variable.peek_value()
    return variable.realize().value


def began_with(context: Any, codes: Sequence[CodeType]) -> bool:
    """Tell whether the current trace began with a call of one of ``codes``: nothing of that call has run."""
    return any(_tracer(context).output.root_tx.f_code is code for code in codes)


def inductor_options(context: Any) -> Mapping[str, Any] | None:
    """Return the options of Inductor with which ``torch.compile`` traces; None if its backend is none such."""
    backend = _tracer(context).output.compiler_fn
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    backend = getattr(backend, "compiler_fn", backend)  # one that is no name is wrapped once more
    return backend.config if getattr(backend, "compiler_name", None) == "inductor" else None


def set_local(context: Any, name: str, value: Any) -> None:
    """Let a local variable of the caller's be a constant, or what Dynamo's record stands for."""
    is_constant = ConstantVariable.is_literal(value)
    _tracer(context).symbolic_locals[name] = ConstantVariable.create(value) if is_constant else value


def graphs_around(context: Any) -> Iterator[Any]:
    """Yield what traces the graph that the caller is in, and those around it, inner ones first."""
    graph = _tracer(context).output.current_tracer
    while graph is not None:
        yield graph
        graph = graph.parent


def branches_around(context: Any) -> list[Any]:
    """Return what traces the branches and bodies of loops that the caller is in, up to any other graph."""
    return list(takewhile(lambda graph: str(graph.source_target) in _BRANCHES, graphs_around(context)))


def entered_function_modes(context: Any) -> bool:
    """Tell whether the traced program is inside of torch function modes that it has entered itself."""
    tracer = _tracer(context)
    return len(tracer.symbolic_torch_function_state.mode_stack) > len(tracer.output.torch_function_mode_stack)


def call_outside_branches(context: Any, function: Callable[..., Any], name: str) -> Any:
    """Trace ``function`` of the caller's local variable into the graph around the branches that the caller is in."""
    assert isinstance(function, FunctionType)
    tracer, inner = _tracer(context), branches_around(context)
    tracers = tracer.output.tracers
    del tracers[len(tracers) - len(inner) :]
    try:
        return UserFunctionVariable(function).call_function(tracer, [local_variable(context, name)], {})
    finally:
        tracers += reversed(inner)


def changed_dict(context: Any, original: dict[Any, Any]) -> dict[Any, Any]:
    """Return Dynamo's records of what a dict holds by now; nothing if the traced program has not touched it."""
    changed = _tracer(context).output.side_effects.id_to_variable.get(id(original))
    return {} if changed is None else {key.vt.as_python_constant(): value for key, value in changed.items.items()}


# ---- traces of regions, which torch reuses from 2.13 on ----


def describe_arguments(context: Any) -> str | None:
    """Return a text that is equal for two calls of equal blocks, the caller's ``self``, if their arguments are alike.

    These are alike in number, names, kinds, values but for tensors, and in which tensors are the same. It is None for
    other arguments, such as objects and functions: torch does not compare what a trace reads of them. Nor does it
    where a global or an attribute of a tensor was set, or where a block is called again after any change.
    """
    seen: dict[Any, int] = {}
    block, call = local_variable(context, "self").source, of_trace(_Call, context)
    effects = _tracer(context).output.side_effects
    call.begin(block, effects)
    is_again = block in call.called
    call.called.add(block)
    is_set = any(isinstance(each, (NewGlobalVariable, TensorVariable)) for each in effects.store_attr_mutations)
    if is_set or (is_again and call.changed):
        return None
    moved = {block: LocalSource("self")}
    try:
        return "".join(_described(local_variable(context, name), moved, seen) for name in ("args", "kwargs"))
    except (NotImplementedError, Unsupported):
        return None


def _described(variable: Any, moved: dict[Any, Any], seen: dict[Any, int]) -> str:
    variable = variable.realize()
    kind = variable.python_type()
    # Of an attribute, torch takes whatever the trace reads there from the other call's argument.
    where = str(variable.source and _moved(variable.source, moved))
    text = f"{kind.__name__} {where if 'member=' in where or 'global_name=' in where else ''} "
    if isinstance(variable, ConstantVariable):
        return text + repr(variable.value)
    if isinstance(variable, (TensorVariable, SymNodeVariable)):
        return text + str(seen.setdefault(variable.as_proxy().node, len(seen)))
    if kind is dict:
        text += str([key.vt.as_python_constant() for key in variable.items])
    elif kind not in (tuple, list):
        raise NotImplementedError(text)
    items = variable.items.values() if kind is dict else variable.items
    return text + str([_described(each, moved, seen) for each in items])


def begin_body(context: Any) -> None:
    """Note from now on what a region's body reads.

    What torch notes lacks what Dynamo has wrapped before, and what is read within a checkpoint in the body.
    """
    output = _tracer(context).output
    of_trace(_Call, context).wrapped = output.variable_tracker_cache
    output.variable_tracker_cache = {}


def end_body(context: Any) -> None:
    output, call = _tracer(context).output, of_trace(_Call, context)
    call.read = set(output.variable_tracker_cache)
    output.variable_tracker_cache |= call.wrapped


def guard_as_reused(context: Any, code: CodeType) -> None:
    """Guard the caller's ``self``, after its call of the region ``code``, as the block whose trace was reused.

    Torch installs none for it, so that another training mode, for example, would go unnoticed.
    """
    output, call = _tracer(context).output, of_trace(_Call, context)
    caches = output.tracing_context.hop_dispatch_set_cache
    for condition, trace in caches.get_cache(torch.ops.higher_order.invoke_subgraph).subgraph_reuse_cache[code]:
        if not any(isinstance(check, _Comparison) for _, check, _, _ in condition.guards):
            _compare_all(output, condition, trace.arg_sources[0])
    output.guard_on_key_order.update([_moved(source, call.moved) for source in output.guard_on_key_order])
    guards = (guard for guard in call.guards if guard.create_fn_name() != "TENSOR_MATCH")
    install_guard(*(_moved_guard(guard, call.moved) for guard in guards))


class _Call:
    """The current call of a region in a trace, and how its block was found to be like one that was traced."""

    def __init__(self) -> None:
        self.called: set[Any] = set()  # blocks
        self.wrapped: dict[Any, Any] = {}  # by Dynamo, before the trace of the last body
        self.read: set[Any] = set()  # sources, in that

    def begin(self, block: Any, effects: Any) -> None:
        self.block, self.guards, self.moved = block, list[Any](), dict[Any, Any]()
        # Objects from before the trace that it has changed until now, by their ids.
        variables, kinds = effects.id_to_variable.items(), (AttributeMutationExisting, ValueMutationExisting)
        existing = [(each, variable) for each, variable in variables if isinstance(variable.mutation_type, kinds)]
        self.changed = {each for each, variable in existing if effects.is_modified(variable)}


def _compare_all(output: Any, condition: Any, block: Any) -> None:
    """Let ``condition``, which tells torch whether a trace may be reused, compare all that was read of ``block``."""
    sources = {block, *condition.traced_sources, *of_trace(_Call).read}
    elsewhere: dict[Any, Any] = {block: LocalSource("")}
    names = {source.name for source in sources if _moved(source, elsewhere) is not source}  # others may have no name

    def is_read(source: Any) -> bool:  # or in a container that is read
        is_item = isinstance(source, (GetItemSource, DictGetItemSource, UnspecializedNNModuleSource))
        return source.name in names or (is_item and is_read(source.base))

    read = [
        guard
        for source, guards in output.guards.source_to_guards.items()
        if _moved(source, elsewhere) is not source
        for guard in guards
        if is_read(source) or guard.create_fn_name() == "TYPE_MATCH"  # all that some reads of a constant ask for
    ]
    condition.guards[:] = [each for each in condition.guards if _moved(each[0], elsewhere) is each[0]]
    condition.guards.append((block, _Comparison(output, block, read, sources), None, read[0]))


class _Comparison:
    """Compares blocks with the traced ``block`` by the guards on what was ``read``; torch takes it for one check.

    Torch's own checks lack modules inside the block, whose sources it wraps after it has noted what was read, types
    of constants and containers, and which values are the same object. They raise where a value has another type, in
    the order of a set, which differs by rank. And they are of values from before the trace, which may have changed
    them: no block is alike that reads a changed object, from any of ``sources``.
    """

    def __init__(self, output: Any, block: Any, read: list[Any], sources: set[Any]) -> None:
        self._root = ref(output.root_tx)  # which leads to the model; the trace keeps this
        self._block, self._read, self._sources = block, read, sources
        self._alike: list[tuple[Any, type, Any, Any]] = []  # sources, types, torch's checks, what these expect
        self._same: list[tuple[Any, Any]] = []  # two sources of one object
        self._can_compare, values = True, dict[Any, Any]()
        for guard in read:
            source, create = guard.originating_source, guard.create_fn
            try:
                check = getattr(create, "func", create).guard_check_spec  # or of a partial
                if guard.create_fn_name() == "DUPLICATE_INPUT":
                    self._same.append((source, create.keywords["source_b"]))
                elif hasattr(check, "get_metadata_fn"):  # else it is of no object
                    value = self._value_at(source, values)
                    self._alike.append((source, type(value), check, check.get_metadata_fn(guard, value)))
            except Exception:  # whatever evaluating a source raises, or NotImplementedError of the check
                self._can_compare = False

    def eval_fn(self, _block: Any, _expected: None) -> bool:
        call, values = of_trace(_Call), dict[Any, Any]()
        moved = {self._block: call.block}

        def value(source: Any) -> Any:
            return self._value_at(_moved(source, moved), values)

        try:
            is_alike = self._can_compare and self._is_alike(value, call.changed)
        except Exception:  # whatever evaluating a source raises, where the block has nothing, or comparing values
            return False
        if is_alike:
            call.guards, call.moved = self._read, moved
        return is_alike

    def _value_at(self, source: Any, values: dict[Any, Any]) -> Any:
        tracer: Any = self._root()
        return source.get_value({"G": tracer.f_globals, "L": tracer.f_locals}, {}, values)

    def _is_alike(self, value: Callable[[Any], Any], changed: set[int]) -> bool:
        for source, kind, check, expected in self._alike:
            found = value(source)
            if type(found) is not kind or not check.eval_fn(found, expected):
                return False
        is_same = all(value(source) is value(other) for source, other in self._same)
        return is_same and not (changed and any(id(each) in changed for each in self._objects(value)))

    def _objects(self, value: Callable[[Any], Any]) -> Iterator[Any]:
        """Yield the objects through which a block leads to what is read of it, and what containers of these hold."""
        sources: set[Any] = {self._block}
        for source in self._sources:
            while source not in sources and source is not None:
                sources.add(source)
                source = getattr(source, "base", None)
        objects = [value(source) for source in sources]
        while objects:
            each = objects.pop()
            yield each
            if isinstance(each, (list, tuple, set, frozenset, dict)):
                objects += each.values() if isinstance(each, dict) else each


def _moved_guard(guard: Any, moved: dict[Any, Any]) -> Any:
    create = guard.create_fn
    if guard.create_fn_name() == "DUPLICATE_INPUT":
        create = partial(create.func, source_b=_moved(create.keywords["source_b"], moved))
    return _moved(guard.originating_source, moved).make_guard(create)


def _moved(source: Any, known: dict[Any, Any]) -> Any:
    """Return what leads from another block to where ``source`` leads; ``known`` has the blocks, and remembers."""
    if source not in known:
        inside = {each.name: getattr(source, each.name) for each in fields(source)}
        inside = {name: _moved(inner, known) for name, inner in inside.items() if isinstance(inner, Source)}
        is_same = all(inner is getattr(source, name) for name, inner in inside.items())
        known[source] = None if is_same else replace(source, **inside)
    return source if known[source] is None else known[source]
