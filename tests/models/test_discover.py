"""What discovery measures instead of believing a config."""

import warnings

import pytest
import torch
import transformers

import streamlens as sl
from streamlens.errors import UnsupportedModelError
from tests.models import tiny


def test_heads_are_counted_where_the_attention_runs():
    model = tiny.model("llama")
    model.config.num_attention_heads //= 2  # a family whose layers differ from its config
    heads = {write.n_heads for _, write in sl.load(model).anatomy.writes() if write.kind == "attn"}
    assert heads == {write.n_heads for _, write in tiny.proven("llama").anatomy.writes() if write.kind == "attn"}


def test_labels_do_not_read_the_family_name():
    config = transformers.RecurrentGemmaConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=48,
        lru_width=32, vocab_size=60, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    anatomy = sl.load(transformers.RecurrentGemmaForCausalLM(config).eval()).anatomy
    assert [[w.kind for w in layer.writes] for layer in anatomy.layers] == [["mixer", "mlp"], ["mixer", "mlp"], ["attn", "mlp"]]


def test_one_block_at_two_places_is_applied_twice():
    model = tiny.model("llama")
    model.model.layers[1] = model.model.layers[0]
    loaded = sl.load(model)
    assert [layer.path for layer in loaded.anatomy.layers][:2] == ["model.layers.0"] * 2
    df = sl.attribute(loaded, [[5, 6, 7, 8]], target=9, check="full")
    assert sorted(df[df.component == "mlp"].layer) == list(range(loaded.n_layers))


def test_a_packed_unembedding_is_refused():
    with warnings.catch_warnings(action="ignore"):  # torch announces another place for it
        packed = torch.ao.quantization.quantize_dynamic(tiny.model("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedModelError, match="its unembedding is packed, and its rows cannot be read"):
        sl.load(packed)
