"""Models to plan for: which mesh, batch and checkpointing trains them fastest on how many GPUs, without a GPU.

    fsdp-compiled plan examples/graphs/plans.py:llama_8b --ranks 8,64,512,16384 --save plan.html
    fsdp-compiled plan examples/graphs/plans.py:llama_70b --ranks 64,512,16384
    fsdp-compiled plan examples/graphs/plans.py:moe_30b --ranks 64,512,16384

The third has the sizes of Qwen3-30B-A3B: 128 experts in each of 48 blocks, 8 of them for a token. Here every expert
gets as many tokens, and ranks share experts as they share all parameters: by all-gathers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compiled.testing.llama import PRESETS, Block, Config, Llama, rotary_angles

LLAMA_70B = replace(PRESETS["8b"], width=8192, layers=80, heads=64, hidden=28_672)
MOE_30B = Config(
    vocab=151_936, width=2048, layers=48, heads=32, kv_heads=4, hidden=768, max_seq=8192, rope_base=1_000_000.0
)
FEATURES, EXPERTS, CHOSEN = 128, 128, 8  # of a head, of a block, of a token


class Experts(nn.Module):
    """SwiGLU by the experts that a router chooses for each token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.router = nn.Linear(config.width, EXPERTS, bias=False)
        self.gate, self.up = (nn.Parameter(torch.empty(EXPERTS, config.width, config.hidden)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(EXPERTS, config.hidden, config.width))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, experts = self.router(tokens).float().softmax(-1).topk(CHOSEN)
        order = experts.flatten().argsort()
        each = tokens[order // CHOSEN].view(EXPERTS, -1, tokens.shape[1])
        hidden = F.silu(torch.bmm(each, self.gate)) * torch.bmm(each, self.up)
        made = torch.bmm(hidden, self.down).flatten(0, 1) * weights.flatten()[order, None].type_as(x)
        return torch.zeros_like(tokens).index_add(0, order // CHOSEN, made).view_as(x)


class Moe(Llama):
    """A Llama with experts, and heads of more features."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for block in self.blocks:
            self._change(block, config)
        self.cos, self.sin = rotary_angles(replace(config, width=FEATURES * config.heads))

    def _change(self, block: Block, config: Config) -> None:
        attention, block.ffn = block.attention, Experts(config)
        attention.features = FEATURES
        attention.wq = nn.Linear(config.width, config.heads * FEATURES, bias=False)
        attention.wk = nn.Linear(config.width, config.kv_heads * FEATURES, bias=False)
        attention.wv = nn.Linear(config.width, config.kv_heads * FEATURES, bias=False)
        attention.wo = nn.Linear(config.heads * FEATURES, config.width, bias=False)


def batch_of(batch: int, config: Config) -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(batch, config.max_seq, dtype=torch.int64)
    return tokens, tokens


def llama_8b(batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Llama(PRESETS["8b"]), batch_of(batch, PRESETS["8b"])


def llama_70b(batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Llama(LLAMA_70B), batch_of(batch, LLAMA_70B)


def moe_30b(batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Moe(MOE_30B), batch_of(batch, MOE_30B)
