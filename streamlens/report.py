"""A folder with every table, their figures and a page that shows them: the answer to "what is in this model?"."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

import streamlens as sl
from streamlens import page, schema
from streamlens.folder import output_folder
from streamlens.prompts import all_bundled
from streamlens.summary import Tables, findings, summarise

UNITS = ("block", "attn", "mlp")
_SWEPT = 6  # prompts of each bundled set that layers are removed for
_BATCH = 256  # tokens: short prompts waste little on padding, and the progress bar moves


@dataclass(frozen=True)
class Report:
    """Where the files are, the tables, the summary as printed, and how many bundled prompts this tokenizer could not serve."""

    folder: Path
    tables: Tables
    summary: str
    left_out: int


def report(
    model="smollm2-135m",
    prompts=None,
    out: str | os.PathLike | None = None,
    *,
    target=None,
    versus=None,
    device=None,
    dtype=None,
    seed: int = 0,
    csv: bool = False,
    overwrite: bool = False,
    progress: bool = False,
) -> Report:
    """Attribute, remove and measure over a set of prompts, and write tables (Parquet), figures (PDF, PNG) and a page into a folder.

    `model` is a loaded model, or a name or folder that :func:`streamlens.load` opens with `device` and `dtype`; `prompts` anything that
    the calls take, by default the bundled sets, of which those are left out whose target or versus isn't one token for this tokenizer.
    `out` is by default a new folder streamlens-report-<date>-<time> in the current one. Attribution and removal are read at each prompt's
    last token; loss and norms at all. Removal, the costly part, is done for six prompts of each bundled set, and for all of your own.
    Raises InputError for bad input, before anything is written.
    """
    folder = Path(out) if out is not None else _dated()
    with output_folder(folder, overwrite) as work:
        model = sl.load(model, device=device, dtype=dtype) if isinstance(model, (str, os.PathLike)) else model
        left_out, swept = 0, None
        if prompts is None:
            prompts, left_out = all_bundled(model.tokenizer, seed=seed)
            swept = _spread(prompts)
        tables = measure(model, prompts, target, versus, progress, swept)
        found = findings(tables, left_out, seed)
        for name in ("card", "attribution", "ablation", "norms"):
            table = getattr(tables, name)
            schema.write_parquet(table, work / f"{name}.parquet")
            if csv:
                table.to_csv(work / f"{name}.csv", index=False)
        page.write(work, tables, found)
    return Report(folder, tables, summarise(tables, found), left_out)


def measure(model, prompts, target=None, versus=None, progress: bool = False, swept: np.ndarray | None = None) -> Tables:
    """The four tables over `prompts`: logits and removal at the last token of each, loss (blocks only) and norms at every token.

    Removal runs the model some hundred times; `swept`, rows of a DataFrame of prompts, are the only ones it is done for.
    """
    asked = {"target": "top" if target is None and not _names_targets(prompts) else target, "versus": versus}
    shown = {"progress": progress, "max_tokens": _BATCH}
    attribution = sl.attribute(model, prompts, **asked, **shown)
    norms = sl.norms(model, _alone(prompts), **shown)
    chosen = prompts if swept is None else prompts.iloc[swept]
    parts = [sl.ablate(model, chosen, unit=unit, **asked, **shown) for unit in UNITS]
    if (norms.position > 0).any():  # else no token has a next one to predict
        parts.append(sl.ablate(model, _alone(chosen), unit="block", metrics=["loss"], **shown))
    ablation = schema.concat(parts, "ablation")
    if swept is not None:
        ablation["prompt"] = swept[ablation["prompt"]]  # the row among all prompts, as in the other tables
    return Tables(sl.card(model), attribution, ablation, norms)


def _spread(prompts: pd.DataFrame) -> np.ndarray:
    """Rows of some prompts of each bundled set, spread over its wordings."""
    sets = prompts.groupby("set", sort=False).indices.values()
    return np.concatenate([rows[np.linspace(0, len(rows) - 1, min(_SWEPT, len(rows))).astype(int)] for rows in sets]).astype(np.int32)


def _alone(prompts):
    """The prompts without what is asked of each: loss and norms are about every token."""
    return prompts.drop(columns=["target", "versus", "position"], errors="ignore") if isinstance(prompts, pd.DataFrame) else prompts


def _names_targets(prompts) -> bool:
    return isinstance(prompts, pd.DataFrame) and "target" in prompts.columns


def _dated() -> Path:
    """A folder name that is free, also for a second report within the second."""
    stem = f"streamlens-report-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    names = (Path(stem if n == 1 else f"{stem}-{n}") for n in range(1, 1000))
    return next(name for name in names if not name.exists())
