"""The ablation table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from streamlens import schema
from streamlens.frames.columns import Labels, carried, place_columns, repeat, target_columns
from streamlens.measure.ablation import Removal
from streamlens.prompts import NONE

_NUMBERS = {"layer": NONE, "sublayer": NONE, "span": 1, "head": NONE}


def ablation(removals: Iterable[Removal], labels: Labels, variants: Mapping[str, Sequence]) -> pd.DataFrame:
    """The ablation table: for each prompt, position and target its metrics, under each variant in turn.

    `variants` holds the key columns of the variants, one entry each: numbers or texts. A change at a position that a prompt has
    not got makes no row.
    """
    parts = [frame for r in removals for frame in _removal_parts(r, variants, labels)]
    df = schema.end_to_end(parts, "ablation") if len(parts) > 1 else parts[0]
    return schema.apply(df.sort_values(["prompt", "position", "layer", "sublayer"], kind="stable"), "ablation")


def _removal_parts(removal: Removal, variants: Mapping[str, Sequence], labels: Labels) -> Iterator[pd.DataFrame]:
    """One frame a metric, without the rows whose inputs are absent."""
    r, none = removal.readouts, np.full(len(removal.prompt), NONE)
    groups = (
        (removal.prompt, removal.position, none, none, removal.at_position),
        (r.prompt, r.position, r.target, r.versus, removal.at_target),
    )
    for prompt, position, target, versus, metrics in groups:
        for name, (clean, changed) in metrics.items():
            rows = np.flatnonzero(~np.isnan(clean))
            if not len(rows):
                continue
            n = len(changed)
            columns = place_columns(labels, prompt[rows], position[rows]) | target_columns(labels, target[rows], versus[rows])
            columns = {key: repeat(values, n) for key, values in (columns | {"clean": clean[rows]}).items()}
            columns |= {key: _tiled(variants.get(key, [value] * n), len(rows)) for key, value in _NUMBERS.items()}
            columns |= {key: _tiled(values, len(rows)) for key, values in variants.items() if key not in (*_NUMBERS, "recovered")}
            columns |= {"ablated": changed[:, rows].T.reshape(-1), "metric": _tiled([name], len(rows) * n)}
            columns["delta"] = columns["ablated"] - columns["clean"]
            if "recovered" in variants:
                columns["recovered"] = _recovered(removal, name, rows, columns["clean"], columns["ablated"], n)
            columns |= {key: values.repeat(n) for key, values in carried(labels.prompts, prompt[rows]).items()}
            yield _where_made(pd.DataFrame(columns, copy=False), removal, labels)


def _tiled(values: Sequence, times: int) -> np.ndarray | pd.Categorical:
    """A column of the variants for every row: whole numbers as int32, texts by their codes."""
    if isinstance(values[0], str):
        texts = list(dict.fromkeys(values))
        return pd.Categorical.from_codes(np.tile(np.array([texts.index(v) for v in values], dtype=np.int32), times), categories=texts)
    return np.tile(np.asarray(values, dtype=np.int32), times)


def _recovered(removal: Removal, name: str, rows: np.ndarray, clean: np.ndarray, ablated: np.ndarray, n: int) -> np.ndarray:
    """(ablated - corrupted) / (clean - corrupted); nan where the two runs do not differ."""
    table = removal.corrupted
    corrupted = (table.at_position if name in table.at_position else table.at_target)[name][1][0][rows].repeat(n)
    span = clean - corrupted
    return np.divide(ablated - corrupted, span, out=np.full(len(span), np.nan), where=span != 0)


def _where_made(df: pd.DataFrame, removal: Removal, labels: Labels) -> pd.DataFrame:
    """Each prompt's own position of the change, without those that it has not got."""
    if "at" not in df.columns:
        return df
    if removal.made_at is not None:
        df = df.assign(at=df["prompt"].map(removal.made_at).astype(np.int32))
    else:
        df = df[df["at"].to_numpy() < labels.prompts.lengths[df["prompt"].to_numpy()]]
    return df.assign(at_token=labels.at(df["prompt"].to_numpy(), df["at"].to_numpy()))
