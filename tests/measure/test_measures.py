"""Measures of vectors, norms, heads and attention, each against its definition."""

import numpy as np
import pytest
import torch

import streamlens as sl
from streamlens.errors import InputError
from streamlens.measure import vectors
from streamlens.measure.growth import AT, MEASURES
from tests import byhand
from tests.models import tiny
from tests.tolerances import HAND

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12], [2, 58, 33, 19, 20, 21]]


def read(x, beside=None):
    found = vectors.Found(x.shape[-1])
    inner = vectors.Reader().read(found, x, vectors.MEASURES, beside)
    return {name: found[name] for name in vectors.MEASURES} | {"inner": inner}


@pytest.fixture(params=["one thread for all", "all threads for each kernel"])
def way(request, monkeypatch):
    monkeypatch.setattr(vectors, "FEW_THREADS", 10**6 if request.param == "one thread for all" else 0)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 3.0, 1e3])
def test_length_spread_largest_coordinate_and_inner_product(offset, dtype):
    generator = torch.Generator().manual_seed(0)
    x, beside = (torch.randn(1500, 96, generator=generator, dtype=dtype) for _ in range(2))
    x = x + offset
    x[::7, 5] *= -300  # a massive coordinate
    found = read(x, beside)
    exact, other, error = x.double(), beside.double(), 1e-6 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(found["l2"], exact.norm(dim=-1), rtol=error)
    np.testing.assert_allclose(found["rms"], exact.square().mean(-1).sqrt(), rtol=error)
    np.testing.assert_allclose(found["std"], exact.std(-1, correction=0), rtol=10 * error)
    np.testing.assert_allclose(found["mean"], exact.mean(-1), atol=error * exact.square().mean().sqrt().item())
    assert (np.abs(found["inner"] - (exact * other).sum(-1).numpy()) <= error * (exact.norm(dim=-1) * other.norm(dim=-1)).numpy()).all()
    assert (found["max_index"] == x.abs().argmax(-1).numpy()).all()
    assert (found["max_abs"] == x.abs().amax(-1).double().numpy()).all()


@pytest.mark.usefixtures("way")
def test_vectors_of_one_number_and_of_none():
    found = read(torch.tensor([[0.1] * 96, [0.0] * 96, [-3e4] * 96]))
    np.testing.assert_allclose(found["std"] / [0.1, 1, 3e4], 0, atol=1e-6)
    np.testing.assert_allclose(found["l2"], np.array([0.1, 0, 3e4]) * 96**0.5, rtol=1e-6)
    assert found["max_index"].tolist() == [0, 0, 0]


def slow_massive(x):
    """The published rule of one prompt: above 100 and at least 1000 times the median over tokens and coordinates."""
    size = x.abs()
    return ((size > 100) & (size >= 1000 * size.median())).sum(-1)


def test_massive_coordinates_by_the_published_rule():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 12, 40, generator=generator) * torch.tensor([0.05, 0.2, 0.4, 3.0, 0.1])[:, None, None]
    x[:, 0, 3:9] = torch.tensor([99.0, 101.0, -180.0, 240.0, -310.0, 2e3])
    x[2, 4, 7] = -5e3
    x[4, 3:] = 50.0  # padding, of which the median knows nothing
    lengths = np.array([12, 12, 9, 12, 3])
    found = torch.from_numpy(vectors.massive(x, lengths, x.abs().amax(-1).numpy()))
    for row, length in enumerate(lengths):
        assert torch.equal(found[row, :length], slow_massive(x[row, :length]))
        assert not found[row, length:].any()
    assert len({*found[:, 0].tolist()}) >= 4  # the rule decides, not the size alone


def test_massive_coordinates_of_many_small_prompts():
    generator, seen = torch.Generator().manual_seed(0), set()
    for i in range(500):
        n, width = torch.randint(1, 9, (1,), generator=generator).item(), torch.randint(2, 12, (1,), generator=generator).item()
        x = torch.randn(n, width, generator=generator) * 10 ** (3 * torch.rand(1, generator=generator) - 2.5)
        large = torch.rand(n, width, generator=generator) < torch.rand(1, generator=generator) / 2
        x = torch.where(large, torch.randint(-400, 400, (n, width), generator=generator).float(), x.round() if i % 3 == 0 else x)
        found = vectors.massive(x[None], np.array([n]), x.abs().amax(-1)[None].double().numpy())
        assert found[0].tolist() == slow_massive(x).tolist(), x
        seen.add(found.sum())
    assert len(seen) > 10


@pytest.mark.parametrize("positions", [None, [0], [-1]])
def test_massive_counts_do_not_depend_on_what_is_read(positions):
    model = sl.load(tiny.model("llama", seed=3))
    with torch.no_grad():
        model.module.model.embed_tokens.weight *= 0.01
        model.module.model.embed_tokens.weight[5, :4] = torch.tensor([500.0, -120.0, 90.0, 101.0])
    df = sl.norms(model, PROMPTS, positions=positions, measures="massive", sites="embed")
    for prompt, ids in enumerate(PROMPTS):
        truth = slow_massive(model.module.model.embed_tokens.weight[ids].detach()).numpy()
        rows = df[df.prompt == prompt]
        assert (rows.value.to_numpy() == truth[rows.position]).all()
    if positions != [-1]:
        assert df.value.max() > 1


def test_of_an_even_number_the_median_is_the_lower_of_the_middle_two():
    x = torch.tensor([[[0.25, 250.0, 0.5], [0.25, 0.25, 0.5]]])  # 250 is 1000 times the lower, and not 1000 times their mean
    assert slow_massive(x[0]).tolist() == [1, 0]
    assert vectors.massive(x, np.array([2]), x.abs().amax(-1).numpy()).tolist() == [[1, 0]]


