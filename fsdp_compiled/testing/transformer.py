"""A transformer whose input and output embeddings are one parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .interface import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTestModel,
    RankAndSize,
    checked_mode,
    default_device,
    seeded,
    shard_units,
)

VOCAB = 23
WIDTH = 16
BATCH = 2


class TransformerWithSharedParams(FSDPTestModel):
    """``nn.Transformer`` of 2 + 2 layers with tied embeddings: ``[6, 2], [4, 2] -> [4, 2, 23]``.

    Args:
        group: gives rank and size.
        device_init_mode: when ``init`` moves the model to the accelerator.
        add_bn: normalise over the batch after the embedding.
        deterministic: make equal parameters on every rank and at every call, and switch dropout off.
    """

    vocab_bias: Tensor
    long_buffer: Tensor

    def __init__(
        self, group: RankAndSize, device_init_mode: DEVICEInitMode, add_bn: bool, deterministic: bool
    ) -> None:
        super().__init__()
        self.rank = group.rank()
        self.world_size = group.size()
        with seeded(0 if deterministic else None):
            self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, nhead=8, dim_feedforward=8)
            # made here, because the one that nn.Transformer makes warns
            encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
            self.transformer = nn.Transformer(WIDTH, num_decoder_layers=2, dim_feedforward=8, custom_encoder=encoder)
            self.output_proj = nn.Linear(WIDTH, VOCAB)
        self.output_proj.weight = self.embed_tokens.weight
        self.register_buffer("vocab_bias", torch.ones(WIDTH))
        self.register_buffer("long_buffer", torch.zeros(WIDTH, dtype=torch.long))
        self.bn = nn.BatchNorm1d(BATCH) if add_bn else nn.Identity()
        if device_init_mode is DEVICEInitMode.DEVICE_BEFORE:
            self.to(default_device())
        if deterministic:
            self.eval()

    def get_input(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return source ``[6, 2]`` and target ``[4, 2]`` tokens in int64, the same on every rank."""
        return (
            torch.arange(6 * BATCH, device=device).view(6, BATCH),
            torch.arange(4 * BATCH, device=device).view(4, BATCH),
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        shift = self.vocab_bias + self.long_buffer.type_as(self.vocab_bias)
        hidden = self.transformer(self.embed_tokens(source) + shift, self.bn(self.embed_tokens(target)))
        return self.output_proj(hidden)

    def get_loss(self, input: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the cross entropy, summed over tokens."""
        return F.cross_entropy(output.view(-1, VOCAB), input[1].view(-1), reduction="sum")

    @staticmethod
    def init(
        group: RankAndSize,
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        fsdp_kwargs: Mapping[str, Any] | None = None,
        deterministic: bool = False,
        add_bn: bool = True,
    ) -> nn.Module:
        """Make an instance; if the mode is RECURSIVE, every layer and the model itself are units.

        Args:
            group: see the class, as for ``device_init_mode``, ``deterministic`` and ``add_bn``.
            fsdp_init_mode: whether to shard.
            fsdp_kwargs: given to ``fully_shard``.

        Raises:
            TypeError: ``fsdp_init_mode`` is none, or a group to shard over is no process group.
        """
        wrap = checked_mode(fsdp_init_mode)
        model = TransformerWithSharedParams(group, device_init_mode, add_bn, deterministic)
        if wrap:
            layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
            units = [module for module in model.modules() if isinstance(module, layers)]
            shard_units([*units, model], group, fsdp_kwargs or {})
        if device_init_mode is DEVICEInitMode.DEVICE_AFTER:
            model.to(default_device())
        return model
