"""The lens: full forward passes whose last block hands on another layer's stream, sums by hand, and rows of the attribution."""

import numpy as np
import pytest
import torch

import streamlens as sl
from streamlens import schema
from streamlens.errors import InputError, NumericError, UnsupportedModelError
from streamlens.measure import lens
from streamlens.stream import unembed
from tests import byhand
from tests.models import tiny
from tests.tolerances import HAND, PRINTED, ROUNDING

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12]]
SITES = ("resid_pre", "resid_mid", "resid_post", "final")


def hooked_logits(model, ids, stream=None):
    """The model's own printed logits of one prompt, with `stream` in the place of its last block's output."""

    def hand_on(part, args, output):
        if stream is None:
            return None
        return (stream[None], *output[1:]) if isinstance(output, tuple) else stream[None]

    handle = model.module.get_submodule(model.anatomy.layers[-1].path).register_forward_hook(hand_on)
    try:
        with torch.no_grad():
            return model.module(torch.tensor([ids]), use_cache=False).logits[0].double()
    finally:
        handle.remove()


def check(rows, logits, top_k, tolerance):
    """The rows of one site and norm against its logits `[pos, vocab]`, position by position."""
    probability = logits.softmax(-1)
    for position, at in rows.groupby("position"):
        z, p = logits[position], probability[position]
        top = at[at.k >= 0]
        assert top.k.tolist() == list(range(top_k))
        assert top.target.tolist() == z.topk(top_k)[1].tolist()
        for row in at.itertuples():
            assert abs(row.logit - float(z[row.target])) <= tolerance * float(z.abs().max())
            assert row.probability == pytest.approx(float(p[row.target]), rel=1e-4, abs=1e-7)
            assert row.rank == int((z > z[row.target]).sum())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_site_is_what_the_model_says_when_its_last_block_hands_that_on(family):
    model = tiny.proven(family)
    sites = SITES if any(layer.reads_mid for layer in model.anatomy.layers) else [s for s in SITES if s != "resid_mid"]
    df = sl.lens(model, PROMPTS, target=[[11, "top"], [4]], sites=sites, top_k=3)
    schema.validate(df, "lens")
    kept = sl.record(model, PROMPTS, sites=[s for s in sites if s != "final"])
    n_groups = 0
    for (prompt, site, layer), rows in df.groupby(["prompt", "site", "layer"], observed=True):
        ids = PROMPTS[prompt]
        stream = None if site == "final" else kept[f"blocks.{layer}.hook_{site}"][prompt, : len(ids)]
        assert sorted(rows.position.unique()) == list(range(len(ids)))
        check(rows, hooked_logits(model, ids, stream), 3, PRINTED[torch.float32])
        n_groups += 1
    n_mid = sum(layer.reads_mid for layer in model.anatomy.layers)
    assert n_groups == len(PROMPTS) * (2 * model.n_layers + n_mid + 1)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_by_hand(family):
    model = tiny.proven(family)
    df = sl.lens(model, PROMPTS[0], target=11, sites=SITES)
    trace = getattr(byhand, family)(model.module, torch.tensor(PROMPTS[0]))
    gain = model.module.get_submodule(next(p for layer, p in model.anatomy.path_norms if layer == model.n_layers))
    for (site, layer), rows in df.groupby(["site", "layer"], observed=True):
        x = trace.sites[site, layer]
        x = x - x.mean(-1, keepdim=True) if family == "gpt2" else x
        eps = model.module.config.rms_norm_eps if family == "llama" else model.module.config.layer_norm_epsilon
        normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain.weight.detach().double()
        normed = normed + gain.bias.detach().double() if family == "gpt2" else normed
        logits = normed @ trace.unembed.T
        named = rows[rows.k == -1].sort_values("position")
        assert np.abs(named.logit.to_numpy() - logits[:, 11].numpy()).max() <= HAND * float(logits.abs().max())


@pytest.mark.parametrize("family", ["llama", "gpt2", "neox", "olmo2", "mixtral"])
def test_frozen_it_is_the_sum_of_what_was_written_so_far(family):
    model = tiny.proven(family)
    df = sl.lens(model, PROMPTS, target=11, sites=["resid_pre", "final"], norm="frozen")
    parts = sl.attribute(model, PROMPTS, target=11, positions="all")
    size = parts.contribution.abs().groupby([parts.prompt, parts.position]).sum().max()
    behind = (parts.layer == model.n_layers) | (parts.component == "unembed_bias")
    for row in df[df.k == -1].itertuples():
        here = (parts.prompt == row.prompt) & (parts.position == row.position)
        assert abs(parts.contribution[here & ((parts.layer < row.layer) | behind)].sum() - row.logit) <= ROUNDING * size


