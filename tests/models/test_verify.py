"""The proof at load: an anatomy that is wrong in one place is refused with what was measured, also where its sums close."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import streamlens as sl
from streamlens.errors import UnsupportedModelError
from streamlens.measure.attribution import attribute_batch
from streamlens.models import discover, structure
from streamlens.models.verify import probe_ids, prove
from streamlens.prompts import Readouts, TokenBatch
from streamlens.stream.replay import Replay
from tests.models import tiny
from tests.tolerances import ADDITIVITY, REPLAY

SWALLOWED = "writes nothing into any logit: .*swallowed"


def changed_layer(anatomy, index, change):
    layers = list(anatomy.layers)
    layers[index] = change(layers[index])
    return replace(anatomy, layers=tuple(layers))


def changed_adds(anatomy, index, change):
    """The anatomy with `change(add)` in the place of each addition of one layer; None takes it out."""

    def segment(s):
        return replace(s, adds=tuple(new for add in s.adds if (new := change(add)) is not None))

    return changed_layer(anatomy, index, lambda layer: replace(layer, segments=tuple(map(segment, layer.segments))))


def changed_write(anatomy, index, kind, **fields):
    """The anatomy with other fields of the write of this kind in one layer."""
    return changed_adds(
        anatomy,
        index,
        lambda add: replace(add, writes=tuple(replace(w, **fields) for w in add.writes)) if add.writes[0].kind == kind else add,
    )


def sum_error(module, anatomy):
    ids = probe_ids(module)
    batch = TokenBatch(np.arange(2), ids, torch.ones_like(ids, dtype=torch.bool))
    readouts = Readouts(*(np.array(x) for x in ([0, 1], [3, 6], [11, 12], [4, 5])))
    return attribute_batch(module, anatomy, batch, readouts).error.max()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_what_is_served_was_measured(family):
    proof = tiny.proven(family).proof
    limit = ADDITIVITY[torch.float32]
    assert 0 < proof.additivity <= limit
    assert 0 <= proof.stream <= 20 * limit
    assert 0 < proof.heads <= 20 * limit
    assert 0 < proof.interventions <= 20 * limit
    assert 0 <= proof.printed <= 20 * limit
    assert 0 <= proof.replay <= REPLAY * 10


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize(
    ("family", "kind", "path"),
    [
        ("bloom", "mlp", "transformer.h.{}.mlp"),  # returns residual plus write
        ("bloom", "attn", "transformer.h.{}.self_attention"),
        ("llama", "mlp", "model.layers.{}"),  # the block's own output
    ],
)
def test_a_leaf_that_holds_the_stream_is_refused_although_the_sum_closes(family, kind, path, layer):
    model, path = tiny.proven(family), path.format(layer)
    wrong = changed_write(model.anatomy, layer, kind, leaf=path, output=path, n_heads=0, d_head=0, bias=False)
    assert sum_error(model.module, wrong) <= ADDITIVITY[torch.float32]
    with pytest.raises(UnsupportedModelError, match=f"cannot be read exactly: embed {SWALLOWED}"):
        prove(model.module, wrong)


@pytest.mark.parametrize("seed", range(3))
def test_sublayers_that_return_the_stream_are_refused_where_nothing_says_so(seed, monkeypatch):
    """BLOOM's sublayers take the residual and return the sum; without knowing that, no anatomy may come out at all."""
    for module in (structure, discover.tree):
        monkeypatch.setattr(module, "passes_residual", lambda part: False)
    with pytest.raises(UnsupportedModelError, match=f"the stream is not its input plus its writes|{SWALLOWED}"):
        sl.load(tiny.model("bloom", seed=seed))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_embedding_leaf_on_a_block_is_refused_although_the_sum_closes(family):
    model = tiny.proven(family)
    wrong = replace(model.anatomy, embed=model.anatomy.block_paths[0])
    assert sum_error(model.module, wrong) <= ADDITIVITY[torch.float32]
    with pytest.raises(UnsupportedModelError, match=SWALLOWED):
        prove(model.module, wrong)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("kind", ["attn", "mlp"])
