"""What to tell about ranks that differ: which, in what, and why if it shows. Text from posts, nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from ..sharding.contract import Collective, Contract


def difference(sides: Sequence[Sequence[int]], posts: Sequence[dict[str, str]]) -> str:
    """Return in what two groups of ranks differ, from a post of each."""
    who = [ranks(side) for side in sides]
    if posts[0]["versions"] != posts[1]["versions"]:
        return f"ranks run other versions: {_beside(who, [post['versions'] for post in posts])}; install one on all"
    contracts = [Contract.decode(post["contract"]) for post in posts]
    if contracts[0].collectives == contracts[1].collectives:
        return (
            f"{who[0]} and {who[1]} came to {described(contracts[0])} after different collectives; "
            "an error or a branch that only some ranks took came before"
        )
    place, pair = _first_difference(*(contract.collectives for contract in contracts))
    shown = _beside(who, _contrast(*pair))
    number = f"collective {place + 1}" if max(len(each.collectives) for each in contracts) > 1 else "a collective"
    return f"ranks were about to start different collectives, in {number}: {shown}. {_cause(who, contracts)}"


def _first_difference(
    ours: Sequence[Collective], theirs: Sequence[Collective]
) -> tuple[int, tuple[Collective | None, Collective | None]]:
    return next(each for each in enumerate(zip_longest(ours, theirs)) if each[1][0] != each[1][1])


def _contrast(ours: Collective | None, theirs: Collective | None) -> list[str]:
    """Return both collectives so that the difference shows."""
    if ours is None or theirs is None or ours.kind != theirs.kind or ours.params == theirs.params:
        return ["none" if each is None else _name(each, each.params) for each in (ours, theirs)]
    pairs = zip(ours.params, theirs.params, strict=False)
    alike = next((n for n, pair in enumerate(pairs) if pair[0] != pair[1]), None)
    if alike is None:
        return [f"{each.kind} of {len(each.params)} parameters from {each.params[0]}" for each in (ours, theirs)]
    return [_name(each, each.params[alike:]) for each in (ours, theirs)]


def _name(collective: Collective, params: Sequence[str]) -> str:
    more = f" and {len(params) - 1} more" if len(params) > 1 else ""
    return f"{collective.kind} of {params[0]}{more}, {collective.how}"


def described(contract: Contract) -> str:
    first, more = contract.collectives[0], len(contract.collectives) - 1
    return _name(first, first.params) + (f" and {more} more collectives of a graph" if more else "")


_ADVICE = {
    "inputs": "the sizes of their inputs differ, from which schedules are estimated: pad them, or set "
    'SchedulePolicy(bucket="unit")',
    "schedule": "they compile with different SchedulePolicy objects: give the same one on every rank",
    "cluster": "they estimate for different machines: set LOCAL_WORLD_SIZE alike, or SchedulePolicy(cluster=...)",
}


def _cause(who: Sequence[str], contracts: Sequence[Contract]) -> str:
    bases = [dict(fact.split(": ", 1) for fact in contract.basis) for contract in contracts]
    if not all(bases):
        compiled = [side for side, basis in zip(who, bases, strict=True) if basis]
        if compiled:
            return f"{compiled[0]} runs a compiled graph where others do not; compile on every rank or on none"
        return "Ranks took different paths through the program: look where they branch by rank or by data"
    for name, advice in _ADVICE.items():
        values = [basis.get(name, "") for basis in bases]
        if values[0] != values[1]:
            return f"Likely {advice} ({_beside(who, values)})"
    return "Ranks compiled different code: look where the model branches by rank or by data"


def _beside(who: Sequence[str], what: Sequence[str]) -> str:
    return "; ".join(f"{side}: {each}" for side, each in zip(who, what, strict=True))


def ranks(numbers: Iterable[int]) -> str:
    names = list(map(str, numbers))
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"
