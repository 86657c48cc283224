"""Ratios and forms of growth on made-up curves whose law is known."""

import numpy as np
import pandas as pd
import pytest
import torch

import streamlens as sl
from streamlens import schema, stats
from streamlens.errors import InputError
from tests.models import tiny


def norms(curve, prompts=4, positions=3, spread=0.0, seed=0, model=None):
    """A norms table: position 0 a hundred times larger, the rest `curve` times a factor of its own."""
    rng, rows = np.random.default_rng(seed), []
    for prompt in range(prompts):
        for position in range(positions):
            own = np.exp(rng.normal(0, spread, size=len(curve))) * (100 if position == 0 else 1)
            rows += [(prompt, position, layer, value) for layer, value in enumerate(np.asarray(curve) * own)]
    df = pd.DataFrame(rows, columns=["prompt", "position", "layer", "value"])
    df["site"] = np.where(df.layer == len(curve) - 1, "final", "resid_pre")
    df = df.assign(measure="l2", sublayer=-1, head=-1, token="x", prompt_text="p" + df.prompt.astype(str))
    df.attrs = {"model": "made-up"}
    df = df.assign(model=model) if model else df
    return schema.apply(df, "norms")


LAYERS = np.arange(13)
CURVES = {"exponential": 3 * 1.2**LAYERS, "linear": 2 + 0.7 * LAYERS, "sqrt": np.sqrt(4 + 3 * LAYERS)}


@pytest.mark.parametrize("form", CURVES)
def test_each_law_is_found(form):
    fits = stats.growth_forms(norms(CURVES[form])).set_index("form")
    assert fits.r2.idxmax() == form
    assert fits.r2[form] == pytest.approx(1.0, abs=1e-9)
    assert fits.r2.drop(form).max() < 0.999
    row = fits.loc[form]
    np.testing.assert_allclose(stats.forms.fitted({"form": form, **row}, LAYERS), CURVES[form], rtol=1e-9)
    assert (row["first"], row["last"], row["n_prompts"]) == (0, 12, 4)


def test_forms_over_a_range_and_by_model():
    df = pd.concat([norms(CURVES["linear"], model="a"), norms(CURVES["sqrt"], model="b")])
    fits = stats.growth_forms(df, layers=(2, 9))
    best = fits.sort_values("r2").groupby("model", observed=True).last()
    assert best.form.to_dict() == {"a": "linear", "b": "sqrt"}
    assert set(fits["first"]) == {2}
    with pytest.raises(InputError, match=r"layers must be \(first, last\), inclusive, with 0 <= first < last <= 12; got \(5, 13\)"):
        stats.growth_forms(norms(CURVES["linear"]), layers=(5, 13))


def test_forms_are_fitted_to_the_geometric_mean_over_prompts():
    """As growth_rate is; an arithmetic mean would be that of the one prompt of large norms."""
    curves = [CURVES["linear"], 50 * CURVES["exponential"]]
    both = pd.concat([norms(curve, prompts=1).assign(prompt=p, prompt_text=f"p{p}") for p, curve in enumerate(curves)])
    alone, numbers = norms(np.sqrt(curves[0] * curves[1]), prompts=1), ["intercept", "slope", "r2"]
    np.testing.assert_allclose(stats.growth_forms(both)[numbers], stats.growth_forms(alone)[numbers], rtol=1e-9)


def test_r2_is_that_of_the_norm_for_all_forms():
    assert stats.growth_forms(norms(np.full(6, 2.0))).r2.isna().all()
    curve = 4.0 ** np.arange(8) + np.arange(8) ** 2
    for _, fit in stats.growth_forms(norms(curve)).iterrows():
        missed = ((curve - stats.forms.fitted(fit, np.arange(8))) ** 2).sum()
        assert fit.r2 == pytest.approx(1 - missed / ((curve - curve.mean()) ** 2).sum())


