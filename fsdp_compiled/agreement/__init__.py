"""Ranks that differ: what they must agree on before collectives start, and what they tell each other when they fail.

It knows contracts and process groups' stores. It must not know units, graphs or how a collective is packed.
"""

from .ledger import agree, note, number_in, register_callbacks, set_rank_agreement
from .peers import callbacks, report_failure, restore_excepthook

__all__ = [
    "agree",
    "callbacks",
    "note",
    "number_in",
    "register_callbacks",
    "report_failure",
    "restore_excepthook",
    "set_rank_agreement",
]
