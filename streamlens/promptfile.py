"""Prompts from a file: a table (CSV, JSON lines, Parquet) with a column `prompt`, or plain text with one prompt a line."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd

from streamlens.errors import InputError

_TEXT = ("prompt", "target", "versus", "corrupted")


def read_prompts(path: str | os.PathLike) -> pd.DataFrame:
    """The prompts of a .csv, .jsonl, .parquet or .txt file as a DataFrame with `prompt` and whatever columns stand beside it.

    Text is kept to the letter: a leading space of a target counts, and nothing is read as a missing value. Empty lines of a text file
    are passed over. Raises InputError for a missing file, another kind of file, a file that does not parse, or no column `prompt`.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(f"prompts must be a file that exists; got {str(path)!r}")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"prompts must be a file that ends in {', '.join(_READERS)}; got {str(path)!r}")
    try:
        frame = reader(path)
    except (ValueError, OSError) as error:  # pandas and pyarrow raise kinds of ValueError for what does not parse
        raise InputError(f"prompts must be a readable {path.suffix} file; got {str(path)!r} ({str(error).splitlines()[0]})") from error
    if "prompt" not in frame.columns:
        raise InputError(f"prompts must have a column 'prompt'; got {', '.join(map(str, frame.columns)) or 'no columns'} in {str(path)!r}")
    if frame.empty:
        raise InputError(f"prompts must hold at least one prompt; got none in {str(path)!r}")
    return frame


def _csv(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype=dict.fromkeys(_TEXT, "str"), keep_default_na=False)


def _jsonl(path: Path) -> pd.DataFrame:
    return pd.read_json(path, lines=True, dtype=False)


def _text(path: Path) -> pd.DataFrame:
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    return pd.DataFrame({"prompt": [line for line in lines if line.strip()]})


_READERS = {".csv": _csv, ".jsonl": _jsonl, ".parquet": pd.read_parquet, ".txt": _text}
