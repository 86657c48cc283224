"""A look into a decoder in training: how large its stream and its attention scores are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from jaxtyping import Int64
from torch import Tensor

from streamlens.decoder.attention import Attention
from streamlens.decoder.model import Decoder


@torch.no_grad()
def look(decoder: Decoder, ids: Int64[Tensor, "batch pos"]) -> tuple[list[float], list[float]]:
    """The largest attention logit of each layer, and the mean l2 norm of the stream before each block and behind the last."""
    largest, norms = [0.0] * len(decoder.blocks), [0.0] * (len(decoder.blocks) + 1)

    def see_scores(layer: int, scores: Tensor) -> Tensor:
        largest[layer] = scores.max().item()
        return scores

    def see_stream(layer: int, block: torch.nn.Module, args: tuple, out: Tensor | None = None) -> None:
        stream = args[0] if out is None else out
        norms[layer] = stream.float().norm(dim=-1).mean().item()

    with ExitStack() as stack:
        for layer, block in enumerate(decoder.blocks):
            stack.callback(block.register_forward_pre_hook(partial(see_stream, layer)).remove)
            stack.enter_context(_seen_scores(block.attn, partial(see_scores, layer)))
        stack.callback(decoder.blocks[-1].register_forward_hook(partial(see_stream, len(decoder.blocks))).remove)
        decoder(ids)
    return largest, norms


@contextmanager
def _seen_scores(attention: Attention, see: partial) -> Iterator[None]:
    place = vars(attention)
    before = place["hook_attn_scores"]
    place["hook_attn_scores"] = see
    try:
        yield
    finally:
        place["hook_attn_scores"] = before
