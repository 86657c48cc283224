"""A decoder as a folder: the same model back, and every way in which a folder can be wrong named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import streamlens as sl
from streamlens.decoder.folder import is_decoder_folder, load_decoder
from tests.decoder.configs import decoder, tokens
from tests.models.tiny import words


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_gives_the_model_back(tmp_path, tied):
    module = decoder(torch.float32, tied=tied, window=3, window_layers=(0, 2))
    module.save(tmp_path / "new" / "folder")
    again = load_decoder(tmp_path / "new" / "folder")
    assert again.config == module.config
    assert torch.equal(again(tokens()).logits, module(tokens()).logits)
    assert (again.unembed.weight is again.embed.weight) == tied
    assert not again.training
    assert [p.name for p in sorted((tmp_path / "new" / "folder").iterdir())] == ["decoder.json", "model.safetensors"]


def test_load_opens_a_folder_with_its_tokenizer(tmp_path):
    decoder(torch.float32).save(tmp_path, words())
    model = sl.load(tmp_path)
    assert is_decoder_folder(tmp_path)
    assert model.name == tmp_path.name
    assert model.tokenizer("the cat").input_ids == [1, 2]
    df = sl.attribute(model, "the cat sat", target=" on")
    assert df.attrs["additivity_error"] <= 5e-6


def test_dtype_of_the_file_unless_another_is_asked_for(tmp_path):
    decoder(torch.float32).half().save(tmp_path)
    assert load_decoder(tmp_path).embed.weight.dtype == torch.float16
    assert sl.load(tmp_path, dtype="float64").dtype == torch.float64


@pytest.fixture
def folder(tmp_path):
    return decoder(torch.float32).save(tmp_path)


def rewrite(folder, **changes):
    values = json.loads((folder / "decoder.json").read_text())
    values = {k: v for k, v in (values | changes).items() if v is not ...}
    (folder / "decoder.json").write_text(json.dumps(values))


BROKEN = [
    (lambda f: rewrite(f, n_head=4), r"decoder.json is no config of a decoder: .*got 'n_head'"),
    (lambda f: rewrite(f, d_model=...), "d_model is missing"),
    (lambda f: rewrite(f, positions="rotary"), "positions must be one of"),
    (lambda f: rewrite(f, rope_scaling="yarn", positions="none"), "rope_scaling 'yarn' needs positions 'rope'; got positions 'none'"),
    (lambda f: rewrite(f, qk_norm="head"), "lacks the weight blocks.0.attn.k_norm.weight and 5 more"),
    (lambda f: rewrite(f, mlp="gelu", d_mlp=64), "holds an unknown weight, blocks.0.mlp.gate_proj.weight and 2 more"),
    (lambda f: rewrite(f, d_mlp=16), r"blocks.0.mlp.gate_proj.weight of shape \[64, 24\], where its config needs \[16, 24\]"),
    (lambda f: (f / "model.safetensors").write_bytes(b"nothing"), "cannot read the weights"),
    (lambda f: (f / "model.safetensors").unlink(), "cannot read the weights"),
]


@pytest.mark.parametrize(("breaks", "message"), BROKEN, ids=[message[:30] for _, message in BROKEN])
def test_what_is_wrong_with_a_folder_is_named(folder, breaks, message):
    breaks(folder)
    with pytest.raises(sl.errors.SourceError, match=message) as caught:
        sl.load(folder)
    assert "\n" not in str(caught.value)


def test_a_lost_weight_is_named(folder):
    state = load_file(folder / "model.safetensors")
    del state["blocks.1.norm2.weight"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(sl.errors.SourceError, match=r"lacks the weight blocks.1.norm2.weight$"):
        sl.load(folder)
