"""Text from a decoder, one token at a time: the likeliest, or drawn by temperature, top-k and top-p."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from streamlens.errors import InputError, whole


@torch.no_grad()
def generate(
    decoder,
    input_ids: Int[Tensor, "batch pos"],
    n_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | None = None,
    use_cache: bool = True,
) -> Int[Tensor, "batch pos_out"]:
    """`input_ids` with up to `n_tokens` tokens behind them.

    `temperature` 0 takes the likeliest token. Else one is drawn from softmax(logits / temperature), of the `top_k` likeliest,
    of the fewest that hold `top_p` of the probability (Holtzman et al. 2020), the same ones for the same `seed`. After `stop`
    a text repeats it, and the end is reached when every text has. Raises :class:`InputError`.
    """
    _check(decoder, input_ids, n_tokens, temperature, top_k, top_p)
    generator = torch.Generator().manual_seed(seed)
    ids, given, cache = input_ids, input_ids, decoder.new_cache() if use_cache else None
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for _ in range(n_tokens):
        logits = decoder(given, cache=cache).logits[:, -1]
        token = logits.argmax(-1) if temperature == 0 else draw(logits, temperature, top_k, top_p, generator)
        if stop is not None:
            token = torch.where(ended, stop, token)
            ended = ended | (token == stop)
        ids = torch.cat((ids, token[:, None]), dim=1)
        given = token[:, None] if use_cache else ids
        if bool(ended.all()):
            break
    return ids


def draw(
    logits: Float[Tensor, "batch vocab"], temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Int[Tensor, " batch"]:
    """One token a row; drawn on the CPU, so that a seed gives the same on every device."""
    probability = (logits.double().cpu() / temperature).softmax(-1)
    value, order = probability.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        value[:, top_k:] = 0
        value = value / value.sum(-1, keepdim=True)
    if top_p is not None:
        value[value.cumsum(-1) - value >= top_p] = 0  # a token stays if those before it do not hold top_p yet
    chosen = torch.multinomial(value, 1, generator=generator)
    return order.gather(-1, chosen)[:, 0].to(logits.device)


def _check(decoder, ids: Tensor, n_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if ids.dim() != 2 or ids.shape[1] < 1:
        raise InputError(f"input_ids must be [batch, pos] with a token or more; got shape {list(ids.shape)}")
    whole("n_tokens", n_tokens, 0)
    if not 0 <= temperature < float("inf"):
        raise InputError(f"temperature must be 0 (the likeliest token) or above; got {temperature!r}")
    if temperature == 0 and (top_k is not None or top_p is not None):
        raise InputError(f"temperature must be above 0 with top_k or top_p; got {temperature!r}")
    if top_k is not None:
        whole("top_k", top_k, 1)
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"top_p must be above 0 and at most 1, or None; got {top_p!r}")
    config, length = decoder.config, ids.shape[1] + n_tokens
    if config.positions == "learned" and length > config.max_length:
        raise InputError(f"n_tokens must leave the text within max_length {config.max_length} of learned positions; got {n_tokens}")
