"""Weights from and to transformers' families: the same logits both ways, and what cannot be said refused by name."""

from dataclasses import replace

import pytest
import torch
import transformers

import streamlens as sl
from streamlens.models.native import FAMILIES, to_native, to_transformers
from tests.models.tiny import randomise, words

ENDS = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 60}
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64, **ENDS}
GQA = {"num_key_value_heads": 2, "intermediate_size": 48}
SHORT = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


def rope(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


def opt(**changes):
    return transformers.OPTConfig(**SMALL, ffn_dim=48, **{"word_embed_proj_dim": 32} | changes)


CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, **GQA),
    "llama, tied and with biases": lambda: transformers.LlamaConfig(
        **SMALL, **GQA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama, linear": lambda: transformers.LlamaConfig(**SMALL, **GQA, **rope("linear", factor=4.0)),
    "llama, dynamic": lambda: transformers.LlamaConfig(**SMALL | {"max_position_embeddings": 8}, **GQA, **rope("dynamic", factor=4.0)),
    "llama, yarn": lambda: transformers.LlamaConfig(**SMALL, **GQA, rope_parameters={"rope_type": "yarn", **SHORT}),
    "llama, llama3": lambda: transformers.LlamaConfig(
        **SMALL, **GQA, rope_parameters={"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SHORT}
    ),
    "mistral": lambda: transformers.MistralConfig(**SMALL, **GQA, sliding_window=4),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, **GQA, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, **GQA),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, **GQA, head_dim=16),
    "granite": lambda: transformers.GraniteConfig(
        **SMALL, **GQA, embedding_multiplier=3.0, residual_multiplier=0.22, attention_multiplier=0.2, logits_scaling=4.0
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SMALL, **GQA, pad_token_id=0),
    "gemma": lambda: transformers.GemmaConfig(**SMALL, **GQA, head_dim=16, pad_token_id=0),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, **GQA, head_dim=16, sliding_window=4, query_pre_attn_scalar=12, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64, **ENDS),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SMALL, intermediate_size=48, **rope("default", partial_rotary_factor=0.5)),
    "gpt-neox, not parallel": lambda: transformers.GPTNeoXConfig(**SMALL, intermediate_size=48, use_parallel_residual=False),
    "bloom": lambda: transformers.BloomConfig(hidden_size=36, n_layer=3, n_head=6, **ENDS),
    "opt": opt,
    "opt, post-norm": lambda: opt(do_layer_norm_before=False),
}
LIMIT = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Of the largest logit."""

FLOAT64 = ("gpt2", "gpt-neox", "gpt-neox, not parallel", "opt", "opt, post-norm")
"""Families that compute all of a float64 model in float64: the others' RMSNorms or softmaxes are made in float32."""


def theirs(name, dtype=torch.float32):
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    randomise(module)
    return module.to(dtype)


