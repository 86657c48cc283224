"""LayerNorm and RMSNorm, with or without parameters, in the dtype of their input.

LN(x) = gain * (x - mean) / sqrt(var + eps) + bias, with the biased variance; RMSNorm(x) = gain * x / sqrt(mean(x^2) + eps)
(Ba et al. 2016; Zhang and Sennrich 2019).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from streamlens.decoder.config import DecoderConfig
from streamlens.decoder.hookable import Hookable, passed


class Norm(Hookable):
    """One fused call, or written out where somebody looks at what the input is divided by or at the quotient."""

    PLACES = ("hook_scale", "hook_normalized")

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        if self.hook_scale is passed and self.hook_normalized is passed:
            return self.fused(x)
        x = self.centred(x)
        y = self.hook_normalized(x / self.hook_scale((x.square().mean(-1, keepdim=True) + self.eps).sqrt()))
        y = y if self.weight is None else y * self.weight
        return y if self.bias is None else y + self.bias


class LayerNorm(Norm):
    """Centred, scaled to unit variance, then a learned gain and bias where it has them."""

    def __init__(self, width: int, eps: float, gain: bool = True, bias: bool = True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width)) if gain else None
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def fused(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)

    def centred(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


class RMSNorm(Norm):
    """Scaled to unit root mean square, then a learned gain where it has one."""

    def __init__(self, width: int, eps: float, gain: bool = True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width)) if gain else None
        self.bias = None

    def fused(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)

    def centred(self, x: Tensor) -> Tensor:
        return x


def make_norm(config: DecoderConfig, width: int | None = None) -> LayerNorm | RMSNorm:
    """The norm of a config, over the stream unless a `width` is given."""
    width = config.d_model if width is None else width
    if config.norm == "layernorm":
        return LayerNorm(width, config.norm_eps, config.norm_parameters, config.norm_bias)
    return RMSNorm(width, config.norm_eps, config.norm_parameters)
