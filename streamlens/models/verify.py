"""The proof at load: what an anatomy claims is measured on two tiny prompts, and what fails is refused by name.

A sum alone proves little: a row that swallowed the stream keeps it. So blocks must be their input plus their writes, every
named row must be reached, a zeroed write must move the logit by its row, and removals by replay must equal plain hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from streamlens.errors import UnsupportedModelError
from streamlens.measure.attribution import Component, Shares, attribute_batch, components
from streamlens.models import limits
from streamlens.models.anatomy import Anatomy, Write
from streamlens.models.blocks import prove_blocks
from streamlens.models.bypass import bypass_that_holds
from streamlens.models.logits import fit_logit_map
from streamlens.models.structure import bias_of
from streamlens.prompts import Readouts, TokenBatch
from streamlens.stream.adds import Miss, watch_adds
from streamlens.stream.clamp import Clamp
from streamlens.stream.hooked import hooked_removal
from streamlens.stream.replay import Replay
from streamlens.stream.run import Run, borrowed
from streamlens.stream.unembed import Unembed

LENGTHS = (7, 4)
"""Tokens of the two probe prompts."""

N_SAMPLED = 3
"""Components of each kind that are zeroed."""

SLACK = 1.01
"""What a block's additions may miss, in units of what rounding each partial sum to nearest allows."""


@dataclass(frozen=True)
class Proof:
    """What was measured at load, each the worst relative error; nan where a check was skipped."""

    additivity: float = float("nan")
    stream: float = float("nan")  # each block: stream in + writes = stream out
    interventions: float = float("nan")  # a zeroed write moves the logit by its row
    heads: float = float("nan")  # heads + bias = the attention write
    replay: float = float("nan")  # a removal by replay = a hooked forward pass
    printed: float = float("nan")  # our logit = the printed one


def probe_ids(module: nn.Module) -> Tensor:
    """Two rows of random tokens, all different, special ones at the vocabulary's start avoided where there is room."""
    n_vocab, n = module.get_input_embeddings().weight.shape[0], LENGTHS[0]
    generator = torch.Generator().manual_seed(0)
    low = n_vocab // 10
    if n_vocab - low < 2 * n:
        return torch.randint(0, n_vocab, (2, n), generator=generator)
    return (torch.randperm(n_vocab - low, generator=generator)[: 2 * n] + low).reshape(2, n)


def probe_batch(module: nn.Module) -> TokenBatch:
    """The probe prompts backwards, other prompts than the anatomy was found on, at their two lengths, padded."""
    ids = probe_ids(module).flip(1)
    mask = torch.arange(LENGTHS[0]) < torch.tensor(LENGTHS)[:, None]
    return TokenBatch(np.arange(2), torch.where(mask, ids, ids[0, 0]), mask)


def prove(module: nn.Module, anatomy: Anatomy, skip: bool = False) -> tuple[Anatomy, Proof]:
    """The anatomy with its logit map and the way it can be replayed, and what was measured.

    `skip` measures the logit map only, for a model whose bytes are known to have passed. Raises :class:`UnsupportedModelError`.
    """
    batch, watched = probe_batch(module), _Watched()
    with torch.no_grad(), Run.of(module, anatomy) as run:
        if not skip:
            watched.plant(run, anatomy, batch.mask)
        hidden, logits = (x[batch.mask.to(x.device)] for x in run.logits(batch.ids, batch.mask))
        if not bool(torch.isfinite(logits).all()):
            raise UnsupportedModelError(f"{type(module).__name__}: its logits are not finite")
        anatomy = replace(anatomy, logits=fit_logit_map(module, module.get_submodule(anatomy.unembed)(hidden), logits))
    if anatomy.n_streams > 1:
        bypass, error, printed = prove_blocks(module, anatomy, batch, hidden, logits)
        return replace(anatomy, bypass=bypass), Proof(replay=error, printed=printed)
    if skip:
        return anatomy, Proof()
    with borrowed(module):  # parts are called by themselves too, and an adapter's dropout would still act
        checker = _Checker(module, anatomy, batch)
        additivity, printed = checker.rows(logits)
        stream, heads = checker.writes(watched)
        interventions = checker.interventions()
        bypass, error = checker.replay()
    return replace(anatomy, bypass=bypass), Proof(additivity, stream, interventions, heads, error, printed)


@dataclass(frozen=True)
class _Watched:
    """What one pass shows of every addition and of every attention's projection."""

    misses: list[Miss] = field(default_factory=list)
    projected: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # what goes in and out, by the projection's path

    def plant(self, run: Run, anatomy: Anatomy, mask: Tensor) -> None:
        watch_adds(run, anatomy, self.misses.append)
        for path in {w.leaf for _, w in anatomy.writes() if w.n_heads}:
            run.on_output(path, lambda _, out, z, path=path: self.projected.__setitem__(path, (_rows(z, mask), _rows(out, mask))))


