"""The report, whole, on a tiny random model with the default model's tokenizer; once on the real one (slow)."""

import re

import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import streamlens as sl
from streamlens import cli, schema
from streamlens.errors import InputError
from streamlens.report import report

TABLES = ("card", "attribution", "ablation", "norms")
SETS = ("indirect_objects", "facts", "agreement", "repeated")
FIGURES = (*(f"heads_{name}" for name in SETS), "waterfall_indirect_objects", "waterfall_facts", "removal_loss", "removal_kl", "growth")


@pytest.fixture(scope="module")
def tiny(smollm2):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    module = LlamaForCausalLM(LlamaConfig(vocab_size=len(smollm2.tokenizer), **sizes))
    return sl.load(module, tokenizer=smollm2.tokenizer)


@pytest.fixture(scope="module")
def bundled(tiny, tmp_path_factory):
    """A report over the bundled prompts."""
    return report(tiny, out=tmp_path_factory.mktemp("report") / "out", csv=True)


def test_folder_holds_tables_figures_and_a_page(bundled):
    names = {path.name for path in bundled.folder.iterdir()}
    tables = {f"{name}.{ending}" for name in TABLES for ending in ("parquet", "csv")}
    figures = {f"{name}.{ending}" for name in FIGURES for ending in ("pdf", "png")}
    assert names == {"index.html", "streamlens.json", *tables, *figures}


@pytest.mark.parametrize("name", TABLES)
def test_tables_on_disk_keep_their_schema(bundled, name):
    df = schema.read_parquet(bundled.folder / f"{name}.parquet", name)
    schema.validate(df, name)
    pd.testing.assert_frame_equal(df, getattr(bundled.tables, name))


def test_columns_of_the_sets_are_carried(bundled):
    counts = bundled.tables.attribution.groupby("set").prompt.nunique()
    assert set(counts.index) == set(SETS)
    assert counts.min() >= 10


def test_removal_covers_every_unit_and_layer_for_six_prompts_of_each_set(bundled):
    removed = bundled.tables.ablation
    assert set(removed.unit.unique()) == {"block", "attn", "mlp"}
    at_last = removed[removed.metric == "logit_diff"].groupby(["unit", "layer", "set"]).prompt.nunique()
    assert len(at_last) == 3 * 3 * len(SETS)
    assert (at_last == 6).all()
    assert removed[removed.metric == "loss"].groupby("prompt").position.nunique().min() >= 4


def test_a_prompt_has_one_number_in_all_tables(bundled):
    tables = (bundled.tables.attribution, bundled.tables.ablation, bundled.tables.norms)
    attribution, ablation, norms = (table.drop_duplicates("prompt").set_index("prompt").prompt_text.astype(str) for table in tables)
    assert ablation.equals(attribution.loc[ablation.index])
    assert norms.equals(attribution)


def test_own_sets_are_removed_for_every_prompt(tiny, tmp_path):
    prompts = pd.DataFrame({"prompt": [f"Number {n}" for n in range(8)], "set": "mine"}, index=range(10, 18))
    done = report(tiny, prompts, tmp_path / "out")
    assert sorted(done.tables.ablation.prompt.unique()) == list(range(8))


def test_clean_logit_difference_is_that_of_the_attribution(bundled):
    rows = bundled.tables.ablation
    clean = rows[rows.metric == "logit_diff"].groupby("prompt").clean.first()
    logits = bundled.tables.attribution.groupby("prompt").logit.first()
    assert (clean - logits.loc[clean.index]).abs().max() < 1e-5


def test_summary_says_what_was_found(bundled):
    lines = bundled.summary.splitlines()
    assert "3 layers x 4 heads, d_model 32" in lines[0]
    assert all(any(line.strip().startswith(name) for line in lines) for name in SETS)
    shares = bundled.tables.attribution
    facts = shares[shares.set == "facts"]
    right = int((facts.groupby("prompt").logit.first() > 0).sum())
    assert f"{right}/{facts.prompt.nunique()}" in next(line for line in lines if line.strip().startswith("facts"))
    assert f"{shares.attrs['additivity_error']:.1e}" in bundled.summary
    left_out = f"left out (target or versus not one token for this tokenizer): {bundled.left_out}\n"
    assert (left_out in f"{bundled.summary}\n") == (bundled.left_out > 0)
    assert "change of the kl" not in bundled.summary


def test_page_stands_alone(bundled):
    text = (bundled.folder / "index.html").read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == len(FIGURES)
    assert not re.search(r"""(src|href)=["'](?!data:)""", text)
    assert "<script" not in text


def test_text_from_prompts_is_escaped(tiny, tmp_path):
    done = report(tiny, ["a <b>bold</b> & plain prompt"], tmp_path / "out")
    page = (done.folder / "index.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;bold" in page
    assert "<b>bold" not in page


def test_own_prompts_need_no_target(tiny, tmp_path):
    done = report(tiny, ["One two three", "Four five"], tmp_path / "out")
    assert done.tables.attribution.groupby("prompt").target.first().tolist() == [
        int(tiny.module(torch.tensor([tiny.tokenizer(text).input_ids])).logits[0, -1].argmax()) for text in ("One two three", "Four five")
    ]
    assert "mean logit " in done.summary


def test_single_tokens_have_no_loss(tiny, tmp_path):
    done = report(tiny, pd.DataFrame({"prompt": ["A", "B"], "target": [" x", " y"], "versus": [" z", " z"]}), tmp_path / "out")
    assert "loss" not in set(done.tables.ablation.metric)
    assert (done.folder / "removal_kl.png").is_file()


def test_without_out_each_report_gets_a_new_dated_folder(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [report(tiny, ["Hi there"]).folder for _ in range(2)]
    assert len(set(folders)) == 2
    assert all(re.fullmatch(r"streamlens-report-\d{8}-\d{6}(-2)?", folder.name) for folder in folders)
    assert all((tmp_path / folder / "index.html").is_file() for folder in folders)


def test_bad_prompts_leave_nothing(tiny, tmp_path):
    with pytest.raises(InputError, match="target must be one token"):
        report(tiny, ["Hi"], tmp_path / "out", target=" antidisestablishmentarianism")
    assert list(tmp_path.iterdir()) == []


def test_command_prints_summary_and_place(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("streamlens.load", lambda source, device=None, dtype=None: tiny)
    assert cli.main(["report", "--prompt", "Hi there", "--out", str(tmp_path / "out"), "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert "worst additivity error" in out
    assert str(tmp_path / "out") in out
    assert err == ""


@pytest.mark.slow
def test_default_model_and_prompts(smollm2, tmp_path):
    done = report(smollm2, out=tmp_path / "out")
    logits = done.tables.attribution.groupby(["set", "prompt"]).logit.first()
    assert ((logits > 0).groupby("set").mean() > 0.9).all()  # it does all four tasks
    assert 1.05 < float(sl.growth_rate(done.tables.norms, layers=(1, 29)).rate.iloc[0]) < 1.2
