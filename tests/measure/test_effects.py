"""Effects against full forward passes with plain hooks, sums by hand, the attribution, and head ablation."""

import numpy as np
import pytest
import torch

import streamlens as sl
from streamlens import schema
from streamlens.errors import InputError, NumericError
from streamlens.stream.leaves import LeafReplay
from tests import byhand
from tests.models import tiny
from tests.tolerances import ADDITIVITY, HAND, REPLAY

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12]]
PLACE = ["prompt", "position", "target", "component", "layer", "sublayer", "head"]


def size_of(attribution):
    return attribution.contribution.abs().groupby([attribution.prompt, attribution.position, attribution.target]).sum().max()


def hooked_logits(model, ids, row, values=None):
    """The model's own logits with one component replaced by `values` (zero for None) where the readout takes it."""
    write = next(w for w in model.anatomy.layers[row.layer].writes if w.sublayer == row.sublayer and w.kind == kind_of(row))
    leaf, call = model.module.get_submodule(write.leaf), sum(layer.path == model.anatomy.layers[row.layer].path for layer in
                                                              model.anatomy.layers[: row.layer])  # fmt: skip
    part = slice(row.head * write.d_head, (row.head + 1) * write.d_head) if row.component == "head" else slice(None)
    calls = []

    def replaced(x):
        calls.append(x)
        if len(calls) != call + 1:
            return x
        x = x.clone()
        x[..., part] = 0 if values is None else values[part]
        return x

    if write.n_heads:
        handle = leaf.register_forward_pre_hook(lambda part, args: (replaced(args[0]), *args[1:]))
    else:
        handle = leaf.register_forward_hook(
            lambda part, args, out: (replaced(out[0]), *out[1:]) if isinstance(out, tuple) else replaced(out)
        )
    try:
        with torch.no_grad():
            return model.module(torch.tensor([ids]), use_cache=False).logits[0].double()
    finally:
        handle.remove()


def seen_at(model, write, ids):
    """What stands at a write's leaf."""
    seen = []
    handle = model.module.get_submodule(write.leaf).register_forward_hook(
        lambda part, args, out: seen.append(args[0] if write.n_heads else out)
    )
    plain_logits(model, ids)
    handle.remove()
    return seen[0]


def kind_of(row):
    return "attn" if row.component == "head" else row.component


def plain_logits(model, ids):
    with torch.no_grad():
        return model.module(torch.tensor([ids]), use_cache=False).logits[0].double()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_total_is_a_plainly_hooked_pass_and_direct_is_the_attribution(family):
    model = tiny.proven(family)
    df = sl.effects(model, PROMPTS, target=11, versus=4, positions=[0, -1])
    schema.validate(df, "effects")
    parts = sl.attribute(model, PROMPTS, target=11, versus=4, positions=[0, -1])
    size = size_of(parts)
    for row in df.itertuples():
        ids = PROMPTS[row.prompt]
        clean, ablated = plain_logits(model, ids)[row.position], hooked_logits(model, ids, row)[row.position]
        truth = float((clean[11] - clean[4]) - (ablated[11] - ablated[4]))
        assert abs(row.total - truth) <= 2 * REPLAY * float(clean.abs().max()), row
    assert np.allclose(df.total, df.direct + df.indirect, rtol=0, atol=1e-9)
    assert np.allclose(df.indirect, df.repair_heads + df.repair_mlps + df.repair_norm, rtol=0, atol=1e-9)
    joined = df.merge(parts, on=PLACE)
    assert len(joined) == (df.component != "attn").sum()
    assert (joined.direct - joined.contribution).abs().max() <= ADDITIVITY[torch.float32] * size
    heads, whole = df[df.component == "head"], df[df.component == "attn"]
    by = ["prompt", "position", "layer"]
    gap = heads.groupby(by).direct.sum() - whole.groupby(by).direct.sum()
    assert gap.abs().max() <= ADDITIVITY[torch.float32] * size


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_direct_recomputed_and_repair_by_hand(family):
    """Every later write of the ablated run through the clean final norm, less the same of the clean run."""
    model, ids, target = tiny.proven(family), PROMPTS[0], 11
    df = sl.effects(model, ids, target=target)
    run = getattr(byhand, family)
    clean = run(model.module, torch.tensor(ids))
    shares = {key: float(value[-1]) for key, value in clean.shares(target).items()}
    for row in df[df.component.isin(("head", "mlp"))].itertuples():
        key = (row.component, row.layer, row.head)
        ablated = ablated_by_hand(family, model, ids, key)
        later = {k: float(clean.norm(k, w)[-1] @ clean.unembed[target]) for k, w in ablated.writes.items()}
        less = {k: shares[k] - later[k] for k in shares if k != key}
        scale = sum(map(abs, shares.values()))
        assert abs(row.direct - shares[key]) <= HAND * scale
        assert abs(row.repair_heads - sum(v for k, v in less.items() if k[0] == "head")) <= 5 * HAND * scale
        assert abs(row.repair_mlps - sum(v for k, v in less.items() if k[0] == "mlp")) <= 5 * HAND * scale
        assert abs(row.total - float(clean.logits[-1, target] - ablated.logits[-1, target])) <= 5 * HAND * scale
        left = final_norm(family, model, clean.final - clean.writes[key])[-1] @ clean.unembed[target]
        assert abs(row.direct_recomputed - float(clean.logits[-1, target] - left)) <= 5 * HAND * scale


