"""What to tell about ranks that differ: which, in what, and why if it shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TypedDict

from ..sharding.contract import Contract, ContractLine


def difference(sides: Sequence[Sequence[int]], versions: Sequence[str], posts: Sequence[str]) -> str:
    """Return in what two groups of ranks differ, from the versions that run on one of each, and its contract."""
    who = [ranks(side) for side in sides]
    if versions[0] != versions[1]:
        return f"ranks run other versions: {_listed(who, versions)}; install one on all"
    contracts = list(map(Contract.decode, posts))  # which other versions may write differently
    if contracts[0].collectives == contracts[1].collectives:
        return (
            f"{who[0]} and {who[1]} came to {described(contracts[0])} after different collectives; "
            "an error or a branch that only some ranks took came before"
        )
    return f"ranks were about to start different collectives: {_shown(who, contracts)}. {_cause(who, contracts)}"


class Record(TypedDict):
    """What a rank has run on a group since its ranks were last found equal."""

    base: int  # how much it ran before
    keys: list[str]
    entries: dict[str, tuple[str, str]]  # by key, a packed contract and what was noted before it


def parted(records: dict[int, Record]) -> str:
    """Return where ranks, by their numbers, have first run different things, each known to all of them."""
    base = max(record["base"] for record in records.values())
    runs = {rank: record["keys"][base - record["base"] :] for rank, record in records.items()}
    first, *others = runs
    pairs = {rank: enumerate(zip(runs[first], runs[rank], strict=False)) for rank in others}
    places = [(place, rank) for rank, pair in pairs.items() for place, (ours, theirs) in pair if ours != theirs]
    if not places:
        return f"{ranks(runs)} have run different collectives longer ago than they remember. {_PARTED}"
    place, odd = min(places)
    after, shown = "", {}
    for one in (first, odd):
        side = ranks(rank for rank, run in runs.items() if run[place : place + 1] == runs[one][place : place + 1])
        entries, keys = records[one]["entries"], runs[one][: place + 1]
        after = f" after {described(Contract.unpack(entries[keys[-2]][0]))}" if place else ""
        shown[side] = entries[keys[-1]]
    contracts, noted = zip(*((Contract.unpack(packed), noted) for packed, noted in shown.values()), strict=True)
    if contracts[0].collectives == contracts[1].collectives:
        how = _listed(list(shown), [f"{described(contracts[0])}{each}" for each in noted])
    else:
        how = _shown(list(shown), contracts)
    return f"ranks have run different collectives{after}: {how}. {_PATHS}. {_PARTED}"


def last_runs(texts: dict[int, str]) -> str:
    """Tell what each rank, by its number, has said that it ran last; "" if none has said anything."""
    sides = {text: ranks(rank for rank in texts if texts[rank] == text) for text in texts.values()}
    what = [text or "nothing that others know of" for text in sides]
    return f"What ran last: {_listed(list(sides.values()), what)}" if any(sides) else ""


def absent(numbers: Sequence[int], contract: Contract, silent_s: float, last: str) -> str:
    """Tell of ranks that have not come to a contract, with what they ran last if that is known."""
    what = f"{ranks(numbers)} neither came to {described(contract)} nor compiled in {silent_s:g} s"
    advice = "Look there for another path through the program or an error, or allow more time by"
    return ". ".join(filter(None, (what, last, f"{advice} set_rank_agreement(deadline=)")))


def _shown(who: Sequence[str], contracts: Sequence[Contract]) -> str:
    """Return the first difference of two contracts, with the ranks of each."""
    pairs = enumerate(zip_longest(*(contract.collectives for contract in contracts)), start=1)
    place, pair = next(each for each in pairs if each[1][0] != each[1][1])
    is_graph = max(len(contract.collectives) for contract in contracts) > 1
    return _listed(who, _contrast(*pair)) + (f" (collective {place} of a graph)" if is_graph else "")


def _contrast(ours: ContractLine | None, theirs: ContractLine | None) -> list[str]:
    """Return both collectives so that the difference shows."""
    if ours is None or theirs is None or ours.kind != theirs.kind or ours.params == theirs.params:
        return ["none" if each is None else _name(each, each.params) for each in (ours, theirs)]
    pairs = zip(ours.params, theirs.params, strict=False)
    alike = next((n for n, pair in enumerate(pairs) if pair[0] != pair[1]), None)
    if alike is None:  # one list begins with the other
        return [f"{one.kind} of {len(one.params)} parameters, the last {one.params[-1]}" for one in (ours, theirs)]
    return [_name(each, each.params[alike:]) for each in (ours, theirs)]


def _name(collective: ContractLine, params: Sequence[str]) -> str:
    more = f" and {len(params) - 1} more" if len(params) > 1 else ""
    how = ", ".join(filter(None, (collective.how, collective.form)))
    return f"{collective.kind} of {params[0]}{more}, {how}"


def described(contract: Contract) -> str:
    """Return what a contract stands for, by the first of its collectives."""
    first, more = contract.collectives[0], len(contract.collectives) - 1
    return _name(first, first.params) + (f" and {more} more collectives of a graph" if more else "")


_ADVICE = {
    "schedule": "they compile with different SchedulePolicy objects: give the same one on every rank",
    "cluster": "they estimate for different machines: give all ranks the same SchedulePolicy(cluster=...)",
}
_PATHS = "Ranks took different paths through the program: look where they branch by rank or by data"
_PARTED = "What ran since may have used wrong parameters: continue from a checkpoint"


def _cause(who: Sequence[str], contracts: Sequence[Contract]) -> str:
    bases = [dict(fact.split(": ", 1) for fact in contract.basis) for contract in contracts]
    if not all(bases):
        for side, basis in zip(who, bases, strict=True):
            if basis:
                return f"{side} runs a compiled graph where others do not; compile on every rank or on none"
        return _PATHS
    for name, advice in _ADVICE.items():
        values = [basis.get(name, "") for basis in bases]
        if values[0] != values[1]:
            return f"Likely {advice} ({_listed(who, values)})"
    return "Ranks compiled different code: look where the model branches by rank or by data"


def _listed(who: Sequence[str], what: Sequence[str]) -> str:
    return "; ".join(f"{side}: {each}" for side, each in zip(who, what, strict=True))


def ranks(numbers: Iterable[int]) -> str:
    names = list(map(str, numbers))
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"
