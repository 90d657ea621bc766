"""What a schedule for a nominal number of tokens loses where a rank's batch holds more or fewer of them.

    python examples/bench/bench_tokens.py
    python examples/bench/bench_tokens.py --cluster A100 --card 9.375

Ranks whose batches differ in length must make one decision, so schedules are decided for one number of tokens
(``SchedulePolicy.tokens``). A Llama of 8 billion parameters on 64 simulated ranks is traced at an eighth to eight
times of it. At each size every policy's schedule is simulated with the times of that size: the default one, one for
each of the other numbers, a bucket for each unit, and buckets of fixed sizes. All times are estimates.
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compiled import MixedPrecisionPolicy, SchedulePolicy, compile, fully_shard
from fsdp_compiled.inspect import capture
from fsdp_compiled.inspect.reading import Scheduled
from fsdp_compiled.passes import CLUSTERS, Cluster, post_grad
from fsdp_compiled.testing.llama import PRESETS, Llama

SEQ = 8192
CAPS_MIB = (64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Size:
    """A number of tokens, and the estimated microseconds of forward and backward under each policy."""

    tokens: int
    step_us: dict[str, float]

    @property
    def best(self) -> str:
        return min(self.step_us, key=self.step_us.__getitem__)

    def loss(self, policy: str) -> float:
        """Return by which fraction the policy's step is longer than the best."""
        return self.step_us[policy] / self.step_us[self.best] - 1


def build(layers: int, batch: int, seq: int) -> tuple[Llama, tuple[Tensor, Tensor]]:
    """Return a Llama 8B of ``layers`` layers, a unit for each, bf16 with fp32 reductions; and its inputs."""
    with torch.device("meta"):
        model = Llama(replace(PRESETS["8b"], layers=layers, max_seq=seq))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)
    model.to_empty(device="cpu")  # memory that nothing writes to
    tokens = torch.zeros(batch, seq, dtype=torch.int64)
    return model, (tokens, tokens)


def measure(tokens: int, layers: int, policies: dict[str, SchedulePolicy]) -> Size:
    model, inputs = build(layers, max(1, tokens // SEQ), min(tokens, SEQ))
    compile(model, regions="auto")  # captures use this setting; nothing is compiled yet
    captured = capture(model, *inputs, schedule=next(iter(policies.values())), code=False)
    found = dict.fromkeys(policies, 0.0)
    for graph in captured.graphs:
        assert graph.before is not None
        for name, policy in policies.items():
            scheduled = copy.deepcopy(graph.before)
            for run in post_grad(policy):
                run(scheduled.graph)
            found[name] += Scheduled(scheduled.graph, policy).timeline.total_us
    return Size(tokens, found)


def policies_for(cluster: Cluster, sizes: list[int]) -> dict[str, SchedulePolicy]:
    """Return the policies to compare by name, the default one first."""
    default = SchedulePolicy(cluster=cluster)
    found = {"default": default}
    found |= {f"tokens={size}": replace(default, tokens=size) for size in sizes if size != default.tokens_on(cluster)}
    found |= {"bucket per unit": replace(default, bucket="unit")}
    return found | {f"buckets of {cap} MiB": replace(default, bucket=cap * 2**20) for cap in CAPS_MIB}


def main() -> None:
    args = parse()
    dist.init_process_group("fake", rank=0, world_size=args.world)
    cluster = CLUSTERS[args.cluster]
    if args.card:
        cluster = replace(cluster, inter=replace(cluster.inter, bytes_per_s=args.card * 1e9))
    policies = policies_for(cluster, args.tokens)
    card = f"{cluster.inter.bytes_per_s / 1e9:g} GB/s per network card"
    print(f"{args.layers} layers of Llama 8B on {args.world} {args.cluster}, {card}")
    print(f"{'tokens':>8}{'default, ms':>13}{'best, ms':>11}{'lost':>8}  best policy")
    sizes = []
    for tokens in args.tokens:
        sizes.append(size := measure(tokens, args.layers, policies))
        step, best = size.step_us["default"] / 1e3, size.step_us[size.best] / 1e3
        print(f"{tokens:8}{step:13.1f}{best:11.1f}{size.loss('default'):8.1%}  {size.best}", flush=True)
    if args.json:
        kept = {"torch": torch.__version__, "world": args.world, "layers": args.layers, "cluster": asdict(cluster)}
        args.json.write_text(json.dumps(kept | {"sizes": [asdict(size) for size in sizes]}, indent=1) + "\n")
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=PRESETS["8b"].layers)
    parser.add_argument("--world", type=int, default=64, help="ranks to shard over")
    parser.add_argument("--cluster", choices=list(CLUSTERS), default="H100", help="that times are estimated for")
    parser.add_argument("--card", type=float, metavar="GB/S", help="bandwidth of each GPU's network card")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[2**k for k in range(10, 17)], help="per rank, to estimate for"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
