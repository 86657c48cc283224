"""Prompts, targets and positions: what a call is asked about, as plain integer arrays; token batches; bundled prompt sets."""

from importlib import import_module

from streamlens.prompts.batches import TokenBatch, batches
from streamlens.prompts.parse import Prompts, parse
from streamlens.prompts.positions import positions
from streamlens.prompts.targets import MEAN, NO_READOUTS, NONE, TOP, Readouts, fill_top, readouts

_BUNDLED = ("all_bundled", "bundled", "bundled_names")

__all__ = [
    "MEAN",
    "NONE",
    "NO_READOUTS",
    "TOP",
    "Prompts",
    "Readouts",
    "TokenBatch",
    "all_bundled",
    "batches",
    "bundled",
    "bundled_names",
    "fill_top",
    "parse",
    "positions",
    "readouts",
]


def __getattr__(name):
    # The bundled sets are DataFrames. Measures may import this package but never pandas, so they come on first use.
    if name not in _BUNDLED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.sets"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
