"""What a read of a sharded parameter becomes in a graph: a region's operand, or an all-gather of the leaf.

Dynamo traces functions that take a parameter. Every attribute that they read is a guard of every step, so the common
case reads one, and the leaf; see :meth:`FSDPParam.follow_call`. By ``comptime`` it calls those that take a
``context`` while it traces, which leaves nothing in the graph, and no guard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx

from .. import collectives
from ..expect import known_internals, unexpected
from ..param.extension import AllGatherExtension
from ..param.param import FSDPParam, not_registered
from ..sharding.dtensor import storage_of
from ..sharding.spec import CommSpec
from . import dynamo

_WHAT = "tell whether functional_call gave a sharded model other parameters"
_UNSHARD = torch.ops.fsdp_compiled.unshard
_OF_LEAVES = _UNSHARD, torch.ops.fsdp_compiled.unshard_all, torch.ops.fsdp_compiled.with_gradient


class _Operands(dict[Any, dict[FSDPParam, Any]]):
    """Of each region that a trace is in or was in, by what traces its graph."""


@known_internals(_WHAT)
def begin(context: Any) -> None:
    """Begin a read of the caller's ``param`` of ``module``; set its ``operand`` in a region that has one.

    So it does in a branch or a loop: whether and how often that runs, data say. It is all-gathered before, once.

    Breaks the graph if ``torch.func.functional_call`` has registered a parameter of the user's there, which the read
    would ignore: it takes the shard, and a guard on what is registered would be slow in every step. So it does where
    the trace has written to the sharded parameter.
    """
    if (replaced := _replaced(context, dynamo.local_value(context, "module"))) is not None:
        context.graph_break(str(replaced))
    param = dynamo.local_value(context, "param")
    sharded = dynamo.fake_input(context, param.sharded_param)
    in_lists = (node.meta["example_value"] for node in dynamo.written_in_lists(context.graph()))
    if sharded is not None and (sharded._version or any(each is sharded for each in in_lists)):
        context.graph_break(str(_written(param.name, "a change before it is read, which the graph makes at its end")))
    dynamo.check_graph(context, _check_traced)
    _find_operand(context)


def check_registered(found: object, param: FSDPParam) -> None:
    """Raise RuntimeError where AOTAutograd traces a read, in ``nonstrict_trace``, of a module that is an argument.

    Torch replaces its parameters by inputs of the graph; the leaf would be a constant there, without a gradient.
    """
    if found is not param.sharded_param and not torch.compiler.is_exporting():
        raise not_registered(param.name, type(found).__name__)


def check_not_frozen(_context: Any) -> None:
    """Raise NotImplementedError if Inductor's freezing is on, under which Dynamo makes constants of parameters."""
    if dynamo.is_parameter_freezing():
        setting, do = "torch._inductor.config.freezing", "compile without it: what is all-gathered is no constant"
        raise unexpected(setting, "False", "True under no_grad", do, NotImplementedError)


def _check_traced(traced: fx.GraphModule) -> None:
    """Raise an error if a graph would lose gradients of parameters, or what the program has written to them."""
    graphs = [module.graph for module in traced.modules() if isinstance(module, fx.GraphModule)]
    _check_backward(graphs)
    _check_unwritten(graphs)


def _check_backward(graphs: list[fx.Graph]) -> None:
    """Raise NotImplementedError if Dynamo has traced a backward, whose end would not take gradients from leaves."""
    leaves = set[int]().union(*map(_inputs, _calls(graphs, *_OF_LEAVES)))
    for node in _calls(graphs, torch.autograd.grad):  # a leaf has one fake, also where a checkpoint's graph reads it
        if leaves & _inputs(node):
            setting, got = "torch._dynamo.config.trace_autograd_ops", "True where it traces backward() of a model"
            do = "call backward() outside of the compiled function, or unset it and compile without fullgraph"
            raise unexpected(setting, "False", got, do, NotImplementedError)


def _calls(graphs: list[fx.Graph], *targets: Any) -> Iterator[fx.Node]:
    for graph, target in product(graphs, targets):
        yield from graph.find_nodes(op="call_function", target=target)


def _inputs(node: fx.Node) -> set[int]:
    """Return the ids of the fakes of a node's inputs."""
    return {id(each.meta["example_value"]) for each in node.all_input_nodes if "example_value" in each.meta}


def _check_unwritten(graphs: list[fx.Graph]) -> None:
    """Raise RuntimeError if the traced program has written to an all-gathered parameter: a graph would lose that."""
    in_lists = {node for graph in graphs for node in dynamo.written_in_lists(graph)}
    for node in _calls(graphs, _UNSHARD):
        if any(alias in in_lists or alias.meta["example_value"]._version for alias in _aliases_of(node)):
            name = CommSpec.decode(str(node.args[-1])).param.name
            raise _written(name, "a change of what was all-gathered, which the graph would lose")