def test_both_norms_stand_beside_each_other_and_agree_at_the_end():
    df = sl.lens(tiny.proven("gemma2"), PROMPTS, norm=["recomputed", "frozen"], target=11, top_k=0)
    wide = df.pivot_table(index=["prompt", "position", "layer", "site"], columns="norm", values="logit", observed=True)
    end = wide.xs("final", level="site")
    assert np.allclose(end.frozen, end.recomputed, rtol=1e-5, atol=1e-5)
    assert (wide.xs("resid_pre", level="site").frozen - wide.xs("resid_pre", level="site").recomputed).abs().min() > 0
    assert set(df.k) == {-1}


def test_without_a_final_norm_both_are_the_same():
    df = sl.lens(tiny.proven("opt-post-norm"), PROMPTS[0], norm=["recomputed", "frozen"])
    groups = df.groupby(["position", "layer", "site", "k", "target"], observed=True).logit
    assert (groups.size() == 2).all()
    assert (groups.nunique() == 1).all()


def test_by_default_the_models_own_answer_is_followed_through_every_layer():
    model = tiny.proven("llama")
    df = sl.lens(model, PROMPTS)
    assert list(df.site.unique()) == ["resid_pre", "final"]
    assert sorted(df.layer.unique()) == list(range(model.n_layers + 1))
    assert (df.norm == "recomputed").all()
    named, end = df[df.k == -1], df[(df.site == "final") & (df.k == 0)]
    assert (named.groupby(["prompt", "position"]).target.nunique() == 1).all()
    assert named[named.site == "final"].target.tolist() == end.target.tolist()
    assert (named[named.site == "final"]["rank"] == 0).all()
    assert df.groupby(["prompt", "position", "layer", "site"], observed=True).size().eq(6).all()


def test_the_models_several_likeliest_tokens_are_followed_each_once():
    model = tiny.proven("llama")
    likeliest = hooked_logits(model, PROMPTS[0])[-1].topk(3)[1].tolist()
    df = sl.lens(model, PROMPTS[0], target=["top3", 4, likeliest[1]], positions="last", top_k=0)
    for _, rows in df.groupby("layer"):
        assert sorted(rows.target) == sorted([*likeliest, 4])
    assert df[df.site == "final"].set_index("target")["rank"][likeliest].tolist() == [0, 1, 2]


def test_next_has_no_named_row_at_a_last_token():
    df = sl.lens(tiny.proven("llama"), PROMPTS, target="next")
    for prompt, ids in enumerate(PROMPTS):
        end = df[(df.prompt == prompt) & (df.site == "final")]
        assert end[end.k == -1].target.tolist() == ids[1:]
        assert sorted(end[end.k == 0].position) == list(range(len(ids)))


