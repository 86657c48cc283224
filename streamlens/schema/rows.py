"""Tables that keep their schema.

Pandas drops dtypes on the way (concatenating different category sets gives text, an empty frame loses its categories in Parquet),
so :func:`apply` imposes the schema again after every concat, merge and read; :func:`concat` does it itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from pandas.api.types import union_categoricals

from streamlens.errors import InputError
from streamlens.schema.tables import NONE, Table, table

_ABSENT = {"int32": NONE, "category": "", "float64": np.nan, "bool": False}


def _missing(df: pd.DataFrame, spec: Table) -> None:
    missing = [c.name for c in spec.columns if not c.optional and c.name not in df.columns]
    if missing:
        raise InputError(f"df must be {spec.name} table with columns {', '.join(missing)}; got {', '.join(map(str, df.columns)) or 'none'}")


def _cast(values: pd.Series, dtype: str, where: str) -> pd.Series:
    if str(values.dtype) == dtype:
        return values
    if dtype in ("int32", "bool") and values.isna().any():
        raise InputError(f"{where} must have no nulls, -1 stands for none; got {int(values.isna().sum())} nulls")
    try:
        cast = values.astype(dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{where} must be {dtype}; got {values.dtype} that cannot be cast ({error})") from error
    if dtype == "int32" and not (cast == values).all():  # 1.5 and 2**40 are cast without a word
        raise InputError(f"{where} must be whole numbers of 32 bits; got {values[cast != values].iloc[0]}")
    return cast


def apply(df: pd.DataFrame, table_name: str) -> pd.DataFrame:
    """`df` with the schema imposed: columns in order, dtypes, text as categories, a new index; other columns follow at the end.

    Costs nothing where the dtypes are right already; `attrs` are kept. Raises InputError for a missing column or a value that
    does not fit its dtype (a null or a fraction in an integer column).
    """
    spec = table(table_name)
    _missing(df, spec)
    named = [c for c in spec.columns if c.name in df.columns]
    data = {c.name: _cast(df[c.name], c.dtype, f"{table_name}.{c.name}") for c in named}
    for name in df.columns:
        if name not in data:
            text = pd.api.types.is_string_dtype(df[name]) and df[name].dtype != "category"
            data[name] = df[name].astype("category") if text else df[name]
    out = pd.DataFrame(data, copy=False).reset_index(drop=True)
    out.attrs = dict(df.attrs)
    return out


def validate(df: pd.DataFrame, table_name: str) -> None:
    """Raise InputError unless `df` keeps its schema: every column there, right dtypes, and a key without nulls or repeats."""
    spec = table(table_name)
    _missing(df, spec)
    for column in spec.columns:
        if column.name in df.columns and str(df[column.name].dtype) != column.dtype:
            raise InputError(f"{table_name}.{column.name} must be {column.dtype}; got {df[column.name].dtype}")
    key = spec.key(df)
    for name in key:
        if df[name].isna().any():
            raise InputError(f"{table_name}.{name} is part of the key and must have no nulls; got {int(df[name].isna().sum())}")
    if repeated := _repeated(df, key):
        raise InputError(f"{table_name} must have one row for each {', '.join(key)}; got {repeated}")


def _repeated(df: pd.DataFrame, key: list[str]) -> str:
    """How many rows repeat the key of another one, and which is the first; "" for none."""
    again = df.duplicated(subset=key)
    return f"{int(again.sum())} repeated, first {df.loc[again, key].iloc[0].to_dict()}" if again.any() else ""


def _named_by_model(frames: list[pd.DataFrame]) -> tuple[list[pd.DataFrame], list[str]]:
    """Frames of several models get their `model` column from attrs, since without it their rows would share keys."""
    models = list(dict.fromkeys(str(f.attrs["model"]) for f in frames if "model" in f.attrs))
    if len(models) > 1:
        frames = [f if "model" in f.columns or "model" not in f.attrs else f.assign(model=str(f.attrs["model"])) for f in frames]
    return frames, models


def _stack(parts: list[pd.Series | None], lengths: list[int], absent: object) -> pd.Series | pd.Categorical:
    """One column of several frames end to end; frames without it are filled with `absent`."""
    given = [part for part in parts if part is not None and len(part)]
    kinds = {part.cat.categories.dtype for part in given if part.dtype == "category"}
    if len(kinds) == 1 and all(part.dtype == "category" for part in given):
        codes = pd.CategoricalDtype(pd.Index([] if pd.isna(absent) else [absent], dtype=kinds.pop()))
        empty = [pd.Series(absent, index=range(n), dtype=codes) for n in lengths]
        return union_categoricals([e if p is None or not len(p) else p for p, e in zip(parts, empty, strict=True)])
    filled = [pd.Series(absent, index=range(n)) if part is None else part for part, n in zip(parts, lengths, strict=True)]
    return pd.concat([part for part in filled if len(part)] or filled[:1], ignore_index=True)


def concat(frames: Sequence[pd.DataFrame], table_name: str) -> pd.DataFrame:
    """The frames of one table end to end, with its schema.

    Categories are united by code, without going through text. Optional columns that a frame lacks are filled with none (-1, ""),
    other columns with nulls. Frames whose `attrs["model"]` differ get a `model` column. `attrs` are the first frame's, with the worst
    `additivity_error` of all and, for several models, their list. Raises InputError for no frames, a missing column, and rows that two
    frames have, which every mean would take for one prompt's.
    """
    out = end_to_end(frames, table_name)
    key = table(table_name).key(out)
    if repeated := _repeated(out, key):
        raise InputError(
            f"frames must hold different rows; got, by {', '.join(key)}, {repeated}: give models in memory names (load(name=)), and "
            f"prompts that were measured apart different numbers"
        )
    return out


def end_to_end(frames: Sequence[pd.DataFrame], table_name: str) -> pd.DataFrame:
    """As :func:`concat`, for frames that are known to hold different rows."""
    spec, frames = table(table_name), list(frames)
    if not frames:
        raise InputError("frames must be one DataFrame or more; got none")
    for frame in frames:
        _missing(frame, spec)
    frames, models = _named_by_model(frames)
    absent = {c.name: _ABSENT[c.dtype] for c in spec.columns}
    names = list(dict.fromkeys(name for frame in frames for name in frame.columns))
    lengths = [len(frame) for frame in frames]
    data = {name: _stack([f.get(name) for f in frames], lengths, absent.get(name, np.nan)) for name in names}
    out = pd.DataFrame(data)
    out.attrs = dict(frames[0].attrs)
    errors = [f.attrs["additivity_error"] for f in frames if f.attrs.get("additivity_error") is not None]
    if errors:
        out.attrs["additivity_error"] = float(np.max(errors))
    if len(models) > 1:
        out.attrs["model"] = models
    return apply(out, table_name)