def _aliases_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node, and others of what shares its tensor's memory; ``data`` counts its versions by itself."""
    yield node
    storage = storage_of(node.meta["example_value"])
    for user in node.users if storage is not None else ():
        other: Any = user.meta.get("example_value")
        if getattr(other, "layout", None) is torch.strided and storage_of(other) is storage:
            yield from _aliases_of(user)


def _written(name: str, got: str) -> Exception:
    do = "write to it in an uncompiled forward, or under no_grad outside of forward to what parameters() gives"
    return unexpected(name, "not to be written to in compiled code", got, do, RuntimeError)


@known_internals(_WHAT)
def check_below(context: Any) -> None:
    """Raise where :func:`begin` breaks the graph, for all modules of a region: Dynamo may not trace their reads."""
    for module in dynamo.local_value(context, "self").modules():
        if "_fsdp_params" in module.__dict__ and (replaced := _replaced(context, module)) is not None:
            raise replaced


def _replaced(context: Any, module: Any) -> Exception | None:
    """Return the error for a parameter of the user's that the traced program has registered in ``module``."""
    for name, variable in dynamo.changed_dict(context, module._parameters).items():
        if (param := module._fsdp_params.get(name)) is not None:
            registered = module._parameters.get(name, param.sharded_param)  # where the call began
            if not any(dynamo.is_variable_of(context, variable, each) for each in (param.sharded_param, registered)):
                return not_registered(param.name, "Tensor")
    return None


@known_internals("compile blocks as regions")
def enter_region(context: Any, params: Iterable[FSDPParam]) -> None:
    """Let the first of the caller's ``operands`` be the unsharded ``params`` in the graph that it is in."""
    variables, known = dynamo.local_variable(context, "operands").realize().items, dynamo.of_trace(_Operands, context)
    known[next(dynamo.graphs_around(context))] = dict(zip(params, variables, strict=False))


@known_internals("compile blocks as regions")
def _find_operand(context: Any) -> None:
    if known := dynamo.of_trace(_Operands, context):
        innermost = next((known[graph] for graph in dynamo.graphs_around(context) if graph in known), {})
        param = dynamo.local_value(context, "param")
        if param in innermost:
            dynamo.set_local(context, "operand", innermost[param])
            return
    if dynamo.branches_around(context):
        dynamo.set_local(context, "operand", dynamo.call_outside_branches(context, _local_unless_held, "param"))


def _local_unless_held(param: FSDPParam) -> Tensor | None:
    return None if _local_spec(param) == "" else unsharded_local(param)  # HELD, without a guard on that global


def _local_spec(param: FSDPParam) -> str | None:
    """Return the spec of a read for which nothing else counts, HELD, or None."""
    return param.local_spec if torch.is_grad_enabled() else param.local_spec_without_grad


def unless_held(param: FSDPParam) -> Tensor | None:
    """Return the unsharded parameter, or None while eager hooks hold it, so that a read is of what is registered."""
    # _local_spec() and unshard_arguments() written out: Dynamo would trace both for each parameter
    spec = param.local_spec if torch.is_grad_enabled() else param.local_spec_without_grad
    if spec:
        return collectives.unshard(param.leaf if param.leaf.requires_grad else param.leaf.detach(), None, None, spec)
    return unsharded(param) if spec is None else None


def unsharded(param: FSDPParam) -> Tensor:
    """Return the unsharded parameter."""
    local = unsharded_local(param)
    return local if param.outer is None else param.outer.wrap(local)


def unsharded_local(param: FSDPParam) -> Tensor:
    """Return it without other parallelism."""
    if param.extension is not None:
        return _extended(param, param.extension)
    return collectives.unshard(*unshard_arguments(param))


def unshard_arguments(param: FSDPParam) -> tuple[Tensor, Tensor | None, Tensor | None, str]:
    """Return the arguments of :func:`collectives.unshard` for a parameter without an extension."""
    spec = _local_spec(param)
    if spec:
        return (param.leaf if param.leaf.requires_grad else param.leaf.detach()), None, None, spec
    return _leaves(param)


def _leaves(param: FSDPParam) -> tuple[Tensor, Tensor | None, Tensor | None, str]:
    """Return the leaf, the one that takes its gradient instead, unsharded or as a shard, and the spec."""
    if not (param.leaf.requires_grad if param.leaf_is_current else param.sharded_param.requires_grad):
        return param.leaf.detach(), None, None, param.spec_text
    if not torch.is_grad_enabled():
        return param.leaf, None, None, param.spec_text
    return param.leaf, param.gradients.unsharded_leaf, param.gradients.shard_leaf, param.gradients.spec_text


def _extended(param: FSDPParam, extension: AllGatherExtension) -> Tensor:
    sent, metadata = extension.split()
    gathered = (collectives.unshard(each, None, None, extension.input_spec_text) for each in sent)
    outputs = [output.view(-1, *each.shape[1:]) for output, each in zip(gathered, sent, strict=True)]
    made = extension.without_padding(extension.join(outputs, metadata)[0])
    return collectives.with_gradient(made, *_leaves(param))
