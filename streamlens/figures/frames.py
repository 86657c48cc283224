"""What a figure takes: nothing is averaged that should not be. Several targets, models or methods are refused, unless `by` names them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from streamlens.errors import InputError
from streamlens.schema import TABLES
from streamlens.stats.means import table_columns

# Apart from these, the rows of a group are averaged: positions within a prompt, then prompts.
_NOT_AVERAGED = ("model", "method", "span", "together", "expert", "at", "reference")
KEYS = {column.name for table in TABLES.values() for column in table.columns if column.key} | {"model"}


def columns(df: pd.DataFrame, names: Sequence[str], table: str) -> None:
    """Raise InputError unless `df` has these columns and rows."""
    table_columns(df, names, table)
    if df.empty:
        raise InputError(f"df must be {table} table with rows; got none")


def parts(df: pd.DataFrame, rows: pd.Series, what: str) -> pd.DataFrame:
    """The chosen rows of a table of contributions. Raise InputError where there are none, or one that is not finite."""
    chosen = df[rows]
    if chosen.empty:
        raise InputError(f"df must have rows with {what}; got components {', '.join(map(str, df['component'].unique()))}")
    if not np.isfinite(chosen["contribution"]).all():
        raise InputError(f"df must hold finite contributions; got {int((~np.isfinite(chosen['contribution'])).sum())} that are not")
    return chosen


def refuse_repeated(df: pd.DataFrame) -> None:
    """Tables of single prompts under one another all say prompt 0, and would be averaged, or summed, as one prompt."""
    key = [c for c in df.columns if c in KEYS]
    if df.duplicated(key).any():
        apart = "different numbers in `prompt`, or a column `model` (sl.load(..., name=))"
        raise InputError(f"df must hold each row once; got repeated rows: give tables that were put together {apart}")


def grouping(df: pd.DataFrame, by: str | Sequence[str] | None) -> list[str]:
    """`by` as a list of columns of `df`."""
    by = [] if by is None else [by] if isinstance(by, str) else list(by)
    for name in by:
        if name not in df.columns:
            raise InputError(f"by must name a column of df ({', '.join(map(str, df.columns))}); got {name!r}")
    return by


def refuse_several(df: pd.DataFrame, by: Sequence[str] = (), names: Sequence[str] = _NOT_AVERAGED, may: str = " or name it in by=") -> None:
    """Raise InputError where a column that must not be averaged has several values and `by` does not name it."""
    for name in names:
        if name in df.columns and name not in by and df[name].nunique() > 1:
            values = ", ".join(map(str, df[name].unique()[:4]))
            raise InputError(f"df must hold one {name}; got {df[name].nunique()} ({values}): select one{may}")


def demand_layers(df: pd.DataFrame) -> None:
    """Raise InputError where rows of an ablation have no layer: sets of units, and orders of blocks."""
    if (df["layer"] < 0).any():
        what = "sets of units" if "together" in df.columns else "orders of blocks"
        raise InputError(f"df must have a layer in every row; got {what}, which have none")


def refuse_targets(df: pd.DataFrame, by: Sequence[str] = (), may: str = "") -> None:
    """Raise InputError where one position of a prompt has several targets (or versus), which have no common mean."""
    place = [name for name in ("model", "prompt", "position", *by) if name in df.columns]
    pairs = df[list(dict.fromkeys([*place, "target", "versus"]))].drop_duplicates()
    repeated = pairs.duplicated(place)
    if repeated.any():
        first = pairs[repeated].iloc[0]
        raise InputError(
            f"df must hold one target and versus a position; got several, first at prompt {first['prompt']}, "
            f"position {first['position']}: select one{may}"
        )


def refuse_groups(df: pd.DataFrame) -> None:
    """Raise InputError unless all rows are of one model, prompt, position, target and versus."""
    key = [name for name in ("model", "prompt", "position", "target", "versus") if name in df.columns]
    groups = df[key].drop_duplicates()
    if len(groups) > 1:
        differ = ", ".join(name for name in key if groups[name].nunique() > 1)
        raise InputError(f"df must hold one prompt, position, target and versus; got {len(groups)} that differ in {differ}: select one")


def positions(df: pd.DataFrame) -> pd.Series:
    """How many positions each prompt has."""
    return df[["prompt", "position"]].drop_duplicates().groupby("prompt").size()
