"""Rotary positions: pairs of coordinates of queries and keys turn by an angle that grows with the position.

Pair i at position p turns by p * theta_i, with theta_i = base^(-2i / r) (Su et al. 2021), so that a score depends on the
distance alone. The tables are made in float32, the numbers that trained models have seen, and then cast.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from streamlens.decoder.config import DecoderConfig

Turns = tuple[Float[Tensor, "pos pair"], Float[Tensor, "pos pair"]]
"""Cosine and sine of every pair's angle at every position."""


class Rotary(nn.Module):
    """The tables of one config, made once for each length, dtype and device that is asked for."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self._tables: dict[tuple[torch.dtype, torch.device], Turns] = {}

    def forward(self, start: int, end: int, dtype: torch.dtype, device: torch.device) -> Turns:
        """Turns at the positions from `start` to before `end`."""
        if self.config.rope_scaling == "dynamic":  # its frequencies change with the length
            cos, sin = self._made(end, end, dtype, device)
        else:
            cos, sin = self._tables.get((dtype, device), (torch.empty(0), None))
            if len(cos) < end:
                length = max(end, min(2 * end, self.config.max_length))
                cos, sin = self._tables[dtype, device] = self._made(length, end, dtype, device)
        return cos[start:end], sin[start:end]

    def _made(self, length: int, seen: int, dtype: torch.dtype, device: torch.device) -> Turns:
        with torch.inference_mode(False), torch.no_grad():
            frequencies, factor = inverse_frequencies(self.config, seen)
            angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
            return (angles.cos() * factor).to(device, dtype), (angles.sin() * factor).to(device, dtype)


def rotate(x: Float[Tensor, "batch pos head d_head"], turns: Turns, pairs: str) -> Float[Tensor, "batch pos head d_head"]:
    """The first 2 * pair coordinates of each head turned, the others as they are."""
    cos, sin = (t[:, None, :] for t in turns)
    width = 2 * cos.shape[-1]
    turning, still = (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])
    if pairs == "half":
        a, b = turning.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return turned if still is None else torch.cat((turned, still), dim=-1)


def inverse_frequencies(c: DecoderConfig, length: int = 0) -> tuple[Float[Tensor, " pair"], float]:
    """Radians a position of each pair, and the factor on cosine and sine; `length` matters to dynamic NTK only."""
    r, s, n = c.rotary_width, c.rope_factor, c.original_length
    base = c.rope_base
    if c.rope_scaling == "ntk":  # the base grows, so that the slowest pair is interpolated by s and the fastest not at all
        base = base * s ** (r / (r - 2))
    elif c.rope_scaling == "dynamic":
        base = base * (s * max(length, n) / n - (s - 1)) ** (r / (r - 2))
    theta = 1.0 / (base ** (torch.arange(0, r, 2, dtype=torch.int64).to(torch.float32) / r))
    if c.rope_scaling == "linear":  # position interpolation (Chen et al. 2023)
        theta = theta / s
    elif c.rope_scaling == "yarn":
        theta = _yarn(c, theta)
    elif c.rope_scaling == "llama3":
        theta = _llama3(c, theta)
    return theta, attention_factor(c)


def attention_factor(c: DecoderConfig) -> float:
    """What cosine and sine are multiplied with: YaRN's temperature, 0.1 ln s + 1, and 1 for the others."""
    if c.rope_attention_factor is not None or c.rope_scaling != "yarn":
        return 1.0 if c.rope_attention_factor is None else c.rope_attention_factor
    if c.yarn_mscale and c.yarn_mscale_all_dim:
        return _temperature(c.rope_factor, c.yarn_mscale) / _temperature(c.rope_factor, c.yarn_mscale_all_dim)
    return _temperature(c.rope_factor, 1.0)


def _temperature(s: float, mscale: float) -> float:
    return 1.0 if s <= 1 else 0.1 * mscale * math.log(s) + 1.0


def _yarn(c: DecoderConfig, theta: Tensor) -> Tensor:
    """Slow pairs are interpolated, fast ones kept, a ramp between (Peng et al. 2023)."""
    r = c.rotary_width

    def pair_that_turns(times: float) -> float:
        return r * math.log(c.original_length / (times * 2 * math.pi)) / (2 * math.log(c.rope_base))

    low, high = pair_that_turns(c.yarn_beta_fast), pair_that_turns(c.yarn_beta_slow)
    if c.yarn_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, r - 1)
    ramp = ((torch.arange(r // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    kept = 1 - ramp
    return theta / c.rope_factor * (1 - kept) + theta * kept


def _llama3(c: DecoderConfig, theta: Tensor) -> Tensor:
    """Pairs with waves longer than the trained length are interpolated, short ones kept, a ramp between."""
    n, s, low, high = c.original_length, c.rope_factor, c.llama3_low_freq_factor, c.llama3_high_freq_factor
    wave = 2 * math.pi / theta
    smooth = (n / wave - low) / (high - low)
    between = (1 - smooth) * theta / s + smooth * theta
    scaled = torch.where(wave > n / low, theta / s, theta)
    return torch.where((wave >= n / high) & (wave <= n / low), between, scaled)
