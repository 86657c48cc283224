"""TransformerLens' hook points on the decoder: its names, its two ways of running, and nothing in the way without hooks."""

import subprocess
import sys

import pytest
import torch
from transformer_lens import HookedRootModule

import streamlens as sl
from tests.decoder.configs import CASES, PLACEMENTS, decoder, tokens
from tests.decoder.test_forward import EXACT, gap

ATTENTION = ["hook_q", "hook_k", "hook_v", "hook_rot_q", "hook_rot_k", "hook_attn_scores", "hook_pattern", "hook_z"]
BLOCK = ["hook_resid_pre", "ln1.hook_scale", "ln1.hook_normalized", *(f"attn.{name}" for name in ATTENTION), "hook_attn_out"]
BLOCK += ["hook_resid_mid", "ln2.hook_scale", "ln2.hook_normalized", "mlp.hook_pre", "mlp.hook_pre_linear", "mlp.hook_post"]
BLOCK += ["hook_mlp_out", "hook_resid_post"]


def test_names_and_order_are_transformerlens():
    hooked = decoder().hooked()
    assert isinstance(hooked, HookedRootModule)
    with torch.no_grad():
        _, cache = hooked.run_with_cache(tokens())
    expected = [
        "hook_embed",
        *(f"blocks.{i}.{name}" for i in range(3) for name in BLOCK),
        "ln_final.hook_scale",
        "ln_final.hook_normalized",
    ]
    assert list(cache) == expected
    assert set(hooked.hook_dict) == set(expected)


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_every_point_is_passed_and_changes_nothing(changes):
    module = decoder(**changes)
    hooked = module.hooked()
    with torch.no_grad():
        plain = module(tokens()).logits
        logits, cache = hooked.run_with_cache(tokens())
    assert set(cache) == set(hooked.hook_dict)
    assert gap(logits, plain) <= EXACT
    assert torch.equal(hooked(tokens()), plain)


@torch.no_grad()
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_cached_tensors_are_those_of_record(placement):
    module = decoder(placement=placement, mix_share=0.5, n_kv_heads=2)
    _, cache = module.hooked().run_with_cache(tokens())
    recorded = sl.record(
        sl.load(module), tokens(), ["resid_pre", "attn_out", "mlp_out", "resid_post", "z", "q", "k", "v", "pattern", "post"]
    )
    alpha = module.config.deepnorm_alpha if placement == "deepnorm" else 1.0
    for name, value in recorded.items():
        if name not in ("positions", "mask"):
            value = value.transpose(1, 2) if name.endswith("pattern") else value
            # Of DeepNorm's stream, alpha is a multiple of all that has come, and what is added stands in units of it.
            factor = alpha if name.endswith(("attn_out", "mlp_out")) else 1.0
            assert gap(cache[name], value * factor) <= EXACT, name


def test_a_hook_can_change_what_goes_by_and_is_gone_afterwards():
    module = decoder()
    hooked, ids = module.hooked(), tokens()
    with torch.no_grad():
        before = module(ids).logits
        changed = hooked.run_with_hooks(ids, fwd_hooks=[("blocks.1.attn.hook_z", lambda z, hook: z * 0)])
        again = decoder()
        again.blocks[1].attn.o_proj.weight.zero_()
        assert gap(changed, again(ids).logits) <= EXACT
        assert torch.equal(module(ids).logits, before)


def test_a_pattern_can_be_changed():
    module, ids = decoder(), tokens()
    with torch.no_grad():
        onto_itself = module.hooked().run_with_hooks(
            ids, fwd_hooks=[(f"blocks.{i}.attn.hook_pattern", lambda p, hook: torch.eye(p.shape[-1]).to(p).expand_as(p)) for i in range(3)]
        )
        window = decoder(window=1)
        assert gap(onto_itself, window(ids).logits) <= EXACT


def test_the_decoder_is_as_it_was_after_an_error_in_a_hook():
    module, ids = decoder(), tokens()
    before = module(ids).logits

    def fails(z, hook):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        module.hooked().run_with_hooks(ids, fwd_hooks=[("blocks.1.attn.hook_z", fails)])
    assert torch.equal(module(ids).logits, before)
    assert not hasattr(module.blocks[1], "name")


def test_gradients_reach_a_backward_hook():
    hooked, seen = decoder().hooked(), []
    hooked.add_hook("blocks.0.hook_resid_post", lambda g, hook: seen.append(g.shape), dir="bwd")
    hooked(tokens()).sum().backward()
    assert seen == [torch.Size([2, 11, 24])]


def test_neither_transformerlens_nor_transformers_is_imported_for_a_plain_decoder():
    code = "import sys, torch, streamlens as sl; d = sl.Decoder(sl.DecoderConfig(9, 8, 1, 2)); d(torch.zeros(1, 3, dtype=torch.long));"
    code += "d.generate(torch.zeros(1, 1, dtype=torch.long), 2); print('transformer_lens' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False"
