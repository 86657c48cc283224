"""What kind of norm a module is, found by calling it.

A family's code decides whether a norm centres, how its gain is parametrised (`w`, `1 + w`, none) and where epsilon
stands; class names do not say. So the module is called on random vectors of small, ordinary and large size and the
answer is fitted; what does not fit is not a norm that can be frozen, and is refused by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from streamlens.models import limits

SIZES = (1e-3, 1.0, 3e2)
"""Sizes of the probe vectors: epsilon decides the first and not the last."""


@dataclass(frozen=True)
class NormForm:
    """`y = gain * (x - mean) / sqrt(mean((x - mean)^2) + eps) + bias`, without the mean where not `centred`."""

    centred: bool
    eps: float
    gain: Float[Tensor, " d_model"] | None  # None: no gain, that is 1
    bias: Float[Tensor, " d_model"] | None

    def scale(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch 1"]:
        """1/sigma at each position."""
        square = x.var(-1, keepdim=True, correction=0) if self.centred else x.square().mean(-1, keepdim=True)
        return torch.rsqrt(square + self.eps)

    def pull_back(self, g: Float[Tensor, "*batch d_model"], x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The gradient at the norm's input when its sigma is frozen at `x`."""
        out = (g if self.gain is None else g * self.gain) * self.scale(x)
        return out - out.mean(-1, keepdim=True) if self.centred else out

    def push_forward(self, dx: Float[Tensor, "*batch d_model"], x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The change of the output for a change `dx` of the input, sigma frozen at `x`."""
        out = (dx - dx.mean(-1, keepdim=True) if self.centred else dx) * self.scale(x)
        return out if self.gain is None else out * self.gain

    def __call__(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        y = self.push_forward(x, x)
        return y if self.bias is None else y + self.bias


def looks_like_norm(module: nn.Module) -> bool:
    """Whether a module claims to be a norm; :func:`fit` decides."""
    name = type(module).__name__.lower()
    return "norm" in name and not any(True for _ in module.children())


@torch.no_grad()
def fit(module: nn.Module, d_model: int, dtype: torch.dtype, device: torch.device) -> NormForm | None:
    """The form of a norm module of width `d_model`, or None where no form fits."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(16, d_model, generator=generator, dtype=torch.float64) + 0.5
    probes = [(base * size).to(device, dtype) for size in SIZES]
    try:
        outputs = [module(probe) for probe in probes]
        bias = module(torch.zeros_like(probes[1])[:1])[0]
        tiny = (base * (SIZES[0] if dtype == torch.float16 else 1e-10)).to(device, dtype)  # 1e-10 would be 0 in float16
        y_tiny = module(tiny)
    except (RuntimeError, TypeError):
        return None
    if any(not isinstance(y, Tensor) or y.shape != probes[0].shape for y in outputs):
        return None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bias = bias.to(wide) if bool((bias != 0).any()) else None
    candidates = (
        NormForm(centred, eps, gain, bias)
        for gain in _gains(module, d_model, wide)
        for centred in (False, True)
        for eps in _epsilons(module, centred, gain, bias, tiny.to(wide), y_tiny.to(wide))
    )
    fitting = ((error, form) for form in candidates if (error := _misfit(form, probes, outputs, wide)) <= limits.NORM[dtype])
    # In 16 bits several may fit, and the best is taken; in more the first that fits is the only one.
    best = min(fitting, key=lambda item: item[0], default=None) if torch.finfo(dtype).bits <= 16 else next(fitting, None)
    return None if best is None else best[1]


def _misfit(form: NormForm, probes: list[Tensor], outputs: list[Tensor], wide: torch.dtype) -> float:
    errors = [((form(x.to(wide)) - y).abs().max() / y.abs().max().clamp_min(1e-30)).item() for x, y in zip(probes, outputs, strict=True)]
    return max(e if e == e else float("inf") for e in errors)


def _gains(module: nn.Module, d_model: int, wide: torch.dtype) -> list[Tensor | None]:
    vectors = [p.detach().to(wide) for p in module.parameters() if p.shape == (d_model,)]
    return [v for w in vectors for v in (w, 1 + w)] + [None]


def _epsilons(module: nn.Module, centred: bool, gain: Tensor | None, bias: Tensor | None, x: Tensor, y: Tensor) -> list[float]:
    """Epsilons that the module names, and the one measured on vectors so small that little but epsilon divides them."""
    named = [float(v) for k, v in vars(module).items() if "eps" in k and isinstance(v, float)]
    bare = x - x.mean(-1, keepdim=True) if centred else x
    linear = bare if gain is None else bare * gain
    change = y if bias is None else y - bias
    ratio = (linear * change).sum(-1) / linear.square().sum(-1)
    measured = float((1 / ratio.square() - bare.square().mean(-1)).median())
    return [*named, *([measured] if 0 < measured < float("inf") and bool((ratio > 0).all()) else []), 0.0]
