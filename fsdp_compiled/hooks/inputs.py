"""What a unit writes to lists and dicts among its forward's inputs, which may be copies, reaches its caller."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .forward import tensors_in


class InputCopies:
    """The inputs of a unit's forwards that have not ended, or have failed within another that has not."""

    def __init__(self) -> None:
        self._forwards: list[_Inputs] = []  # the innermost at last

    def begin(self, module: nn.Module, given: tuple[Any, Any], got: tuple[Any, Any]) -> None:
        """Note what a forward gets in place of what it was given, in which tensors were replaced."""
        self._forwards.append(_Inputs(module, given, got))

    def __bool__(self) -> bool:
        """Tell whether a forward of the unit has not ended: the backward of one within it ends before its own."""
        return bool(self._forwards)

    def end(self, module: nn.Module) -> list[Tensor]:
        """End a forward: let the caller's lists and dicts follow what it wrote; return the results among that."""
        added, last = [], None
        while self._forwards and (last is None or last.module is not module):  # others have failed within it
            last = self._forwards.pop()
            added += last.write_back()
        return [each for each in tensors_in(added) if each.requires_grad]

    def clear(self) -> None:
        self._forwards.clear()


class _Inputs:
    """Those of one forward."""

    def __init__(self, module: nn.Module, given: tuple[Any, Any], got: tuple[Any, Any]) -> None:
        self.module = module
        self._given: dict[int, tuple[Any, Any]] = {}  # by id: what forward gets, and in whose place
        self._containers: list[tuple[Any, Any, list[tuple[Any, int]]]] = []  # the same, and the ids of what was in it
        if any(isinstance(each, (tuple, list, dict)) for each in (*got[0], *got[1].values())):
            self._note(given, got)

    def _note(self, given: Any, got: Any) -> None:
        is_new = id(got) not in self._given
        self._given[id(got)] = got, given
        if is_new and isinstance(got, (tuple, list, dict)):
            for before, item in zip(_items(given).values(), _items(got).values(), strict=True):
                self._note(before, item)
            if not isinstance(got, tuple):
                self._containers.append((given, got, _ids(got)))

    def write_back(self) -> list[Any]:
        added = []
        for given, got, before in self._containers:
            items = _items(got)
            added += [item for item in items.values() if id(item) not in self._given]
            if got is not given and _ids(got) != before:
                _fill(given, {key: self._given.get(id(item), (None, item))[1] for key, item in items.items()})
        return added


def _items(container: Any) -> dict[Any, Any]:
    return dict(container if isinstance(container, dict) else enumerate(container))


def _ids(container: Any) -> list[tuple[Any, int]]:
    return [(key, id(item)) for key, item in _items(container).items()]


def _fill(container: Any, items: dict[Any, Any]) -> None:
    if isinstance(container, list):
        container[:] = items.values()
        return
    if [*container] != [*items][: len(container)]:  # else new ones come last, and Hugging Face's delete nothing
        for key in [*container]:
            del container[key]
    for key, item in items.items():  # one by one: Hugging Face's have no update()
        container[key] = item