def tokens(n_vocab=60):
    return torch.randint(0, n_vocab, (2, 24), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def gap(ours, hf):
    a, b = ours(tokens()).logits, hf(input_ids=tokens()).logits
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers_both_ways(name):
    hf = theirs(name)
    native = to_native(hf)
    assert gap(native, hf) <= LIMIT[torch.float32]
    back = to_transformers(native, hf.config.model_type)
    assert type(back) is type(hf)
    assert gap(native, back) <= LIMIT[torch.float32]
    kept = {k: v for k, v in back.state_dict().items() if "embed_positions" not in k}  # OPT's padding rows are nobody's
    assert all(torch.allclose(v, hf.state_dict()[k], rtol=0, atol=1e-6) for k, v in kept.items())
    assert to_native(back).config.settled() == native.config.settled()


@pytest.mark.parametrize("name", FLOAT64)
def test_in_float64_to_its_rounding(name):
    hf = theirs(name, torch.float64)
    assert gap(to_native(hf), hf) <= LIMIT[torch.float64]


def test_every_family_is_tested():
    assert {CONFIGS[name]().model_type for name in CONFIGS} == set(FAMILIES)


def test_what_the_user_holds_keeps_its_own_tensors():
    hf = theirs("llama")
    before = hf.model.layers[0].self_attn.q_proj.weight.clone()
    native = to_native(hf)
    with torch.no_grad():
        native.blocks[0].attn.q_proj.weight.zero_()
    assert torch.equal(hf.model.layers[0].self_attn.q_proj.weight, before)
    shared = to_native(hf, copy=False).blocks[0].attn.q_proj.weight
    assert shared.data_ptr() == hf.model.layers[0].self_attn.q_proj.weight.data_ptr()


def test_load_gives_the_native_twin_of_a_module_with_the_same_rows():
    hf = theirs("gemma2")
    model, native = sl.load(hf, tokenizer=words()), sl.load(hf, tokenizer=words(), native=True)
    assert isinstance(native.module, sl.Decoder)
    assert native.source == "native Decoder of Gemma2ForCausalLM in memory"
    ours, other = (sl.attribute(m, [[1, 2, 3, 4]], target=3, versus=5) for m in (native, model))
    keys = ["component", "layer", "sublayer", "head"]
    assert ours[keys].astype(str).equals(other[keys].astype(str))
    assert (ours.contribution - other.contribution).abs().max() <= 1e-5 * ours.contribution.abs().max()


REFUSED = [
    (lambda: transformers.GPTJConfig(n_embd=32, n_layer=1, n_head=4, rotary_dim=4, **ENDS), "no way to read 'gptj' models"),
    (lambda: transformers.LlamaConfig(**SMALL, **GQA, hidden_act="relu"), "needs hidden_act 'silu'; got 'relu'"),
    (lambda: opt(word_embed_proj_dim=16), "needs word_embed_proj_dim 32; got 16"),
    (lambda: transformers.LlamaConfig(**SMALL, **GQA, rope_parameters={
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 16}), "no rope scaling 'longrope'"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message[-20:] for _, message in REFUSED])
def test_what_the_native_decoder_cannot_express_is_named(config, message):
    with pytest.raises(sl.errors.UnsupportedModelError, match=message):
        sl.load(transformers.AutoModelForCausalLM.from_config(config()).eval(), native=True)


def test_what_a_family_cannot_express_is_named():
    decoder = to_native(theirs("llama"))
    odd = sl.Decoder(replace(decoder.config, placement="parallel"))
    with pytest.raises(sl.errors.UnsupportedModelError, match=r"llama models cannot express placement 'parallel'; theirs would be 'pre'"):
        to_transformers(odd, "llama")
    with pytest.raises(sl.errors.UnsupportedModelError, match="no rope_pairs 'interleaved'"):
        to_transformers(sl.Decoder(replace(decoder.config, rope_pairs="interleaved")), "llama")
    with pytest.raises(sl.errors.InputError, match=r"model_type must be one of llama.*; got 'gpt5'"):
        to_transformers(decoder, "gpt5")


def test_a_twin_with_other_logits_is_refused(monkeypatch):
    """The check is what stands between a wrong table of names and the user."""
    from streamlens.decoder.convert import llama
    from streamlens.models import native

    swapped = llama.LLAMA.names | {"blocks.{i}.norm1": llama.LLAMA.names["blocks.{i}.norm2"]}
    swapped["blocks.{i}.norm2"] = llama.LLAMA.names["blocks.{i}.norm1"]
    monkeypatch.setitem(native.FAMILIES, "llama", replace(llama.LLAMA, names=swapped))
    with pytest.raises(sl.errors.UnsupportedModelError, match="logits differ from those of LlamaForCausalLM"):
        to_native(theirs("llama"))


@pytest.mark.slow
def test_the_default_model_s_native_twin_gives_its_logits_and_passes_the_whole_proof(smollm2):
    """`load` skips the proof for this model: here it is done."""
    from streamlens.models.loaded import understand

    native = sl.load("smollm2-135m", native=True, device="cpu")
    ids = smollm2.tokenizer("The Eiffel Tower is in the city of", return_tensors="pt").input_ids
    with torch.no_grad():
        ours, theirs = native.module(ids).logits, smollm2.module(ids).logits
    assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 1e-4
    _, proof = understand(native.module)
    assert proof.additivity <= 5e-6
