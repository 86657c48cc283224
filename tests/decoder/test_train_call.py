"""`sl.train`: the training table, what its attrs hold, and that a broken run's table is the unbroken one's."""

import numpy as np
import pytest

import streamlens as sl
from streamlens import schema
from streamlens.decoder.tasks import ModularAddition
from streamlens.decoder.train import TrainConfig, train
from streamlens.errors import InputError

TASK = ModularAddition(p=5)
SETTINGS = {"steps": 5, "batch": 4, "warm_up": 2, "look_every": 2}


def decoder():
    return sl.Decoder(sl.DecoderConfig(n_vocab=6, d_model=16, n_layers=2, n_heads=2))


def test_a_row_is_a_measure_of_a_step():
    df = sl.train(decoder(), TASK, **SETTINGS)
    schema.validate(df, "training")
    history = train(decoder(), TASK, TrainConfig(**SETTINGS))
    wide = df[df.layer == -1].pivot(index="step", columns="measure", values="value")
    assert wide.index.tolist() == [0, 1, 2, 3, 4]
    for measure in ("loss", "gradient_norm", "learning_rate"):
        assert np.array_equal(wide[measure], getattr(history, measure))
    for measure, layers in (("attention_logit", 2), ("stream_norm", 3)):
        inside = df[df.measure == measure].pivot(index="step", columns="layer", values="value")
        assert inside.index.tolist() == [0, 2, 4]
        assert inside.columns.tolist() == list(range(layers))
        assert np.array_equal(inside.to_numpy(), getattr(history, measure))
    assert df.step.is_monotonic_increasing
    assert df.attrs["seed"] == 0
    assert df.attrs["arguments"]["batch"] == 4
    assert df.attrs["arguments"]["weight_decay"] == 0.1  # what was not said too
    assert df.attrs["arguments"]["data"] == "ModularAddition(p=5, train_share=0.5, part='train', seed=0)"


def test_the_table_outlives_parquet_and_a_break(tmp_path):
    df = sl.train(decoder(), TASK, **SETTINGS)
    schema.write_parquet(df, tmp_path / "training.parquet")
    assert schema.read_parquet(tmp_path / "training.parquet", "training").equals(df)
    first = sl.train(decoder(), TASK, folder=tmp_path / "kept", until=3, **SETTINGS)
    assert first.equals(df[df.step < 3].reset_index(drop=True))
    assert sl.train(decoder(), TASK, folder=tmp_path / "kept", **SETTINGS).equals(df)


def test_progress_is_shown_where_it_is_wanted(capsys):
    sl.train(decoder(), TASK, **SETTINGS)
    assert capsys.readouterr().err == ""
    sl.train(decoder(), TASK, progress=True, **SETTINGS)
    assert "train: 100%" in capsys.readouterr().err


@pytest.mark.parametrize(("settings", "got"), [({}, "none"), ({"steps": 3, "lr": 1e-3}, "lr"), ({"batch": 2}, "batch")])
def test_other_settings_are_refused(settings, got):
    with pytest.raises(InputError, match=rf"settings must hold steps, and be among steps, batch, learning_rate.*; got {got}$"):
        sl.train(decoder(), TASK, **settings)


def test_a_bare_text_is_refused_with_what_makes_data_of_it():
    with pytest.raises(InputError, match=r"data must be streamlens.decoder.data.Text\(text\), a task of .*; got str$"):
        sl.train(decoder(), "a text as it is", **SETTINGS)
