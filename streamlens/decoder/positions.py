"""Positions that are added: vectors to the embedding (sinusoidal, learned), or a penalty to the scores (ALiBi)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from streamlens.decoder.config import DecoderConfig
from streamlens.errors import InputError


class LearnedEmbedding(nn.Embedding):
    """One vector a position, up to the config's max_length; `like` decides nothing here."""

    def forward(self, start: int, end: int, like: Tensor) -> Float[Tensor, "pos d_model"]:
        if end > self.num_embeddings:
            raise InputError(f"input_ids must be at most max_length = {self.num_embeddings} tokens with positions 'learned'; got {end}")
        return self.weight[start:end]


class SinusoidalEmbedding(nn.Module):
    """PE(p, 2i) = sin(p / 10000^(2i / d)), PE(p, 2i + 1) = cos of the same (Vaswani et al. 2017); no parameters."""

    def __init__(self, d_model: int):
        super().__init__()
        self.d_model = d_model

    def forward(self, start: int, end: int, like: Tensor) -> Float[Tensor, "pos d_model"]:
        position = torch.arange(start, end, dtype=torch.float64)[:, None]
        angle = position / 10000.0 ** (torch.arange(0, self.d_model, 2, dtype=torch.float64) / self.d_model)
        return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2).to(like.device, like.dtype)


def make_pos_embed(config: DecoderConfig) -> LearnedEmbedding | SinusoidalEmbedding | None:
    """What gives the vectors that are added to the embedding; None where none are."""
    if config.positions == "learned":
        return LearnedEmbedding.from_pretrained(torch.empty(config.max_length, config.d_model), freeze=False)
    return SinusoidalEmbedding(config.d_model) if config.positions == "sinusoidal" else None


def alibi_slopes(n_heads: int) -> Float[Tensor, " head"]:
    """Slope of each head: 2^(-8h / n) for a power of two n, the rest from every second slope of 2n (Press et al. 2021)."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    finer = [2 ** (-4 * h / power) for h in range(1, 2 * power + 1, 2)]
    return torch.tensor(slopes + finer[: n_heads - power], dtype=torch.float64)
