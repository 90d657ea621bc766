"""Reads the arguments of one command, calls what does it, and prints what that returns."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from ..inspect import OPTIMIZERS, capture, explain
from ..inspect.gpu_program import GPUS
from ..inspect.render.text import WIDTH, wrapped
from ..inspect.report import WRITERS
from ..passes.cost import CLUSTERS, VARIABLE, named
from ..planner.plan import plan, simulated_group
from ..policy import SchedulePolicy
from . import doctor
from .calibrate import calibrate
from .target import UsageError, build, find

WORLD = 8  # ranks of the fake process group that is used where the user's module starts none

_INSPECT = """\
Compile a sharded model and print its schedule: every collective of every graph, when it is launched and waited
for, how long it takes by estimate and how much of that is hidden behind compute.

MODULE is a dotted module or a path to a .py file. BUILD is a function in it without arguments that returns
(model, args) or (model, args, kwargs): a model given to fully_shard, and example inputs for its forward.
If MODULE starts no process group when it is imported, a fake one of --world ranks is used, so that one
process without GPUs can look at any number of ranks; nothing is communicated, and BUILD must not start another."""

_INSPECT_EXAMPLES = """\
examples:
  fsdp-compiled inspect train.py:build
  fsdp-compiled inspect train.py:build --world 64 --cluster H100 --save report.html timeline.png
  fsdp-compiled inspect my.package:build --bucket 64MiB --prefetch 2 --in-flight-bytes 1GiB
  fsdp-compiled inspect train.py:build --bucket unit --explain --save capture.json
  fsdp-compiled inspect train.py:build --device H100 --code

train.py:
  def build():
      model = Transformer()
      for layer in model.layers:
          fully_shard(layer)
      fully_shard(model)
      return model, (torch.zeros(8, 512, dtype=torch.int64),)

files: .html is a page that needs nothing else, .json the data, .trace.json a trace for Perfetto or
chrome://tracing, .png a picture of the timelines.

exit status: 0, or 2 for a mistake in the command or in what BUILD returns."""

_DOCTOR = """\
Check versions, compilers, devices, torch's settings and Inductor's custom-pass slots. Each line begins with ok, with
note for what works but is worth knowing, or with problem for what fails or hangs.

exit status: 0, 1 if there is any problem, or 2 if FSDP_COMPILED_CLUSTER names no cluster."""

_CALIBRATE = """\
Measure the machine that it runs on, and write a cluster file, for SchedulePolicy(cluster=FILE), for inspect --cluster
FILE, and for the environment variable FSDP_COMPILED_CLUSTER of the first rank, which tells the others. It takes one
to two minutes. Start it as training is started, on all machines:

  torchrun --nproc-per-node 8 -m fsdp_compiled calibrate --out cluster.json"""


_PLAN = """\
For each number of ranks, estimate which mesh, batch, activation checkpointing and reshard_after_forward train fastest
and fit, what they take, and what to write to get them. Nothing is computed or communicated.

MODULE is a dotted module or a path to a .py file. BUILD is a function in it that takes a number of sequences and
returns (model, args) or (model, args, kwargs): a model that is not sharded, whose forward returns the loss, and
inputs that many sequences long in dimension 0. It is called with torch's default device "meta".

  fsdp-compiled plan train.py:build --cluster H100 --ranks 8,64,512 --tokens-per-step 4M --save plan.html

