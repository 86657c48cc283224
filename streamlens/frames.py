"""The only door from arrays to DataFrames: codes and categories, never one string a row."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version

import numpy as np
import pandas as pd

from streamlens import schema
from streamlens.measure.ablation import Removal, Variant
from streamlens.measure.attribution import Component, Shares
from streamlens.measure.growth import Sites
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
    return {"component": pd.Categorical.from_codes(np.tile(codes, times), categories=kinds)} | {
        n: np.tile(v, times) for n, v in numbers.items()
    }


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


def ablation(removals: Iterable[Removal], changes: Sequence[Variant], unit: str, method: str, labels: Labels) -> pd.DataFrame:
    """The ablation table: for each prompt, position and target its metrics, under each change in turn."""
    parts = [frame for r in removals for frame in _removal_parts(r, changes, labels)]
    df = schema.concat(parts, "ablation") if len(parts) > 1 else schema.apply(parts[0], "ablation")
    df["unit"], df["method"] = (pd.Categorical.from_codes(np.zeros(len(df), dtype=np.int8), categories=[word]) for word in (unit, method))
    return schema.apply(df.sort_values(["prompt", "position", "layer", "sublayer"], kind="stable"), "ablation")


def _removal_parts(removal: Removal, changes: Sequence[Variant], labels: Labels) -> Iterable[pd.DataFrame]:
    """One frame a metric, without the rows whose inputs are absent."""
    none = np.full(len(removal.prompt), NONE)
    r = removal.readouts
    groups = (
        (removal.prompt, removal.position, none, none, removal.at_position),
        (r.prompt, r.position, r.target, r.versus, removal.at_target),
    )
    for prompt, position, target, versus, metrics in groups:
        for name, (clean, changed) in metrics.items():
            rows = np.flatnonzero(~np.isnan(clean))
            if not len(rows):
                continue
            n = len(changes)
            columns = place_columns(labels, prompt[rows], position[rows]) | target_columns(labels, target[rows], versus[rows])
            columns = {key: repeat(values, n) for key, values in (columns | {"clean": clean[rows]}).items()}
            columns |= {
                key: np.tile(np.array([getattr(c, key) for c in changes], dtype=np.int32), len(rows)) for key in ("layer", "sublayer")
            }
            columns |= {"span": np.ones(len(rows) * n, dtype=np.int32), "head": np.full(len(rows) * n, NONE, dtype=np.int32)}
            columns |= {
                "ablated": changed[:, rows].T.reshape(-1),
                "metric": pd.Categorical.from_codes(np.zeros(len(rows) * n, dtype=np.int8), [name]),
            }
            columns["delta"] = columns["ablated"] - columns["clean"]
            columns |= {"unit": pd.Categorical([""] * len(rows) * n), "method": pd.Categorical([""] * len(rows) * n)}
            columns |= {key: values.repeat(n) for key, values in carried(labels.prompts, prompt[rows]).items()}
            yield pd.DataFrame(columns, copy=False)


def norms(parts: Iterable[Sites], labels: Labels) -> pd.DataFrame:
    """The norms table, ordered by prompt and position, sites in the model's order."""
    parts = list(parts)
    first = parts[0]
    prompt, position = (np.concatenate([getattr(p, name) for p in parts]) for name in ("prompt", "position"))
    value = np.concatenate([p.value for p in parts])
    order = np.lexsort((position, prompt))
    n = len(first.sites) * len(first.measures)
    columns = {k: repeat(v, n) for k, v in place_columns(labels, prompt[order], position[order]).items()}
    kinds, measures = list(dict.fromkeys(site for site, _, _ in first.sites)), list(first.measures)
    codes = np.repeat([kinds.index(site) for site, _, _ in first.sites], len(measures)).astype(np.int8)
    for name, index in (("layer", 1), ("sublayer", 2)):
        columns[name] = np.tile(np.repeat(np.array([s[index] for s in first.sites], dtype=np.int32), len(measures)), len(order))
    columns["head"] = np.full(len(order) * n, NONE, dtype=np.int32)
    columns["site"] = pd.Categorical.from_codes(np.tile(codes, len(order)), categories=kinds)
    columns["measure"] = pd.Categorical.from_codes(
        np.tile(np.arange(len(measures), dtype=np.int8), n // len(measures) * len(order)), categories=measures
    )
    columns["value"] = value[order].reshape(-1)
    columns |= {k: v.repeat(n) for k, v in carried(labels.prompts, prompt[order]).items()}
    return schema.apply(pd.DataFrame(columns, copy=False), "norms")


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
