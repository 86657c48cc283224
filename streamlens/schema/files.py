"""Tables in Parquet, with their attrs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd

from streamlens.errors import InputError
from streamlens.schema.rows import apply


def json_safe(value: object) -> object:
    """`value` as plain JSON types with sorted keys, so that attrs survive Parquet and give the same bytes twice."""
    if isinstance(value, dict):
        return {str(k): json_safe(value[k]) for k in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [json_safe(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (np.generic, np.ndarray)):
        return json_safe(value.tolist())
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


def write_parquet(df: pd.DataFrame, path: str | os.PathLike) -> Path:
    """Write `df` with its attrs; the file is there whole or not at all (a temporary file, then a rename). Gives the path."""
    path = Path(path)
    out = df.copy(deep=False)
    out.attrs = json_safe(df.attrs)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        out.to_parquet(temporary, index=False)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_parquet(path: str | os.PathLike, table_name: str) -> pd.DataFrame:
    """Read what :func:`write_parquet` wrote, with the schema and attrs. Raises InputError for a missing file or another table."""
    if not Path(path).is_file():
        raise InputError(f"path must be a Parquet file of the {table_name} table; got {os.fspath(path)!r}, which does not exist")
    return apply(pd.read_parquet(path), table_name)
