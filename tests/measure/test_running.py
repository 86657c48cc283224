"""Summaries in constant memory: against numpy on all values at once, and merged however they are split."""

import numpy as np
import pandas as pd
import pytest

import streamlens as sl
from streamlens import schema
from streamlens.errors import InputError
from streamlens.measure import running
from streamlens.measure.growth import Column, Measured
from streamlens.measure.running import Running
from tests.models import tiny

COLUMNS = tuple(Column("resid_pre", layer, -1, -1, measure) for layer in range(3) for measure in ("l2", "max_index", "cosine"))


def batches(n=40, length=7, seed=0):
    """Norms and cosines of `n` prompts, one a batch: some zeros, both signs, many orders of magnitude."""
    rng, out = np.random.default_rng(seed), []
    for prompt in range(n):
        l2 = np.exp(rng.normal(0, 6, size=(length, 3))) * np.where(np.arange(length) == 0, 100, 1)[:, None]
        cosine = np.round(rng.uniform(-1, 1, size=(length, 3)), 2)
        value = np.stack([l2, rng.integers(0, 9, size=(length, 3)).astype(float), cosine], axis=-1).reshape(length, -1)
        out.append(Measured(np.full(length, prompt), np.arange(length), COLUMNS, value))
    return out


def joined(parts):
    names = ("prompt", "position", "value")
    prompt, position, value = (np.concatenate([getattr(p, name) for p in parts]) for name in names)
    return Measured(prompt, position, COLUMNS, value)


def of(parts, group="layer"):
    found = Running(group)
    for part in parts:
        found.add(part)
    return found


def same(a, b):
    np.testing.assert_array_equal(a.count, b.count)
    np.testing.assert_array_equal(a.n_prompts, b.n_prompts)
    for (name, x), y in zip(a.statistics().items(), b.statistics().values(), strict=True):
        exact = name in ("min", "max", *running.QUANTILES)
        np.testing.assert_allclose(x, y, rtol=0 if exact else 1e-9, atol=0 if exact else 1e-12, err_msg=name)


@pytest.mark.parametrize("group", running.GROUPS)
def test_any_split_gives_the_same(group, monkeypatch):
    parts = batches()
    whole = of([joined(parts)], group)
    same(of(parts, group), whole)
    same(of([joined(parts[:2]), joined(parts[2:23]), *parts[23:]], group), whole)
    monkeypatch.setattr(running, "_PENDING", 50)  # sorted into the sketch at almost every batch
    same(of(parts, group), whole)
    left, right = of(parts[:11], group), of(parts[11:], group)
    left.merge(right)
    same(left, whole)


def test_merging_groups_that_one_side_lacks():
    parts = batches(4)
    short = [Measured(p.prompt[:2], p.position[:2], COLUMNS, p.value[:2]) for p in parts[:2]]
    for left, right in ((short, parts[2:]), (parts[2:], short)):
        merged = of(left, "position")
        merged.merge(of(right, "position"))
        same(merged, of([*left, *right], "position"))


@pytest.mark.parametrize("group", running.GROUPS)
def test_statistics_by_numpy(group):
    parts = batches()
    all_values, position = joined(parts).value, joined(parts).position
    found = of(parts, group)
    statistics = found.statistics()
    kept = [i for i, c in enumerate(COLUMNS) if c.measure != "max_index"]
    assert found.columns == tuple(COLUMNS[i] for i in kept)
    for g in range(len(found.count)):
        values = all_values[(position == g) if group == "position" or g == 0 else position > 0][:, kept]
        assert (found.count[g] == len(values)).all()
        assert found.n_prompts[g] == 40
        np.testing.assert_allclose(statistics["mean"][g], values.mean(0), rtol=1e-12)
        np.testing.assert_allclose(statistics["std"][g], values.std(0), rtol=1e-9)
        np.testing.assert_array_equal(statistics["min"][g], values.min(0))
        np.testing.assert_array_equal(statistics["max"][g], values.max(0))
        for name, q in running.QUANTILES.items():
            exact = np.sort(values, axis=0)[int(np.floor(q * (len(values) - 1)))]
            np.testing.assert_allclose(statistics[name][g], exact, rtol=running.ACCURACY * 1.001)
        positive = (values > 0).all(0)
        assert np.isnan(statistics["geometric_mean"][g][~positive]).all()
        np.testing.assert_allclose(statistics["geometric_mean"][g][positive], np.exp(np.log(values[:, positive]).mean(0)), rtol=1e-12)
    assert not positive.all()


