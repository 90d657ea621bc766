"""Runs one command: reads arguments, calls ``inspect`` or ``doctor``, prints.

It must not examine models or the machine itself.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from ..passes.cost import CLUSTERS
from ..policy import SchedulePolicy
from . import doctor
from .machine import look
from .parser import WIDTH, WORLD, make_parser
from .target import UsageError, build, find

if TYPE_CHECKING:
    from ..inspect import Capture


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1 for problems that ``doctor`` found, 2 for wrong usage.

    Args:
        argv: without the program's name; None takes the process's.
    """
    args = make_parser().parse_args(argv)
    try:
        return {"inspect": _inspect, "doctor": _doctor}[args.command](args)
    except UsageError as error:
        print(f"fsdp-compiled {args.command}: error: {error}", file=sys.stderr)
        return 2


# ---- inspect ----


def _inspect(args: argparse.Namespace) -> int:
    from ..inspect import capture, explain  # only here, so that doctor also runs where inspect cannot be imported

    schedule = _schedule(args)
    builder = find(args.target)
    with _process_group(args.world, args.rank):
        built = build(args.target, builder)
        if args.explain:
            print(explain(built.model, schedule), end="\n\n")
        with _schedule_mistakes():
            captured = capture(built.model, *built.args, loss=None, schedule=schedule, **built.kwargs)
        print(captured)
        for path in args.save:
            _save(captured, path)
    return 0


def _schedule(args: argparse.Namespace) -> SchedulePolicy:
    try:
        return SchedulePolicy(
            bucket=args.bucket,
            prefetch=args.prefetch,
            in_flight_bytes=args.in_flight_bytes,
            keep_unsharded_bytes=args.keep_unsharded_bytes,
            cluster=None if args.cluster is None else CLUSTERS[args.cluster],
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


@contextmanager
def _process_group(world: int | None, rank: int | None) -> Iterator[None]:
    """Start a fake process group unless the user's module has started one."""
    if dist.is_initialized():
        ignored = "; --world and --rank are ignored" if world is not None or rank is not None else ""
        _say(
            f"process group: the one that MODULE started, rank {dist.get_rank()} of {dist.get_world_size()}{ignored}"
        )
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


@contextmanager
def _schedule_mistakes() -> Iterator[None]:
    """Raise UsageError for a schedule that a graph cannot keep, which is known only while it compiles."""
    try:
        yield
    except Exception as error:
        for cause in _causes(error):
            if isinstance(cause, ValueError) and str(cause).startswith("SchedulePolicy."):
                raise UsageError(str(cause)) from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _save(captured: Capture, path: Path) -> None:
    try:
        _say(f"saved {captured.save(path)}")
    except (ImportError, OSError, ValueError) as error:
        raise UsageError(str(error)) from error


def _say(line: str) -> None:
    print(line, file=sys.stderr)


# ---- doctor ----


def _doctor(_: argparse.Namespace) -> int:
    findings = doctor.diagnose(look(rule.setting for rule in doctor.RULES))
    width = max(len(found.subject) for found in findings)
    for found in findings:
        head = f"{found.level:<7}  {found.subject:<{width}}  "
        rest = " " * len(head)
        print(textwrap.fill(found.text, WIDTH, initial_indent=head, subsequent_indent=rest, break_on_hyphens=False))
    problems = sum(found.level == "problem" for found in findings)
    print(f"\n{problems or 'no'} problem{'' if problems == 1 else 's'}")
    return 1 if problems else 0
