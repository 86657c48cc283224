"""Raw tensors, for what no call answers: `sl.record`."""

from __future__ import annotations

import torch

from streamlens.arguments import CHECKS, MAX_TOKENS, batched, opened, parsed_for, positions_or_all, watched
from streamlens.checks import demand_finite
from streamlens.errors import choice
from streamlens.models.loaded import Model
from streamlens.prompts.plain import plain
from streamlens.stream.record import record_batch, resolve


def record(
    model: Model,
    prompts: object,
    sites: object,
    positions: object = None,
    *,
    progress: bool = False,
    max_tokens: int = MAX_TOKENS,
    check: bool | str = True,
) -> dict[str, torch.Tensor]:
    """Raw tensors, for what no call answers: a dict from TransformerLens' name to a tensor `[prompt, pos, ...]` on the CPU.

    `sites`: resid_pre, attn_out, resid_mid, mlp_out, resid_post, embed, pos_embed; z `[.., head, d_head]`; q, k (as they enter
    the scores, rotated), v `[.., head, d_head]`, pattern `[.., head, source]`; post, the MLP's activation `[.., d_mlp]`; or full
    names ("blocks.3.attn.hook_z"). Only these are kept. `positions`, "all" by default, chooses along `pos` (for a pattern, the
    queries). Shorter prompts are padded with zeros on the right; "mask" `[prompt, pos]` is True at what is real, and
    "positions" `[prompt, pos]` holds the positions, -1 at padding. Raises :class:`InputError`.
    """
    opened(model)
    choice("check", check, CHECKS)
    chosen = resolve(model.anatomy, plain(sites) if isinstance(plain(sites), list) else [sites])
    parsed = parsed_for(model, prompts)
    where = positions_or_all(parsed, positions)
    pieces: list[dict[str, torch.Tensor]] = [{} for _ in where]
    for batch in watched(batched(model, parsed, max_tokens), progress, "record"):
        for name, value in record_batch(model.module, model.anatomy, batch, chosen).items():
            demand_finite(model, name, int((~torch.isfinite(value[batch.mask])).sum()), check)
            for row, prompt in enumerate(batch.index):
                tensor = value[row, torch.from_numpy(where[prompt])]
                is_pattern = chosen[name] == "pattern"
                pieces[prompt][name] = tensor[..., : parsed.lengths[prompt]] if is_pattern else tensor
    out = {name: _padded([p[name] for p in pieces]) for name in sorted(chosen, key=_by_layer)}
    at = _padded([torch.from_numpy(w) + 1 for w in where]) - 1
    return out | {"positions": at, "mask": at >= 0}


def _padded(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Tensors of unequal shape as one, zeros behind the shorter ones along every axis."""
    shape = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
    out = tensors[0].new_zeros(len(tensors), *shape)
    for row, tensor in zip(out, tensors, strict=True):
        row[tuple(slice(n) for n in tensor.shape)] = tensor
    return out


def _by_layer(name: str) -> tuple[int, str]:
    parts = name.split(".")
    return (int(parts[1]) if parts[0] == "blocks" else -1, name)
