"""Attention weights at the positions that are read, whatever function the model attends with.

Where that function makes no weights, the family's own eager one does, for these queries alone.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from streamlens.models import limits
from streamlens.models.attention import eager_attention


def pattern_at(
    t: Int[Tensor, " row"],
    pattern: Float[Tensor, "head pos source"] | None,
    output: Float[Tensor, "pos head d_v"],
    module: nn.Module,
    query: Float[Tensor, "1 head pos d_head"],
    key: Float[Tensor, "1 kv_head source d_head"],
    value: Float[Tensor, "1 kv_head source d_v"],
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Float[Tensor, "row head source"]:
    """The weights of one prompt's positions `t` that make `output` of `value`, from the arguments of its attention function."""
    if pattern is None:
        mask = mask_at(t, attention_mask, query, key.shape[2], kwargs.get("is_causal", getattr(module, "is_causal", True)))
        kwargs = {name: _rows(v, t, query.shape[2]) for name, v in kwargs.items()}
        pattern = eager_attention(module)(module, query[:, :, t], key, value, mask, **kwargs)[1][0]
    else:
        pattern = pattern[:, t]
    pattern = pattern.transpose(0, 1)
    return pattern * _sink(output[t], weighted(pattern, value[0]), limits.room(value.dtype))


def mask_at(t: Int[Tensor, " row"], mask: Tensor | None, query: Tensor, n_sources: int, causal: bool | None) -> Tensor | None:
    """The additive mask of the positions `t`, from one that is boolean, additive or left to the function."""
    if mask is None:
        if causal is False:
            return None
        mask = (torch.arange(n_sources, device=t.device) <= t[:, None])[None, None]
    else:
        mask = _rows(mask, t, query.shape[2])
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, torch.finfo(query.dtype).min)


def weighted(pattern: Float[Tensor, "row head source"], value: Float[Tensor, "kv_head source d_v"]) -> Float[Tensor, "row head d_v"]:
    """The values that each head weighs, several heads in a row sharing theirs."""
    grouped = pattern.unflatten(1, (len(value), -1))
    return torch.einsum("rkgs,ksd->rkgd", grouped, value.to(pattern.dtype)).flatten(1, 2)


def by_value(read: Float[Tensor, "row head d_v"], value: Float[Tensor, "kv_head source d_v"]) -> Float[Tensor, "row head source"]:
    """<value at the source, direction of the head>."""
    grouped = read.unflatten(1, (len(value), -1))
    return torch.einsum("rkgd,ksd->rkgs", grouped, value.to(read.dtype)).flatten(1, 2)


def _sink(output: Float[Tensor, "row head d_v"], sum_of: Float[Tensor, "row head d_v"], room: float) -> Float[Tensor, "row head 1"]:
    """The factor of heads that scale their weighted values afterwards, as one more logit in the softmax would; 1 for all others."""
    output, sum_of = output.detach().float(), sum_of.detach().float()
    factor = (output * sum_of).sum(-1, keepdim=True) / sum_of.square().sum(-1, keepdim=True).clamp_min(1e-30)
    off = (output - sum_of).square().sum(-1, keepdim=True) > (room**2 * output.square().sum(-1, keepdim=True))
    return torch.where(off, factor, torch.ones_like(factor))


def _rows(x: Any, t: Tensor, n_pos: int) -> Any:
    """The queries `t` of what has one row a query in its last axis but one."""
    return x[..., t, :] if isinstance(x, Tensor) and x.dim() >= 3 and x.shape[-2] == n_pos else x
