"""Generation: with a cache as without one for every choice, and what is drawn."""

import pytest
import torch

import streamlens as sl
from streamlens.decoder.generate import draw
from tests.decoder.configs import ATTENTION, POSITIONS, decoder, tokens
from tests.decoder.test_forward import EXACT, gap

CHOICES = {f"positions {name}": changes for name, changes in POSITIONS.items()} | ATTENTION
CHOICES |= {"post": {"placement": "post"}, "parallel": {"placement": "parallel"}, "experts": {"n_experts": 3}}


@pytest.mark.parametrize("changes", CHOICES.values(), ids=CHOICES)
def test_cached_logits_are_the_uncached_ones(changes):
    """A prompt in two pieces and then token by token, past the window and past the length that rope was trained on."""
    module, ids, cache = decoder(**changes), tokens(length=14), None
    pieces = []
    with torch.no_grad():
        for start, end in ((0, 3), (3, 7), *((i, i + 1) for i in range(7, 14))):
            out = module(ids[:, start:end], use_cache=True, cache=cache)
            pieces.append(out.logits)
            cache = out.cache
            # Dynamic NTK turns every earlier token anew as the text grows, so each piece is what the text up to its end gives.
            assert gap(pieces[-1], module(ids[:, :end]).logits[:, start:end]) <= EXACT
    assert cache.length == 14


def test_keys_are_turned_when_they_are_written():
    module, ids, keys = decoder(), tokens(), []
    module.blocks[0].attn.k_proj.register_forward_hook(lambda _, x, out: keys.append(out.unflatten(-1, (4, 6))))
    with torch.no_grad():
        held = module(ids, use_cache=True).cache.layers[0].keys
    assert torch.equal(held[:, 0], keys[0][:, 0])  # the first position turns by nothing
    assert not torch.isclose(held[:, 1:], keys[0][:, 1:]).all(-1).any()


def test_a_cache_with_a_window_keeps_no_more_than_the_window_will_see():
    module = decoder(window=4, window_layers=(1,))
    with torch.no_grad():
        cache = module(tokens(), use_cache=True).cache
    assert [layer.keys.shape[1] for layer in cache.layers] == [11, 3, 11]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_k": 7, "top_p": 0.9, "seed": 5}], ids=["greedy", "drawn"])
def test_generated_tokens_do_not_depend_on_the_cache(options):
    module, ids = decoder(window=5, n_kv_heads=2), tokens(length=4)
    with_cache, without = (module.generate(ids, 12, use_cache=use, **options) for use in (True, False))
    assert torch.equal(with_cache, without)
    assert with_cache.shape == (2, 16)
    assert torch.equal(with_cache[:, :4], ids)


def test_greedy_takes_the_likeliest():
    module, ids = decoder(), tokens(length=4)
    out = module.generate(ids, 5)
    with torch.no_grad():
        assert torch.equal(module(out).logits[:, 3:-1].argmax(-1), out[:, 4:])


def test_a_seed_repeats_and_another_does_not():
    module, ids = decoder(), tokens(length=4)
    first, again, other = (module.generate(ids, 20, temperature=3.0, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_text_that_stopped_stays_stopped():
    module, ids = decoder(), tokens(length=4)
    plain = module.generate(ids, 8)
    stop = int(plain[0, 5])
    out = module.generate(ids, 8, stop=stop)
    assert bool((out[0, 5:] == stop).all())
    alone = module.generate(ids[:1], 8, stop=stop)
    assert alone.shape[1] <= 6


PROBABILITY = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
KEPT = [
    ({}, {0, 1, 2, 3, 4}),
    ({"top_k": 2}, {1, 3}),
    ({"top_p": 0.6}, {1, 3}),
    ({"top_p": 0.7}, {1, 3, 4}),
    ({"top_p": 1e-9}, {1}),
    ({"top_k": 3, "top_p": 0.7}, {1, 3}),  # of the three, 0.4 / 0.85 and 0.25 / 0.85 hold 0.76
]


@pytest.mark.parametrize(("options", "kept"), KEPT, ids=[str(options) for options, _ in KEPT])
def test_only_what_is_kept_is_drawn_and_in_its_proportion(options, kept):
    n = 4000
    options = {"top_k": None, "top_p": None} | options
    drawn = draw(PROBABILITY.log().expand(n, -1), 1.0, **options, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn, minlength=5) / n
    expected = torch.tensor([float(p) if i in kept else 0.0 for i, p in enumerate(PROBABILITY)])
    torch.testing.assert_close(counts, expected / expected.sum(), rtol=0, atol=0.03)
    assert set(drawn.tolist()) == kept


def test_temperature_sharpens():
    draws = [draw(PROBABILITY.log().expand(2000, -1), t, None, None, torch.Generator().manual_seed(0)) for t in (0.5, 2.0)]
    sharp, flat = (float((d == 1).double().mean()) for d in draws)
    power = PROBABILITY**2 / (PROBABILITY**2).sum()
    assert sharp == pytest.approx(float(power[1]), abs=0.04)
    assert flat < 0.4


BAD = [
    ({"n_tokens": -1}, "n_tokens must be"),
    ({"temperature": -0.1}, "temperature must be"),
    ({"top_k": 3}, "temperature must be above 0 with top_k"),
    ({"temperature": 1.0, "top_k": 0}, "top_k must be"),
    ({"temperature": 1.0, "top_p": 0.0}, "top_p must be"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_options_are_named(options, message):
    with pytest.raises(sl.errors.InputError, match=message):
        decoder().generate(tokens(), **{"n_tokens": 3} | options)


def test_learned_positions_end_before_generation_starts():
    with pytest.raises(sl.errors.InputError, match="max_length 16 of learned positions; got 6"):
        decoder(positions="learned", max_length=16).generate(tokens(length=11), 6)