def test_ratios_are_geometric_means_over_positions_then_prompts():
    df = norms(CURVES["linear"], spread=0.3, prompts=5)
    out = stats.growth_ratios(df)
    assert out.layer.tolist() == list(range(12))
    logs = (
        df[df.position > 0].assign(log=lambda d: np.log(d.value)).pivot_table(index=["prompt", "position"], columns="layer", values="log")
    )
    steps = logs.diff(axis=1).iloc[:, 1:]
    by_prompt = steps.groupby("prompt").mean()
    np.testing.assert_allclose(out["mean"], np.exp(by_prompt.mean()), rtol=1e-12)
    np.testing.assert_allclose(out["arithmetic"], np.exp(steps).groupby("prompt").mean().mean(), rtol=1e-12)
    assert (out.arithmetic > out["mean"]).all()
    assert ((out.low <= out["mean"]) & (out["mean"] <= out.high)).all()
    # With all layers, the product of the ratios is the whole growth.
    assert out["mean"].prod() == pytest.approx(np.exp((logs[12] - logs[0]).groupby("prompt").mean().mean()))


def test_position_0_is_left_out_of_ratios_unless_asked_for():
    df = norms(CURVES["linear"])
    df.loc[(df.position == 0) & (df.layer == 3), "value"] *= 1e3
    assert stats.growth_ratios(df)["mean"].max() < 2
    assert stats.growth_ratios(df, skip_first=False)["mean"].max() > 5
    with pytest.raises(InputError, match="skip_first must be False where every row is a first position"):
        stats.growth_ratios(norms(CURVES["linear"], positions=1))


def test_a_step_over_a_gap_is_no_layers_ratio():
    df = norms(CURVES["linear"])
    assert stats.growth_ratios(df[df.layer != 5]).layer.tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(("variance", "rate"), [(0.5, 1.0), (0.2, 0.4), (0.0, 0.0)])
def test_what_initialisation_predicts(variance, rate):
    lines = stats.initial_growth(8, variance=variance)
    assert lines.layer.tolist() == list(range(9))
    np.testing.assert_allclose(lines.random_walk**2, 1 + rate * lines.layer)
    np.testing.assert_allclose(lines.low**2, 1 + lines.layer / 2)
    np.testing.assert_allclose(lines.high**2, 1 + 1.5 * lines.layer)
    with pytest.raises(InputError, match=r"variance must be 0 or more; got -1.0"):
        stats.initial_growth(8, variance=-1.0)


def test_sink_rate_by_the_published_rule():
    rng = np.random.default_rng(0)
    index = pd.MultiIndex.from_product([range(3), range(6), range(2), range(4)], names=["prompt", "position", "layer", "head"])
    df = index.to_frame(index=False).assign(site="pattern", sublayer=0, measure="to_first", token="x", prompt_text="p")
    df["value"] = rng.random(len(df)) ** np.where(df["head"] == 1, 0.2, 2)
    rate = stats.sink_rate(schema.apply(df, "norms")).set_index("layer")
    count = dict.fromkeys((-1, 0, 1), 0.0)
    for (layer, _, _), rows in df.groupby(["layer", "head", "prompt"]):
        sink = rows.value.mean() > 0.3
        count[layer] += sink / 12
        count[-1] += sink / 24
    assert rate.rate.to_dict() == pytest.approx(count)
    assert 0 < rate.rate[-1] < 1
    with pytest.raises(InputError, match="df must be a norms table with the measure to_first"):
        stats.sink_rate(norms(CURVES["linear"]))


@pytest.mark.parametrize(("threshold", "rate"), [(0.3, 0.75), (0.4, 0.5), (0.45, 0.25)])
def test_a_sink_is_one_head_of_one_attention_above_the_threshold(threshold, rate):
    rows = [(0, 0, 0.1), (0, 1, 0.9), (1, 0, 0.35), (1, 1, 0.45)]  # two attentions of one head in one block
    df = pd.DataFrame(rows, columns=["prompt", "sublayer", "value"])
    df = df.assign(position=3, layer=0, head=0, site="pattern", measure="to_first", token="x", prompt_text="p" + df.prompt.astype(str))
    out = stats.sink_rate(schema.apply(df, "norms"), threshold)
    assert out[["layer", "rate", "n_prompts"]].values.tolist() == [[-1, rate, 2], [0, rate, 2]]
    assert out["mean"].tolist() == pytest.approx([0.45, 0.45])