exit status: 0, 1 if nothing fits on any number of ranks, or 2 for a mistake in the command or in what BUILD
returns."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1 for problems that were found, 2 for wrong usage.

    Args:
        argv: without the program's name; None takes the process's.
    """
    args = _parser().parse_args(argv)
    try:
        commands = {"inspect": _inspect, "doctor": _doctor, "calibrate": _calibrate, "plan": _plan}
        return commands[args.command](args)
    except UsageError as error:
        print(f"fsdp-compiled {args.command}: error: {error}", file=sys.stderr)
        return 2


def _inspect(args: argparse.Namespace) -> int:
    schedule = _schedule(args)
    builder = find(args.target)
    with _process_group(args.world, args.rank):
        model, inputs, keywords = build(args.target, builder)
        with _one_line_about("SchedulePolicy.", "device: ", f"{VARIABLE}: "):
            if args.explain:
                print(explain(model, schedule), end="\n\n")
            captured = capture(model, *inputs, loss=None, schedule=schedule, device=args.device, **keywords)
        print(captured)
        for graph in captured.graphs if args.code else ():
            print(f"\n{graph.kind}: code that Inductor generated\n{graph.code}")
        try:
            measured = captured.compare(args.trace) if args.trace else None
            if measured:
                print(f"\n{args.trace}: {measured}")
            for path in args.save:
                shown = measured if path.suffix == ".html" else None
                _say(f"saved {captured.save(path, measured=shown)}")
        except (ImportError, OSError, ValueError) as error:
            raise UsageError(str(error)) from error
    return 0


def _schedule(args: argparse.Namespace) -> SchedulePolicy:
    given = {field.name: getattr(args, field.name) for field in fields(SchedulePolicy)}
    with _one_line_about("SchedulePolicy."):
        return SchedulePolicy(**{name: value for name, value in given.items() if value is not None})


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
    with simulated_group(world, rank):
        _say(f"process group: fake, rank {rank} of {world}; nothing is communicated, so results are garbage")
        yield


@contextmanager
def _one_line_about(*beginnings: str) -> Iterator[None]:
    """Report errors that begin so, and errors that these cause, in one line; any others keep their traceback."""
    try:
        yield
    except Exception as error:
        found: BaseException | None = error
        kinds = (TypeError, ValueError, RuntimeError, ImportError)
        while found and not (isinstance(found, kinds) and str(found).startswith(beginnings)):
            found = found.__cause__ or found.__context__
        if found is None:
            raise
        raise UsageError(str(found)) from error


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _calibrate(args: argparse.Namespace) -> int:
    with _one_line_about("calibrate: ", f"{VARIABLE}: "):
        found = calibrate(args.out)
    if int(os.environ.get("RANK", "0")) == 0:
        for name, link in (("inside a node", found.intra), ("between nodes", found.inter)):
            rate = f"{link.bytes_per_s / 1e9:.3g} GB/s, {link.latency_us + link.hop_us:.3g} us"
            _say(f"{name + (':' if link.measured else ', not measured:'):<29} {rate}")
        fp32, bf16 = (curve[-1][1] / 1e12 for curve in (found.products_32bit, found.products_16bit))
        _say(f"{'products:':<29} {fp32:.3g} TFLOP/s fp32, {bf16:.3g} bf16")
        _say(f"saved {args.out}")
    return 0


def _plan(args: argparse.Namespace) -> int:
    builder = find(args.target, 1)
    given = {name: value for name, value in vars(args).items() if name not in ("command", "target", "save")}
    with _one_line_about("plan: ", "build: ", "memory_bytes: ", "optimizer: "):
        found = plan(builder, **given, progress=_say)
    print(found)
    if args.save:
        _say(f"saved {found.save(args.save)}")
    return 0 if any(found.best(ranks, 1) for ranks in found.options) else 1


def _doctor(_: argparse.Namespace) -> int:
    with _one_line_about(f"{VARIABLE}: "):
        findings = doctor.diagnose()
    width = max(len(found.subject) for found in findings)
    for level, subject, text in findings:
        head = f"{level:<7}  {subject:<{width}}  "
        print(*wrapped(text, head, " " * len(head)), sep="\n")
    problems = sum(found.level == "problem" for found in findings)
    print(f"\n{problems or 'no'} problem{'' if problems == 1 else 's'}")
    return 1 if problems else 0


class _Parser(argparse.ArgumentParser):
    """A parser whose errors take one line, and whose help keeps its lines."""

    def __init__(self, **kwargs: Any) -> None:
        formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=32, width=WIDTH)
        super().__init__(formatter_class=formatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    about = "Inspect what fsdp_compiled does with a model, or check whether this machine can run it."
    more = "fsdp-compiled is short for python -m fsdp_compiled. More on a command: fsdp-compiled inspect --help"
    parser = _Parser(prog="fsdp-compiled", description=about, epilog=more)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    about = "compile a model and print its schedule"
    inspect = commands.add_parser("inspect", help=about, description=_INSPECT, epilog=_INSPECT_EXAMPLES)
    inspect.usage = "%(prog)s MODULE:BUILD [options]"
    about = "check what on this machine fails or slows training down"
    commands.add_parser("doctor", help=about, description=_DOCTOR)
    about = "measure this machine for estimates"
    calibrate = commands.add_parser("calibrate", help=about, description=_CALIBRATE)
    calibrate.add_argument("--out", type=_new_file(), required=True, metavar="FILE", help="the cluster file, JSON")
    _add_plan(commands.add_parser("plan", help="which mesh, batch and checkpointing to use", description=_PLAN))
    add = inspect.add_argument
    add("target", metavar="MODULE:BUILD", help="where the function is that builds the model")
    add("--world", type=int, metavar="N", help=f"ranks of the fake process group ({WORLD})")
    add("--rank", type=int, metavar="N", help="this process's rank in it (0)")
    add("--explain", action="store_true", help="first say what each unit does, and why")
    about = f"also save the capture as {' or '.join(WRITERS)}"
    add("--save", type=_new_file(*WRITERS), nargs="+", action="extend", default=[], metavar="FILE", help=about)
    about = f"generate and assemble the program of this GPU ({', '.join(GPUS)}), which need not be here"
    add("--device", choices=GPUS, metavar="NAME", help=about)
    add("--code", action="store_true", help="also print the code that Inductor generates")
    about = "a file by torch.profiler: also hold the estimates against this run"
    add("--trace", type=_trace, metavar="FILE", help=about)
    about = "The fields of SchedulePolicy. BYTES is 65536, 64MiB, 1.5GiB or the like."
    add = inspect.add_argument_group("schedule", about).add_argument
    about = "shortest estimated step, one for each unit, every parameter alone, or full up to so many bytes"
    add("--bucket", type=_or(byte_size, "auto", "unit", "none"), metavar="auto|unit|none|BYTES", help=about)
    add("--prefetch", type=_or(_count, "auto"), metavar="auto|N", help="all-gathers launched ahead of use")
    about = "bound on unsharded bytes: all-gathered and not freed, and gradients not yet reduced"
    add("--in-flight-bytes", type=_or(byte_size, "auto"), metavar="auto|BYTES", help=about)
    about = "of parameters that stay unsharded from forward to backward"
    add("--keep-unsharded-bytes", type=_or(byte_size, "auto"), metavar="auto|BYTES", help=about)
    about = "tokens that a rank's batch is taken to have (8192, 1024 where ranks compute on the host)"
    add("--tokens", type=_or(_count, "auto"), metavar="auto|N", help=about)
    add("--verify", action="store_true", help="check after every pass that the graph keeps the rules")
    about = f"{', '.join(CLUSTERS)} or a file by calibrate: what times are estimated for (--device, or found)"
    add("--cluster", type=_or(named), metavar="NAME|FILE", help=about)
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s MODULE:BUILD [options]"
    add = parser.add_argument
    add("target", metavar="MODULE:BUILD", help="where the function is that builds the model")
    about = f"{', '.join(CLUSTERS)} or a file by calibrate (H100)"
    add("--cluster", type=_or(named), metavar="NAME|FILE", default="H100", help=about)
    add("--ranks", type=_counts, metavar="N,N", default=(8, 64, 512), help="numbers of ranks (8,64,512)")
    about = "of all ranks together, such as 4000000, 512K or 4M (4M)"
    add("--tokens-per-step", type=_tokens, metavar="N", default=4_000_000, help=about)
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="whose state and step count (adamw)")
    add("--memory", dest="memory_bytes", type=_or(byte_size), metavar="BYTES", help="of each rank (the cluster's)")
    add("--save", type=_new_file(".html"), metavar="FILE", help="also save the plan as .html")


def byte_size(text: str) -> int:
    """Return the bytes that ``65536``, ``64MiB``, ``1.5GiB`` or ``10 MB`` mean."""
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+) *(?:(?:([KMGT])(I?))?B)?\s*", text.upper())
    if match is None:
        raise ValueError(f"expected a number of bytes such as 65536, 64MiB or 1GiB, got {text!r}")
    number, prefix, is_binary = match.groups(default="")
    size = float(number) * (1024 if is_binary else 1000) ** ("", "K", "M", "G", "T").index(prefix)
    if not size.is_integer():
        raise ValueError(f"expected an integer number of bytes, got {text!r}, which is {size}")
    return int(size)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"expected a number, got {text!r}")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    if not all(each.isdecimal() and int(each) for each in text.split(",")):
        raise argparse.ArgumentTypeError(f"expected numbers of at least 1 such as 8,64, got {text!r}")
    return tuple(map(int, text.split(",")))


def _tokens(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)([KM]?)", text)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"expected a number of at least 1 such as 4000000, 512K or 4M, got {text!r}")
    return int(match[1]) * {"": 1, "K": 10**3, "M": 10**6}[match[2]]


def _or(read: Callable[[str], Any], *words: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return text if text in words else read(text)
        except (TypeError, ValueError) as error:
            expected = " or ".join([*map(repr, words), ""])
            raise argparse.ArgumentTypeError(str(error).replace("expected ", f"expected {expected}")) from None

    return parse


def _new_file(*suffixes: str) -> Callable[[str], Path]:
    """Return what parses the path of a file to write, which ends in one of ``suffixes`` if there are any."""

    def parse(text: str) -> Path:
        path = Path(text)
        if suffixes and not text.endswith(suffixes):
            raise argparse.ArgumentTypeError(f"expected a file that ends in {' or '.join(suffixes)}, got {text!r}")
        if path.is_dir() or not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise argparse.ArgumentTypeError(f"expected a file that can be written, got {text!r}")
        return path

    return parse


def _trace(text: str) -> Path:
    if Path(text).is_dir() or not os.access(text, os.R_OK):  # said before anything compiles
        raise argparse.ArgumentTypeError(f"expected a file that can be read, got {text!r}")
    return Path(text)
