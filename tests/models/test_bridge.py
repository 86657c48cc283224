"""TransformerBridge in and out, on tiny random models: same logits, shared weights, and nobody's model changed."""

import pytest
import torch
import transformers

from streamlens.errors import UnsupportedModelError
from streamlens.models.bridge import is_bridge, make_bridge, share_tree
from streamlens.models.sources import open_source
from tests.models.tiny import llama, words

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 12}
CONFIGS = {
    "llama": lambda: llama().config,
    "gpt2": lambda: transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, **ENDS),
    "bloom": lambda: transformers.BloomConfig(hidden_size=16, n_layer=2, n_head=2, **ENDS),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=8, do_layer_norm_before=False, **ENDS
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, **ENDS
    ),
}


def random_model(family):
    """A model with every weight drawn anew: gains of 1 and biases of 0 would hide mistakes."""
    module = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(std=0.3)
    return module


def logits(module):
    with torch.no_grad():
        return module(IDS).logits


def structure(module):
    return {name: (type(part), id(part), len(part._forward_hooks), part.training) for name, part in module.named_modules()}


def same_parameters(one, other):
    return {name: id(weight) for name, weight in one.named_parameters()} == {name: id(weight) for name, weight in other.named_parameters()}


def test_shared_tree_has_modules_of_its_own_on_the_same_weights():
    module = random_model("gpt2")
    copy = share_tree(module)
    assert same_parameters(copy, module)
    assert copy.lm_head.weight is copy.transformer.wte.weight  # tied
    assert not {id(part) for part in copy.modules()} & {id(part) for part in module.modules()}
    assert copy.config is not module.config
    assert torch.equal(logits(copy), logits(module))
    copy.transformer.h[0].register_forward_hook(lambda *call: None)
    copy.transformer.ln_f = torch.nn.Identity()
    assert not module.transformer.h[0]._forward_hooks
    assert isinstance(module.transformer.ln_f, torch.nn.LayerNorm)


def test_shared_tree_keeps_hooks_and_what_they_hold():
    module, seen = random_model("llama"), []
    # A bound method of an object that holds a tensor of a graph, which could not be copied.
    seen.append(module.lm_head.weight * 1)
    module.model.norm.register_forward_hook(lambda part, inputs, output: seen.append(output))
    module.model.norm.last = seen[0]
    copy = share_tree(module)
    assert copy.model.norm.last is seen[0]
    logits(copy)
    assert len(seen) == 2


@pytest.mark.parametrize("family", CONFIGS)
def test_there_and_back(family):
    module = random_model(family)
    before, plain, attention = structure(module), logits(module), module.config._attn_implementation
    bridge = make_bridge(module)
    with torch.no_grad():
        torch.testing.assert_close(bridge(IDS), plain, atol=1e-4, rtol=1e-4)
    assert structure(module) == before
    assert module.config._attn_implementation == attention
    assert torch.equal(logits(module), plain)

    inside = structure(bridge.original_model)
    opened = open_source(bridge)
    assert same_parameters(opened.module, module)
    assert opened.source == f"the TransformerBridge's {type(module).__name__} in memory"
    assert all(type(part).__module__.split(".")[0] in ("torch", "transformers") for part in opened.module.modules())
    torch.testing.assert_close(logits(opened.module), plain, atol=1e-5, rtol=1e-5)
    assert structure(bridge.original_model) == inside


def test_bridge_is_told_by_name():
    bridge = make_bridge(llama())
    assert is_bridge(bridge)
    assert not is_bridge(llama())
    assert not is_bridge("gpt2")


def test_bridge_brings_its_tokenizer_and_the_users_stays_as_it_is():
    tokenizer = words()
    bridge = make_bridge(llama(), tokenizer)
    assert tokenizer.bos_token is None
    assert tokenizer.pad_token is None
    assert bridge.tokenizer is not tokenizer
    assert open_source(bridge).tokenizer is bridge.tokenizer
    assert open_source(bridge, tokenizer=tokenizer).tokenizer is tokenizer


def test_compatibility_mode_on_a_copy_leaves_the_model_alone():
    module = random_model("gpt2")
    plain = logits(module)
    bridge = make_bridge(module, copy=True)
    bridge.enable_compatibility_mode()
    assert torch.equal(logits(module), plain)
    with pytest.raises(UnsupportedModelError, match=r"without compatibility mode"):  # the folded gains are the bridge's own business
        open_source(bridge)


def test_bridge_that_computes_something_else_is_refused_with_the_difference():
    bridge = make_bridge(llama())
    bridge.add_perma_hook("blocks.0.hook_resid_post", lambda value, hook: value * 2)
    with pytest.raises(UnsupportedModelError, match=r"logits of this TransformerBridge differ .* by 0\.\d+ of the largest logit"):
        open_source(bridge)


def test_training_mode_of_a_bridge_survives_opening():
    bridge = make_bridge(random_model("gpt2")).train()
    opened = open_source(bridge)
    assert all(part.training for part in bridge.modules())
    assert opened.module.training


def test_bridges_that_cannot_be_made():
    class NamelessForCausalLM(transformers.LlamaForCausalLM):
        pass

    with pytest.raises(UnsupportedModelError, match=r"TransformerLens has no adapter for NamelessForCausalLM"):
        make_bridge(NamelessForCausalLM(llama().config))


def test_bridge_without_a_transformers_model_is_refused():
    from transformer_lens.model_bridge import TransformerBridge

    native = TransformerBridge.boot_native(
        {
            "n_layers": 1,
            "d_model": 8,
            "n_ctx": 8,
            "d_head": 4,
            "n_heads": 2,
            "d_vocab": 12,
            "d_mlp": 16,
            "act_fn": "relu",
            "normalization_type": "LN",
        }
    )
    with pytest.raises(UnsupportedModelError, match=r"wraps no transformers model"):
        open_source(native)