def test_logit_by_depth_sums_to_the_logit():
    rng = np.random.default_rng(0)
    index = pd.MultiIndex.from_product([range(3), [4, 5], [-1, 0, 1, 2], ["a", "b"]], names=["prompt", "position", "layer", "component"])
    df = index.to_frame(index=False).assign(target=1, versus=-1)
    df["contribution"] = rng.normal(1, 1, size=len(df))
    out = stats.logit_by_depth(df)
    whole = df.groupby(["prompt", "position"]).contribution.sum().groupby("prompt").mean().mean()
    assert out["mean"].sum() == pytest.approx(whole)
    assert out.cumulative.iloc[-1] == pytest.approx(whole)
    assert out.share.sum() == pytest.approx(1.0)
    assert out.layer.tolist() == [-1, 0, 1, 2]
    with pytest.raises(InputError, match="df must be an attribution table with columns target"):
        stats.logit_by_depth(norms(CURVES["linear"]))


def test_the_depths_of_several_models_are_those_of_each():
    index = pd.MultiIndex.from_product([range(3), [4, 5], [-1, 0, 1, 2]], names=["prompt", "position", "layer"])
    one = index.to_frame(index=False).assign(target=1, versus=-1, contribution=lambda df: 1.0 + df["layer"] + df["prompt"])
    other = one.assign(contribution=10 * one.contribution - 3)
    out = stats.logit_by_depth(pd.concat([one.assign(model="b"), other.assign(model="a")]))
    for name, table in (("a", other), ("b", one)):
        rows = out[out.model == name].drop(columns="model").reset_index(drop=True)
        pd.testing.assert_frame_equal(rows, stats.logit_by_depth(table))


def parts(layers=4, prompts=3, positions=3, seed=0):
    """A norm_parts table of random addends, in two sublayers a layer."""
    rng, rows = np.random.default_rng(seed), []
    names = [("embed", -1), *((kind, layer) for layer in range(layers) for kind in ("attn", "mlp"))]
    for prompt in range(prompts):
        for position in range(positions):
            vectors = rng.normal(size=(len(names), 5)) * (100 if position == 0 else 1)
            total = (vectors.sum(0) ** 2).sum()
            for i, (later, layer) in enumerate(names):
                for j, (earlier, to) in enumerate(names[: i + 1]):
                    value = vectors[i] @ vectors[j] * (1 if i == j else 2)
                    rows.append((prompt, position, later, layer, earlier, to, value, total))
    names = ["prompt", "position", "component", "layer", "component_to", "layer_to", "value", "total"]
    df = pd.DataFrame(rows, columns=names).assign(sublayer=0, sublayer_to=0, token="x", prompt_text="p")
    df["prompt_text"] = "p" + df.prompt.astype(str)
    return schema.apply(df, "norm_parts")


def test_sources_of_growth_are_shares_that_sum_to_one():
    df = parts()
    out = stats.growth_sources(df)
    assert out["mean"].sum() == pytest.approx(1.0)
    later = df[df.position > 0]
    both = later.assign(share=later.value / later.total).groupby(["layer", "prompt", "position"]).share.sum()
    np.testing.assert_allclose(out.groupby("layer")["mean"].sum(), both.groupby("layer").mean())
    size = later[later.layer == later.layer_to]
    assert (size[size.layer == 2].component_to == "attn").any()  # a layer's own two writes are its size
    expected = (size.value / size.total).groupby([size.layer, size.prompt, size.position]).sum().groupby("layer").mean()
    np.testing.assert_allclose(out[out.source == "size"].set_index("layer")["mean"], expected)
    with pytest.raises(InputError, match="df must be a norm_parts table with columns layer_to, total"):
        stats.growth_sources(norms(CURVES["linear"]))


