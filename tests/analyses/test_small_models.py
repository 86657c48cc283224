"""The small models of the package: what they are, that they load at once, and that three ways find the same heads."""

import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import streamlens as sl
from streamlens.decoder.data import Text, python_text, split
from streamlens.decoder.loss import bits_per_byte, evaluate
from streamlens.decoder.tasks import RepeatedTokens
from streamlens.models import named
from streamlens.models.loaded import understand
from streamlens.models.sources import open_source

FOLDER = Path(__file__).parents[2] / "analyses" / "08_small_models"
PREVIOUS, INDUCTION = (0, 0), (1, 0)
NAMES = [model.name for model in named.PACKAGED]


@pytest.fixture(scope="module")
def induction():
    return sl.load("induction-2l", device="cpu")


@pytest.fixture(scope="module")
def heads():
    return runpy.run_path(str(FOLDER / "heads.py"))


@pytest.mark.parametrize("name", NAMES)
def test_known_bytes_whose_proof_is_done_here(name):
    opened = open_source(name, device="cpu")
    assert (opened.name, opened.trusted) == (name, True)
    assert {weight.dtype for weight in opened.module.parameters()} == {torch.float32}
    _, proof = understand(opened.module, trusted=False)
    assert 0 < proof.interventions < 5e-6
    assert open_source(name, device="cpu", dtype="float16").trusted is False


@pytest.mark.parametrize("name", NAMES)
def test_other_bytes_are_opened_but_proven(name, monkeypatch):
    rows = tuple(replace(model, sha256="0" * 64) for model in named.PACKAGED)
    monkeypatch.setattr(named, "PACKAGED", rows)
    assert open_source(name.upper(), device="cpu").trusted is False


def test_they_are_small():
    files = [file for model in named.PACKAGED for file in model.folder.iterdir()]
    assert sum(file.stat().st_size for file in files) < 4e6
    assert {file.name for file in files} == {"decoder.json", "model.safetensors", "streamlens_tokenizer.json"}


def test_they_load_at_once_after_imports():
    """In a new process, where nothing is warm; sympy is what torch itself imports for the first gradient of a process."""
    code = (
        "import sys, time, sympy, streamlens as sl; from safetensors.torch import load_file; sl.load\n"
        f"for name in {NAMES!r}:\n"
        "    start = time.process_time(); sl.load(name, device='cpu'); print(time.process_time() - start)\n"
        "print('torch._dynamo' in sys.modules, 'transformers.modeling_utils' in sys.modules)"
    )
    *seconds, modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert modules == "False False"
    assert len(seconds) == 2
    assert all(float(taken) < 0.3 for taken in seconds)


def test_induction_is_learned(induction):
    assert evaluate(induction.module, RepeatedTokens(), n_batches=2) < 0.01
    df = sl.attribute(induction, "Kq7aBzKq7aB")
    assert df.target_token.unique().tolist() == ["z"]
    assert sl.attribute(induction, "Kq7aBzKq7aB", target="z", versus="K").logit.iloc[0] > 5


def test_three_ways_find_the_same_heads(induction, heads):
    """And they are those that the README names, far before the next ones; all heads of the second layer do some induction."""
    rows = heads["prompts"]()
    found = heads["found"](induction, rows)
    assert found.index.tolist() == ["attention", "attribution", "ablation"]
    assert found.previous.tolist() == [PREVIOUS] * 3
    assert found.induction.tolist() == [INDUCTION] * 3
    assert found.by_strength.nunique() == 1
    attention = heads["by_attention"](induction, rows)
    assert attention.previous.nlargest(2).iloc[1] < 0.5 * attention.previous.max()
    assert attention.induction.loc[1].min() > 0.5 > 10 * attention.induction.loc[0].max()


def test_without_its_previous_token_head_no_head_does_induction(induction, heads):
    """The three ways do not merely repeat which heads they are told."""
    module = open_source("induction-2l", device="cpu").module
    (layer, head), width = PREVIOUS, module.config.head_width
    with torch.no_grad():
        module.blocks[layer].attn.o_proj.weight[:, head * width : (head + 1) * width] = 0
    broken, rows = sl.load(module, tokenizer=induction.tokenizer), heads["prompts"](4)
    whole = heads["by_attention"](induction, rows).induction
    assert heads["by_attention"](broken, rows).induction.max() < 0.5 * whole.max()
    assert heads["by_attribution"](broken, rows).induction.max() < 0.5 * heads["by_attribution"](induction, rows).induction.max()
    assert heads["by_ablation"](broken, rows).lost.loc[(layer, head)] == pytest.approx(0, abs=1e-4)


def test_bytes_know_python():
    model = sl.load("bytes-4l", device="cpu")
    _, held_out = split(python_text())
    bits = bits_per_byte(model.module, Text(held_out[:6000], length=256))
    assert bits < 2.5  # on another Python's text a little more than on the one of the README
    df = sl.attribute(model, "The import stateme", top_k=None)
    assert df.target_token.unique().tolist() == ["n"]


@pytest.mark.parametrize("name", NAMES)
def test_the_script_writes_what_loads(name, tmp_path, capsys):
    run = runpy.run_path(str(FOLDER / "train.py"))
    run["main"].__globals__["bits_per_byte"] = lambda model, text: 8.0
    assert run["main"]([name, "--steps", "2", "--out", str(tmp_path)]) == 0
    assert f"{name}: 2 steps" in capsys.readouterr().out
    model = sl.load(tmp_path / name)
    assert model.dtype == torch.float16
    assert model.module.config == sl.load(name).module.config
    assert model.tokenizer == sl.load(name).tokenizer


def test_heads_are_printed(heads, capsys):
    assert heads["main"](["--prompts", "2"]) == 0
    assert "previous" in capsys.readouterr().out


def test_benchmark_runs(capsys):
    run = runpy.run_path(str(FOLDER / "benchmark.py"))
    assert run["main"](["--rounds", "1", "--steps", "1"]) in (0, 1)
    ours, theirs = capsys.readouterr().out.split("weights: ")[1].split(";")[0].split(" and ")
    assert ours == theirs
    assert "transformers" in sys.modules