def test_a_named_token_has_the_probability_of_its_own_row_where_others_have_none():
    df = sl.lens(tiny.proven("llama"), PROMPTS, target="next", sites="final", top_k=0)
    for prompt, ids in enumerate(PROMPTS):
        truth = hooked_logits(tiny.proven("llama"), ids).softmax(-1)[range(len(ids) - 1), ids[1:]].numpy()
        assert np.allclose(df[df.prompt == prompt].probability, truth, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "target", "top_k"),
    [("gemma2", ["top3", 11], 5), ("llama", ["top3", 11], 5), ("llama", ["top3", 11], 0), ("llama", "next", 5)],
)
def test_a_prompts_rows_do_not_depend_on_the_batch_nor_on_the_chunk(family, target, top_k, monkeypatch):
    model = tiny.proven(family)
    together = sl.lens(model, PROMPTS, target=target, top_k=top_k)
    monkeypatch.setattr(unembed, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(unembed, "CHUNK_ROWS", 3)
    monkeypatch.setattr(lens, "SCRATCH_ELEMENTS", 2 * model.anatomy.n_vocab)
    apart = sl.lens(model, PROMPTS, target=target, top_k=top_k, max_tokens=4)
    keys = schema.table("lens").key(together)
    assert together[keys].equals(apart[keys])
    assert np.allclose(together.logit, apart.logit, rtol=1e-5, atol=1e-5)
    assert np.allclose(together.probability, apart.probability, rtol=1e-5, atol=1e-7)
    assert np.array_equal(together["rank"], apart["rank"])


@pytest.mark.parametrize("middle", [-1000.0, -80.0, 0.0, 50.0, 1000.0])
@pytest.mark.parametrize("spread", [0.0, 5.0, 100.0])
def test_probabilities_are_those_of_the_softmax_wherever_the_logits_stand(middle, spread):
    logits = middle + spread * torch.randn(50, 1000, generator=torch.Generator().manual_seed(0))
    found = lens._log_normalizer(logits, logits.amax(-1))
    assert torch.allclose(found.double(), logits.double().logsumexp(-1), rtol=3e-7, atol=1e-5)


def test_all_sites_are_one_product(monkeypatch):
    model, rows = tiny.proven("llama"), []
    multiply = torch.mm
    monkeypatch.setattr(unembed.torch, "mm", lambda a, b, out: rows.append(len(a)) or multiply(a, b, out=out))
    sl.lens(model, PROMPTS, target=11, sites=SITES, positions="last")
    assert rows == [2 * (3 * model.n_layers + 1)]


def test_one_pass_and_one_unembedding_a_site_at_the_rows_that_are_read(monkeypatch):
    model, rows, blocks = tiny.proven("llama"), [], []
    head, layer = model.module.lm_head, model.module.model.layers[1].mlp
    run_head, run_layer = head.forward, layer.forward
    monkeypatch.setattr(head, "forward", lambda hidden: rows.append(hidden.numel() // hidden.shape[-1]) or run_head(hidden))
    monkeypatch.setattr(layer, "forward", lambda hidden: blocks.append(hidden.shape[:2].numel()) or run_layer(hidden))
    sl.lens(model, PROMPTS, target=11, positions="last")
    assert sum(rows) == 2 * (model.n_layers + 1)
    assert blocks == [14, 1]  # one pass over the padded batch, and one token to see what a block returns


def test_the_first_versus_column_of_a_frame_is_of_no_concern():
    import pandas as pd

    frame = pd.DataFrame({"prompt": [PROMPTS[0]], "target": [11], "versus": [4], "template": ["a"]})
    df = sl.lens(tiny.proven("llama"), frame, top_k=1)
    assert set(df[df.k == -1].target) == {11}
    assert set(df.template) == {"a"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"sites": "attn_out"}, "sites must be one of 'embed', 'resid_pre', 'resid_mid', 'resid_post', 'final'; got 'attn_out'"),
        ({"norm": "both"}, "norm must be one of 'recomputed', 'frozen'; got 'both'"),
        ({"top_k": -1}, "top_k must be from 0 to the vocabulary's 60; got -1"),
        ({"top_k": 61}, "top_k must be from 0 to the vocabulary's 60; got 61"),
        ({"check": "always"}, "check must be one of"),
    ],
)
def test_what_the_lens_does_not_take(asked, message):
    with pytest.raises(InputError, match=message):
        sl.lens(tiny.proven("llama"), PROMPTS, **asked)


def test_sites_that_are_no_streams():
    with pytest.raises(InputError, match=r"'embed' cannot be read by the lens; this model has vectors of 16 coordinates there, not .* 32"):
        sl.lens(tiny.proven("opt-post-norm"), PROMPTS, sites="embed")
    with pytest.raises(InputError, match="'resid_mid' cannot be read by the lens; this model has none"):
        sl.lens(tiny.proven("neox"), PROMPTS, sites=["resid_mid", "final"])
    assert len(sl.lens(tiny.proven("llama"), PROMPTS, sites="embed"))


