"""The command line: ``python -m fsdp_compiled`` and ``fsdp-compiled``.

``commands`` reads the arguments and prints; ``target`` builds the user's model; ``doctor`` judges this machine.
"""

from .commands import main as main
