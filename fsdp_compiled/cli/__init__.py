"""The command line: ``python -m fsdp_compiled`` and ``fsdp-compiled``.

``commands`` runs what ``parser`` has read; ``target`` builds the user's model; ``doctor`` judges this machine.
Nothing in the library imports this package, and it must not know how graphs are scheduled or drawn.
"""

from .commands import main

__all__ = ["main"]
