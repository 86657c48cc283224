"""Ratios of streamlens' calls to a plain forward pass and to TransformerLens, both sides alternating in one process.

python run.py [attribution] [source] [neuron] [expert] [memory] [removal] [startup] [--rounds N] [--threads N]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from timing import MODEL, alternate, peak, peaks_of, plain, ratio, report, tokens

import streamlens as sl
from streamlens.measure.ablation import Plan, sweep_by_hooks
from streamlens.measure.units import variants
from streamlens.prompts import NO_READOUTS, TokenBatch

UNEMBEDDINGS = 6
"""Timed together: a single one is too short beside all the rest of a round."""

EVERYWHERE = {"target": "next", "positions": "all"}


def attribution(rounds: int) -> None:
    model = sl.load(MODEL)
    ids = tokens(model, 4, 256)
    sides = {
        "plain": lambda: plain(model, ids),
        "without logits": lambda: plain(model, ids, logits=False),
        "attribute": lambda: sl.attribute(model, ids, **EVERYWHERE),
    }
    seconds = alternate(sides, rounds)
    rows = len(sides["attribute"]())
    report("attribution of 4 x 256 tokens, all positions / plain forward pass with logits", ratio(seconds, "attribute", "plain"), 1.00)
    median, bare = statistics.median(seconds["plain"]), ratio(seconds, "without logits", "plain")
    print(f"    {rows} rows; plain {median:.2f} s; without logits {bare:.2f} x")
    del sides
    transformer_lens(model, ids, rounds)


def transformer_lens(model, ids: torch.Tensor, rounds: int) -> None:
    """TransformerLens' own attribution of all heads at all positions, on a deep copy in compatibility mode."""
    from transformer_lens.tools.analysis import direct_logit_attribution

    bridge = model.bridge(copy=True)
    bridge.enable_compatibility_mode()
    following = ids.roll(-1, 1)  # one answer a position, as target="next"

    def theirs() -> None:
        with torch.no_grad():
            direct_logit_attribution(bridge, ids, answer_tokens=following, unit="head", pos=None)

    sides = {"attribute": lambda: sl.attribute(model, ids, **EVERYWHERE), "theirs": theirs}
    seconds = alternate(sides, max(3, rounds // 2))
    report("TransformerLens' attribution of the same / ours", ratio(seconds, "theirs", "attribute"), 3.5, at_least=True)


def against_plain(what: str, asked: float, model, ids: torch.Tensor, rounds: int, **how: object) -> None:
    """One way of attribution beside a plain forward pass with logits."""
    sides = {"plain": lambda: plain(model, ids), "attribute": lambda: sl.attribute(model, ids, **how)}
    seconds = alternate(sides, rounds)
    report(f"{what} / plain forward pass with logits", ratio(seconds, "attribute", "plain"), asked)
    print(f"    {len(sides['attribute']())} rows; plain {statistics.median(seconds['plain']):.2f} s")


def source(rounds: int) -> None:
    model = sl.load(MODEL)
    against_plain("heads by source at one position of 256 tokens", 1.3, model, tokens(model, 1, 256), rounds, target=5, by="source")


def neuron(rounds: int) -> None:
    model, rounds = sl.load(MODEL), max(3, rounds // 2)
    against_plain("MLPs by neuron, 4 x 256 tokens, all positions", 2.0, model, tokens(model, 4, 256), rounds, **EVERYWHERE, by="neuron")
    peaks = peaks_of(__file__, ("plain", "neuron"), rounds)
    report("peak memory of the same / plain forward pass", peaks["neuron"] / peaks["plain"], 1.5)


def expert(rounds: int) -> None:
    model, rounds = sl.load(mixtral()), max(3, rounds // 2)
    against_plain("mixtures by expert, 4 x 256 tokens, all positions", 2.2, model, tokens(model, 4, 256), rounds, **EVERYWHERE, by="expert")


def lens(rounds: int) -> None:
    model = sl.load(MODEL)
    ids, n_layers = tokens(model, 4, 256), model.n_layers
    hidden = torch.randn(ids.numel(), model.anatomy.d_model, generator=torch.Generator().manual_seed(0))
    sides = {
        "plain": lambda: plain(model, ids),
        "unembeddings": torch.no_grad()(lambda: [model.module.lm_head(hidden).shape for _ in range(UNEMBEDDINGS)]),
        "lens": lambda: sl.lens(model, ids),
    }
    seconds = alternate(sides, max(3, rounds // 2))
    once = [u / UNEMBEDDINGS for u in seconds["unembeddings"]]
    budget = [n_layers * u + p for u, p in zip(once, seconds["plain"], strict=True)]
    measured = statistics.median(one / most for one, most in zip(seconds["lens"], budget, strict=True))
    report(f"lens of every layer, 4 x 256 tokens / ({n_layers} unembeddings + a forward pass with logits)", measured, 1.0)
    print(f"    lens {statistics.median(seconds['lens']):.1f} s; unembedding {statistics.median(once):.2f} s")


def mixtral():
    """A random Mixtral of middle size: its weights change no timing."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 8, "vocab_size": 32000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, max_position_embeddings=1024)).eval()


def removal(rounds: int) -> None:
    model = sl.load(MODEL)
    ids = tokens(model, 4, 128)
    metrics = ["loss", "kl", "top1_agree"]
    batch = TokenBatch(np.arange(len(ids)), ids, torch.ones_like(ids, dtype=torch.bool))
    places = np.repeat(np.arange(4), 128), np.tile(np.arange(128), 4)
    plan = Plan(variants(model.anatomy, "block", range(model.n_layers)), tuple(metrics))
    sides = {
        "hooked": lambda: sweep_by_hooks(model.module, model.anatomy, batch, plan, places, NO_READOUTS),
        "ablate": lambda: sl.ablate(model, ids, unit="block", metrics=metrics, positions="all"),
    }
    seconds = alternate(sides, max(3, rounds // 2))
    report("removal of every block, 4 x 128 tokens, all positions / hooked forward passes", ratio(seconds, "ablate", "hooked"), 0.70)
    print(f"    hooked {statistics.median(seconds['hooked']):.1f} s, ablate {statistics.median(seconds['ablate']):.1f} s")


def memory(rounds: int) -> None:
    median = peaks_of(__file__, ("plain", "attribute"), max(3, rounds // 2))
    report("peak memory of attribution of 4 x 256 tokens / plain forward pass", median["attribute"] / median["plain"], 1.2)


def memory_of(side: str) -> None:
    """Print the peak resident set of one call less what the loaded, warmed-up process holds, in KiB."""
    model = sl.load(MODEL)
    calls = {
        "plain": lambda ids: plain(model, ids),
        "attribute": lambda ids: sl.attribute(model, ids, **EVERYWHERE),
        "neuron": lambda ids: sl.attribute(model, ids, **EVERYWHERE, by="neuron"),
    }
    calls[side](tokens(model, 1, 16))
    ids = tokens(model, 4, 256)
    print(peak(lambda: calls[side](ids)))


def startup(rounds: int) -> None:
    seconds = []
    for _ in range(max(5, rounds)):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import streamlens"], check=True)
        bare = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        seconds.append((bare - start) - (time.perf_counter() - bare))
    report("import streamlens, seconds beyond a bare interpreter", statistics.median(seconds), 0.2)


PARTS = {
    "startup": startup,
    "attribution": attribution,
    "source": source,
    "neuron": neuron,
    "expert": expert,
    "lens": lens,
    "memory": memory,
    "removal": removal,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-of", choices=("plain", "attribute", "neuron"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory_of:
        memory_of(args.memory_of)
        return
    for name in args.parts or PARTS:
        PARTS[name](args.rounds)


if __name__ == "__main__":
    main()