def test_sources_of_position_0_are_left_out_unless_asked_for():
    df = parts()
    shares = df.assign(share=df.value / df.total).groupby(["layer", "prompt", "position"]).share.sum()
    out = stats.growth_sources(df, skip_first=False)
    np.testing.assert_allclose(out.groupby("layer")["mean"].sum(), shares.groupby(["layer", "prompt"]).mean().groupby("layer").mean())
    assert not np.allclose(out["mean"], stats.growth_sources(df)["mean"])
    with pytest.raises(InputError, match="skip_first must be False where every row is a first position"):
        stats.growth_sources(df[df.position == 0])


def test_a_prediction_is_settled_where_the_top_token_stays():
    rows = []
    for prompt, tops in enumerate([[1, 7, 3, 7, 7], [4, 4, 4, 4, 4], [5, 5, 5, 5, 9], [2, 8, 8, 8, 8]]):
        rows += [(prompt, 3, layer, top, k) for layer, top in enumerate(tops) for k, top in ((-1, tops[-1]), (0, top), (1, 99))]
    df = pd.DataFrame(rows, columns=["prompt", "position", "layer", "target", "k"])
    df["site"] = np.where(df.layer == 4, "final", "resid_pre")
    out = stats.settled_layer(df)
    assert out.layer.tolist() == [3, 0, 4, 1]
    assert out.depth.tolist() == [0.75, 0.0, 1.0, 0.25]
    two = stats.settled_layer(pd.concat([df.assign(norm="frozen"), df.assign(norm="recomputed")]))
    assert len(two) == 8
    with pytest.raises(InputError, match="df must be a lens table with top_k=1 or more at the sites resid_pre and final"):
        stats.settled_layer(df[df.k == -1])


def test_settled_layers_of_a_model():
    """Against argmaxes of a lens made by hand from raw streams."""
    model = tiny.proven("llama")
    prompts = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12]]
    out = stats.settled_layer(sl.lens(model, prompts, top_k=1)).set_index(["prompt", "position"])
    kept = sl.record(model, prompts, sites=["resid_pre", "resid_post"])
    streams = [kept[f"blocks.{i}.hook_resid_pre"] for i in range(model.n_layers)] + [kept[f"blocks.{model.n_layers - 1}.hook_resid_post"]]
    with torch.no_grad():
        tops = torch.stack([model.module.lm_head(model.module.model.norm(x)).argmax(-1) for x in streams])
    for prompt, ids in enumerate(prompts):
        for position in range(len(ids)):
            same = (tops[:, prompt, position] == tops[-1, prompt, position]).tolist()
            assert out.layer[prompt, position] == next(i for i in range(len(same)) if all(same[i:]))


def test_a_pre_norm_network_at_initialisation_stays_within_the_published_bounds():
    """Xiong et al. 2020: unit embedding, Xavier weights, uniform attention, MLPs as wide as the stream."""
    config = sl.DecoderConfig(
        n_vocab=500, d_model=256, n_layers=10, n_heads=4, placement="pre", norm="layernorm", mlp="relu", d_mlp=256, init="xavier",
        positions="none",
    )  # fmt: skip
    decoder = sl.Decoder(config)
    with torch.no_grad():
        decoder.get_input_embeddings().weight.normal_()
    model = sl.load(decoder)
    ids = torch.randint(500, (6, 24), generator=torch.Generator().manual_seed(0))
    df = sl.norms(model, ids, measures="rms", sites=["resid_pre", "final"])
    square = df[df.position > 0].assign(square=lambda d: d.value**2).groupby("layer").square.mean().to_numpy()
    bounds = stats.initial_growth(10)
    assert (square >= 0.93 * square[0] * bounds.low**2).all()
    assert (square <= square[0] * bounds.high**2).all()
    assert square[-1] > 3 * square[0]
