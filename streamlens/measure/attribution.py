"""Direct logit attribution: each component's share of a logit, by the frozen readout, with the sum rule checked.

Contributions are exact on the untouched weights: heads, MLPs, mixers, embeddings and every constant on the residual path
sum to the model's own logit. A head keeps its share of the value bias. A split puts finer rows in the place of some.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor, nn

from streamlens.errors import UnsupportedModelError
from streamlens.measure.components import Component, components, components_by_key
from streamlens.measure.places import flat_index, ids_on, ordinals, with_top
from streamlens.measure.splits import Split
from streamlens.measure.table import Shares, Sources, Table
from streamlens.models import limits
from streamlens.models.anatomy import Anatomy
from streamlens.models.structure import bias_of
from streamlens.prompts import MEAN, NONE, Readouts, TokenBatch
from streamlens.stream.readout import Key, Readout
from streamlens.stream.run import Run
from streamlens.stream.tap import Places
from streamlens.stream.unembed import SCALES, Tangent, Unembed

__all__ = ["Component", "Shares", "Sources", "attribute_batch", "components", "printed_error"]


def attribute_batch(
    module: nn.Module, anatomy: Anatomy, batch: TokenBatch, readouts: Readouts, split: Split | None = None, scale: str = "logit"
) -> Shares:
    """Contributions of every component to the logits in `readouts`, whose prompts are all in `batch`; `scale` as in `attribute`.

    Raises :class:`UnsupportedModelError` where the parts that `split` finds miss the row that they stand for.
    """
    unembed = SCALES[scale](module.get_submodule(anatomy.unembed), anatomy.logits)
    read = np.unique(flat_index(batch, readouts.prompt, readouts.position))
    tap = None if split is None else split.tap(Places(torch.from_numpy(read), batch.ids.numel()))
    with Readout(module, anatomy, tap) as readout:
        hidden = readout.forward(batch.ids, batch.mask)
        readouts = with_top(readouts, batch, hidden.detach(), unembed)
        flat = torch.from_numpy(flat_index(batch, readouts.prompt, readouts.position))
        table = Table(components_by_key(anatomy, split and partial(split.components, tap)), readouts, unembed.wide)
        rounds = ordinals(readouts.prompt, readouts.position)
        n_rounds = int(rounds.max()) + 1
        for number in range(n_rounds):
            rows = np.flatnonzero(rounds == number)
            _pull(readout, hidden, unembed, table, rows, flat[rows], split, last=number + 1 == n_rounds)
    shares, gap = table.finished()
    if gap > limits.SUM[module.get_output_embeddings().weight.dtype]:
        raise UnsupportedModelError(
            f"{type(module).__name__} cannot be split by {split.column}: parts miss the row that they stand for by {gap:.2g} of sum|parts|"
        )
    return shares


@torch.no_grad()
def printed_error(module: nn.Module, anatomy: Anatomy, batch: TokenBatch, shares: Shares) -> Float64[np.ndarray, " row"]:
    """|logit (or log-probability) - what the model prints| of every row, over the largest printed logit of the batch."""
    r = shares.readouts
    with Run.of(module, anatomy) as run:
        _, logits = run.logits(batch.ids, batch.mask)
    rows = logits.reshape(-1, logits.shape[-1])[torch.from_numpy(flat_index(batch, r.prompt, r.position)).to(logits.device)].double().cpu()
    target, versus = torch.from_numpy(r.target), torch.from_numpy(r.versus)
    minus = torch.where(versus == MEAN, rows.mean(-1), rows.gather(-1, versus.clamp_min(0)[:, None])[:, 0])
    minus = torch.where(versus == NONE, 0.0, minus)
    printed = rows.gather(-1, target[:, None])[:, 0] - minus
    if shares.entropy is not None:
        printed = rows.log_softmax(-1).gather(-1, target[:, None])[:, 0] + torch.from_numpy(shares.entropy)
    return ((printed - torch.from_numpy(shares.logit)).abs() / rows.abs().max()).numpy()


def _pull(
    readout: Readout,
    hidden: Tensor,
    unembed: Unembed,
    table: Table,
    rows: np.ndarray,
    flat: Tensor,
    split: Split | None,
    *,
    last: bool,
) -> None:
    """One backward pass: the contributions to at most one logit a (prompt, position)."""
    device, chosen = hidden.device, table.readouts.take(rows)
    flat, (target, versus) = flat.to(device), ids_on(device, chosen)
    stream = hidden.detach().reshape(-1, hidden.shape[-1])[flat].to(unembed.wide)
    reader = unembed.at(stream, target)
    read = reader.direction(target, versus).to(device)
    start = torch.zeros(hidden.shape, dtype=hidden.dtype, device=device)
    start.view(-1, hidden.shape[-1])[flat] = read.to(hidden.dtype)
    dense, heads = 2 * len(flat) >= start[..., 0].numel(), {(i, "write", w.leaf): w.n_heads for i, w in readout.anatomy.writes()}
    constants = _constants(readout, unembed.wide)

    def sink(key: Key, value: Tensor | None, g: Tensor) -> None:
        if key not in table.columns:
            return
        at = flat.to(g.device)
        pick = (lambda x: x.reshape(-1, x.shape[-1])) if dense else (lambda x: x.reshape(-1, x.shape[-1])[at])
        direction = pick(g).to(unembed.wide)
        if value is None:
            shares = direction @ constants[key].to(direction)
        else:
            by_head = (max(heads.get(key, 0), 1), -1)
            written = pick(value).to(unembed.wide)
            shares = torch.einsum("rhd,rhd->rh", written.unflatten(-1, by_head), direction.unflatten(-1, by_head))
        shares = shares[at] if dense else shares
        part = None if split is None or value is None else split.part(readout.tap, key, g, at, shares)
        if part is None:
            table.put(key, rows, shares)
        else:
            table.put_part(key, rows, part)

    readout.pull(hidden, start, sink, last=last)
    bias, bend = reader.bias(target, versus), reader.softcap(stream, target, versus)
    for key, values in (((-1, "unembed_bias", ""), bias), ((-1, "softcap", ""), bend)):
        if key in table.columns:
            table.put(key, rows, values)
    table.logit[torch.from_numpy(rows)] = ((stream * read).sum(-1) + bias + bend).cpu()
    if isinstance(reader, Tangent):
        table.entropy[torch.from_numpy(rows)] = reader.entropy.cpu()


def _constants(readout: Readout, wide: torch.dtype) -> dict[Key, Tensor]:
    """Every constant vector that enters the stream at a known place: output biases and norm biases."""
    anatomy, module = readout.anatomy, readout.module
    biases = {(i, "bias", w.leaf): bias_of(module.get_submodule(w.leaf)).to(wide) for i, w in anatomy.writes() if w.bias}
    norms = {(i, "norm", p): anatomy.norms[p].bias for i, p in anatomy.path_norms if anatomy.norms[p].bias is not None}
    return biases | norms
