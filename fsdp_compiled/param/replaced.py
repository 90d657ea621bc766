"""Finds what has taken a sharded parameter's place without the module hearing of it; forward would ignore it.

It knows what is registered and what should be; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Protocol

from torch import Tensor, nn

from ..expect import unexpected
from .placement import ParamModuleInfo


def storage_of(sharded: Tensor) -> int:
    """Return an identity of the storage that a DTensor has beside its local tensor's; ``p.data = ...`` changes it."""
    return sharded.untyped_storage()._cdata


class Parameter(Protocol):
    """What is asked of ``FSDPParam``, whose file imports this one."""

    info: ParamModuleInfo
    sharded_param: nn.Parameter


class Registered:
    """Sharded parameters as they are registered, and the storages that :func:`storage_of` tells apart.

    Unlike :func:`check_untouched` it is fast, and does not know what else may be right, such as unsharded ones. It
    keeps the parameters; weak references to them would forbid ``torch.utils.swap_tensors``.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        places = [
            (module._parameters, name, param.sharded_param)
            for param in params
            for module, name in param.info.places()
        ]
        self._dicts = [registered for registered, *_ in places]
        self._names = [name for _, name, _ in places]
        self._expected = [sharded for *_, sharded in places]
        # Each is the same object for as long as it is kept. That of a DTensor has no memory.
        self._storages = [sharded.untyped_storage() for *_, sharded in places]

    def still(self) -> bool:
        """Tell whether the same parameters are registered, over the same storages."""
        registered = map(dict.get, self._dicts, self._names)
        storages = map(Tensor.untyped_storage, self._expected)
        return all(map(is_, registered, self._expected)) and all(map(is_, storages, self._storages))


def check_untouched(
    name: str, info: ParamModuleInfo, unsharded: nn.Parameter | None, sharded: nn.Parameter, storage: int
) -> None:
    """Raise RuntimeError unless the parameter is registered wherever it is used, and has the storage it had.

    What is registered is ``unsharded``, or ``sharded`` where that is None; ``storage`` is its :func:`storage_of`.
    """
    expected = sharded if unsharded is None else unsharded
    for module, attribute in info.places():
        found = module._parameters.get(attribute)
        if found is not expected:
            raise not_registered(name, type(found).__name__)
    if storage_of(sharded) != storage:
        got = "another by param.data = ..., which a DTensor does not follow"
        do = "use param.copy_(...) under torch.no_grad(), or load_state_dict()"
        raise unexpected(name, "the shard that it had", got, do, RuntimeError)


def not_registered(name: str, found: str) -> Exception:
    """Return the error for a parameter in whose place ``found`` is registered."""
    got = f"a {found} in its place, as torch.func.functional_call and torch.nn.utils.parametrize put there"
    do = (
        "call the model with its own parameters and copy values into them, or parametrize it before fully_shard; "
        "after an exception call reset_iter_state()"
    )
    return unexpected(name, "the parameter that fully_shard registered", got, do, RuntimeError)
