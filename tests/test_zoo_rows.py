"""Finer rows on every architecture of the zoo: they sum to the rows that they replace, and each is what its absence changes."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import streamlens as sl
from streamlens import schema
from streamlens.errors import UnsupportedModelError
from streamlens.stream.unembed import Unembed
from tests import zoo
from tests.finer import Open, sampled
from tests.test_zoo import PROMPTS, SERVED, TARGET, Case

SUM, MOVED = 5e-6, 2e-5
"""Limits, relative to sum|parts|."""

PLACE = ["prompt", "position"]
SPLIT = {  # the rows that take another's place, that row's component, and what tells its rows apart
    "neuron": (["neuron", "neuron_rest", "mlp_bias", "mlp"], "mlp", ["layer", "sublayer"]),
    "expert": (["expert", "shared_expert", "mlp_bias", "mlp"], "mlp", ["layer", "sublayer"]),
    "source": (["head"], "head", ["layer", "sublayer", "head"]),
    "token": (["head"], "head", []),
}

_OWN_ATTENTION = "does not attend through a function that it looks up"
_NO_HEADS = "it has no attention heads"
WITHOUT_SOURCES = (
    dict.fromkeys(("gpt_neo", "openai_gpt", "xglm", "xglm_unscaled", "bloom", "bloom_post_norm_residual", "mpt"), _OWN_ATTENTION)
    | dict.fromkeys(
        (name for name in zoo.VARIANTS if name.startswith("falcon_") and name not in ("falcon_h1", "falcon_mamba")), _OWN_ATTENTION
    )
    | {"diffllama": _OWN_ATTENTION, "jetmoe": "it has heads that cannot be told apart"}
    | dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv_unscaled", "xlstm", "zamba", "zamba2", "inkling"), _NO_HEADS)
)
"""Variants whose heads cannot be split by source, and what the refusal says."""

FIRST = [
    "gpt2",
    "bloom",
    "opt_post_norm",
    "llama_tied_bias",
    "gemma2",
    "gemma4",
    "bitnet",
    "granite_swa",
    "gpt_oss",
    "olmo_hybrid",
    "kimi_linear",
    "minimax",
    "mixtral",
    "qwen2_moe",
    "llama4",
    "jetmoe",
    "longcat_flash",
    "axk1",
    "dbrx",
    "deepseek_v3",
    "deepseek_v32",
    "nemotron_h",
    "qwen3_next",
    "gemma4_moe",
]
"""Variants whose sublayers differ: their rows are taken out one by one in every run, those of the others in the slow ones."""

DENSE = "none of its MLPs is a mixture"
NOT_LINEAR = "none of its MLPs ends in one linear map"


@pytest.fixture(scope="module", params=SERVED)
def case(request) -> Case:
    return Case(request.param, zoo.opened(request.param))


@pytest.fixture(scope="module")
def table(case) -> pd.DataFrame:
    return sl.attribute(case.model, PROMPTS, target=TARGET, positions="all")


def test_as_many_variants_as_promised_are_split_by_source():
    assert len([name for name in SERVED if name not in WITHOUT_SOURCES]) >= 118


@pytest.mark.parametrize("by", ["neuron", "expert", "source", pytest.param("token", marks=pytest.mark.slow)])
def test_finer_rows_sum_to_those_that_they_replace(case, table, by):
    if (reason := _refusal(case, by)) is not None:
        with pytest.raises(UnsupportedModelError, match=reason):
            sl.attribute(case.model, PROMPTS, target=TARGET, positions="all", by=by)
        return
    df = sl.attribute(case.model, PROMPTS, target=TARGET, positions="all", by=by, top_k=3)
    schema.validate(df, "attribution")
    size = table.groupby(PLACE).contribution.agg(lambda c: c.abs().sum())
    fine, whole, key = SPLIT[by]
    parts, rows = _sums(df, fine, PLACE + key), _sums(table, [whole], PLACE + key)
    assert parts.index.equals(rows.index)
    error = (parts - rows).abs() / size.reindex(parts.index.droplevel(key) if key else parts.index).to_numpy()
    assert error.max() <= SUM
    others = [column for column in table.columns if column in df.columns]
    pd.testing.assert_frame_equal(_but(df, fine)[others], _but(table, [whole])[others], rtol=0, atol=float(SUM * size.max()))


def _refusal(case: Case, by: str) -> str | None:
    """What the config says cannot be split, and how that is refused."""
    mlps = [w for _, w in case.anatomy.writes() if w.kind == "mlp"]
    if by in ("source", "token"):
        return WITHOUT_SOURCES.get(case.name)
    if by == "expert":
        return None if any("experts" in path.split(".") or "MoE" in kind for path, kind in _modules(case, mlps)) else DENSE
    return None if any(w.down is not None for w in mlps) else NOT_LINEAR


def _modules(case: Case, writes: list) -> list[tuple[str, str]]:
    return [
        (path, type(part).__name__) for w in writes for path, part in case.module.get_submodule(w.reader).named_modules(prefix=w.reader)
    ]


def _sums(df: pd.DataFrame, components: list[str], key: list[str]) -> pd.Series:
    return df[df.component.isin(components)].groupby(key).contribution.sum()


def _but(df: pd.DataFrame, components: list[str]) -> pd.DataFrame:
    rest = df[~df.component.isin(components)].reset_index(drop=True)
    return rest.assign(component=rest.component.astype(str))


@pytest.mark.parametrize("by", ["neuron", "expert", "source"])
@pytest.mark.parametrize("name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in SERVED])
def test_every_finer_row_is_what_its_absence_changes(name, by):
    case = Case(name, zoo.opened(name))
    if _refusal(case, by) is not None:
        pytest.skip("refused, as the sums test holds")
    ids, target, versus = torch.tensor([PROMPTS[0]]), 31, 5
    df = sl.attribute(case.model, PROMPTS[:1], target=target, versus=versus, positions="all", by=by, top_k=None)
    size = df.groupby("position").contribution.agg(lambda c: c.abs().sum()).to_numpy()
    layers = sorted(df[df[by] >= 0].layer.unique())
    layer, unembed = layers[len(layers) // 2], Unembed(case.module.get_submodule(case.anatomy.unembed), case.anatomy.logits)
    direction = unembed.direction(torch.tensor([target]), torch.tensor([versus]))[0]
    rows = df[df.layer == layer]
    sublayer = rows[rows[by] >= 0].sublayer.iloc[0]
    kind = "attn" if by == "source" else "mlp"
    write = next(w for i, w in case.anatomy.writes() if i == layer and w.kind == kind and w.sublayer == sublayer)
    with Open(case.module, case.anatomy, ids, layer, write) as opened, torch.no_grad():
        assert torch.equal(opened.less(), opened.hidden) or (opened.less() - opened.hidden).abs().max() <= 1e-5 * opened.hidden.abs().max()
        for part, of_part in sampled(rows[rows.sublayer == sublayer], by):
            moved = ((opened.hidden - opened.less(**part)) @ direction)[0].double().numpy()
            expected = of_part.groupby("position").contribution.sum().reindex(range(len(PROMPTS[0])), fill_value=0.0).to_numpy()
            assert (np.abs(moved - expected) <= MOVED * size).all(), (layer, part)
