"""The command line, run as a user runs it; most cases in this process on the model that the session has loaded."""

import io
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pandas as pd
import pytest
import torch

import streamlens as sl
from streamlens import cli, schema

EIFFEL = ["--prompt", "The Eiffel Tower is in the city of", "--target", " Paris", "--versus", " Rome"]


@pytest.fixture
def loaded(monkeypatch, smollm2):
    """`sl.load` gives the session's model."""
    monkeypatch.setattr(sl, "load", lambda source, device=None, dtype=None: smollm2)


def refused(capsys, *argv: str) -> str:
    """The one line on stderr of a command that exits with 2."""
    assert cli.main([*argv, "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("streamlens: error: ")
    return err.strip()


def test_help_is_quick():
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "streamlens.cli", "--help"], check=True, capture_output=True)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 0.5


def test_every_command_has_help(capsys):
    for command in ("report", "attribute", "ablate", "lens", "effects", "similarity", "norms", "card"):
        with pytest.raises(SystemExit, match="0"):
            cli.main([command, "--help"])
        assert "--out DIR" in capsys.readouterr().out


def test_end_to_end_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, "-m", "streamlens.cli", "attribute", *EIFFEL, "--top", "3"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TQDM_DISABLE": "0"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "logit of ' Paris' - ' Rome'" in done.stdout
    assert "298 others" in done.stdout
    assert "attribute: 100%" in done.stderr  # the progress bar
    assert list(tmp_path.iterdir()) == []


def test_printed_shares_sum_to_the_logit(loaded, capsys):
    assert cli.main(["attribute", *EIFFEL, "--top", "5"]) == 0
    values = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[2:]]
    *shares, total, logit = values
    assert len(shares) == 6
    assert sum(shares) == pytest.approx(total, abs=5e-4)
    assert total == pytest.approx(logit, abs=2e-4)


