"""The only door from arrays to DataFrames: codes and categories, never one string a row."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version

import numpy as np
import pandas as pd

from streamlens import schema
from streamlens.measure.attribution import Component, Shares
from streamlens.prompts import MEAN, NONE, Prompts
from streamlens.prompts.text import decode

PACKAGES = ("streamlens", "torch", "transformers", "numpy", "pandas")


class Labels:
    """Texts of tokens and prompts, each decoded once."""

    def __init__(self, tokenizer: object | None, prompts: Prompts):
        self.tokenizer, self.prompts = tokenizer, prompts

    def tokens(self, ids: np.ndarray) -> pd.Categorical:
        """The decoding of each single id; "" for none, "mean" for the vocabulary's mean."""
        unique, codes = np.unique(ids, return_inverse=True)
        return _categories([self._text(int(i)) for i in unique], codes)

    def prompt_texts(self, prompt: np.ndarray) -> pd.Categorical:
        return _categories(self.prompts.texts, prompt)

    def at(self, prompt: np.ndarray, position: np.ndarray) -> pd.Categorical:
        """The token that stands at each position."""
        starts = np.cumsum([0, *self.prompts.lengths])
        return self.tokens(np.concatenate(self.prompts.ids)[starts[prompt] + position])

    def _text(self, token: int) -> str:
        if token in (NONE, MEAN):
            return "" if token == NONE else "mean"
        return str(token) if self.tokenizer is None else decode(self.tokenizer, [token])


def _categories(texts: Sequence[str], codes: np.ndarray) -> pd.Categorical:
    """A categorical from codes into `texts`, where one text may stand twice."""
    unique = list(dict.fromkeys(texts))
    index = {text: i for i, text in enumerate(unique)}
    return pd.Categorical.from_codes(np.array([index[t] for t in texts], dtype=np.int32)[codes], categories=unique)


def repeat(values, times: int):
    """Each entry `times` times over, categoricals by their codes."""
    if isinstance(values, pd.Categorical):
        return pd.Categorical.from_codes(np.repeat(values.codes, times), categories=values.categories)
    return np.repeat(values, times)


def place_columns(labels: Labels, prompt: np.ndarray, position: np.ndarray) -> dict:
    return {
        "prompt": prompt.astype(np.int32),
        "prompt_text": labels.prompt_texts(prompt),
        "position": position.astype(np.int32),
        "token": labels.at(prompt, position),
    }


def target_columns(labels: Labels, target: np.ndarray, versus: np.ndarray) -> dict:
    return {
        "target": target.astype(np.int32),
        "target_token": labels.tokens(target),
        "versus": versus.astype(np.int32),
        "versus_token": labels.tokens(versus),
    }


def component_columns(components: Sequence[Component], times: int) -> dict:
    """The columns that name a component, all components `times` times over."""
    kinds = list(dict.fromkeys(c.kind for c in components))
    codes = np.array([kinds.index(c.kind) for c in components], dtype=np.int8)
    numbers = {n: np.array([getattr(c, n) for c in components], dtype=np.int32) for n in ("layer", "sublayer", "head")}
    return {"component": pd.Categorical.from_codes(np.tile(codes, times), categories=kinds)} | {n: np.tile(v, times) for n, v in numbers.items()}


def carried(prompts: Prompts, prompt: np.ndarray) -> dict:
    """The user's own columns, at each row's prompt."""
    return {name: pd.Series(values).take(prompt).array for name, values in prompts.columns.items()}


def attribution(shares: Iterable[Shares], components: Sequence[Component], labels: Labels) -> pd.DataFrame:
    """The attribution table, ordered by prompt, position and target as asked, components in the model's order."""
    shares = list(shares)
    parts = {name: np.concatenate([getattr(s.readouts, name) for s in shares]) for name in ("prompt", "position", "target", "versus")}
    contribution = np.concatenate([s.contribution for s in shares])
    logit = np.concatenate([s.logit for s in shares])
    if len(shares) > 1:
        order = np.lexsort((np.arange(len(logit)), parts["position"], parts["prompt"]))
        parts, contribution, logit = {n: v[order] for n, v in parts.items()}, contribution[order], logit[order]
    n = len(components)
    groups = place_columns(labels, parts["prompt"], parts["position"]) | target_columns(labels, parts["target"], parts["versus"])
    groups |= {"logit": logit}
    columns = {name: repeat(values, n) for name, values in groups.items()}
    columns |= component_columns(components, len(logit)) | {"contribution": contribution.reshape(-1)}
    columns |= {name: values.repeat(n) for name, values in carried(labels.prompts, parts["prompt"]).items()}
    return schema.apply(pd.DataFrame(columns, copy=False), "attribution")


def stamp(df: pd.DataFrame, model, arguments: Mapping[str, object], **facts: object) -> pd.DataFrame:
    """Where the numbers come from, in `df.attrs`: kept by Parquet, so plain JSON values only."""
    df.attrs = {
        "model": model.name,
        "source": model.source,
        "revision": model.revision,
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in PACKAGES}},
        "arguments": {k: _plain(v) for k, v in arguments.items()},
        **facts,
    }
    return df


def _version(package: str) -> str:
    if package == "streamlens":
        from streamlens import __version__

        return __version__
    return version(package)


def _plain(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, range)):
        return [_plain(v) for v in value]
    return getattr(value, "__name__", str(value)[:200])
