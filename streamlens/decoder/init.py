"""Initial weights: every matrix normal, with a standard deviation by its role; gains 1, biases and sinks 0; embeddings 0.02 always.

plain: std 0.02 everywhere. gpt2: the matrices that write into the stream smaller by 1/sqrt(2L) (Radford et al. 2019).
deepnorm: Xavier, with gain beta on values, outputs and the MLP (Wang et al. 2022). xavier: sqrt(2 / (fan_in + fan_out)).
mup: std as plain at the base width, falling with 1/sqrt(width) inside and with 1/width at the unembedding (Yang et al. 2022, table 3).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from streamlens.decoder.config import DecoderConfig

_WRITES = ("o_proj", "down_proj")
_BETA = ("v_proj", "o_proj", "up_proj", "gate_proj", "down_proj")


@torch.no_grad()
def initialise(decoder: nn.Module, seed: int) -> None:
    """Draw every weight of a decoder anew, the same ones for the same seed on any machine."""
    generator = torch.Generator().manual_seed(seed)
    for path, weight in decoder.named_parameters():
        if weight.dim() == 1:
            weight.fill_(1.0 if "norm" in path and path.endswith("weight") else 0.0)
        else:
            draw = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            weight.copy_(draw * standard_deviation(decoder.config, path, weight))


def standard_deviation(c: DecoderConfig, path: str, weight: Tensor) -> float:
    """Of the matrix at `path`, `[.., out, in]`."""
    fan_out, fan_in = weight.shape[-2:]
    role = next(part for part in reversed(path.split(".")) if part != "weight")
    if role in ("embed", "pos_embed"):
        return c.init_std
    if c.init == "gpt2" and role in _WRITES:
        return c.init_std / math.sqrt(2 * c.n_layers)
    if c.init in ("xavier", "deepnorm"):
        gain = c.deepnorm_beta if c.init == "deepnorm" and role in _BETA else 1.0
        return gain * math.sqrt(2 / (fan_in + fan_out))
    if c.init == "mup":
        narrower = c.mup_base_width / c.d_model
        return c.init_std * (narrower if role == "unembed" else math.sqrt(narrower))
    return c.init_std
