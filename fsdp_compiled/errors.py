"""The library's own errors: a broken invariant, or ranks that differ or fail."""


class FSDPError(RuntimeError):
    """The library found its own state inconsistent. Users' mistakes in arguments raise ValueError or TypeError."""


class RankMismatchError(FSDPError):
    """Ranks were about to start different collectives, or one did not come to any; nothing was started.

    Or they have run different ones, each known to all ranks, in this step or the one before.
    """


class RankFailureError(FSDPError):
    """Another rank has failed while this one waited for it, in a collective or before one."""
