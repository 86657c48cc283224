"""The tables of what grows the stream, what depth is used for, and how gradients flow back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from streamlens import schema
from streamlens.frames.columns import Labels, carried, place_columns, repeat
from streamlens.measure.depth import STATISTICS, DepthUse
from streamlens.measure.gradients import Gradients
from streamlens.measure.squares import Addend, Squares, pairs
from streamlens.measure.units import Variant
from streamlens.prompts import TokenBatch


def norm_parts(batches: Iterable[Squares], addends: Sequence[Addend], labels: Labels) -> pd.DataFrame:
    """The norm_parts table, ordered by prompt and position, terms by their later addend."""
    batches = list(batches)
    prompt, position, total, term = (
        np.concatenate([getattr(b, name) for b in batches]) for name in ("prompt", "position", "total", "term")
    )
    order, n = np.lexsort((position, prompt)), term.shape[1]
    columns = {k: repeat(v, n) for k, v in place_columns(labels, prompt[order], position[order]).items()}
    for end, index in zip(("", "_to"), pairs(len(addends)), strict=True):
        kinds = list(dict.fromkeys(p.component for p in addends))
        codes = np.array([kinds.index(p.component) for p in addends], dtype=np.int8)[index]
        columns[f"component{end}"] = pd.Categorical.from_codes(np.tile(codes, len(order)), categories=kinds)
        for name in ("layer", "sublayer"):
            columns[name + end] = np.tile(np.array([getattr(p, name) for p in addends], dtype=np.int32)[index], len(order))
    columns |= {"value": term[order].reshape(-1), "total": total[order].repeat(n)}
    columns |= {k: v.repeat(n) for k, v in carried(labels.prompts, prompt[order]).items()}
    return schema.apply(pd.DataFrame(columns, copy=False), "norm_parts")


def depth_use(batches: Iterable[DepthUse], taken: Sequence[Variant], unit: str, span: str, labels: Labels) -> pd.DataFrame:
    """The depth_use table, ordered by prompt, what was taken away, and the later layer; nothing stands before the layer taken away."""
    batches = list(batches)
    prompt, cut = (np.concatenate([getattr(b, name) for b in batches]) for name in ("prompt", "cut"))
    both = [np.concatenate([b.write, b.prediction[:, None]], axis=1) for b in batches]  # [change, layer and predictions, prompt, statistic]
    value = np.concatenate(both, axis=2)
    order = np.argsort(prompt)
    at, number, to, statistic = np.nonzero(~np.isnan(value[:, :, order]).transpose(2, 0, 1, 3))
    rows = order[at]
    numbers = {k: np.array([getattr(v, k) for v in taken], dtype=np.int32)[number] for k in ("layer", "sublayer", "head")}
    columns = {
        "prompt": prompt[rows].astype(np.int32),
        "prompt_text": labels.prompt_texts(prompt[rows]),
        "unit": _constant(unit, len(rows)),
        **numbers,
        "layer_to": to.astype(np.int32),
        "positions": _constant(span, len(rows)),
        "cut": cut[rows].astype(np.int32),
        "measure": pd.Categorical.from_codes((to == value.shape[1] - 1).astype(np.int8), categories=["write", "prediction"]),
        "statistic": pd.Categorical.from_codes(statistic.astype(np.int8), categories=list(STATISTICS)),
        "value": value[number, to, rows, statistic],
    }
    return schema.apply(pd.DataFrame(columns | carried(labels.prompts, prompt[rows]), copy=False), "depth_use")


def gradients(batches: Iterable[tuple[TokenBatch, Gradients]], labels: Labels) -> pd.DataFrame:
    """The gradients table, ordered by prompt, position and layer."""
    prompts, positions, values, losses = [], [], [], []
    for batch, found in batches:
        row, position = batch.mask.numpy().nonzero()
        prompts.append(batch.index[row])
        positions.append(position)
        values.append(found.value[:, row, position].T)
        losses.append(found.loss[row])
    prompt, position, value, loss = map(np.concatenate, (prompts, positions, values, losses))
    order, n = np.lexsort((position, prompt)), value.shape[1]
    columns = {k: repeat(v, n) for k, v in place_columns(labels, prompt[order], position[order]).items()}
    columns["layer"] = np.tile(np.arange(n, dtype=np.int32), len(order))
    last = (np.arange(n) == n - 1).astype(np.int8)
    columns["site"] = pd.Categorical.from_codes(np.tile(last, len(order)), categories=["resid_pre", "final"])
    columns |= {"value": value[order].reshape(-1), "loss": loss[order].repeat(n)}
    columns |= {k: v.repeat(n) for k, v in carried(labels.prompts, prompt[order]).items()}
    return schema.apply(pd.DataFrame(columns, copy=False), "gradients")


def _constant(text: str, n: int) -> pd.Categorical:
    return pd.Categorical.from_codes(np.zeros(n, dtype=np.int8), categories=[text])
