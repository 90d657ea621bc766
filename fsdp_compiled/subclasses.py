"""What a class needs that takes the place of the user's class it is made of: of a module or an optimizer."""

from __future__ import annotations

from typing import Any


class Unannounced:
    """Base that hides the user's ``__init_subclass__``, which may want arguments, or register classes."""

    def __init_subclass__(cls, **_: object) -> None:
        pass


def layout_base(user_cls: type[Any]) -> tuple[type, ...]:
    """Return the first base that a subclass needs if instances get their ``__dict__`` below an ABC or a Generic."""
    slots: Any = user_cls
    while slots.__dictoffset__:
        slots = slots.__base__
    if slots is object:
        return ()
    layout = type("_Layout", (slots,), {"__orig_bases__": ()})
    for name in {"_is_protocol", "__init__"} & vars(layout).keys():  # by which no instance could be of a Protocol
        delattr(layout, name)
    return (layout,)
