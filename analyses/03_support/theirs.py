"""TransformerLens' own direct logit attribution on a model, judged row by row against streamlens'.

Differences of logits are compared, at every position, so that centring over the vocabulary takes nothing away; its rows for
heads may differ by a constant vector each, since it moves the value bias to the attention's output bias.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

import streamlens as sl
from streamlens.errors import UnsupportedModelError
from streamlens.models.bridge import make_bridge
from streamlens.stream.readout import Readout
from streamlens.stream.unembed import Unembed

EXACT = 1e-4
"""Largest miss that counts as exact, over sum|parts|: it folds and centres weights in float32."""

UNITS = ("component", "head")
LOGITS, SUM = "its logits", "the sum of its rows"
REFUSALS = (ValueError, NotImplementedError, RuntimeError, AssertionError)


@dataclass(frozen=True)
class Probe:
    """Two prompts of one length and the logit difference that is explained at every position."""

    ids: torch.Tensor
    target: int
    versus: int


@dataclass(frozen=True)
class Verdict:
    """ "exact", "wrong", "refused" or "crash"; the worst miss in logits and over sum|parts|; which row misses most, or the message."""

    verdict: str
    miss: float = float("nan")
    relative: float = float("nan")
    reason: str = ""


def judge(module: torch.nn.Module, model: sl.Model | None, rows: pd.DataFrame | None, probe: Probe) -> Verdict:
    """What TransformerLens makes of the model. Without rows of ours to compare with, only whether it answers."""
    answers = {}
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            bridge = make_bridge(module, copy=True)
            bridge.enable_compatibility_mode()
            for unit in UNITS:
                answers[unit] = _answer(bridge, unit, probe)
            logits = {LOGITS: _difference(bridge(probe.ids), probe) - _difference(module(probe.ids, use_cache=False).logits, probe)}
    except TimeoutError:
        return Verdict("crash", reason="takes too long")
    except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
        return _refusal_or_crash(error)
    finally:
        logging.disable(logging.NOTSET)
    if model is None or rows is None:
        return Verdict("answers", reason="nothing to compare with")
    misses = logits | _component_misses(answers["component"], rows, model.n_layers) | _head_misses(answers["head"], rows, model, probe)
    return _worst(misses, _size(rows))


def _difference(logits: torch.Tensor, probe: Probe) -> np.ndarray:
    return (logits[..., probe.target] - logits[..., probe.versus]).double().flatten().numpy()


def _answer(bridge, unit: str, probe: Probe) -> dict[str, np.ndarray]:
    from transformer_lens.tools.analysis import direct_logit_attribution

    tokens = {"answer_tokens": torch.full((len(probe.ids),), probe.target), "incorrect_tokens": torch.full((len(probe.ids),), probe.versus)}
    found = direct_logit_attribution(bridge, probe.ids, unit=unit, pos=None, **tokens)
    values = found.attribution.detach().double().flatten(1).numpy()
    return dict(zip(found.labels, values, strict=True))


def _refusal_or_crash(error: Exception) -> Verdict:
    """A refusal is what TransformerLens says on purpose, in a raise or an assert with words; the rest broke."""
    last, text = traceback.extract_tb(error.__traceback__)[-1], " ".join(str(error).split())
    said = "transformer_lens" in last.filename and (last.line or "").startswith(("raise", "assert"))
    if isinstance(error, UnsupportedModelError):
        return Verdict("refused", reason="no adapter for this architecture")
    if said and text and isinstance(error, REFUSALS):
        return Verdict("refused", reason=text[:160])
    return Verdict("crash", reason=f"{type(error).__name__}: {text[:120]}".rstrip(": "))


def _component_misses(answer: dict[str, np.ndarray], rows: pd.DataFrame, n_layers: int) -> dict[str, np.ndarray]:
    """Theirs minus ours of every row, and of the sum: all but what their output bias holds."""
    ours = {"embed": _share(rows, component="embed"), "pos_embed": _share(rows, component="pos_embed")}
    for layer in range(n_layers):
        ours[f"{layer}_attn_out"] = sum(_share(rows, component=kind, layer=layer) for kind in ("head", "attn", "attn_bias"))
        ours[f"{layer}_mlp_out"] = _share(rows, component="mlp", layer=layer)
    misses = {label: value - ours.get(label, 0.0) for label, value in answer.items()}
    # The bias of a norm behind the embedding may stand in their embedding or in no row of theirs; then the sum says so.
    behind = _share(rows, component="norm_bias", layer=-1)
    misses["embed"] = min(misses["embed"], misses["embed"] - behind, key=lambda x: abs(x).max())
    kept = ~(rows.component.isin(["unembed_bias", "softcap"]) | ((rows.component == "norm_bias") & (rows.layer >= n_layers)))
    return {SUM: sum(answer.values()) - _share(rows[kept])} | misses


def _head_misses(answer: dict[str, np.ndarray], rows: pd.DataFrame, model: sl.Model, probe: Probe) -> dict[str, np.ndarray]:
    """Theirs minus ours of every head, less the best constant vector a head where the model has biases to move."""
    moves = any(name.endswith("bias") for name, _ in model.module.named_parameters())
    read = _read_directions(model, probe) if moves else {}
    misses = {}
    for layer, write in model.anatomy.writes():
        for head in range(write.n_heads if write.kind == "attn" else 0):
            label = f"L{layer}H{head}"
            if label not in answer:
                continue
            gap = answer[label] - _share(rows, component="head", layer=layer, sublayer=write.sublayer, head=head)
            if moves:
                g = read[layer, write.leaf].unflatten(-1, (write.n_heads, -1))[:, head].numpy()
                gap = gap - g @ np.linalg.lstsq(g, gap, rcond=None)[0]
            misses[label] = gap
    return misses


def _read_directions(model: sl.Model, probe: Probe) -> dict[tuple[int, str], torch.Tensor]:
    """In which direction the logit difference reads each attention's z: `[batch * pos, head * d_head]` by (layer, leaf)."""
    unembed = Unembed(model.module.get_submodule(model.anatomy.unembed), model.anatomy.logits)
    direction = unembed.direction(torch.tensor([probe.target]), torch.tensor([probe.versus])).detach()
    found = {}

    def sink(key, value, g):
        if key[1] == "write":
            found[key[0], key[2]] = g.detach().double().flatten(0, 1)

    with Readout(model.module, model.anatomy) as readout:
        hidden = readout.forward(probe.ids)
        readout.pull(hidden, direction.expand(hidden.shape).contiguous(), sink)
    return found


