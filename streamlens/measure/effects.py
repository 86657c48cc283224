"""Direct, total and indirect effects of every component, and what the rest of the model does about its loss.

Everything is clean - ablated, positive where a component helps. Total and direct effect: McGrath et al. 2023 (the hydra effect);
self-repair and its split: Rushing & Nanda 2024. A component is replaced where the readout takes it, at every position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from streamlens.measure.components import Component
from streamlens.measure.places import at, flat_index, ids_on, ordinals, with_top
from streamlens.measure.replacements import Replacement
from streamlens.models.anatomy import MIXING, Anatomy, Write
from streamlens.prompts import Readouts, TokenBatch
from streamlens.stream.changes import Change
from streamlens.stream.hooked import hooked
from streamlens.stream.leaves import LeafReplay
from streamlens.stream.push import Push
from streamlens.stream.run import Place
from streamlens.stream.tail import Tail
from streamlens.stream.unembed import Unembed
from streamlens.stream.values import Key as ValueKey

Tick = Callable[[float], object]
"""Receives shares of the batch's work as they are done."""


@dataclass(frozen=True)
class Subject:
    """A component, and the coordinates of a write's leaf that are it."""

    component: Component
    write: Write
    part: slice | None = None  # of z; None for the whole leaf

    @property
    def place(self) -> Place:
        return self.component.layer, self.write.leaf

    @property
    def key(self) -> ValueKey:
        return *self.place, self.write.n_heads > 0

    @property
    def coordinates(self) -> slice:
        return slice(None) if self.part is None else self.part

    def change(self, value: Tensor | None) -> Change:
        value = None if value is None else value[..., self.coordinates]
        return Change(*self.place, self.coordinates if self.write.n_heads else None, value)


@dataclass(frozen=True)
class Effects:
    """One batch, clean - ablated in logits, `[row, component]`."""

    readouts: Readouts
    components: tuple[Component, ...]
    direct: Float64[np.ndarray, "row component"]
    direct_recomputed: Float64[np.ndarray, "row component"]
    total: Float64[np.ndarray, "row component"]
    repair_heads: Float64[np.ndarray, "row component"]
    repair_mlps: Float64[np.ndarray, "row component"]


def subjects(anatomy: Anatomy, layers: Sequence[int]) -> tuple[Subject, ...]:
    """Heads, each attention as a whole, MLPs, mixers and other writes of `layers`, in their order."""
    found = []
    for layer in layers:
        for w in anatomy.layers[layer].writes:
            heads = (Component("head", layer, w.sublayer, h) for h in range(w.n_heads))
            found += [Subject(c, w, w.coordinates(c.head)) for c in heads]
            found.append(Subject(Component(w.kind, layer, w.sublayer), w))
    return tuple(found)


def effects_batch(
    module: nn.Module,
    anatomy: Anatomy,
    batch: TokenBatch,
    readouts: Readouts,
    chosen: Sequence[Subject],
    replacement: Replacement,
    max_tokens: int,
    tick: Tick = lambda done: None,
) -> Effects:
    """The effects of `chosen` on the logits in `readouts`, whose prompts are all in `batch`."""
    unembed = Unembed(module.get_submodule(anatomy.unembed), anatomy.logits)
    values = next(iter(replacement.draws(batch, tuple(dict.fromkeys(s.key for s in chosen))))).values
    lost = {s.key: values.get(s.key) for s in chosen}
    clean, gone = _clean(module, anatomy, batch, readouts, unembed, chosen, lost)
    recomputed = _recomputed(module, anatomy, clean, gone)
    total, repair = _replayed(module, anatomy, batch, clean, chosen, lost, max_tokens, tick)
    columns = (torch.stack([clean.direct(s, lost[s.key]) for s in chosen], 1), recomputed, total, *repair)
    return Effects(clean.readouts, tuple(s.component for s in chosen), *(c.double().cpu().numpy() for c in columns))