def test_an_end_that_mixes_positions_is_refused(monkeypatch):
    model = tiny.proven("llama")
    norm = model.module.model.norm
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", lambda x: forward(x + x.mean(1, keepdim=True)))
    with pytest.raises(UnsupportedModelError, match="its last block and its unembedding is no map of single positions: off by"):
        sl.lens(model, PROMPTS)


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt-post-norm"])
def test_the_full_check_compares_with_what_the_model_prints(family, monkeypatch):
    model = tiny.proven(family)
    asked = {"norm": ["recomputed", "frozen"], "target": ["top2", 11]}
    assert sl.lens(model, PROMPTS, **asked, check="full").equals(sl.lens(model, PROMPTS, **asked))
    assert len(sl.lens(model, PROMPTS, sites="resid_pre", check="full"))
    head = model.module.get_output_embeddings()
    handle = head.register_forward_hook(lambda part, args, out: out + torch.arange(out.shape[-1]) if out.dim() == 3 else None)
    try:
        with pytest.raises(NumericError, match="the lens at `final` misses the model's own forward pass by"):
            sl.lens(model, PROMPTS, target=11, check="full")
    finally:
        handle.remove()


def test_tokens_of_one_logit_share_their_rank():
    """A rank counts the tokens strictly above: ties, as bfloat16 has many, stand on the same one."""
    module, tied = tiny.model("llama"), range(50, 58)
    with torch.no_grad():
        module.lm_head.weight[50:58] = 0.0
    df = sl.lens(sl.load(module), PROMPTS, target=53, top_k=60)
    for _, rows in df.groupby(["prompt", "position", "layer"]):
        top = rows[rows.k >= 0]
        above = int((top.logit > 0).sum())
        assert set(top[top.target.isin(tied)]["rank"]) == {above}
        assert top["rank"].tolist() == [int((top.logit > logit).sum()) for logit in top.logit]
        assert rows[rows.k == -1][["target", "rank", "logit"]].values.tolist() == [[53, above, 0.0]]


@pytest.mark.parametrize("named", [True, False])
def test_the_full_check_sees_named_tokens_and_likeliest_ones(named):
    """The named one, which is nowhere among the likeliest two, alone is printed wrong; or all but it are."""
    model = tiny.proven("llama")
    asked = {"target": 11, "top_k": 2, "sites": "final", "norm": ["recomputed", "frozen"], "positions": "last"}
    assert not (sl.lens(model, PROMPTS, **asked).query("k >= 0").target == 11).any()
    wrong = (torch.arange(60) == 11) == named
    handle = model.module.lm_head.register_forward_hook(lambda part, args, out: out + wrong if out.dim() == 3 else None)
    try:
        with pytest.raises(NumericError, match="the lens at `final` misses the model's own forward pass by"):
            sl.lens(model, PROMPTS, **asked, check="full")
    finally:
        handle.remove()


def test_rows_stand_by_prompt_position_site_norm_and_rank_beside_the_users_columns():
    import pandas as pd

    model, norms = tiny.proven("llama"), ["recomputed", "frozen"]
    frame = pd.DataFrame({"prompt": PROMPTS[::-1], "template": ["a", "b"]})  # the longer prompt is the first batch
    df = sl.lens(model, frame, norm=norms, target=11, top_k=2, max_tokens=4)
    places = [(p, t) for p, ids in enumerate(PROMPTS[::-1]) for t in range(len(ids))]
    expected = [(p, t, layer, norm, k) for p, t in places for layer in range(model.n_layers + 1) for norm in norms for k in (-1, 0, 1)]
    assert list(zip(df.prompt, df.position, df.layer, df.norm, df.k, strict=True)) == expected
    assert df.template.tolist() == ["ab"[p] for p in df.prompt]


def test_a_logit_that_is_not_finite_is_an_error():
    module = tiny.model("llama")
    model = sl.load(module)
    with torch.no_grad():
        module.model.embed_tokens.weight[7] = float("nan")
    with pytest.raises(NumericError, match="a logit of the lens is not finite in"):
        sl.lens(model, [[5, 7, 9]], target=11)


@pytest.mark.parametrize(("target", "k"), [("top", 1), ("top3", 3)])
def test_top_is_what_the_model_says_in_the_end_also_where_that_is_not_among_the_sites(target, k):
    model = tiny.proven("llama")
    df = sl.lens(model, PROMPTS, target=target, sites="resid_pre", top_k=0)
    for (prompt, position, _), rows in df.groupby(["prompt", "position", "layer"]):
        assert set(rows.target) == set(hooked_logits(model, PROMPTS[prompt])[position].topk(k)[1].tolist())
    beside = sl.lens(model, PROMPTS, target=target, sites=["resid_pre", "final"], top_k=0)
    np.testing.assert_allclose(df.logit, beside[beside.site == "resid_pre"].logit, atol=1e-5)