def test_the_median_of_massive_coordinates_knows_no_padding():
    model, short = sl.load(tiny.model("llama", seed=3)), [5, 6]
    weight = model.module.model.embed_tokens.weight
    with torch.no_grad():
        weight[0] = 0.0  # what stands behind the shorter prompt
        weight[5, 4] = 900 * weight[short].abs().median()
    assert weight[5, 4] > 100
    assert not slow_massive(weight[short].detach()).any()
    df = sl.norms(model, [list(range(10, 30)), short], measures="massive", sites="embed")
    assert (df.value == 0).all()


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt-post-norm", "gemma2"])
def test_norms_that_read_the_stream(family):
    """Against sigma of what goes into each norm module, by plain hooks; a branch norm reads no stream."""
    model, seen, handles = tiny.proven(family), [], []
    branch = {add.norm for layer in model.anatomy.layers for add in layer.adds if add.norm}
    for path, form in model.anatomy.norms.items():
        if path not in branch:
            hook = lambda _, args, out, form=form: seen.append((args[0][0].double(), form))  # noqa: E731
            handles.append(model.module.get_submodule(path).register_forward_hook(hook))
    try:
        with torch.no_grad():
            model.module(torch.tensor(PROMPTS[:1]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    df = sl.norms(model, PROMPTS[0], measures=["scale", "gain"])
    assert set(df.site) == {"norm"}
    rows = [rows for _, rows in df.groupby(["layer", "sublayer"])]
    assert len(rows) == len(seen)
    for part, (x, form) in zip(rows, seen, strict=True):
        sigma = ((x - x.mean(-1, keepdim=True) if form.centred else x).square().mean(-1) + form.eps).sqrt()
        scale = part[part.measure == "scale"].sort_values("position").value.to_numpy()
        gain = part[part.measure == "gain"].sort_values("position").value.to_numpy()
        np.testing.assert_allclose(scale, 1 / sigma.numpy(), rtol=HAND * 5)
        np.testing.assert_allclose(gain / scale, float(form.gain.square().mean().sqrt()) if form.gain is not None else 1.0, rtol=1e-5)


def test_a_gain_is_what_a_write_of_no_particular_direction_is_multiplied_by():
    model = tiny.proven("llama")
    df = sl.norms(model, PROMPTS[0], measures="gain", positions="last")
    norm = model.module.model.norm
    kept = sl.record(model, [PROMPTS[0]], sites=[f"blocks.{model.n_layers - 1}.hook_resid_post"], positions="last")
    x = next(v for k, v in kept.items() if k.endswith("resid_post"))[0, 0]
    write = torch.randn(20_000, len(x), generator=torch.Generator().manual_seed(0))
    sigma = (x.square().mean() + norm.variance_epsilon).sqrt()
    factor = ((write * norm.weight / sigma).norm(dim=-1).square().mean() / write.norm(dim=-1).square().mean()).sqrt()
    assert df[df.layer == model.n_layers].value.item() == pytest.approx(float(factor.detach()), rel=0.02)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_attention_to_position_0_by_hand(family):
    model = tiny.proven(family)
    df = sl.norms(model, PROMPTS, measures="to_first", sites="pattern")
    for prompt, ids in enumerate(PROMPTS):
        inside = getattr(byhand, family)(model.module, ids).inside
        for (layer, head), rows in df[df.prompt == prompt].groupby(["layer", "head"]):
            pattern = inside["pattern", layer][head]
            assert abs(rows.sort_values("position").value.to_numpy() - pattern[:, 0].numpy()).max() < 1e-5
    assert df[df.position == 0].value.to_numpy() == pytest.approx(1.0)


def test_patterns_that_cannot_be_had_are_refused():
    with pytest.raises(InputError, match=r"none of them with such a measure|shows no pattern"):
        sl.norms(tiny.proven("llama"), PROMPTS, measures="l2", sites="pattern")


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
def test_no_measure_depends_on_the_batch_or_on_padding(family):
    model = tiny.proven(family)
    sites = [site for site in AT if site != "embed"]
    together, apart = (sl.norms(model, PROMPTS, measures=list(MEASURES), sites=sites, max_tokens=n) for n in (1000, 1))
    assert (together.drop(columns="value") == apart.drop(columns="value")).all(axis=None)
    scale = together.groupby(["site", "measure"], observed=True).value.transform(lambda v: v.abs().max()) + 1e-9
    assert ((together.value - apart.value).abs() / scale).max() < 1e-5


def test_measures_that_a_site_has_not_are_refused():
    with pytest.raises(InputError, match=r"sites=\['resid_pre'\]: this model has none of them with such a measure"):
        sl.norms(tiny.proven("llama"), PROMPTS, measures="cosine", sites="resid_pre")
    with pytest.raises(InputError, match=r"measures must be one of 'l2', 'rms', .*; got 'norm'"):
        sl.norms(tiny.proven("llama"), PROMPTS, measures="norm")


def test_parallel_writes_are_measured_against_the_stream_that_enters():
    model = tiny.proven("neox")
    kept = sl.record(model, [PROMPTS[0]], sites=["resid_pre", "mlp_out"])
    df = sl.norms(model, PROMPTS[0], measures="relative", sites="mlp_out")
    for layer in range(model.n_layers):
        ratio = kept[f"blocks.{layer}.hook_mlp_out"].norm(dim=-1) / kept[f"blocks.{layer}.hook_resid_pre"].norm(dim=-1)
        np.testing.assert_allclose(df[df.layer == layer].value, ratio[0].double().numpy(), rtol=1e-5)
