"""The library's own error: a broken invariant, never a user's mistake."""


class FSDPError(RuntimeError):
    """The library found its own state inconsistent. Users' mistakes raise ValueError or TypeError."""
