"""Which tokens a component pushes up and down: its frozen contribution to every logit at once, less the mean over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from streamlens.measure.components import Component
from streamlens.measure.places import at, flat_index
from streamlens.models.anatomy import Anatomy
from streamlens.models.structure import bias_of
from streamlens.prompts import TokenBatch
from streamlens.stream.push import Push
from streamlens.stream.readout import Key
from streamlens.stream.unembed import Unembed, largest

DIRECTIONS = ("up", "down")


@dataclass(frozen=True)
class Source:
    """A component, and the places of the readout whose values are its write: all of each, or some coordinates."""

    component: Component
    places: tuple[tuple[Key, slice], ...]


@dataclass(frozen=True)
class Promoted:
    """One batch: the tokens that each component moves most, at each (prompt, position)."""

    prompt: Int64[np.ndarray, " row"]
    position: Int64[np.ndarray, " row"]
    id: Int64[np.ndarray, "row component direction k"]
    contribution: Float64[np.ndarray, "row component direction k"]


def sources(anatomy: Anatomy) -> dict[Component, Source]:
    """Every component whose write can be followed: embeddings, heads, and each sublayer as a whole."""
    found = [Source(Component("embed"), (((-1, "embed", anatomy.embed), slice(None)),))]
    for n, path in enumerate(anatomy.pos_embeds):
        number = n if len(anatomy.pos_embeds) > 1 else -1
        found.append(Source(Component("pos_embed", -1, number), (((-1, "embed", path), slice(None)),)))
    for layer, w in anatomy.writes():
        key = (layer, "write", w.leaf)
        bias = (((layer, "bias", w.leaf), slice(None)),) if w.bias else ()
        found.append(Source(Component(w.kind, layer, w.sublayer), ((key, slice(None)), *bias)))
        for h in range(w.n_heads):
            found.append(Source(Component("head", layer, w.sublayer, h), ((key, w.coordinates(h)),)))
    return {source.component: source for source in found}


def promote_batch(
    module: nn.Module,
    anatomy: Anatomy,
    batch: TokenBatch,
    places: tuple[np.ndarray, np.ndarray],
    chosen: Sequence[Source],
    top_k: int,
) -> Promoted:
    """The `top_k` tokens that each component pushes up, and down, most at `places` (prompt, position)."""
    unembed, flat = Unembed(module.get_submodule(anatomy.unembed), anatomy.logits), flat_index(batch, *places)
    moved = []
    with Push(module, anatomy) as push:
        hidden = push.forward(batch.ids, batch.mask)
        for source in chosen:
            moved.append(at(sum(pushed(push, hidden, source)), flat))
    found = [_most_moved(unembed, rows, top_k) for rows in moved]
    ids, contribution = (np.stack([side[i] for side in found], axis=1) for i in (0, 1))
    return Promoted(*places, ids, contribution)


def pushed(push: Push, end: Tensor, source: Source) -> Iterator[Float[Tensor, "batch pos width"]]:
    """What each of a component's places adds to `end`."""
    for key, part in source.places:
        if key[1] == "bias":
            value = bias_of(push.module.get_submodule(key[2])).detach().expand_as(push.outputs[key])
        else:
            leaf = push.leaves[key].detach()
            value = torch.zeros_like(leaf)
            value[..., part] = leaf[..., part]
        yield from push.each(end, key, [value])


@torch.no_grad()
def _most_moved(unembed: Unembed, rows: Float[Tensor, "row width"], k: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, contributions) `[row, direction, k]`."""
    ids, values = [], []
    for chunk in unembed.chunks(len(rows)):
        moved = unembed.moved(rows[chunk])
        (up, up_ids), (down, down_ids) = largest(moved, k), largest(moved.neg_(), k)
        ids.append(torch.stack([up_ids, down_ids], 1).cpu().numpy())
        values.append(torch.stack([up, -down], 1).double().cpu().numpy())
    return np.concatenate(ids), np.concatenate(values)
