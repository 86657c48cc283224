"""The analysis of heads behind post-norms: ours agree with the intervention, the figure comes from the Parquet file alone."""

import runpy
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import streamlens as sl

FOLDER = Path(__file__).parents[2] / "analyses" / "02_heads_through_post_norms"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A run without the real model, as where its wheels are absent."""
    run = runpy.run_path(str(FOLDER / "run.py"))

    def absent():
        raise sl.errors.SourceError("not installed")

    run["main"].__globals__["real"] = absent
    folder = tmp_path_factory.mktemp("heads") / "results"
    with pytest.warns(UserWarning, match="does not support fold_ln"):  # of OLMo-2, by TransformerLens
        assert run["main"](["--out", str(folder)]) == 0
    return folder


def test_every_head_of_every_tiny_model(results):
    df = pd.read_parquet(results / "heads.parquet")
    assert df.groupby("model").size().to_dict() == {"tiny Gemma-3": 12, "tiny Gemma-2": 12, "tiny OLMo-2": 12}
    assert df.intervention.abs().groupby(df.model).max().min() > 0.1
    assert (df.streamlens - df.intervention).abs().max() < 2e-6


def test_transformerlens_misses_or_refuses(results):
    """The reason why this analysis is here; a version that gets it right makes the claim stale."""
    df = pd.read_parquet(results / "heads.parquet")
    misses = (df.transformerlens - df.intervention).abs().groupby(df.model).max()
    assert misses["tiny Gemma-3"] > 0.1
    assert misses["tiny Gemma-2"] > 0.1
    assert df[df.transformerlens.isna()].model.unique().tolist() == ["tiny OLMo-2"]
    assert df.refusal[df.transformerlens.isna()].str.contains("identity final norm").all()


def test_figure_comes_from_parquet_alone(results):
    script = str(FOLDER / "figures.py")
    code = f"import runpy, sys; sys.argv = ['figures.py', {str(results)!r}]\ntry: runpy.run_path({script!r}, run_name='__main__')"
    code += "\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr
    assert "In tiny Gemma-3 zeroing head" in done.stdout
    assert (results / "heads_through_post_norms.png").stat().st_size > 10_000


def test_panels_hold_the_values(results):
    figures = runpy.run_path(str(FOLDER / "figures.py"))
    df = figures["read"](results)
    left, right = figures["draw"](df).axes
    assert [c.get_label() for c in left.collections] == ["tiny Gemma-3", "tiny Gemma-2", "tiny OLMo-2"]
    assert [c.get_label() for c in right.collections] == ["tiny Gemma-3", "tiny Gemma-2"]
    gemma = df[df.model == "tiny Gemma-3"]
    assert right.collections[0].get_offsets().tolist() == gemma[["intervention", "transformerlens"]].to_numpy().tolist()


def test_no_results_is_one_line(tmp_path, capsys):
    main = runpy.run_path(str(FOLDER / "figures.py"))["main"]
    assert main([str(tmp_path)]) == 2
    assert "which run.py writes" in capsys.readouterr().err