@torch.no_grad()
def hooked_error(
    module: nn.Module, anatomy: Anatomy, batch: TokenBatch, found: Effects, chosen: Sequence[Subject], replacement: Replacement
) -> float:
    """How far the middle component's total effect is from plainly hooked passes, over the largest that a logit can be there."""
    number, unembed = len(chosen) // 2, Unembed(module.get_submodule(anatomy.unembed), anatomy.logits)
    subject, flat = chosen[number], flat_index(batch, found.readouts.prompt, found.readouts.position)
    value = next(iter(replacement.draws(batch, (subject.key,)))).values.get(subject.key)
    rows = []
    for made in ((), (subject.change(value),)):
        with hooked(module, anatomy, made) as run:
            rows.append(at(run.hidden(batch.ids, batch.mask), flat))
    clean, ablated = (_logit(unembed, hidden, found.readouts) for hidden in rows)
    target, versus = ids_on(clean.device, found.readouts)
    size = rows[0].to(unembed.wide).norm(dim=-1) * unembed.direction(target, versus).norm(dim=-1)
    gap = (clean - ablated).double().cpu() - torch.from_numpy(found.total[:, number])
    return float((gap.abs() / size.double().cpu()).max())


@dataclass
class _Clean:
    """The untouched model at the rows that are read: each leaf's value, and the direction in which the row reads it."""

    unembed: Unembed
    readouts: Readouts
    flat: np.ndarray  # [row] index into the batch's [batch * pos]
    hidden: Float[Tensor, "row width"]
    final: Float[Tensor, "row d_model"]
    logit: Float[Tensor, " row"]
    value: dict[Place, Tensor] = field(default_factory=dict)  # [row, width of the leaf]
    direction: dict[Place, Tensor] = field(default_factory=dict)

    def direct(self, subject: Subject, lost: Tensor | None) -> Float[Tensor, " row"]:
        """What the loss of a component moves through the frozen readout alone."""
        here, part = self.value[subject.place], subject.coordinates
        change = here if lost is None else here - lost.to(here)
        return torch.linalg.vecdot(change[:, part], self.direction[subject.place][:, part])


def _clean(
    module: nn.Module,
    anatomy: Anatomy,
    batch: TokenBatch,
    readouts: Readouts,
    unembed: Unembed,
    chosen: Sequence[Subject],
    lost: dict[ValueKey, Tensor | None],
) -> tuple[_Clean, list[Float[Tensor, "row d_model"]]]:
    """The clean side, and what the last stream lacks without each component, norms within the blocks frozen."""
    with Push(module, anatomy) as push:
        hidden = push.forward(batch.ids, batch.mask)
        readouts = with_top(readouts, batch, hidden.detach(), unembed)
        flat = flat_index(batch, readouts.prompt, readouts.position)
        rows = at(hidden.detach(), flat)
        clean = _Clean(unembed, readouts, flat, rows, at(push.final.detach(), flat), _logit(unembed, rows, readouts))
        rounds = ordinals(readouts.prompt, readouts.position)
        for number in range(int(rounds.max()) + 1):
            _pull(push, hidden, clean, np.flatnonzero(rounds == number))
        gone = [at(part, flat) for part in _pushed(push, chosen, lost)]
    return clean, gone


def _pull(push: Push, hidden: Tensor, clean: _Clean, rows: np.ndarray) -> None:
    """One backward pass: how at most one row a position reads every leaf."""
    flat, chosen = torch.from_numpy(clean.flat[rows]).to(hidden.device), clean.readouts.take(rows)
    target, versus = ids_on(hidden.device, chosen)
    start = torch.zeros_like(hidden)
    start.view(-1, hidden.shape[-1])[flat] = clean.unembed.direction(target, versus).to(hidden)

    def sink(key: tuple[int, str, str], value: Tensor | None, g: Tensor) -> None:
        if key[1] != "write":
            return
        for kept, x in ((clean.value, value.detach()), (clean.direction, g)):
            wide = x.reshape(-1, x.shape[-1])[flat.to(x.device)].to(clean.unembed.wide)
            kept.setdefault((key[0], key[2]), wide.new_zeros(len(clean.flat), x.shape[-1]))[torch.from_numpy(rows)] = wide

    push.pull(hidden, start, sink, last=False)


def _pushed(push: Push, chosen: Sequence[Subject], lost: dict[ValueKey, Tensor | None]) -> Iterator[Tensor]:
    """What each component has become in the last stream, less what stands in its place."""
    for layer, leaf in dict.fromkeys(s.place for s in chosen):
        own, key = [s for s in chosen if s.place == (layer, leaf)], (layer, "write", leaf)
        value, value_lost = push.leaves[key].detach(), lost[own[0].key]
        change = value if value_lost is None else value - value_lost.to(value)
        yield from push.each(push.final, key, (_only(change, s.coordinates) for s in own))


