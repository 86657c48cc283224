"""Tiny random models and a tokenizer of six words, for tests that only need something to open."""

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["<unk>", "the", "cat", "sat", "on", "mat"]


def llama(**changes):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 12,
    }
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{"vocab_size": 12} | sizes | changes, bos_token_id=1, eos_token_id=2)
    ).eval()


def words():
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
