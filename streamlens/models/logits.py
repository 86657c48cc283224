"""From the unembedding's output to the printed logits: measured, since one config key divides in one family and multiplies in another."""

from __future__ import annotations

import re

import torch
from jaxtyping import Float
from torch import Tensor, nn

from streamlens.errors import UnsupportedModelError
from streamlens.models import limits
from streamlens.models.anatomy import LogitMap
from streamlens.models.structure import text_config

_ELSEWHERE = re.compile(r"attn|attention|gate|router|mlp")
"""Words of a config's other caps."""


def fit_logit_map(module: nn.Module, raw: Float[Tensor, "*rows vocab"], logits: Float[Tensor, "*rows vocab"]) -> LogitMap:
    """The map from `raw`, the unembedding's output, to `logits`, what the model prints for it.

    A named cap is tried first: on small logits a cap is nearly linear, and would be missed.
    Raises :class:`UnsupportedModelError` where no multiplier and cap fit (a head with a non-linear layer).
    """
    limit = limits.LOGIT_MAP[logits.dtype]
    u, y = raw.double(), logits.double()
    named = _numbers(module)
    caps = [v for k, v in named.items() if "cap" in k and not _ELSEWHERE.search(k)]
    misfits = {m: _misfit(u, y, m) for cap in (*caps, None) for m in (LogitMap(f, cap) for f in (1.0, *_multipliers(u, y, cap, named)))}
    for kind in (caps, [None]):
        fitting = [next((m for m in misfits if m.cap == cap and misfits[m] <= limit), None) for cap in kind]
        if any(fitting):
            return min((m for m in fitting if m is not None), key=misfits.__getitem__)
    raise UnsupportedModelError(
        f"{type(module).__name__}: the printed logits are not the unembedding's output times a number, capped or not; "
        f"off by {min(misfits.values()):.2g} of the largest"
    )


def _misfit(u: Tensor, y: Tensor, logit_map: LogitMap) -> float:
    return float((apply_map(u, logit_map) - y).abs().max() / y.abs().max().clamp_min(1e-30))


def apply_map(u: Tensor, logit_map: LogitMap) -> Tensor:
    """Printed logits of unembedding outputs `u` of any shape."""
    z = u if logit_map.multiplier == 1.0 else u * logit_map.multiplier
    return z if logit_map.cap is None else capped(z, logit_map.cap)


def capped(z: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(z / cap)


def _numbers(module: nn.Module) -> dict[str, float]:
    values = text_config(module).to_dict()
    return {k: float(v) for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool) and v}


def _multipliers(u: Tensor, y: Tensor, cap: float | None, named: dict[str, float]) -> list[float]:
    """The measured multiplier; the config's own number (or its reciprocal) in its place where they agree, since that is exact."""
    z = y if cap is None else cap * torch.atanh((y / cap).clamp(-0.999999, 0.999999))
    measured = float((z * u).sum() / u.square().sum())
    exact = [x for v in named.values() for x in (v, 1 / v) if abs(x - measured) <= 1e-4 * abs(measured)]
    return [*exact, measured]
