"""What the rows of the attribution table are about, in their order, and the place in the readout that each comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from streamlens.models.anatomy import Anatomy, Write
from streamlens.stream.readout import Key


@dataclass(frozen=True)
class Component:
    """What a row of the attribution table is about; -1 where a column does not apply."""

    kind: str
    layer: int = -1
    sublayer: int = -1
    head: int = -1


Rows = Callable[[int, Write], tuple[Component, ...] | None]
"""The components that stand in place of a write's own, None for a write that is not split."""


def components(anatomy: Anatomy) -> tuple[Component, ...]:
    """The components that a model has, in the order of the table: embeddings, layers, norms on the stream, unembedding."""
    return tuple(c for place in components_by_key(anatomy).values() for c in place)


def whole(layer: int, write: Write) -> tuple[Component, ...]:
    """A write's own components: its heads, or the one row that it is."""
    heads = tuple(Component("head", layer, write.sublayer, h) for h in range(write.n_heads))
    return heads or (Component(write.kind, layer, write.sublayer),)


def components_by_key(anatomy: Anatomy, rows: Rows | None = None) -> dict[Key, tuple[Component, ...]]:
    """Where rows come from, and which: the place's key in the readout and its components."""
    found: dict[Key, tuple[Component, ...]] = {(-1, "embed", anatomy.embed): (Component("embed"),)}
    for ordinal, path in enumerate(anatomy.pos_embeds):
        found[(-1, "embed", path)] = (Component("pos_embed", -1, ordinal if len(anatomy.pos_embeds) > 1 else -1),)
    for layer, write in anatomy.writes():
        split = None if rows is None else rows(layer, write)
        found[(layer, "write", write.leaf)] = whole(layer, write) if split is None else split
        if write.bias:
            found[(layer, "bias", write.leaf)] = (Component("attn_bias", layer, write.sublayer),)
    counts: dict[int, int] = {}
    order = {path: i for i, path in enumerate(anatomy.norms)}
    for layer, path in sorted(anatomy.path_norms, key=lambda item: (item[0], order[item[1]])):
        if anatomy.norms[path].bias is not None:
            found[(layer, "norm", path)] = (Component("norm_bias", layer, counts.setdefault(layer, 0)),)
            counts[layer] += 1
    if anatomy.unembed_bias:
        found[(-1, "unembed_bias", "")] = (Component("unembed_bias"),)
    if anatomy.logits.cap is not None:
        found[(-1, "softcap", "")] = (Component("softcap"),)
    return found
