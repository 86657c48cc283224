"""Ratios of ablation sweeps to plainly hooked forward passes with the same metrics, both sides alternating in one process.

python run.py [blocks] [answers] [heads] [spans] [memory] [--rounds N] [--threads N] [--cpu]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from timing import MODEL, alternate, peak, peaks_of, plain, ratio, report, tokens

import streamlens as sl
from streamlens.measure import units
from streamlens.measure.ablation import Plan, sweep_batch, sweep_by_hooks
from streamlens.prompts import NO_READOUTS, Readouts, TokenBatch


class Task:
    """One sweep over random ordinary tokens; timing does not depend on which."""

    def __init__(self, model: sl.Model, batch: int, pos: int, changes: tuple, wanted: tuple[str, ...], last: bool = False):
        ids = tokens(model, batch, pos)
        self.batch = TokenBatch(np.arange(batch), ids, torch.ones_like(ids, dtype=torch.bool))
        self.model, self.plan = model, Plan(changes, wanted, max_tokens=2048, n_layers=model.n_layers)
        rows = np.arange(batch), np.full(batch, pos - 1)
        every = np.repeat(np.arange(batch), pos), np.tile(np.arange(pos), batch)
        self.places = rows if last else every
        target = np.arange(batch, dtype=np.int64)
        self.readouts = Readouts(*rows, target, target + 100) if "logit_diff" in wanted else NO_READOUTS

    def of(self, changes: tuple) -> Task:
        """The same with other changes."""
        other = copy(self)
        other.plan = replace(self.plan, changes=changes)
        return other

    def ours(self):
        return sweep_batch(self.model.module, self.model.anatomy, self.batch, self.plan, self.places, self.readouts)

    def hooked(self):
        return sweep_by_hooks(self.model.module, self.model.anatomy, self.batch, self.plan, self.places, self.readouts)


def tasks(model: sl.Model, full: bool = False) -> dict[str, tuple[Task, float]]:
    """Each sweep with the ratio that it must stay under."""
    layers, usual = range(model.n_layers), ("loss", "kl", "top1_agree")
    blocks, heads = units.variants(model.anatomy, "block", layers), units.variants(model.anatomy, "head", layers)
    spans = units.variants(model.anatomy, "block", layers, range(1, model.n_layers + 1))
    if not full:
        chosen = np.sort(np.random.default_rng(0).choice(len(spans), size=48, replace=False))
        spans = tuple(spans[i] for i in chosen)
    return {
        "blocks": (Task(model, 4, 128, blocks, usual), 0.65),
        "answers": (Task(model, 4, 128, blocks, usual, last=True), 0.50),
        "heads": (Task(model, 8, 15, heads, ("logit_diff",), last=True), 0.40),
        "spans": (Task(model, 2, 128, spans, ("loss",)), 0.50),
    }


def compare(name: str, rounds: int, clock: Callable[[], float]) -> None:
    task, asked = tasks(sl.load(MODEL))[name]
    found: dict[str, list[np.ndarray]] = {}
    sides = {side: lambda side=side: found.update({side: _values(getattr(task, side)())}) for side in ("ours", "hooked")}
    short = task.of(task.plan.changes[:: max(1, len(task.plan.changes) // 3)])
    seconds = alternate(sides, rounds, clock, warm_up=(short.ours, short.hooked))
    gaps = (abs(a - b) for a, b in zip(found["ours"], found["hooked"], strict=True))
    gap = max(np.nanmax(g) for g in gaps if not np.isnan(g).all())  # a last token has no loss
    report(f"{name}: {len(task.plan.changes)} variants / hooked forward passes", ratio(seconds, "ours", "hooked"), asked)
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["hooked"], strict=True)]
    median = {side: round(statistics.median(taken), 2) for side, taken in seconds.items()}
    print(f"    seconds {median}; ratios {min(ratios):.3f} to {max(ratios):.3f}; largest difference of a metric {gap:.1e}", flush=True)


def _values(removal) -> list[np.ndarray]:
    tables = chain(removal.at_position.values(), removal.at_target.values())
    return [changed for _, changed in tables]


def memory(rounds: int) -> None:
    model, peaks = sl.load(MODEL), peaks_of(__file__, ("plain", "sweep"), rounds)
    kept = model.n_layers * 4 * 128 * model.anatomy.d_model * 4 // 2**20
    report("memory: (peak of the block sweep - kept streams) / plain forward pass", (peaks["sweep"] - kept) / peaks["plain"], 1.5)
    print(f"    kept streams {kept} MiB")


def memory_of(side: str) -> None:
    """Print the peak of one call of the loaded, warmed-up process, in KiB."""
    model = sl.load(MODEL)
    task, _ = tasks(model)["blocks"]
    plain(model, task.batch.ids[:1, :16])
    print(peak(task.ours if side == "sweep" else lambda: plain(model, task.batch.ids)))


def main() -> None:
    names = ("blocks", "answers", "heads", "spans")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*names, "memory", "all-spans", []], help="default: all but all-spans")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="processor time instead of wall-clock time, for a busy machine")
    parser.add_argument("--memory-of", choices=("plain", "sweep"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory_of:
        return memory_of(args.memory_of)
    for name in args.parts or (*names, "memory"):
        if name == "memory":
            memory(args.rounds)
        elif name == "all-spans":
            start, task = time.perf_counter(), tasks(sl.load(MODEL), full=True)["spans"][0]
            task.ours()
            print(f"all {len(task.plan.changes)} spans: {time.perf_counter() - start:.1f} s")
        else:
            compare(name, args.rounds, time.process_time if args.cpu else time.perf_counter)


if __name__ == "__main__":
    main()