def _only(x: Tensor, part: slice) -> Tensor:
    kept = torch.zeros_like(x)
    kept[..., part] = x[..., part]
    return kept


def _recomputed(module: nn.Module, anatomy: Anatomy, clean: _Clean, gone: Sequence[Tensor]) -> Float[Tensor, "row component"]:
    """The direct effect where what stands behind the last block runs again on what is left of the stream."""
    with Tail(module, anatomy) as tail:
        tail.fit(clean.final, clean.hidden)
        return torch.stack([clean.logit - _logit(clean.unembed, tail(clean.final - part), clean.readouts) for part in gone], 1)


def _replayed(
    module: nn.Module,
    anatomy: Anatomy,
    batch: TokenBatch,
    clean: _Clean,
    chosen: Sequence[Subject],
    lost: dict[ValueKey, Tensor | None],
    max_tokens: int,
    tick: Tick,
) -> tuple[Float[Tensor, "row component"], tuple[Tensor, Tensor]]:
    """The total effects, and how much less later heads and MLPs write in the frozen readout's terms: the clean norms' scales."""
    later = _Later(clean, batch.ids.numel())
    totals = []
    with LeafReplay(module, anatomy, later.see) as replay:
        replay.record(batch.ids, batch.mask, attention=True)
        for group in _passes(chosen, max(1, max_tokens // batch.ids.numel()) if replay.enlarges else 1):
            later.start(group)
            for hidden in replay.each([(s.change(lost[s.key]),) for s in group]):
                totals.append(clean.logit - _logit(clean.unembed, at(hidden, clean.flat), clean.readouts))
            tick(len(group) / len(chosen))
    return torch.stack(totals, 1), later.finished()


def _passes(chosen: Sequence[Subject], n: int) -> Iterator[list[Subject]]:
    """Neighbours of one layer, `n` at most."""
    for layer in dict.fromkeys(s.component.layer for s in chosen):
        own = [s for s in chosen if s.component.layer == layer]
        yield from (own[start : start + n] for start in range(0, len(own), n))


class _Later:
    """Sums over the writes behind a loss: by how much each one's direct contribution is less than in the clean run."""

    def __init__(self, clean: _Clean, n_tokens: int):
        self.clean, self.n_tokens = clean, n_tokens
        self.group: list[Subject] = []
        self.sums: list[dict[str, Tensor]] = []  # heads and MLPs of each component, [row]

    def start(self, group: list[Subject]) -> None:
        self.group = group
        self.sums += [{kind: torch.zeros_like(self.clean.logit) for kind in ("heads", "mlps")} for _ in group]

    def see(self, layer: int, write: Write, value: Tensor) -> None:
        place = (layer, write.leaf)
        if not self.group or place not in self.clean.direction or layer < self.group[0].component.layer:
            return
        before, direction = self.clean.value[place], self.clean.direction[place]
        rows = torch.from_numpy(self.clean.flat).to(value.device)
        value, kind = value.reshape(-1, value.shape[-1]), "heads" if write.kind in MIXING else "mlps"
        for number, subject in enumerate(self.group):
            if subject.place != place:  # its own loss is the direct effect
                here = value[rows + number * self.n_tokens].to(before)
                self.sums[number - len(self.group)][kind] += torch.linalg.vecdot(before - here, direction).to(self.clean.logit)

    def finished(self) -> tuple[Tensor, Tensor]:
        return tuple(torch.stack([s[kind] for s in self.sums], 1) for kind in ("heads", "mlps"))


@torch.no_grad()
def _logit(unembed: Unembed, hidden: Float[Tensor, "row width"], readouts: Readouts) -> Float[Tensor, " row"]:
    """The printed logit, or difference of logits, of every row."""
    target, versus = ids_on(hidden.device, readouts)
    wide = hidden.to(unembed.wide)
    return (wide * unembed.direction(target, versus)).sum(-1) + unembed.bias(target, versus) + unembed.softcap(wide, target, versus)
