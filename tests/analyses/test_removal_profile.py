"""The script of analyses/01_removal_profile resumes, and its figures come from the Parquet files alone."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import streamlens as sl
from streamlens import schema

FOLDER = Path(__file__).parents[2] / "analyses" / "01_removal_profile"
TABLES = ("ablation", "card", "norms")


@pytest.fixture(scope="module")
def models(smollm2, tmp_path_factory):
    """Two tiny models, in folders with the default model's tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    for n_layers in (2, 3):
        torch.manual_seed(n_layers)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": n_layers, "num_attention_heads": 2}
        LlamaForCausalLM(LlamaConfig(vocab_size=len(smollm2.tokenizer), **sizes)).save_pretrained(folder / f"tiny-{n_layers}")
        smollm2.tokenizer.save_pretrained(folder / f"tiny-{n_layers}")
    return [str(folder / name) for name in ("tiny-2", "tiny-3")]


@pytest.fixture(scope="module")
def run():
    return runpy.run_path(str(FOLDER / "run.py"))


@pytest.fixture(scope="module")
def results(models, run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    assert run["main"]([*models, "--out", str(folder)]) == 0
    return folder


def test_one_parquet_a_model_and_table(results, models):
    for source in models:
        name = Path(source).name
        (folder,) = [path for path in results.iterdir() if name in path.name]
        for table in TABLES:
            df = schema.read_parquet(folder / f"{table}.parquet", table)
            schema.validate(df, table)
            assert df.attrs["model"] == name


def test_removal_covers_units_and_metrics(results):
    for path in results.glob("*/ablation.parquet"):
        df = schema.read_parquet(path, "ablation")
        layers = df.groupby(["unit", "metric"]).layer.nunique()
        assert set(layers.index) == {(u, m) for u in ("block", "attn", "mlp") for m in ("loss", "kl", "top1_agree", "logit_diff")}
        assert layers.nunique() == 1


def test_finished_models_are_skipped(results, models, run, capsys, monkeypatch):
    monkeypatch.setattr(sl, "load", lambda source: pytest.fail(f"{source} was opened again"))
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*")}
    assert run["main"]([*models, "--out", str(results)]) == 0
    assert capsys.readouterr().err.count("finished, skipped") == 2
    assert {path: path.stat().st_mtime_ns for path in results.rglob("*")} == before


def test_model_that_fails_leaves_nothing_and_the_rest_runs(results, models, run, capsys, tmp_path):
    assert run["main"](["./no-such-folder", models[0], "--out", str(tmp_path)]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [path.name for path in results.iterdir() if "tiny-2" in path.name]


def test_figures_come_from_parquet_alone(results, tmp_path):
    """In a process that could not open a model if it wanted to: torch is never imported."""
    script = str(FOLDER / "figures.py")
    code = f"import runpy, sys; sys.argv = ['figures.py', {str(results)!r}]\ntry: runpy.run_path({script!r}, run_name='__main__')"
    code += "\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr
    stems = {"growth", *(f"removal_{metric}" for metric in ("loss", "kl", "logit_diff"))}
    each = {f"removal_{metric}_tiny-{n}" for metric in ("loss", "kl", "logit_diff") for n in (2, 3)}
    assert {path.name for path in results.glob("*.p*")} == {f"{stem}.{ending}" for stem in stems | each for ending in ("pdf", "png")}


def test_figures_without_results_say_so(tmp_path, capsys):
    main = runpy.run_path(str(FOLDER / "figures.py"))["main"]
    assert main([str(tmp_path)]) == 2
    assert "which run.py writes" in capsys.readouterr().err
