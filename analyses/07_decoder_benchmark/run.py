"""Ratios of the native decoder to an equally sized Llama of transformers with the same weights, both sides alternating in one process.

python run.py [forward] [generate] [hooks] [--rounds N]

Processor time of one thread, so that what else runs on the machine weighs little; the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import transformers

import streamlens as sl
from streamlens.models.native import to_native

SIZES = {  # d_model, layers, heads, heads with keys, d_mlp, vocabulary, batch, tokens
    "as bytes-4l, 8 x 128 tokens": (128, 4, 4, 2, 344, 257, 8, 128),
    "d_model 256, 8 x 256 tokens": (256, 4, 8, 4, 704, 257, 8, 256),
    "d_model 256, no shared keys, 4 x 256 tokens": (256, 4, 8, 8, 704, 257, 4, 256),
    "8 blocks of SmolLM2-135M, 1 x 256 tokens": (576, 8, 9, 3, 1536, 4096, 1, 256),
    "d_model 128, 1 x 16 tokens": (128, 4, 4, 4, 344, 257, 1, 16),
}


def pair(size: tuple[int, ...]) -> tuple[transformers.PreTrainedModel, sl.Decoder, torch.Tensor]:
    d_model, layers, heads, kv_heads, d_mlp, vocabulary, batch, tokens = size
    config = transformers.LlamaConfig(
        hidden_size=d_model,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=d_mlp,
        vocab_size=vocabulary,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    return theirs, to_native(theirs), torch.randint(0, vocabulary, (batch, tokens))


def ratio(one: Callable[[], object], other: Callable[[], object], rounds: int, repeats: int) -> float:
    """Processor time of `one` over that of `other`: the median over rounds in which each runs `repeats` times in turn."""
    found = []
    for number in range(rounds + 1):
        seconds = []
        for side in (one, other):
            start = time.process_time()
            for _ in range(repeats):
                side()
            seconds.append(time.process_time() - start)
        if number:  # the first warms up
            found.append(seconds[0] / seconds[1])
    return statistics.median(found)


@torch.no_grad()
def forward(rounds: int) -> None:
    for name, size in SIZES.items():
        report(f"forward pass, {name} / transformers' Llama", _forward(*pair(size), rounds), 1.05)


def _forward(theirs: torch.nn.Module, ours: sl.Decoder, ids: torch.Tensor, rounds: int) -> float:
    repeats = max(1, 512 // ids.numel())
    return ratio(lambda: ours(ids), lambda: theirs(input_ids=ids, use_cache=False), rounds, repeats)


@torch.no_grad()
def generate(rounds: int) -> None:
    theirs, ours, ids = pair(SIZES["as bytes-4l, 8 x 128 tokens"])
    ids = ids[:1, :16]
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
    found = ratio(lambda: ours.generate(ids, 64), lambda: theirs.generate(ids, **options), rounds, 1)
    report("64 tokens generated greedily with a cache / transformers' generate", found, 1.0)


@torch.no_grad()
def hooks(rounds: int) -> None:
    for name in ("as bytes-4l, 8 x 128 tokens", "d_model 128, 1 x 16 tokens"):
        _, ours, ids = pair(SIZES[name])
        report(f"empty places for hooks / forward pass, {name}", _places(ours, ids, rounds), 0.02)


def _places(decoder: sl.Decoder, ids: torch.Tensor, rounds: int) -> float:
    """As many calls of an empty place as a pass makes, over the pass."""
    n_calls = len(decoder.hooked().run_with_cache(ids)[1])
    part, repeats = decoder.blocks[0], 50

    def calls() -> None:
        for _ in range(n_calls * repeats):
            part.hook_resid_pre(ids)

    return ratio(calls, lambda: decoder(ids), rounds, 1) / repeats


def report(what: str, value: float, limit: float) -> None:
    print(f"{value:6.3f}  {what} (limit {limit:g})", flush=True)


PARTS = {"forward": forward, "generate": generate, "hooks": hooks}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for part in arguments.parts or PARTS:
        PARTS[part](arguments.rounds)