def ablated_by_hand(family, model, ids, key):
    """The whole forward pass by hand, with one head's write or one MLP's at zero (the MLP's output bias too)."""
    kind, layer, head = key
    if kind == "mlp":
        return getattr(byhand, family)(model.module, torch.tensor(ids), without={("mlp", layer)})
    weight = next(
        w for n, w in model.module.named_parameters() if f".{layer}." in n and n.endswith(("o_proj.weight", "attn.c_proj.weight"))
    )
    d_head = model.anatomy.layers[layer].writes[0].d_head
    part, kept = slice(head * d_head, (head + 1) * d_head), weight.detach().clone()
    try:
        with torch.no_grad():
            weight[part if family == "gpt2" else (slice(None), part)] = 0
        return getattr(byhand, family)(model.module, torch.tensor(ids))
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def final_norm(family, model, x):
    w, config = byhand.weights(model.module), model.module.config
    if family == "llama":
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * w["model.norm.weight"]
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + config.layer_norm_epsilon).sqrt()
    return x * w["transformer.ln_f.weight"] + w["transformer.ln_f.bias"]


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt-post-norm"])
def test_means_come_from_the_reference_and_leave_out_first_tokens(family):
    model, reference = tiny.proven(family), [[1, 2, 3, 4], [50, 40, 30]]
    df = sl.effects(model, PROMPTS[1], target=11, method="mean", reference=reference, layers=1)
    assert (df.method == "mean").all()
    for row in df.itertuples():
        write = next(w for w in model.anatomy.layers[1].writes if w.kind == kind_of(row))
        seen = [seen_at(model, write, ids) for ids in reference]
        mean = torch.cat([x.reshape(len(ids), -1)[1:] for x, ids in zip(seen, reference, strict=True)]).double().mean(0).float()
        clean, ablated = plain_logits(model, PROMPTS[1])[-1, 11], hooked_logits(model, PROMPTS[1], row, mean)[-1, 11]
        assert abs(row.total - float(clean - ablated)) <= 2 * REPLAY * max(1.0, abs(float(clean)))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_direct_effects_of_a_mean_by_hand(family):
    """A write is linear in what stands at its leaf, so what is lost is the write less the mean of the reference's writes."""
    model, ids, target, reference = tiny.proven(family), PROMPTS[0], 11, [[1, 2, 3, 4], [50, 40, 30]]
    df = sl.effects(model, ids, target=target, method="mean", reference=reference, layers=1)
    clean, *others = (getattr(byhand, family)(model.module, torch.tensor(x)) for x in (ids, *reference))
    scale = sum(abs(float(share[-1])) for share in clean.shares(target).values())
    for row in df[df.component.isin(("head", "mlp"))].itertuples():
        key = (row.component, row.layer, row.head)
        lost = clean.writes[key] - torch.cat([other.writes[key][1:] for other in others]).mean(0)
        direct = clean.norm(key, lost)[-1] @ clean.unembed[target]
        left = final_norm(family, model, clean.final - lost)[-1] @ clean.unembed[target]
        assert abs(row.direct - float(direct)) <= HAND * scale
        assert abs(row.direct_recomputed - float(clean.logits[-1, target] - left)) <= 5 * HAND * scale


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma4"])
def test_totals_are_those_of_head_ablation(family):
    model = tiny.proven(family)
    df = sl.effects(model, PROMPTS, target=11)
    ablated = sl.ablate(model, PROMPTS, unit="head", method="zero", target=11, metrics="target_logit")
    joined = df.merge(ablated, on=["prompt", "position", "target", "layer", "sublayer", "head"])
    assert len(joined) == (df.component == "head").sum()
    assert np.allclose(joined.total, -joined.delta, atol=1e-4)


