"""The models whose uncompiled steps others have published, operator by operator, and what their kernels took then.

*Sources:* mosaicml/llm-foundry at 5e85bd6 with Composer of January 2024, torch 2.1 and flash-attn 2.4.2;
pytorch/torchtitan at 9dec370, December 2024. Some of what they run writes what nobody reads: only its time matters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from operators import Eager
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compiled.testing.llama import Attention, Config, Llama

# Bytes that FSDP's own kernels read and write for each unsharded parameter, in a forward and its backward. FSDP2
# copies all-gathered parameters out, twice, and gradients in, as fp32; FSDP1 concatenates, converts and divides them.
SHARDING_BYTES = {"llama": 2 * (2 + 2) + (2 + 4), "mpt": (2 + 2) + (2 + 4) + (4 + 4)}
CLIPPING = 3  # how often clipping by norm reads or writes a gradient's shard
# Of the peak bandwidth, what LayerNorm's five reads and writes of an array, forward and backward, reached. *Source:*
# 186 to 509 us in all for 8192 x 1536 to 8192 x 4096 in fp16, on an A100 (pytorch/pytorch, pull request 87445).
_LAYER_NORM = 0.34
_TILES, _PROCESSORS = ((128, 256), (256, 128)), 132  # of an H100


class AsThen(Eager):
    """Sums what operators of torch 2.1 to 2.6 took on H100s."""

    def slower(self, operator: str, out: Any) -> float:
        if "layer_norm" in operator:
            return self.cluster.memory_efficiency / _LAYER_NORM
        return waves(*out.shape[-2:]) if operator.endswith("mm") else 1.0


def waves(height: int, width: int) -> float:
    """Return how much longer a product of this shape takes because of processors without a tile in the last wave.

    *Source:* NVIDIA's Matrix Multiplication Background User's Guide, on tile and wave quantization.
    """
    tiles = min(-(-height // a) * -(-width // b) for a, b in _TILES)
    return -(-tiles // _PROCESSORS) * _PROCESSORS * 128 * 256 / (height * width)


# ---- llm-foundry's MPT ----


class _Unpad(torch.autograd.Function):
    """Copies tokens that are no padding, which are all of them, ``[batch, length, width]``."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        return padded.flatten(0, 1).gather(0, indices.expand(-1, padded.shape[-1])).view_as(padded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        flat, (indices,) = grads[0].flatten(0, 1), ctx.saved_tensors
        return torch.zeros_like(flat).scatter_(0, indices.expand_as(flat), flat).view_as(grads[0]), None


class _Pad(torch.autograd.Function):
    """Copies tokens to where they were."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        flat = tokens.flatten(0, 1)
        return torch.zeros_like(flat).index_put_((indices[:, 0],), flat).view_as(tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].flatten(0, 1)[ctx.saved_tensors[0][:, 0]].view_as(grads[0]), None


class _FusedLoss(torch.autograd.Function):
    """Reads logits once, and once more in backward, as flash-attn's cross-entropy."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.logsumexp(-1).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * grads[0]


class _MptBlock(nn.Module):
    """LayerNorm, causal attention, LayerNorm, GELU with four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        packed = (_Unpad.apply(each, indices) for each in self.qkv(self.norms[0](x)).chunk(3, -1))
        heads = (each.unflatten(-1, (-1, 128)).transpose(1, 2) for each in packed)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(_Pad.apply(mixed.transpose(1, 2).flatten(2), indices))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Mpt(nn.Module):
    """A GPT with learned positions and tied embeddings; a step takes its loss, and twice more for metrics."""

    def __init__(self, width: int, layers: int, seq: int, *, recomputes: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50368, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(_MptBlock(width) for _ in range(layers))
        self.norm, self.recomputes = nn.LayerNorm(width), recomputes

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        indices = torch.arange(tokens.numel(), device=tokens.device)[:, None]
        for block in self.blocks:
            x = checkpoint(block, x, indices, use_reentrant=False) if self.recomputes else block(x, indices)
        logits = F.linear(self.norm(x), self.tokens.weight).flatten(0, 1)
        with torch.no_grad():
            for _ in ("cross-entropy", "perplexity"):
                F.cross_entropy(logits.float(), targets.flatten(), reduction="sum")
        return _FusedLoss.apply(logits)


# ---- torchtitan's Llama ----


class _RmsNorm(nn.Module):
    """RMSNorm by several operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class _Attention(Attention):
    """Turns queries and keys as complex numbers; repeats keys and values for each query head."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turns = torch.complex(cos, sin)[:, None]
        q, k, v = (linear(x).unflatten(-1, (-1, self.features)) for linear in (self.wq, self.wk, self.wv))
        q, k = (torch.view_as_complex(each.float().unflatten(-1, (-1, 2))) * turns for each in (q, k))
        q, k = (torch.view_as_real(each).flatten(3).type_as(x) for each in (q, k))
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, dim=2) for each in (k, v))
        y = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def llama(config: Config) -> Llama:
    """Return a Llama with torchtitan's operators."""
    model = Llama(config)
    for block in model.blocks:
        block.attention = _Attention(config)
        block.attention_norm, block.ffn_norm = _RmsNorm(config.width), _RmsNorm(config.width)
    model.norm = _RmsNorm(config.width)
    return model