class _Checker:
    def __init__(self, module: nn.Module, anatomy: Anatomy, batch: TokenBatch):
        self.module, self.anatomy, self.batch, self.name = module, anatomy, batch, type(module).__name__
        self.dtype = module.get_output_embeddings().weight.dtype
        self.limit, self.room = limits.of_sum(module), limits.room(self.dtype)
        self.unembed = Unembed(module.get_submodule(anatomy.unembed), anatomy.logits)
        self.readouts = self._readouts()
        self.shares: Shares = attribute_batch(module, anatomy, batch, self.readouts)

    def rows(self, logits: Float[Tensor, "row vocab"]) -> tuple[float, float]:
        """The sum rule at every position of both prompts; every row named by the anatomy reached; our logits the printed ones."""
        additivity = float(self.shares.error.max())
        self._demand(additivity <= self.limit, f"contributions miss the logit by {additivity:.2g} of sum|parts| (limit {self.limit:.0e})")
        silent = self._silent()
        self._demand(silent is None, f"{silent} writes nothing into any logit: another row has swallowed it")
        logits, r = logits.double().cpu(), self.readouts
        rows = torch.arange(len(r))
        printed = logits[rows, torch.from_numpy(r.target)] - logits[rows, torch.from_numpy(r.versus)]
        error = float((printed - torch.from_numpy(self.shares.logit)).abs().max() / logits.abs().max())
        self._demand(error <= self.room, f"logits from the unembedding's rows miss the printed ones by {error:.2g} of the largest")
        return additivity, error

    def _silent(self) -> str | None:
        """The first write without a share in any logit: all heads of an attention, an MLP, a mixer, the embedding."""
        reached: dict[tuple[str, int, int], bool] = {}
        for c, column in zip(components(self.anatomy), self.shares.contribution.T, strict=True):
            if not c.kind.endswith("bias") and c.kind != "softcap":
                place = (c.kind, c.layer, c.sublayer)
                reached[place] = reached.get(place, False) or bool(column.any())
        return next((_label(Component(*place)) for place, any_share in reached.items() if not any_share), None)

    @torch.no_grad()
    def writes(self, watched: _Watched) -> tuple[float, float]:
        """Each block is stream in plus writes to one rounding an add, and heads plus bias are each attention's write."""
        worst = max(watched.misses, key=lambda miss: float("inf") if miss.roundings != miss.roundings else miss.roundings)
        self._demand(
            worst.roundings <= SLACK,
            f"layer {worst.layer}: stream in plus its writes misses stream out by {worst.relative:.2g} of its largest value, "
            f"{worst.roundings:.3g} times what rounding its sums allows",
        )
        writes = {w.leaf: w for _, w in self.anatomy.writes()}
        heads = max((self._heads(writes[path], *values) for path, values in watched.projected.items()), default=0.0)
        return max(miss.relative for miss in watched.misses), heads

    def _heads(self, write: Write, z: Float[Tensor, "row width"], out: Float[Tensor, "row d_out"]) -> float:
        """How far the heads' parts through their projection, plus its bias, are from its output."""
        projection = self.module.get_submodule(write.leaf)
        bias, constant = bias_of(projection), projection(torch.zeros_like(z[:1])).double()
        parts = torch.zeros(write.n_heads, *z.shape, dtype=z.dtype, device=z.device)
        for head in range(write.n_heads):
            at = write.coordinates(head)
            parts[head, :, at] = z[:, at]
        total = (projection(parts).double() - constant).sum(0) + constant
        error = float((total - out.double()).abs().max() / out.double().abs().max())
        self._demand(error <= self.room, f"{write.leaf}: heads plus bias miss the attention write by {error:.2g}")
        declared = 0 if bias is None else bias.double()
        gap = float((constant - declared).abs().max() / out.double().abs().max())
        self._demand(gap <= self.room, f"{write.leaf}: its constant is not its bias, off by {gap:.2g} of its largest output")
        return error

    @torch.no_grad()
    def interventions(self) -> float:
        """A sample of each kind of component: zeroed with the other writes held and the norms frozen, it moves the logit by its row."""
        r, sample = self.readouts, list(self._sample())
        size = np.abs(self.shares.contribution).sum(-1)
        with Clamp(self.module, self.anatomy, self.batch.ids, self.batch.mask) as clamp:
            hidden = clamp.without_each([(place, part) for _, _, place, part in sample])
            changes = (clamp.hidden - hidden)[:, r.prompt, r.position].to(self.unembed.wide)
        direction = self.unembed.direction(torch.from_numpy(r.target), torch.from_numpy(r.versus)).to(changes)
        moved = (changes * direction).sum(-1).double().cpu().numpy()
        worst = 0.0
        for (column, component, _, _), change in zip(sample, moved, strict=True):
            error = float((np.abs(change - self.shares.contribution[:, column]) / size).max())
            self._demand(
                error <= self.room,
                f"zeroing {_label(component)} with frozen norms does not move the logit by its row: off by {error:.2g} of sum|parts|",
            )
            worst = max(worst, error)
        return worst

    @torch.no_grad()
    def replay(self) -> tuple[bool, float]:
        """An early, a middle and the last block removed by replay, in both orders, against plain hooks; bypassing where that holds."""
        n = self.anatomy.n_layers
        layers = sorted({0, n // 2, n - 1})
        truth = {}
        for layer in layers:
            with hooked_removal(self.module, self.anatomy, removed={layer}) as run:
                truth[layer] = run.hidden(self.batch.ids, self.batch.mask)
        middle = self.anatomy.layers[n // 2]
        for add in middle.adds:
            with hooked_removal(self.module, self.anatomy, zeroed={(n // 2, p) for p in add.outputs}) as run:
                truth[add] = run.hidden(self.batch.ids, self.batch.mask)
        return bypass_that_holds(self.name, self.anatomy, self.room, lambda tried: self._replay_error(tried, layers, truth))

    def _replay_error(self, anatomy: Anatomy, layers: list[int], truth: dict) -> float:
        worst, middle = 0.0, anatomy.n_layers // 2
        with Replay(self.module, anatomy) as replay:
            replay.record(self.batch.ids, self.batch.mask)
            # A block before an earlier one and after it: what a replay leaves behind would show in the next.
            for what in (middle, *(n for n in layers if n != middle), *anatomy.layers[middle].adds):
                hidden = replay.without_blocks({what}) if isinstance(what, int) else replay.without_write(middle, what)
                gap = (hidden - truth[what])[self.batch.mask.to(hidden.device)].double().abs().max()
                gap = float(gap / truth[what].double().abs().max())
                worst = max(worst, gap if gap == gap else float("inf"))
        return worst

    def _sample(self) -> Iterator[tuple[int, Component, tuple[int, str], slice]]:
        """(column, component, leaf, coordinates) of a few components of each kind, spread over the layers."""
        places_of: dict[tuple, tuple[tuple[int, str], int]] = {("embed", -1, -1): ((-1, self.anatomy.embed), 0)}
        for ordinal, path in enumerate(self.anatomy.pos_embeds):
            places_of["pos_embed", -1, ordinal if len(self.anatomy.pos_embeds) > 1 else -1] = ((-1, path), 0)
        for layer, write in self.anatomy.writes():
            places_of["head" if write.n_heads else write.kind, layer, write.sublayer] = ((layer, write.leaf), write.d_head)
        by_kind: dict[str, list[int]] = {}
        for column, c in enumerate(components(self.anatomy)):
            if (c.kind, c.layer, c.sublayer) in places_of:
                by_kind.setdefault(c.kind, []).append(column)
        for columns in by_kind.values():
            for column in sorted({columns[i] for i in np.linspace(0, len(columns) - 1, N_SAMPLED).astype(int)}):
                c = components(self.anatomy)[column]
                place, d_head = places_of[c.kind, c.layer, c.sublayer]
                yield column, c, place, slice(None) if c.head < 0 else slice(c.head * d_head, (c.head + 1) * d_head)

    def _readouts(self) -> Readouts:
        """A random pair of tokens at every position, in the order of the mask."""
        prompt, position = (x.numpy() for x in torch.nonzero(self.batch.mask, as_tuple=True))
        rng = np.random.default_rng(0)
        target = rng.integers(0, self.anatomy.n_vocab, len(prompt))
        versus = (target + 1 + rng.integers(0, max(self.anatomy.n_vocab - 1, 1), len(prompt))) % self.anatomy.n_vocab
        return Readouts(prompt, position, target, versus)

    def _demand(self, holds: bool, message: str) -> None:
        if not holds:
            raise UnsupportedModelError(f"{self.name} cannot be read exactly: {message}")


def _rows(x: Tensor, mask: Tensor) -> Float[Tensor, "row width"]:
    return x.reshape(-1, x.shape[-1])[mask.flatten().to(x.device)]


def _label(c: Component) -> str:
    return f"{c.kind} {c.head} of layer {c.layer}" if c.head >= 0 else f"{c.kind} of layer {c.layer}" if c.layer >= 0 else c.kind