def _share(rows: pd.DataFrame, **where) -> np.ndarray:
    """Our contribution `[batch * pos]` of all rows with these values."""
    chosen = rows[np.logical_and.reduce([np.ones(len(rows), bool), *(rows[name] == value for name, value in where.items())])]
    every = pd.MultiIndex.from_frame(rows[["prompt", "position"]].drop_duplicates().sort_values(["prompt", "position"]))
    return chosen.groupby(["prompt", "position"]).contribution.sum().reindex(every, fill_value=0.0).to_numpy()


def _size(rows: pd.DataFrame) -> np.ndarray:
    """sum|parts| `[batch * pos]`."""
    return rows.contribution.abs().groupby([rows.prompt, rows.position]).sum().to_numpy()


def _worst(misses: dict[str, np.ndarray], size: np.ndarray) -> Verdict:
    """The largest miss, and what it comes from: wrong logits before a wrong sum before a wrong row."""
    relative = {label: float((abs(gap) / size).max()) for label, gap in misses.items()}
    worst = max(relative, key=relative.get)
    miss = float(abs(misses[worst]).max())
    if relative[worst] <= EXACT:
        return Verdict("exact", miss, relative[worst])
    return Verdict("wrong", miss, relative[worst], next(label for label in (LOGITS, SUM, worst) if relative[label] > EXACT))
