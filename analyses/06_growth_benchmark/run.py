"""What measuring the stream costs, beside a plain forward pass without logits: both sides alternate in one process.

python run.py [norms] [heads] [frame] [--rounds N] [--threads N] [--clock wall|cpu]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

import streamlens as sl
from streamlens import frames
from streamlens.measure.growth import SITES, Column, Measured
from streamlens.prompts import parse

MODEL = "smollm2-135m"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def tokens(model, batch: int, pos: int) -> torch.Tensor:
    """Random ordinary tokens: timing does not depend on which."""
    return torch.randint(1000, model.anatomy.n_vocab, (batch, pos), generator=torch.Generator().manual_seed(0))


def alternate(sides: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each side in each round, after one warm-up of each."""
    for side in sides.values():
        side()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            start = clock()
            side()
            seconds[name].append(clock() - start)
    return seconds


@torch.no_grad()
def plain(model, ids: torch.Tensor) -> torch.Tensor:
    """A plain forward pass of transformers without logits (sdpa, no cache)."""
    return model.module.get_decoder()(input_ids=ids, use_cache=False)[0]


def compare(what: str, asked: float, rounds: int, clock: Callable[[], float], **chosen: object) -> None:
    model = sl.load(MODEL)
    ids = tokens(model, 4, 256)
    sides = {"plain": lambda: plain(model, ids), "norms": lambda: sl.norms(model, ids, **chosen)}
    seconds = alternate(sides, rounds, clock)
    ratio = statistics.median(a / b for a, b in zip(seconds["norms"], seconds["plain"], strict=True))
    report(f"{what}, 4 x 256 tokens / plain forward pass without logits", ratio, asked)
    print(f"    {len(sides['norms']())} rows; plain {statistics.median(seconds['plain']):.2f} s")


def norms(rounds: int, clock: Callable[[], float]) -> None:
    compare("all measures of streams, writes and read norms", 1.10, rounds, clock, measures=None)


def heads(rounds: int, clock: Callable[[], float]) -> None:
    every = [site for site in SITES if site != "pattern"]
    compare("the same with every head's write", 1.3, rounds, clock, measures=None, sites=every)


def frame(rounds: int, clock: Callable[[], float]) -> None:
    """A table of a million rows from arrays: 1,024 positions with 977 columns."""
    prompts = parse([list(range(256))] * 4, None, max_length=None, vocab_size=256)
    columns = tuple(Column("resid_pre", layer, -1, head, "l2") for layer in range(40) for head in range(25))[:977]
    prompt, position = np.repeat(np.arange(4), 256), np.tile(np.arange(256), 4)
    measured = Measured(prompt, position, columns, np.random.default_rng(0).random((1024, len(columns))))
    labels = frames.Labels(None, prompts)
    seconds = alternate({"frame": lambda: frames.norms([measured], labels)}, rounds, clock)["frame"]
    report(f"seconds for a table of {1024 * len(columns)} rows", statistics.median(seconds), 1.0)


def report(what: str, measured: float, asked: float) -> None:
    print(f"{measured:6.3f}  (at most {asked:.2f}: {'met' if measured <= asked else 'MISSED'})  {what}", flush=True)


PARTS = {"norms": norms, "heads": heads, "frame": frame}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in args.parts or PARTS:
        PARTS[name](args.rounds, CLOCKS[args.clock])


if __name__ == "__main__":
    main()
