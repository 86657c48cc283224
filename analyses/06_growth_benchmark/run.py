"""What measuring the stream costs, beside a plain forward pass without logits: both sides alternate in one process.

python run.py [norms] [heads] [reads] [wide] [frame] [--rounds N] [--threads N] [--clock wall|cpu]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from timing import MODEL, alternate, plain, ratio, report, tokens, wide

import streamlens as sl
from streamlens import frames
from streamlens.measure.growth import SITES, Column, Measured
from streamlens.prompts import parse

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def compare(what: str, asked: float, rounds: int, clock: Callable[[], float], model, **chosen: object) -> None:
    ids = tokens(model, 4, 256)
    sides = {"plain": lambda: plain(model, ids, logits=False), "norms": lambda: sl.norms(model, ids, **chosen)}
    seconds = alternate(sides, rounds, clock)
    report(f"{what}, 4 x 256 tokens / plain forward pass without logits", ratio(seconds, "norms", "plain"), asked)
    low, _, high = statistics.quantiles((a / b for a, b in zip(seconds["norms"], seconds["plain"], strict=True)), n=4)
    print(f"    quartiles {low:.3f}, {high:.3f}; {len(sides['norms']())} rows; plain {statistics.median(seconds['plain']):.2f} s")


def norms(rounds: int, clock: Callable[[], float], model=None) -> None:
    sites = without("norm", "head_out")
    compare("all measures of streams and sublayer writes", 1.10, rounds, clock, model or sl.load(MODEL), measures=None, sites=sites)


def heads(rounds: int, clock: Callable[[], float], model=None) -> None:
    compare("the same with every head's write", 1.3, rounds, clock, model or sl.load(MODEL), measures=None, sites=without("norm"))


def of_wide(rounds: int, clock: Callable[[], float]) -> None:
    """Both in a model of 2048 coordinates: a pass grows with their square, a measure with their number."""
    model = sl.load(wide())
    norms(max(3, rounds // 2), clock, model)
    heads(max(3, rounds // 2), clock, model)


def reads(rounds: int, clock: Callable[[], float]) -> None:
    """Beyond what is asked for: the scale and gain of every norm that a sublayer reads through."""
    compare("all of these and read norms", 1.3, rounds, clock, sl.load(MODEL), measures=None, sites=without())


def without(*sites: str) -> list[str]:
    """All sites but these and attention patterns, which need another attention."""
    return [site for site in SITES if site not in ("pattern", *sites)]


def frame(rounds: int, clock: Callable[[], float]) -> None:
    """A table of a million rows from arrays: 1,024 positions with 977 columns."""
    prompts = parse([list(range(256))] * 4, None, max_length=None, vocab_size=256)
    columns = tuple(Column("resid_pre", layer, -1, head, "l2") for layer in range(40) for head in range(25))[:977]
    prompt, position = np.repeat(np.arange(4), 256), np.tile(np.arange(256), 4)
    measured = Measured(prompt, position, columns, np.random.default_rng(0).random((1024, len(columns))))
    labels = frames.Labels(None, prompts)
    seconds = alternate({"frame": lambda: frames.norms([measured], labels)}, rounds, clock)["frame"]
    report(f"seconds for a table of {1024 * len(columns)} rows", statistics.median(seconds), 1.0)


PARTS = {"norms": norms, "heads": heads, "reads": reads, "wide": of_wide, "frame": frame}


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
