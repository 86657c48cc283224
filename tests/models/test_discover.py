"""What discovery measures instead of believing a config."""

import torch
import transformers

import streamlens as sl
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
