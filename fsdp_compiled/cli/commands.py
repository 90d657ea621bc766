"""Runs one command: reads arguments, calls ``inspect`` or ``doctor``, prints.

It must not examine models or the machine itself.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields

import torch.distributed as dist

from ..passes.cost import CLUSTERS
from ..policy import SchedulePolicy
from . import doctor
from .parser import WIDTH, WORLD, make_parser
from .target import UsageError, build, find


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1 for problems that ``doctor`` found, 2 for wrong usage.

    Args:
        argv: without the program's name; None takes the process's.
    """
    args = make_parser().parse_args(argv)
    try:
        return _inspect(args) if args.command == "inspect" else _doctor()
    except UsageError as error:
        print(f"fsdp-compiled {args.command}: error: {error}", file=sys.stderr)
        return 2


def _inspect(args: argparse.Namespace) -> int:
    from ..inspect import capture, explain  # only here, so that doctor also runs where inspect cannot be imported

    schedule = _schedule(args)
    builder = find(args.target)
    with _process_group(args.world, args.rank):
        model, inputs, keywords = build(args.target, builder)
        if args.explain:
            print(explain(model, schedule), end="\n\n")
        try:
            captured = capture(model, *inputs, loss=None, schedule=schedule, **keywords)
        except Exception as error:
            if mistake := _mistake_in_schedule(error):
                raise UsageError(mistake) from error
            raise
        print(captured)
        try:
            for path in args.save:
                _say(f"saved {captured.save(path)}")
        except (ImportError, OSError, ValueError) as error:
            raise UsageError(str(error)) from error
    return 0


def _schedule(args: argparse.Namespace) -> SchedulePolicy:
    given = {field.name: getattr(args, field.name) for field in fields(SchedulePolicy)}
    given["cluster"] = CLUSTERS.get(args.cluster)
    try:
        return SchedulePolicy(**{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise UsageError(str(error)) from error


@contextmanager
def _process_group(world: int | None, rank: int | None) -> Iterator[None]:
    """Start a fake process group unless the user's module has started one."""
    if dist.is_initialized():
        place = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        ignored = "" if world is rank is None else "; --world and --rank are ignored"
        _say(f"process group: the one that MODULE started, {place}{ignored}")
        yield
        return
    world, rank = WORLD if world is None else world, rank or 0
    if world < 1:
        raise UsageError(f"--world: expected at least 1, got {world}")
    if not 0 <= rank < world:
        raise UsageError(f"--rank: expected 0 to {world - 1} for --world {world}, got {rank}")
    dist.init_process_group("fake", rank=rank, world_size=world)
    _say(f"process group: fake, rank {rank} of {world}; nothing is communicated, so results are garbage")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _mistake_in_schedule(error: BaseException | None) -> str | None:
    """Return what a pass says, while a graph compiles, about a schedule that the graph cannot keep."""
    while error is not None:
        if isinstance(error, ValueError) and str(error).startswith("SchedulePolicy."):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _doctor() -> int:
    findings = doctor.diagnose()
    width = max(len(found.subject) for found in findings)
    for level, subject, text in findings:
        head = f"{level:<7}  {subject:<{width}}  "
        lines = textwrap.wrap(text, WIDTH - len(head), break_on_hyphens=False)
        print(head + f"\n{' ' * len(head)}".join(lines))
    problems = sum(found.level == "problem" for found in findings)
    print(f"\n{problems or 'no'} problem{'' if problems == 1 else 's'}")
    return 1 if problems else 0
