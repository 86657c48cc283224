"""The position-wise MLP, plain or gated: down(act(up(x))), or down(act(gate(x)) * up(x)) (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from streamlens.decoder.config import DecoderConfig
from streamlens.decoder.hookable import Hookable


class MLP(Hookable):
    """GELU or ReLU between two matrices, by default four times as wide as the stream."""

    PLACES = ("hook_pre", "hook_post")

    def __init__(self, config: DecoderConfig, width: int | None = None):
        super().__init__()
        width = config.mlp_width if width is None else width
        self.act = activation(config)
        self.up_proj = nn.Linear(config.d_model, width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, config.d_model, bias=config.mlp_bias)

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        return self.down_proj(self.hook_post(self.act(self.hook_pre(self.up_proj(x)))))


class GatedMLP(Hookable):
    """SwiGLU or GEGLU: three matrices, so 8/3 of the stream's width costs as much as four times it does with two."""

    PLACES = ("hook_pre", "hook_pre_linear", "hook_post")

    def __init__(self, config: DecoderConfig, width: int | None = None):
        super().__init__()
        width = config.mlp_width if width is None else width
        self.act = activation(config)
        self.gate_proj = nn.Linear(config.d_model, width, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.d_model, width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, config.d_model, bias=config.mlp_bias)

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        gate, linear = self.hook_pre(self.gate_proj(x)), self.hook_pre_linear(self.up_proj(x))
        return self.down_proj(self.hook_post(self.act(gate) * linear))


def activation(config: DecoderConfig) -> Callable[[Tensor], Tensor]:
    """The non-linearity that a config's `mlp` and `gelu` name."""
    if config.mlp == "swiglu":
        return F.silu
    if config.mlp == "relu":
        return F.relu
    return partial(F.gelu, approximate="tanh") if config.gelu == "tanh" else F.gelu
