"""The card, and where a table's numbers come from."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version

import numpy as np
import pandas as pd

from streamlens import schema

PACKAGES = ("streamlens", "torch", "transformers", "numpy", "pandas")


def card(name: str, facts: Mapping[str, object]) -> pd.DataFrame:
    """One row, one column a fact."""
    return schema.apply(pd.DataFrame({"model": [name]} | {key: [value] for key, value in facts.items()}), "card")


def stamp(df: pd.DataFrame, model, arguments: Mapping[str, object], **facts: object) -> pd.DataFrame:
    """Where the numbers come from, in `df.attrs`: kept by Parquet, so plain JSON values only."""
    df.attrs = {
        "model": model.name,
        "source": model.source,
        "revision": model.revision,
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": versions(),
        "seed": _plain(arguments.get("seed")),
        "arguments": {k: _plain(v) for k, v in arguments.items()},
        **facts,
    }
    return df


def versions() -> dict[str, str]:
    """Of Python and the packages that numbers depend on."""
    return {"python": platform.python_version(), **{p: _version(p) for p in PACKAGES}}


@cache
def _version(package: str) -> str:
    if package == "streamlens":
        from streamlens import __version__

        return __version__
    return version(package)


def _plain(value: object) -> object:
    """What JSON keeps; an array or a table by its first lines, since an argument is named here, not stored."""
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, range)):
        return [_plain(v) for v in value]
    return getattr(value, "__name__", str(value)[:200])