def test_finer_rows_are_named(loaded, capsys):
    assert cli.main(["attribute", *EIFFEL, "--by", "neuron", "--top-k", "2", "--top", "4", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "L26 neuron 1262" in out or " neuron " in out
    shares = [float(line.split()[-1]) for line in out.splitlines()[2:]]
    assert shares[-2] == pytest.approx(shares[-1], abs=2e-4)


def test_lens_ends_with_what_the_model_says(loaded, capsys):
    assert cli.main(["lens", *EIFFEL[:2], "--top-k", "1", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 31
    assert lines[-1].split()[:3] == ["30", "final", "'"]
    assert "' Paris'" in lines[-1]


def test_lens_has_nothing_to_compare_with(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["lens", *EIFFEL])
    assert capsys.readouterr().err.startswith("streamlens: error: unrecognized arguments: --versus")


def test_effects_and_similarity_are_printed(loaded, capsys):
    assert cli.main(["effects", *EIFFEL, "--layers", "28,29", "--top", "3", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "clean - ablated (zero), 3 of 22 components"
    assert lines[3].split() == ["component", "direct", "indirect", "total", "repair_heads", "repair_mlps", "repair_norm"]
    direct, indirect, total = map(float, lines[4].split()[-6:-3])
    assert direct + indirect == pytest.approx(total, abs=2e-4)
    assert cli.main(["similarity", *EIFFEL[:2], "--quiet"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 30


def test_lens_and_effects_have_their_figures(loaded, tmp_path):
    assert cli.main(["lens", *EIFFEL[:2], "--top-k", "1", "--out", str(tmp_path / "lens"), "--quiet"]) == 0
    assert cli.main(["effects", *EIFFEL, "--layers", "29", "--out", str(tmp_path / "effects"), "--quiet"]) == 0
    assert {p.name for p in (tmp_path / "lens").iterdir()} >= {"lens.parquet", "lens_0.pdf", "lens_0.png"}
    assert {p.name for p in (tmp_path / "effects").iterdir()} >= {"effects.parquet", "effects.pdf", "effects.png"}


@pytest.mark.parametrize(
    ("command", "written"),
    [
        (["lens", "--top-k", "0", "--target", " Paris"], ["lens.parquet", "lens_0.pdf", "lens_0.png", "streamlens.json"]),
        (["lens", "--top-k", "0", "--target", "top2"], ["lens.parquet", "streamlens.json"]),
        (
            ["effects", "--layers", "29", "--target", "top2"],
            ["effects.parquet", "effects_0.pdf", "effects_0.png", "effects_1.pdf", "effects_1.png", "streamlens.json"],
        ),
    ],
)
def test_targets_without_a_figure_of_all_keep_their_table(loaded, tmp_path, command, written):
    assert cli.main([*command, *EIFFEL[:2], "--out", str(tmp_path / "out"), "--quiet"]) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == written


@pytest.mark.parametrize(
    ("command", "figure"),
    [
        (["attribute", "--by", "neuron", "--top-k", "1"], "neurons_0"),
        (["attribute", "--by", "source"], "sources_0"),
        (["attribute", "--by", "token"], "tokens_0"),
        (["ablate", "--unit", "head", "--method", "zero", "--layers", "3", "--metrics", "logit_diff"], "ablated_heads_logit_diff"),
        (["ablate", "--span", "2", "--layers", "3,4", "--metrics", "kl"], "removal_kl"),
    ],
)
def test_finer_rows_and_units_have_their_figures(loaded, tmp_path, command, figure):
    assert cli.main([*command, *EIFFEL, "--out", str(tmp_path / "out"), "--quiet"]) == 0
    assert (tmp_path / "out" / f"{figure}.png").stat().st_size > 1000


def test_heads_by_the_mean_of_a_file(loaded, capsys, tmp_path):
    (tmp_path / "reference.txt").write_text("Rome is a city\nThe sea is wide\n")
    options = ["--unit", "head", "--method", "mean", "--reference", str(tmp_path / "reference.txt"), "--layers", "3", "--heads", "0,2"]
    assert cli.main(["ablate", *EIFFEL, *options, "--metrics", "logit_diff", "--quiet", "--csv"]) == 0
    df = pd.read_csv(io.StringIO(capsys.readouterr().out), keep_default_na=False)
    assert df[["unit", "method", "layer", "head"]].values.tolist() == [["head", "mean", 3, 0], ["head", "mean", 3, 2]]


def test_csv_on_stdout_is_the_whole_table(loaded, capsys, smollm2):
    assert cli.main(["attribute", *EIFFEL, "--csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    df = sl.attribute(smollm2, EIFFEL[1], target=" Paris", versus=" Rome")
    assert lines[0] == ",".join(df.columns)
    assert len(lines) == 1 + len(df)


def test_out_holds_table_and_figures(loaded, capsys, tmp_path):
    assert cli.main(["attribute", *EIFFEL, "--out", str(tmp_path / "out"), "--csv"]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    figures = {f"{stem}.{ending}" for stem in ("heads", "waterfall_0") for ending in ("pdf", "png")}
    assert names == {"attribution.parquet", "attribution.csv", "streamlens.json", *figures}
    png = (tmp_path / "out" / "heads.png").read_bytes()
    assert int.from_bytes(png[16:20]) == 2025  # 6.75 inches at 300 dpi: in the style of a report's figures
    df = schema.read_parquet(tmp_path / "out" / "attribution.parquet", "attribution")
    assert df.contribution.sum() == pytest.approx(df.logit.iloc[0], abs=1e-4)
    assert df.attrs["model"] == "smollm2-135m"
    assert str(tmp_path / "out") in capsys.readouterr().out


def test_prompts_from_a_file_carry_their_columns(loaded, tmp_path):
    pd.DataFrame({"prompt": ["One two three", "A B C D"], "target": [" four", " E"], "kind": ["words", "letters"]}).to_csv(
        tmp_path / "p.csv", index=False
    )
    assert cli.main(["attribute", "--prompts", str(tmp_path / "p.csv"), "--out", str(tmp_path / "out"), "--quiet"]) == 0
    df = schema.read_parquet(tmp_path / "out" / "attribution.parquet", "attribution")
    assert df.groupby("kind").target_token.unique().map(list).to_dict() == {"letters": [" E"], "words": [" four"]}


def test_full_folder_needs_overwrite(loaded, capsys, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    assert "which holds files" in refused(capsys, "attribute", *EIFFEL, "--out", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert cli.main(["attribute", *EIFFEL, "--out", str(tmp_path), "--overwrite", "--quiet"]) == 0
    assert (tmp_path / "attribution.parquet").is_file()
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prompt", ""], "prompt"),
        (["--prompt", "word " * 9000], "8192"),
        (["--prompt", "Hi", "--target", " antidisestablishmentarianism"], "' ant"),
        (["--prompt", "Hi", "--target", " a", "--versus", " a"], "versus"),
        (["--prompt", "Hi", "--positions", "7"], "positions"),
        (["--prompt", "Hi", "--target", " a", "--target", " b", "--versus", " c", "--versus", " d", "--versus", " e"], "versus"),
        (["--prompts", "nowhere.csv"], "nowhere.csv"),
        (["--prompt", "Hi", "--top", "0"], "top must be 1 or more"),
    ],
    ids=["empty", "too-long", "several-tokens", "versus-is-target", "position", "count", "no-file", "top"],
)
def test_bad_input_is_one_line_and_leaves_nothing(loaded, capsys, tmp_path, options, says):
    assert says in refused(capsys, "attribute", *options, "--out", str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--layers", "30"], "layers"),
        (["--metrics", "perplexity"], "metrics"),
        (["--positions", "99"], "positions"),
    ],
)
def test_bad_input_of_ablate(loaded, capsys, tmp_path, options, says):
    assert says in refused(capsys, "ablate", *EIFFEL, *options, "--out", str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["gtp2-does-not-exist"], "gtp2-does-not-exist"),
        (["./no-such-folder"], "no such folder"),
        (["--dtype", "float7"], "dtype"),
        (["--device", "cuda:99"], "device"),
        (["--device", "toaster"], "device"),
    ],
)
def test_bad_model_is_one_line(capsys, options, says):
    assert says in refused(capsys, "card", *options)


def test_encoder_is_refused(capsys, tmp_path):
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    BertModel(config).save_pretrained(tmp_path / "bert")
    assert "bert" in refused(capsys, "card", str(tmp_path / "bert")).lower()


def test_nan_weights_are_refused(capsys, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "llama")
    assert "down_proj" in refused(capsys, "card", str(tmp_path / "llama"))


WRONG = [[], ["atribute"], ["attribute"], ["ablate", "--prompt", "a", "--unit", "neuron"], ["card", "--prompt", "a"]]


@pytest.mark.parametrize("argv", WRONG)
def test_wrong_usage_is_one_line(capsys, argv):
    with pytest.raises(SystemExit, match="2"):
        cli.main(argv)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("streamlens: error: ")


def test_ctrl_c_leaves_nothing(monkeypatch, loaded, capsys, tmp_path):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(sl, "attribute", interrupted)
    assert cli.main(["attribute", *EIFFEL, "--out", str(tmp_path / "deep" / "out")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_nothing(tmp_path, number, status):
    """Sent while the command works: what it has begun to write is seen, and gone afterwards."""
    command = [sys.executable, "-m", "streamlens.cli", "report", "--quiet", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # What runs in the background of a shell has Ctrl-C ignored, and its children inherit that.
    heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **piped, env=environment, preexec_fn=heeded) as process:
        while process.poll() is None and not list(tmp_path.glob(".out.*.partial")):
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_a_text_is_executed(tmp_path):
    """As while a dataclass is made: a plain KeyboardInterrupt there would end `python -m` by the signal although it is caught."""
    lines = [
        "import os, signal, sys",
        "from streamlens import cli, commands",
        "commands.run = lambda args: exec('os.kill(os.getpid(), signal.SIGINT); [None for _ in range(10**7)]')",
        "sys.exit(cli.main(['card']))",
    ]
    (tmp_path / "interrupted.py").write_text("\n".join(lines))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=heeded, check=False)
    assert (done.returncode, done.stderr) == (130, "streamlens: interrupted, nothing was written\n")


def test_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} -m streamlens.cli attribute --prompt Hi --positions all --csv --quiet | head -1; echo ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.splitlines()[1] == "0"
    assert done.stderr == ""


def test_bug_is_not_dressed_up_as_bad_input(monkeypatch, loaded, tmp_path):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(sl, "attribute", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main(["attribute", *EIFFEL, "--out", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []


class Reached(Exception):
    """Ends a command where its call begins."""


OPTIONS = [
    ("attribute", ["--by", "neuron", "--top-k", "3"], {"by": "neuron", "top_k": 3}),
    ("attribute", ["--target", " a", "--versus", " b"], {"target": " a", "versus": " b"}),
    ("attribute", ["--target", " a", "--target", " b", "--positions=-2,-1"], {"target": [" a", " b"], "positions": [-2, -1]}),
    ("ablate", ["--method", "resample", "--reference", "paired", "--seed", "7"], {"reference": "paired", "seed": 7}),
    ("ablate", ["--span", "all", "--layers", "0,2-4"], {"span": "all", "layers": [0, 2, 3, 4], "heads": None}),
    ("ablate", ["--metrics", "loss, kl", "--heads", "3"], {"metrics": ["loss", "kl"], "heads": [3], "span": 1}),
    ("lens", ["--norm", "frozen", "--top-k", "2"], {"norm": "frozen", "top_k": 2, "positions": "last"}),
    ("lens", ["--target", " a", "--positions", "all"], {"norm": "recomputed", "target": " a", "positions": "all"}),
    ("effects", ["--method", "mean", "--reference", "FILE", "--layers", "1"], {"method": "mean", "reference": ["one"], "layers": [1]}),
    ("effects", ["--positions", "0"], {"method": "zero", "reference": None, "positions": [0]}),
    ("similarity", ["--positions", "last"], {"positions": "last"}),
    ("norms", ["--positions", "0,3"], {"positions": [0, 3]}),
]


@pytest.mark.parametrize(("command", "options", "given"), OPTIONS)
def test_options_reach_the_call(monkeypatch, tmp_path, command, options, given):
    """Under their names there; and each prompt, and no progress bar where it is to be quiet."""
    (tmp_path / "reference.txt").write_text("one\n")
    seen = {}

    def call(model, prompts, *args, **named):
        seen.update({"model": model, "prompts": prompts} | named)
        if isinstance(seen.get("reference"), pd.DataFrame):
            seen["reference"] = seen["reference"]["prompt"].tolist()
        raise Reached

    monkeypatch.setattr(sl, "load", lambda *source, **opened: (*source, opened))
    monkeypatch.setattr(sl, command, call)
    options = [str(tmp_path / "reference.txt") if option == "FILE" else option for option in options]
    with pytest.raises(Reached):
        cli.main([command, "gpt2", "--dtype", "float64", "--prompt", "x", "--prompt", "y", *options, "--quiet"])
    assert seen["model"] == ("gpt2", {"device": None, "dtype": "float64"})
    assert {name: seen[name] for name in given} == given
    assert (seen["prompts"], seen["progress"]) == (["x", "y"], False)


def test_options_reach_the_report(monkeypatch):
    seen = {}

    def report(*args, **named):
        seen.update(named)
        raise Reached

    monkeypatch.setattr("streamlens.report.report", report)
    with pytest.raises(Reached):
        cli.main(["report", "--seed", "5", "--device", "cpu", "--target", " a", "--csv", "--quiet"])
    expected = {"target": " a", "versus": None, "progress": False, "device": "cpu", "dtype": None, "seed": 5, "csv": True}
    assert seen == expected | {"overwrite": False}


def test_each_logit_has_a_waterfall_up_to_eight(loaded, tmp_path):
    for n in (2, 9):
        assert cli.main(["attribute", *EIFFEL[:2], "--target", f"top{n}", "--out", str(tmp_path / str(n)), "--quiet"]) == 0
        assert len(list((tmp_path / str(n)).glob("waterfall_*.png"))) == min(n, 8)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("3", [3]), ("0,3,5-8", [0, 3, 5, 6, 7, 8]), ("-1", [-1]), ("-2,-1", [-2, -1]), (" 1 , 2 ", [1, 2])],
)
def test_numbers(text, numbers):
    assert cli.integers(text) == numbers
