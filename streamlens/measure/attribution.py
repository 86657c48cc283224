"""Direct logit attribution: each component's share of a logit, by the frozen readout, with the sum rule checked.

Contributions are exact on the untouched weights: heads, MLPs, mixers, embeddings and every constant on the residual path
sum to the model's own logit. A head keeps its share of the value bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor, nn

from streamlens.measure.places import flat_index, with_top
from streamlens.models.anatomy import Anatomy
from streamlens.models.structure import bias_of
from streamlens.prompts import MEAN, NONE, Readouts, TokenBatch
from streamlens.stream.readout import Key, Readout
from streamlens.stream.run import Run
from streamlens.stream.unembed import Unembed


@dataclass(frozen=True)
class Component:
    """What a row of the attribution table is about; -1 where a column does not apply."""

    kind: str
    layer: int = -1
    sublayer: int = -1
    head: int = -1


@dataclass(frozen=True)
class Shares:
    """Contributions of one batch: every component at every readout."""

    readouts: Readouts  # prompt is the index into all prompts of the call
    contribution: Float64[np.ndarray, "row component"]
    logit: Float64[np.ndarray, " row"]
    error: Float64[np.ndarray, " row"]  # |sum - logit| / sum|parts|


def components(anatomy: Anatomy) -> tuple[Component, ...]:
    """The components that a model has, in the order of the table: embeddings, layers, norms on the stream, unembedding."""
    return tuple(c for place in _places(anatomy).values() for c in place)


def attribute_batch(module: nn.Module, anatomy: Anatomy, batch: TokenBatch, readouts: Readouts) -> Shares:
    """Contributions of every component to the logits in `readouts`, whose prompts are all in `batch`."""
    unembed = Unembed(module.get_submodule(anatomy.unembed), anatomy.logits)
    with Readout(module, anatomy) as readout:
        hidden = readout.forward(batch.ids, batch.mask)
        readouts = with_top(readouts, batch, hidden.detach(), unembed)
        flat = torch.from_numpy(flat_index(batch, readouts.prompt, readouts.position))
        table = _Table(anatomy, len(readouts), unembed.wide)
        rounds = _rounds(readouts)
        n_rounds = int(rounds.max()) + 1
        for number in range(n_rounds):
            rows = np.flatnonzero(rounds == number)
            _pull(readout, hidden, unembed, table, rows, flat[rows], readouts.take(rows), last=number + 1 == n_rounds)
    return _checked(readouts, table)


@torch.no_grad()
def printed_error(module: nn.Module, anatomy: Anatomy, batch: TokenBatch, shares: Shares) -> Float64[np.ndarray, " row"]:
    """|logit - what the model prints| of every row, over the largest printed logit of the batch."""
    r = shares.readouts
    with Run.of(module, anatomy) as run:
        _, logits = run.logits(batch.ids, batch.mask)
    rows = logits.reshape(-1, logits.shape[-1])[torch.from_numpy(flat_index(batch, r.prompt, r.position)).to(logits.device)].double().cpu()
    target, versus = torch.from_numpy(r.target), torch.from_numpy(r.versus)
    minus = torch.where(versus == MEAN, rows.mean(-1), rows.gather(-1, versus.clamp_min(0)[:, None])[:, 0])
    minus = torch.where(versus == NONE, 0.0, minus)
    printed = rows.gather(-1, target[:, None])[:, 0] - minus
    return ((printed - torch.from_numpy(shares.logit)).abs() / rows.abs().max()).numpy()


class _Table:
    """The contributions while they come in, one row a readout."""

    def __init__(self, anatomy: Anatomy, n_rows: int, dtype: torch.dtype):
        start, self.columns = 0, {}
        for key, place in _places(anatomy).items():
            self.columns[key] = slice(start, start + len(place))
            start += len(place)
        self.contribution = torch.zeros(n_rows, start, dtype=dtype)
        self.logit = torch.zeros(n_rows, dtype=dtype)

    def put(self, key: Key, rows: np.ndarray, values: Tensor) -> None:
        """`values` `[row]` or `[row, head]` of the place `key`."""
        values = values.reshape(len(rows), -1).cpu()
        if len(rows) == len(self.logit):
            self.contribution[:, self.columns[key]] = values
        else:
            self.contribution[torch.from_numpy(rows), self.columns[key]] = values


def _pull(
    readout: Readout, hidden: Tensor, unembed: Unembed, table: _Table, rows: np.ndarray, flat: Tensor, chosen: Readouts, *, last: bool
) -> None:
    """One backward pass: the contributions to at most one logit a (prompt, position)."""
    device = hidden.device
    flat, target, versus = flat.to(device), torch.from_numpy(chosen.target).to(device), torch.from_numpy(chosen.versus).to(device)
    direction = unembed.direction(target, versus).to(device)
    start = torch.zeros(hidden.shape, dtype=hidden.dtype, device=device)
    start.view(-1, hidden.shape[-1])[flat] = direction.to(hidden.dtype)
    dense, heads = 2 * len(flat) >= start[..., 0].numel(), {(i, "write", w.leaf): w.n_heads for i, w in readout.anatomy.writes()}
    constants = _constants(readout, unembed.wide)

    def sink(key: Key, value: Tensor | None, g: Tensor) -> None:
        if key not in table.columns:
            return
        at = flat.to(g.device)
        pick = (lambda x: x.reshape(-1, x.shape[-1])) if dense else (lambda x: x.reshape(-1, x.shape[-1])[at])
        g = pick(g).to(unembed.wide)
        if value is None:
            shares = g @ constants[key].to(g)
        else:
            by_head = (max(heads.get(key, 0), 1), -1)
            shares = torch.linalg.vecdot(pick(value).to(unembed.wide).unflatten(-1, by_head), g.unflatten(-1, by_head))
        table.put(key, rows, shares[at] if dense else shares)

    readout.pull(hidden, start, sink, last=last)
    stream = hidden.detach().reshape(-1, hidden.shape[-1])[flat].to(unembed.wide)
    bias = unembed.bias(target, versus)
    bend = unembed.softcap(stream, target, versus)
    for key, values in (((-1, "unembed_bias", ""), bias), ((-1, "softcap", ""), bend)):
        if key in table.columns:
            table.put(key, rows, values)
    table.logit[torch.from_numpy(rows)] = ((stream * direction).sum(-1) + bias + bend).cpu()


def _constants(readout: Readout, wide: torch.dtype) -> dict[Key, Tensor]:
    """Every constant vector that enters the stream at a known place: output biases and norm biases."""
    anatomy, module = readout.anatomy, readout.module
    biases = {(i, "bias", w.leaf): bias_of(module.get_submodule(w.leaf)).to(wide) for i, w in anatomy.writes() if w.bias}
    norms = {(i, "norm", p): anatomy.norms[p].bias for i, p in anatomy.path_norms if anatomy.norms[p].bias is not None}
    return biases | norms


def _places(anatomy: Anatomy) -> dict[Key, tuple[Component, ...]]:
    """Where rows come from, and which: the place's key in the readout and its components."""
    places: dict[Key, tuple[Component, ...]] = {(-1, "embed", anatomy.embed): (Component("embed"),)}
    for ordinal, path in enumerate(anatomy.pos_embeds):
        places[(-1, "embed", path)] = (Component("pos_embed", -1, ordinal if len(anatomy.pos_embeds) > 1 else -1),)
    for layer, write in anatomy.writes():
        heads = tuple(Component("head", layer, write.sublayer, h) for h in range(write.n_heads))
        places[(layer, "write", write.leaf)] = heads or (Component(write.kind, layer, write.sublayer),)
        if write.bias:
            places[(layer, "bias", write.leaf)] = (Component("attn_bias", layer, write.sublayer),)
    counts: dict[int, int] = {}
    order = {path: i for i, path in enumerate(anatomy.norms)}
    for layer, path in sorted(anatomy.path_norms, key=lambda item: (item[0], order[item[1]])):
        if anatomy.norms[path].bias is not None:
            places[(layer, "norm", path)] = (Component("norm_bias", layer, counts.setdefault(layer, 0)),)
            counts[layer] += 1
    if anatomy.unembed_bias:
        places[(-1, "unembed_bias", "")] = (Component("unembed_bias"),)
    if anatomy.logits.cap is not None:
        places[(-1, "softcap", "")] = (Component("softcap"),)
    return places


def _rounds(readouts: Readouts) -> np.ndarray:
    """The how-many-eth readout of its (prompt, position) each row is: a backward pass serves one at each position."""
    order = np.lexsort((readouts.position, readouts.prompt))
    prompt, position = readouts.prompt[order], readouts.position[order]
    new = np.r_[True, (prompt[1:] != prompt[:-1]) | (position[1:] != position[:-1])]
    starts = np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))
    rounds = np.empty(len(new), dtype=np.int64)
    rounds[order] = np.arange(len(new)) - starts
    return rounds


def _checked(readouts: Readouts, table: _Table) -> Shares:
    contribution, logit = table.contribution.double(), table.logit.double()
    error = (contribution.sum(-1) - logit).abs() / contribution.abs().sum(-1).clamp_min(1e-300)
    return Shares(readouts, contribution.numpy(), logit.numpy(), error.numpy())
