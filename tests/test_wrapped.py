"""Models that are not plain: quantised, with adapters, dispatched over devices, saved with changed weights."""

import numpy as np
import pytest
import torch
from torch import nn

import streamlens as sl
from streamlens.errors import UnsupportedModelError
from tests.models import tiny
from tests.tolerances import ADDITIVITY, HAND

PROMPTS = [[5, 9, 3, 22, 41, 17, 8], [30, 7, 7, 12]]
CALLS = {
    "attribute": (lambda m: sl.attribute(m, PROMPTS, target=11, versus=4, positions="all", check="full"), "contribution"),
    "ablate": (lambda m: sl.ablate(m, PROMPTS, positions="all"), "ablated"),
    "norms": (lambda m: sl.norms(m, PROMPTS), "value"),
}


def same_numbers(one, other, limit=HAND):
    """Every call gives the same rows and numbers for both models; attributions add up."""
    for call, column in CALLS.values():
        ours, theirs = call(one), call(other)
        assert len(ours) == len(theirs)
        values = ours[column].to_numpy()
        assert np.abs(values - theirs[column].to_numpy()).max() <= limit * np.abs(values).max()
        assert theirs.attrs.get("additivity_error", 0) <= ADDITIVITY[torch.float32]


def differ(one, other):
    call, column = CALLS["attribute"]
    values = call(one)[column].to_numpy()
    return np.abs(values - call(other)[column].to_numpy()).max() > 0.01 * np.abs(values).max()


@torch.no_grad()
def replaced(module, make, names):
    """The model with `make(linear)` in the place of each linear map of these names."""
    for path, part in list(module.named_modules()):
        if path.rsplit(".", 1)[-1] in names:
            module.get_submodule(path.rsplit(".", 1)[0]).register_module(path.rsplit(".", 1)[-1], make(part))
    return module


# -- quantised -------------------------------------------------------------------------------------------------------
class Packed(nn.Module):
    """A linear map in 8 bits, a scale a row, as quantisation libraries keep them: no parameter, no float weight."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x):
        return nn.functional.linear(x, self.qweight.float() * self.scale, self.bias)


PROJECTIONS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gemma2": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "bloom": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}


@torch.no_grad()
def unpacked(packed):
    linear = nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None)
    linear.weight.copy_(packed.qweight.float() * packed.scale)
    if packed.bias is not None:
        linear.bias.copy_(packed.bias)
    return linear


@pytest.mark.parametrize("family", PROJECTIONS)
def test_quantised_projections_give_the_numbers_of_their_unpacked_weights(family):
    names = PROJECTIONS[family]
    quantised = sl.load(replaced(tiny.model(family), Packed, names))
    plain = sl.load(replaced(tiny.model(family), lambda linear: unpacked(Packed(linear)), names))
    assert [w.n_heads for _, w in quantised.anatomy.writes()] == [w.n_heads for _, w in plain.anatomy.writes()]
    assert max(w.n_heads for _, w in quantised.anatomy.writes()) == 4
    same_numbers(plain, quantised)


# -- adapters --------------------------------------------------------------------------------------------------------
class LowRank(nn.Module):
    """A linear map with a low-rank change beside it, laid out as PEFT lays it out."""

    def __init__(self, linear):
        super().__init__()
        self.base_layer, self.in_features, self.out_features = linear, linear.in_features, linear.out_features
        generator = torch.Generator().manual_seed(0)
        self.lora_A, self.lora_B = nn.Linear(linear.in_features, 2, bias=False), nn.Linear(2, linear.out_features, bias=False)
        for part in (self.lora_A, self.lora_B):
            part.weight.copy_(torch.randn(part.weight.shape, generator=generator) * 0.3)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@torch.no_grad()
def merged(adapted):
    adapted.base_layer.weight += adapted.lora_B.weight @ adapted.lora_A.weight
    return adapted.base_layer


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
def test_adapters_give_the_numbers_of_their_merged_weights(family):
    names = PROJECTIONS[family]
    adapted = sl.load(replaced(tiny.model(family), LowRank, names))
    plain = sl.load(replaced(tiny.model(family), lambda linear: merged(LowRank(linear)), names))
    same_numbers(plain, adapted)
    assert differ(tiny.proven(family), adapted)


@pytest.fixture
def peft():
    return pytest.importorskip("peft", reason="PEFT models need the peft package")


def with_lora(peft, module):
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"], init_lora_weights=False, lora_dropout=0.5)
    return peft.get_peft_model(module, config)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_peft_model_gives_the_numbers_of_its_merged_weights_and_stays_as_it_is(peft):
    torch.manual_seed(0)
    model = with_lora(peft, tiny.model("llama")).train()
    before = {name: (p.requires_grad, p.detach().clone()) for name, p in model.named_parameters()}
    adapted = sl.load(model)
    assert adapted.source == "the PeftModel's LlamaForCausalLM in memory"
    assert adapted.module is model.get_base_model()
    adapted_rows = CALLS["attribute"][0](adapted)
    assert model.training
    assert all(before[n][0] == p.requires_grad and torch.equal(before[n][1], p) for n, p in model.named_parameters())
    plain = sl.load(model.merge_and_unload())
    gap = adapted_rows.contribution - CALLS["attribute"][0](plain).contribution
    assert gap.abs().max() <= HAND * adapted_rows.contribution.abs().max()
    assert differ(tiny.proven("llama"), plain)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_learned_prompt_is_refused(peft):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UnsupportedModelError, match="PeftModelForCausalLM learns a prompt, which is no part of LlamaForCausalLM"):
        sl.load(peft.get_peft_model(tiny.model("llama"), config))


# -- dispatched ------------------------------------------------------------------------------------------------------
@pytest.fixture
def accelerate():
    return pytest.importorskip("accelerate", reason="dispatched models need the accelerate package")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_a_dispatched_model_gives_the_same_numbers_and_keeps_its_hooks(accelerate, family):
    module = tiny.model(family)
    # Each part is placed by itself, so that each gets a forward pass of accelerate's in the place of its class's.
    places = {name: "cpu" for name, part in module.named_modules() if part._parameters or not any(part.children())}
    module = accelerate.dispatch_model(module, places, main_device="cpu", force_hooks=True)
    forwards = {name: part.__dict__.get("forward") for name, part in module.named_modules()}
    assert sum(forward is not None for forward in forwards.values()) > 10
    same_numbers(tiny.proven(family), sl.load(module))
    assert {name: part.__dict__.get("forward") for name, part in module.named_modules()} == forwards


def test_device_map_auto(accelerate, tmp_path):
    tiny.model("llama").save_pretrained(tmp_path)
    module = type(tiny.model("llama")).from_pretrained(tmp_path, device_map="auto")
    same_numbers(tiny.proven("llama"), sl.load(module.float()))


def test_weights_that_are_offloaded_to_disk_are_refused_by_name(accelerate, tmp_path):
    module = tiny.model("llama")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu", "model.layers": "disk"}
    module = accelerate.dispatch_model(module, places, main_device="cpu", offload_dir=str(tmp_path))
    with pytest.raises(UnsupportedModelError, match=r"weights that are not in memory \(model\.layers\.0\..* is offloaded"):
        sl.load(module)


# -- saved locally ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_folder_with_changed_weights_gives_the_changed_numbers(family, tmp_path):
    module = tiny.model(family)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "layers.1." in name or "h.1." in name:
                weight.mul_(1.5)
    module.save_pretrained(tmp_path)
    saved = sl.load(tmp_path, device="cpu")
    same_numbers(sl.load(module), saved)
    assert differ(tiny.proven(family), saved)
