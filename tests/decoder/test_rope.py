"""Rotary tables against transformers' numbers, and the two ways of pairing coordinates."""

import json
from pathlib import Path

import pytest
import torch

import streamlens as sl
from streamlens.decoder.convert.rope import read_rope
from streamlens.decoder.rope import inverse_frequencies, rotate

TABLES = json.loads((Path(__file__).parent / "rope_inv_freq.json").read_text())
"""Made with transformers 5.24's own functions."""


def rope_config(table):
    fields = read_rope({"rope_theta": table["theta"], **table["params"]}, table["head_dim"])
    return sl.DecoderConfig(10, 2 * table["head_dim"], 1, 2, max_length=table["max_position_embeddings"], **fields)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_frequencies_are_those_of_transformers(table):
    got, factor = inverse_frequencies(rope_config(table), table["kw"].get("seq_len", 0))
    torch.testing.assert_close(got, torch.tensor(table["inv_freq"]), rtol=2e-6, atol=0)
    assert factor == pytest.approx(table["attention_factor"], abs=1e-9)


def test_ntk_keeps_the_fastest_pair_and_interpolates_the_slowest():
    plain, ntk = (inverse_frequencies(sl.DecoderConfig(10, 64, 1, 1, **c))[0] for c in ({}, {"rope_scaling": "ntk", "rope_factor": 8.0}))
    ratio = (plain / ntk).double()
    assert ratio[0] == 1
    assert float(ratio[-1]) == pytest.approx(8.0, rel=1e-5)
    assert bool((ratio.diff() > 0).all())


def turned(x, position, pairs):
    theta = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angle = position * theta[None]
    return rotate(x.reshape(1, 1, 1, 8), (angle.cos(), angle.sin()), pairs).flatten()


HALF = [-1.69559252, 0.13755167, 2.78868151, 3.97598219, -4.80884266, 6.32305956, 7.08683681, 8.01196384]
INTERLEAVED = [-1.27223253, -1.83886504, 1.68392861, 4.70790672, 4.81777716, 6.14727783, 6.97596836, 8.02096462]


@pytest.mark.parametrize(("pairs", "expected"), [("half", HALF), ("interleaved", INTERLEAVED)], ids=["half", "interleaved"])
def test_a_vector_turns_to_where_it_should(pairs, expected):
    x = torch.arange(1, 9, dtype=torch.float64)
    torch.testing.assert_close(turned(x, 3, pairs), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("pairs", ["half", "interleaved"])
def test_a_score_depends_on_the_distance_alone_and_a_turn_keeps_the_norm(pairs):
    q, k = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    score = turned(q, 5, pairs) @ turned(k, 2, pairs)
    shifted = turned(q, 12, pairs) @ turned(k, 9, pairs)
    assert float(score) == pytest.approx(float(shifted), abs=1e-12)
    assert float(turned(q, 5, pairs).norm()) == pytest.approx(float(q.norm()), abs=1e-12)


def test_the_two_pairings_are_one_up_to_the_order_of_coordinates():
    q = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    torch.testing.assert_close(turned(q[order], 3, "half"), turned(q, 3, "interleaved")[order])


def test_tables_are_made_once_and_survive_inference_mode():
    decoder = sl.Decoder(sl.DecoderConfig(10, 16, 1, 2))
    with torch.inference_mode():
        decoder(torch.zeros(1, 4, dtype=torch.long))
    cos, _ = decoder.rotary(0, 4, torch.float32, torch.device("cpu"))
    assert not cos.is_inference()
    assert cos.untyped_storage().data_ptr() == decoder.rotary(1, 8, torch.float32, torch.device("cpu"))[0].untyped_storage().data_ptr()
    decoder(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