def test_what_is_kept_does_not_grow_with_the_prompts():
    """10,000 prompts of 64 tokens: the sketch has found nearly all of its bins after a tenth of them."""
    rng = np.random.default_rng(0)
    columns = tuple(Column("resid_pre", layer, -1, -1, measure) for layer in range(4) for measure in ("l2", "rms"))
    found, kept = Running(), []
    for start in range(0, 10_000, 100):
        prompt, position = np.repeat(np.arange(start, start + 100), 64), np.tile(np.arange(64), 100)
        found.add(Measured(prompt, position, columns, np.exp(rng.normal(1, 0.3, size=(6400, 8)))))
        kept.append(found.kept)
    assert kept[-1] < 1.25 * kept[len(kept) // 10]
    assert kept[-1] * 8 < 100_000  # bytes, where a table of the values takes 41 MB
    assert found.count.sum() == 10_000 * 64 * 8


def test_a_summary_is_that_of_the_table():
    model = tiny.proven("llama")
    prompts = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12], [2, 58, 33, 19, 20, 21], [4, 4]]
    table = sl.norms(model, prompts, measures=["l2", "cosine"])
    for by in running.GROUPS:
        summary = sl.norm_summary(model, prompts, by=by, measures=["l2", "cosine"], max_tokens=8)
        schema.validate(summary, "norm_summary")
        group = table.position if by == "position" else table.position.where(table.position == 0, -1)
        groups = table.assign(position=group).groupby(["position", "layer", "sublayer", "head", "site", "measure"], observed=True).value
        rows = summary.set_index(["position", "layer", "sublayer", "head", "site", "measure"])
        assert len(rows) == len(groups)
        for key, values in groups:
            assert rows.loc[key, "n"] == len(values)
            assert rows.loc[key, "mean"] == pytest.approx(values.mean(), rel=1e-5, abs=1e-6)
            assert rows.loc[key, "max"] == pytest.approx(values.max(), rel=1e-5, abs=1e-6)
    assert summary.n_prompts.max() == 4
    assert summary[summary.position == 6].n_prompts.max() == 1


def test_growth_of_a_summary_is_fitted_without_an_interval():
    model = tiny.proven("llama")
    prompts = [[5, 9, 3, 22, 41, 17, 8], [2, 58, 33, 19, 20, 21, 7]]
    whole, fit = sl.growth_rate(sl.norms(model, prompts)), sl.growth_rate(sl.norm_summary(model, prompts))
    assert fit.rate.item() == pytest.approx(whole.rate.item(), rel=1e-6)  # prompts of one length: the same geometric means
    assert np.isnan(fit.low.item())
    assert fit.n_prompts.item() == whole.n_prompts.item() == 2
    with pytest.raises(InputError, match='df must be a norms table, or a norm_summary with by="layer"; got one by position'):
        sl.growth_rate(sl.norm_summary(model, prompts, by="position"))
    with pytest.raises(InputError, match="by must be one of 'layer', 'position'; got 'prompt'"):
        sl.norm_summary(model, prompts, by="prompt")


def test_different_measures_do_not_merge():
    a, b = Running(), Running()
    a.add(batches(1)[0])
    part = batches(1)[0]
    b.add(Measured(part.prompt, part.position, COLUMNS[:3], part.value[:, :3]))
    with pytest.raises(InputError, match="summaries must have the same sites, measures and groups to be merged"):
        a.merge(b)
    with pytest.raises(InputError, match="batches must have the same sites and measures"):
        a.add(Measured(part.prompt, part.position, COLUMNS[:3], part.value[:, :3]))


def test_a_summary_survives_parquet(tmp_path):
    df = sl.norm_summary(tiny.proven("llama"), [[1, 2, 3]])
    back = schema.read_parquet(schema.write_parquet(df, tmp_path / "summary.parquet"), "norm_summary")
    pd.testing.assert_frame_equal(back, df)