def test_nothing_depends_on_how_much_shares_a_pass():
    model = tiny.proven("llama")
    together = sl.effects(model, PROMPTS, target=["top2", 4], positions="all")
    apart = sl.effects(model, PROMPTS, target=["top2", 4], positions="all", max_tokens=7)
    assert together[PLACE].equals(apart[PLACE])
    for name in ("direct", "direct_recomputed", "total", "repair_heads", "repair_mlps", "repair_norm"):
        assert np.allclose(together[name], apart[name], atol=2e-5), name


def test_the_full_check_compares_with_hooked_passes(monkeypatch):
    model = tiny.proven("gemma2")
    for asked in ({}, {"method": "mean", "reference": [[1, 2, 3]]}):
        assert sl.effects(model, PROMPTS, **asked, check="full").equals(sl.effects(model, PROMPTS, **asked))
    each = LeafReplay.each
    monkeypatch.setattr(LeafReplay, "each", lambda self, made: each(self, made) * 1.1)
    with pytest.raises(NumericError, match="a total effect misses the model's own forward pass by"):
        sl.effects(tiny.proven("llama"), PROMPTS, check="full")


def test_mixers_repair_as_heads_do():
    """In a model of mixers alone, what the later ones do less of stands with the heads, and nothing with the MLPs."""
    from tests import zoo

    model = sl.load(zoo.build("mamba"))
    df = sl.effects(model, PROMPTS, target=11)
    assert set(df.component) == {"mixer"}
    assert (df.repair_mlps == 0).all()
    early = df.layer < model.n_layers - 1
    assert (df.repair_heads[early] != 0).all()
    assert (df.repair_heads[~early] == 0).all()


def test_layers_and_the_last_layers_repair():
    model = tiny.proven("llama")
    df = sl.effects(model, PROMPTS, layers=2)
    assert set(df.layer) == {2}
    last = df[df.component == "mlp"]
    assert (last.repair_heads == 0).all()
    assert (last.repair_mlps == 0).all()
    assert np.allclose(last.total, last.direct_recomputed, atol=1e-5)  # behind the last MLP there is the norm alone


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"method": "remove"}, "method must be one of 'zero', 'mean'; got 'remove'"),
        ({"method": "mean"}, "reference must be given for method='mean'"),
        ({"reference": [[1, 2]]}, "reference goes with the methods mean"),
        ({"layers": 3}, "layers must be indices from 0 to 2; got 3"),
        ({"target": "next"}, "before the last token for target 'next'"),
    ],
)
def test_what_effects_does_not_take(asked, message):
    with pytest.raises(InputError, match=message):
        sl.effects(tiny.proven("llama"), PROMPTS, **asked)
