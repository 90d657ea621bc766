"""Ranks that differ: what they agree on before collectives start, and what they tell each other when they fail."""

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
