"""Columns that several tables share: places, tokens, targets, components, and the columns that the user brought."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from streamlens.measure.attribution import Component
from streamlens.prompts import MEAN, NONE, Prompts
from streamlens.prompts.text import decode


class Labels:
    """Texts of tokens and prompts, each decoded once."""

    def __init__(self, tokenizer: object | None, prompts: Prompts):
        self.tokenizer, self.prompts = tokenizer, prompts
        self._texts: dict[int, str] = {NONE: "", MEAN: "mean"}

    def tokens(self, ids: np.ndarray) -> pd.Categorical:
        """The decoding of each single id; "" for none, "mean" for the vocabulary's mean."""
        unique, codes = np.unique(ids, return_inverse=True)
        return _categories([self._text(int(i)) for i in unique], codes)

    def prompt_texts(self, prompt: np.ndarray) -> pd.Categorical:
        return _categories(self.prompts.texts, prompt)

    def at(self, prompt: np.ndarray, position: np.ndarray) -> pd.Categorical:
        """The token that stands at each position, "" at none (-1)."""
        starts = np.cumsum([0, *self.prompts.lengths])
        ids = np.concatenate([*self.prompts.ids, [NONE]])
        return self.tokens(ids[np.where(position < 0, -1, starts[prompt] + position)])

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = str(token) if self.tokenizer is None else decode(self.tokenizer, [token])
        return self._texts[token]


def _categories(texts: Sequence[str], codes: np.ndarray) -> pd.Categorical:
    """A categorical from codes into `texts`, where one text may stand twice."""
    unique = list(dict.fromkeys(texts))
    index = {text: i for i, text in enumerate(unique)}
    return pd.Categorical.from_codes(np.array([index[t] for t in texts], dtype=np.int32)[codes], categories=unique)


def repeat(values, times: int | np.ndarray):
    """Each entry `times` times over (as many times each, or its own number), categoricals by their codes."""
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


def component_columns(components: Sequence[Component], which: int | np.ndarray) -> dict:
    """The columns that name a component: all components `which` times over, or the components that `which` lists."""
    kinds = list(dict.fromkeys(c.kind for c in components))
    codes = np.array([kinds.index(c.kind) for c in components], dtype=np.int8)
    numbers = {n: np.array([getattr(c, n) for c in components], dtype=np.int32) for n in ("layer", "sublayer", "head")}
    spread = (lambda values: np.tile(values, which)) if isinstance(which, int) else (lambda values: values[which])
    return {"component": pd.Categorical.from_codes(spread(codes), categories=kinds)} | {n: spread(v) for n, v in numbers.items()}


def carried(prompts: Prompts, prompt: np.ndarray) -> dict:
    """The user's own columns, at each row's prompt."""
    return {name: pd.Series(values).take(prompt).array for name, values in prompts.columns.items()}
