"""The units of a sweep: what is changed together, named as a row of the ablation table names it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from streamlens.models.anatomy import Anatomy, Write
from streamlens.prompts import NONE
from streamlens.stream.changes import Change
from streamlens.stream.values import Key

UNITS = ("block", "attn", "mlp", "mixer", "head", "expert")

EVERYWHERE, SEVERAL = NONE, -2
"""`Variant.at` where a change is made at every position, and at several but not all."""


@dataclass(frozen=True)
class Site:
    """One place whose value a change replaces: a block's write, an addition, a slice of z, an expert's weight."""

    layer: int
    path: str
    part: tuple[int, int] | None = None  # coordinates of the module's input
    expert: int = NONE

    @property
    def key(self) -> Key:
        return self.layer, self.path, self.part is not None

    def of(self, value: Tensor | None) -> Tensor | None:
        """This site's coordinates of a value at :attr:`key`."""
        return value if value is None or self.part is None else value[..., slice(*self.part)]

    def change(self, value: Tensor | None, at: Tensor | None) -> Change:
        return Change(self.layer, self.path, None if self.part is None else slice(*self.part), self.of(value), at, self.expert)


@dataclass(frozen=True)
class Variant:
    """One change of a sweep."""

    layer: int
    sublayer: int = NONE
    span: int = 1
    head: int = NONE
    expert: int = NONE
    at: int = EVERYWHERE
    sample: int = NONE
    sites: tuple[Site, ...] = ()
    name: str = ""  # of a set of units changed together, whose `layer` is the first one's

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(dict.fromkeys(site.key for site in self.sites))


def variants(
    anatomy: Anatomy,
    unit: str,
    layers: Sequence[int],
    spans: Sequence[int] = (1,),
    heads: Collection[int | tuple[int, int]] | None = None,
    experts: dict[str, tuple[str, int]] | None = None,
) -> tuple[Variant, ...]:
    """The changes that `unit` asks for at `layers`, by layer.

    A layer without such a sublayer has none, nor one whose norm covers other kinds too. Spans start at `layers` and end within the
    model. `heads` holds heads, of every layer, or (layer, head)s. `experts` gives each MLP's experts module and their number, by
    the path of its write's leaf.
    """
    if unit == "block":
        return tuple(_span(anatomy, layer, n) for layer in layers for n in spans if layer + n <= anatomy.n_layers)
    if unit == "head":
        found = ((layer, w, h) for layer in layers for w in anatomy.layers[layer].writes for h in range(w.n_heads))
        return tuple(_head(layer, w, h) for layer, w, h in found if heads is None or h in heads or (layer, h) in heads)
    if unit == "expert":
        return tuple(_experts(anatomy, layers, experts or {}))
    adds = ((layer, add) for layer in layers for add in anatomy.layers[layer].adds)
    return tuple(
        Variant(layer, add.writes[0].sublayer, sites=tuple(Site(layer, path) for path in add.outputs))
        for layer, add in adds
        if {w.kind for w in add.writes} == {unit}
    )


def without_blocks(anatomy: Anatomy, layers: Sequence[int]) -> Variant:
    """Several blocks at once, neighbours or not."""
    sites = tuple(Site(layer, anatomy.layers[layer].path) for layer in sorted(layers))
    return Variant(min(layers), span=len(sites), sites=sites)


def together(name: str, found: Sequence[Variant]) -> Variant:
    """All of these, of one unit, as one change."""
    sites = tuple(site for variant in found for site in variant.sites)
    first = min(found, key=lambda variant: variant.layer)
    return replace(first, span=len(sites), head=NONE, expert=NONE, sites=sites, name=name)


def at_each(found: Sequence[Variant], n_positions: int) -> tuple[Variant, ...]:
    """Every change at every position in turn."""
    return tuple(replace(v, at=t) for v in found for t in range(n_positions))


def _span(anatomy: Anatomy, layer: int, n: int) -> Variant:
    return without_blocks(anatomy, range(layer, layer + n))


def _head(layer: int, w: Write, head: int) -> Variant:
    z = w.coordinates(head)
    site = Site(layer, w.leaf, (z.start, z.stop))
    return Variant(layer, w.sublayer, head=head, sites=(site,))


def _experts(anatomy: Anatomy, layers: Sequence[int], experts: dict[str, tuple[str, int]]) -> Iterator[Variant]:
    for layer in layers:
        for w in anatomy.layers[layer].writes:
            path, n = experts.get(w.leaf, ("", 0))
            for expert in range(n):
                yield Variant(layer, w.sublayer, expert=expert, sites=(Site(layer, path, expert=expert),))
