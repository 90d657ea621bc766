"""A Llama-style decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU; in PyTorch, knows no sharding.

The examples train it and the tests use it at tiny sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of a model.

    Args:
        vocab: number of tokens; 256 for bytes.
        width: features of the residual stream.
        layers: number of decoder blocks.
        heads: query heads; ``width / heads`` features each.
        kv_heads: key and value heads, a divisor of ``heads``.
        hidden: features inside the feed-forward network.
        max_seq: longest sequence.
        rope_base: base of the rotary frequencies.
    """

    vocab: int = 256
    width: int = 384
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    hidden: int = 1024
    max_seq: int = 256
    rope_base: float = 10_000.0


PRESETS = {
    "tiny": Config(width=128, layers=2, heads=4, kv_heads=2, hidden=352, max_seq=128),
    "small": Config(),
    "1b": Config(
        vocab=128_256,
        width=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        hidden=8192,
        max_seq=8192,
        rope_base=500_000.0,
    ),
    "8b": Config(
        vocab=128_256,
        width=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        hidden=14_336,
        max_seq=8192,
        rope_base=500_000.0,
    ),
}


def rotary_angles(config: Config, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, each ``[max_seq, head features / 2]`` in fp32."""
    half = config.width // config.heads // 2
    frequencies = config.rope_base ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
    angles = torch.outer(torch.arange(config.max_seq, dtype=torch.float32, device=device), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features of ``x`` ``[batch, heads, seq, features]`` by its position's angle."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention in which several query heads share one key and value head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.features = config.width // config.heads
        self.wq = nn.Linear(config.width, config.heads * self.features, bias=False)
        self.wk = nn.Linear(config.width, config.kv_heads * self.features, bias=False)
        self.wv = nn.Linear(config.width, config.kv_heads * self.features, bias=False)
        self.wo = nn.Linear(config.heads * self.features, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = self.wq(x).view(batch, seq, self.heads, self.features).transpose(1, 2)
        k = self.wk(x).view(batch, seq, self.kv_heads, self.features).transpose(1, 2)
        v = self.wv(x).view(batch, seq, self.kv_heads, self.features).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.wo(y.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then feed-forward, each on a normalised residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """Tokens ``[batch, seq]`` to logits ``[batch, seq, vocab]``, or to the mean cross-entropy."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        cos, sin = rotary_angles(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def init_weights(self, seed: int = 0) -> None:
        """Initialise every parameter and buffer from ``seed``, sharded or not: the same model on any world."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        deep = 0.02 / (2 * self.config.layers) ** 0.5
        for name, param in self.named_parameters():
            if param.dim() == 1:
                nn.init.ones_(param)
            else:
                unsharded = torch.empty(param.shape, device="cpu")
                std = deep if name.endswith(("wo.weight", "down.weight")) else 0.02
                nn.init.normal_(unsharded, std=std, generator=generator)
                _copy_shard(param, unsharded)
        cos, sin = rotary_angles(self.config, device=self.cos.device)
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        seq = tokens.shape[1]
        x = self.embed(tokens)
        cos, sin = self.cos[:seq], self.sin[:seq]
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return logits if targets is None else loss(logits, targets)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits ``[batch, seq, vocab]``."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def _copy_shard(param: Tensor, unsharded: Tensor) -> None:
    """Copy this rank's part of ``unsharded`` into ``param``, a DTensor or a plain tensor."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(param, DTensor):
        local = distribute_tensor(unsharded.to(param.device), param.device_mesh, param.placements, src_data_rank=None)
        param.to_local().copy_(local.to_local())
    else:
        param.copy_(unsharded)
