"""Norms inside a sublayer, between what a tap has made a leaf there and the sublayer's write: frozen as those on the residual path are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from streamlens.errors import UnsupportedModelError
from streamlens.models.norms import NormForm, fit, looks_like_norm
from streamlens.stream.readout import FrozenNorm
from streamlens.stream.run import Run


def freeze_inside(run: Run, module: nn.Module, readers: Iterable[str]) -> None:
    """Freeze the norms of these sublayers where they act on a leaf; where they act on what a sublayer reads they stay as they are.

    A pass raises :class:`UnsupportedModelError` at one that is of no known form.
    """
    forms: dict[nn.Module, NormForm | None] = {}
    for reader in dict.fromkeys(readers):
        for path, part in module.get_submodule(reader).named_modules(prefix=reader):
            if looks_like_norm(part):
                run.replace(path, partial(_frozen, part, forms))


def _frozen(part: nn.Module, forms: dict[nn.Module, NormForm | None], original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
    if x is None or not x.requires_grad:
        return original(*args, **kwargs)
    with torch.no_grad():
        if part not in forms:
            forms[part] = fit(part, x.shape[-1], x.dtype, x.device)
        if forms[part] is None:
            raise UnsupportedModelError(f"{type(part).__name__} stands inside a sublayer that is to be split, and is no norm that is known")
        out = original(*args, **kwargs)
    return FrozenNorm.apply(x, out, forms[part], lambda g: None)
