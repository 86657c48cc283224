"""A model without blocks: its logits, its cache, its weights, and its way to disk and back."""

import pytest
import torch
import transformers

import streamlens as sl
from streamlens.errors import InputError, UnsupportedModelError
from tests import zoo
from tests.models import tiny

IDS = torch.tensor([[5, 9, 3, 22, 41, 17, 8]])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "olmo2", "bloom", "mixtral", "neox"])
@pytest.mark.parametrize("removed", [[1], [0, 2]])
def test_it_is_the_model_with_the_blocks_removed(family, removed, tmp_path):
    model = tiny.proven(family)
    new = sl.without_blocks(model, removed)
    df = sl.ablate(model, IDS, layers=removed, span=1, target=11, positions="all", metrics="target_logit")
    assert type(new) is type(model.module)
    with torch.no_grad():
        logits = new(IDS, use_cache=False).logits
        if len(removed) == 1:
            assert abs(df.ablated.to_numpy() - logits[0, :, 11].double().numpy()).max() < 1e-5
    mine, theirs = (new.get_input_embeddings().weight, model.module.get_input_embeddings().weight)
    assert mine.data_ptr() == theirs.data_ptr()
    new.save_pretrained(tmp_path)
    again = type(new).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(IDS, use_cache=False).logits, logits)
    # With a cache numbered anew, token by token is as good as all at once.
    generated = new.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    for n in range(7, 12):
        with torch.no_grad():
            following = new(generated[:, :n], use_cache=False).logits[0, -1].argmax()
        assert generated[0, n] == following
    assert sl.load(new).n_layers == model.n_layers - len(removed)


def test_the_model_stays_as_it_was():
    model = sl.load(tiny.model("gpt2"))
    before = model.module.config.to_dict()
    with torch.no_grad():
        logits = model.module(IDS, use_cache=False).logits
        sl.without_blocks(model, 1)
        assert torch.equal(model.module(IDS, use_cache=False).logits, logits)
    assert model.module.config.to_dict() == before


def test_lists_of_layers_in_the_config_follow():
    module = tiny.model("gemma2")
    new = sl.without_blocks(sl.load(module), 0)
    assert new.config.layer_types == ["full_attention", "sliding_attention"]
    mixed = sl.without_blocks(sl.load(zoo.build("qwen2_moe_mixed")), 0)
    assert mixed.config.mlp_only_layers == [0]


def test_what_cannot_be_said_by_a_config_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"cannot be made without blocks|its config makes another model"):
        sl.without_blocks(sl.load(zoo.build("jamba")), 0)  # every second layer attends, counted from the first
    with pytest.raises(UnsupportedModelError, match="depends on the number of layers"):
        sl.without_blocks(sl.load(zoo.build("gemma4")), 0)
    with pytest.raises(UnsupportedModelError, match="among those that are left is not what its config says"):
        sl.without_blocks(sl.load(zoo.build("xlstm")), 1)
    with pytest.raises(InputError, match="layers must leave a block of 3; got all of them"):
        sl.without_blocks(tiny.proven("llama"), None)


def test_the_bundled_model_generates_without_two_blocks(smollm2):
    new = sl.without_blocks(smollm2, [14, 15])
    assert isinstance(new, transformers.PreTrainedModel)
    ids = smollm2.tokenizer("The Eiffel Tower is in the city of", return_tensors="pt").input_ids
    cached = new.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    plain = new.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, use_cache=False)
    assert torch.equal(cached, plain)
    assert sum(p.data_ptr() in {q.data_ptr() for q in smollm2.module.parameters()} for p in new.parameters()) == len(list(new.parameters()))
