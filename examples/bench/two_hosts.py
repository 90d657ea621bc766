"""Calibrate and compare over a network whose wire takes time but no CPU: two network namespaces with a rate limit.

    sudo OMP_NUM_THREADS=1 python examples/bench/two_hosts.py --rate 1gbit --layers 4 --width 384

Between two ranks of one machine gloo copies with the cores that compute, so nothing can be hidden. Here overlap is
real. It makes the namespaces, measures the link with ``python -m fsdp_compiled calibrate``, lets ``compare.py`` train
with the schedule made without and with that file and with one for a link given by hand, and removes the namespaces.
It needs root, iproute2 and Linux's tbf, and changes no network but its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fsdp_compiled.passes import CLUSTERS, Link, cost

HOSTS = 2
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
COMPARE = Path(__file__).with_name("compare.py")
CONTENDERS = ("unsharded compiled", "FSDP2", "FSDP2, blocks compiled", "full graph", "full graph, unit buckets")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def network(rate: str) -> Iterator[list[str]]:
    """Yield the names of two namespaces, each with an interface ``wire`` of this rate; remove them afterwards."""
    names = [f"fsdp-{os.getpid()}-{host}" for host in range(HOSTS)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", names[1])
        for host, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.200.1.{host + 1}/24", "dev", "wire")
            for interface in ("wire", "lo"):
                ip("-n", name, "link", "set", interface, "up")
            limit = ["tbf", "rate", rate, "burst", "512kb", "latency", "100ms"]
            ip("netns", "exec", name, "tc", "qdisc", "add", "dev", "wire", "root", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def run(names: list[str], ranks: int, port: int, program: list[str]) -> float:
    """Run a program on ``ranks`` ranks of each host, show the first one's output, and return the seconds it took."""
    began, started = time.perf_counter(), []
    try:
        for rank in range(ranks * len(names)):
            host, local = divmod(rank, ranks)
            places = {"RANK": rank, "WORLD_SIZE": ranks * len(names), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": ranks}
            address = {"MASTER_ADDR": "10.200.1.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "wire"}
            env = os.environ | {"OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in (places | address).items()}
            words = ["ip", "netns", "exec", names[host], sys.executable, *program]
            started.append(subprocess.Popen(words, env=env, stdout=None if rank == 0 else subprocess.DEVNULL))
        while any(process.poll() is None for process in started):
            if failed := [p.returncode for p in started if p.poll()]:
                raise SystemExit(f"{program[0]}: a rank ended with status {failed[0]}")
            time.sleep(0.2)
    finally:
        for process in started:
            process.kill()
    return time.perf_counter() - began


def by_hand(rate: str, ranks: int) -> cost.Cluster:
    """Return what somebody would write who knows the network: two thirds of the rate, shared by a host's ranks."""
    unit = next(unit for unit in BITS if rate.endswith(unit))
    bytes_per_s = float(rate.removesuffix(unit)) * BITS[unit] / 8 * 2 / 3 / ranks
    return replace(
        CLUSTERS["CPU"], inter=Link(500.0, 50.0, bytes_per_s, compute_blocked_fraction=0.15), ranks_per_node=ranks
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("--port", type=int, default=29533)
    parser.add_argument("--json", type=Path, help="where to write the figures, and the link that calibrate found")
    args, rest = parser.parse_known_args()
    if not any(args.rate.endswith(unit) for unit in BITS):
        parser.error(f"--rate: expected a number and one of {', '.join(BITS)}, got {args.rate!r}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the namespaces are removed
    folder = Path(tempfile.mkdtemp())
    calibrated, hand = folder / "calibrated.json", folder / "by hand.json"
    hand.write_text(cost.as_text(by_hand(args.rate, args.ranks)))
    with network(args.rate) as names:
        took = run(names, args.ranks, args.port, ["-m", "fsdp_compiled", "calibrate", "--out", str(calibrated)])
        print(f"calibrated in {took:.0f} s: {calibrated}")
        found = cost.named(str(calibrated)).inter
        print(found)
        program = [str(COMPARE), "--only", *CONTENDERS, "--cluster", str(calibrated), str(hand), *rest]
        run(names, args.ranks, args.port + 1, program + (["--json", str(args.json)] if args.json else []))
    if args.json:
        rates = {"calibrated": found.bytes_per_s, "by hand": cost.named(str(hand)).inter.bytes_per_s}
        figures = json.loads(args.json.read_text())
        link = {"rate": args.rate, "bytes_per_s": rates, "calibration_s": took}
        args.json.write_text(json.dumps({**figures, "link": link}, indent=1) + "\n")


if __name__ == "__main__":
    main()