def test_a_wrong_multiplier_is_refused(kind, layer):
    model = tiny.proven("llama")
    wrong = changed_adds(model.anatomy, layer, lambda add: replace(add, factors=(1.01,)) if add.writes[0].kind == kind else add)
    with pytest.raises(UnsupportedModelError, match=rf"layer {layer}: stream in plus its writes misses stream out by 0\.0"):
        prove(model.module, wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_proof_has_teeth_in_other_dtypes_too(dtype):
    """Rounding excuses a few units in the last place of the stream, and no more."""
    model = tiny.proven("llama", dtype)
    wrong = changed_adds(model.anatomy, 1, lambda add: replace(add, factors=(1.2,)) if add.writes[0].kind == "attn" else add)
    with pytest.raises(UnsupportedModelError, match=r"layer 1: stream in plus its writes misses stream out by 0\.1"):
        prove(model.module, wrong)


@pytest.mark.parametrize("norm", ["post_attention_layernorm", "post_feedforward_layernorm"])
def test_a_forgotten_branch_norm_is_refused(norm):
    model, path = tiny.proven("gemma2"), f"model.layers.1.{norm}"
    out_of_program = changed_adds(model.anatomy, 1, lambda add: replace(add, norm=None) if add.norm == path else add)
    with pytest.raises(UnsupportedModelError, match="layer 1: stream in plus its writes misses stream out"):
        prove(model.module, out_of_program)
    not_frozen = replace(
        model.anatomy,
        norms={p: form for p, form in model.anatomy.norms.items() if p != path},
        path_norms=frozenset(place for place in model.anatomy.path_norms if place[1] != path),
    )
    with pytest.raises(UnsupportedModelError, match=r"contributions miss the logit by 0\.\d+ of sum\|parts\|"):
        prove(model.module, not_frozen)


def test_a_forgotten_norm_on_the_stream_is_refused():
    model = tiny.proven("opt-post-norm")
    wrong = changed_layer(model.anatomy, 1, lambda layer: replace(layer, segments=tuple(replace(s, norm=None) for s in layer.segments)))
    with pytest.raises(UnsupportedModelError, match="layer 1: stream in plus its writes misses stream out"):
        prove(model.module, wrong)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", lambda a: changed_adds(a, 1, lambda add: None if add.writes[0].kind == "mlp" else add)),
        ("llama", lambda a: changed_adds(a, 1, lambda add: None if add.writes[0].kind == "attn" else add)),
        ("llama", lambda a: changed_write(a, 1, "attn", bias=False)),
        ("llama", lambda a: replace(a, norms={p: replace(f, eps=f.eps + 1e-2) for p, f in a.norms.items()})),
        ("llama", lambda a: replace(a, norms={p: replace(f, gain=f.gain + 1e-3) for p, f in a.norms.items()})),
        ("llama", lambda a: replace(a, norms={}, path_norms=frozenset())),
        ("gpt2", lambda a: replace(a, norms={p: replace(f, centred=False) for p, f in a.norms.items()})),
        ("gpt2", lambda a: replace(a, norms={p: replace(f, bias=None) for p, f in a.norms.items()})),
        ("gpt2", lambda a: replace(a, pos_embeds=())),
    ],
    ids=["no mlp", "no attn", "no bias", "epsilon", "gain", "no norm", "not centred", "no norm bias", "no positions"],
)
def test_what_is_left_out_or_wrong_is_missed_by_the_sum(family, change):
    model = tiny.proven(family)
    with pytest.raises(
        UnsupportedModelError, match=rf"{type(model.module).__name__} cannot be read exactly: contributions miss the logit by"
    ):
        prove(model.module, change(model.anatomy))


def test_a_forgotten_last_layer_is_refused():
    model = tiny.proven("llama")
    with pytest.raises(UnsupportedModelError, match="none of the writes of its anatomy reaches the unembedding"):
        prove(model.module, replace(model.anatomy, layers=model.anatomy.layers[:2]))


def test_a_head_row_of_another_width_is_refused():
    model = tiny.proven("llama")
    with pytest.raises(UnsupportedModelError, match="cannot be read exactly"):
        prove(model.module, changed_write(model.anatomy, 1, "attn", n_heads=2, d_head=8))


def test_a_replay_that_misses_the_hooked_pass_is_refused(monkeypatch):
    model = tiny.proven("llama")
    original = Replay.without_blocks

    def second_removal_keeps_the_first(replay, layers):
        replay.gone = getattr(replay, "gone", set()) | layers
        return original(replay, replay.gone)

    monkeypatch.setattr(Replay, "without_blocks", second_removal_keeps_the_first)
    with pytest.raises(UnsupportedModelError, match=r"removing a block by replay misses the hooked forward pass by \d"):
        prove(model.module, model.anatomy)


def test_a_model_that_answers_differently_each_time_is_refused():
    module = tiny.model("llama")
    generator = torch.Generator().manual_seed(0)
    module.model.layers[1].mlp.register_forward_hook(lambda part, args, out: out + 0.01 * torch.randn(out.shape, generator=generator))
    with pytest.raises(UnsupportedModelError, match=r"not its input plus its writes|cannot be read exactly|not the unembedding's output"):
        sl.load(module)


def test_logits_that_are_not_finite_are_refused():
    module = tiny.model("llama")
    with torch.no_grad():
        module.lm_head.weight[7] = 3e38
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM: its logits are not finite"):
        sl.load(module)


def test_an_unembedding_that_is_more_than_its_rows_is_refused():
    module = tiny.model("llama")
    module.lm_head.register_forward_hook(lambda part, args, out: out + out.square())
    with pytest.raises(UnsupportedModelError, match="cannot be read exactly: logits from the unembedding's rows miss the printed ones"):
        sl.load(module)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_skipping_the_proof_still_measures_the_logit_map(family):
    model = tiny.proven(family)
    anatomy, proof = prove(model.module, replace(model.anatomy, logits=type(model.anatomy.logits)()), skip=True)
    assert anatomy.logits == model.anatomy.logits
    assert np.isnan(proof.additivity)


def test_probe_ids_fit_small_vocabularies():
    ids = probe_ids(tiny.llama())
    assert ids.shape == (2, 7)
    assert int(ids.max()) < 12
    assert len(probe_ids(tiny.proven("llama").module).unique()) == 14
