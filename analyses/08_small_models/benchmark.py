"""Tokens a second of training `bytes-4l`, against transformers' Llama of the same sizes in the same loop.

python benchmark.py [--rounds N] [--steps N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

import streamlens as sl
from streamlens.decoder.data import Text, python_text
from streamlens.decoder.model import Decoder
from streamlens.decoder.train import TrainConfig, train
from streamlens.models.native import to_transformers

AT_LEAST = 0.8


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8, help="in each round, on either side")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    config = sl.load("bytes-4l", device="cpu").module.config
    ours = Decoder(config)
    sides = {"streamlens": ours, "transformers": to_transformers(ours, "llama")}
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in sides.values()]
    data, training = Text(python_text(), length=256), TrainConfig(steps=args.steps, batch=8, look_every=0)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds + 1):
        for name, model in sides.items():
            start = time.process_time()
            train(model, data, training)
            seconds[name].append(time.process_time() - start)
    speed = {name: args.steps * 8 * 256 / statistics.median(times[1:]) for name, times in seconds.items()}  # the first round warms up
    ratio = statistics.median(b / a for a, b in zip(*(times[1:] for times in seconds.values()), strict=True))
    print(f"weights: {sizes[0]:,} and {sizes[1]:,}; tokens a CPU second: {speed['streamlens']:.0f} and {speed['transformers']:.0f}")
    met = "met" if ratio >= AT_LEAST else "MISSED"
    print(f"ours / transformers', median of {args.rounds} rounds: {ratio:.2f} (at least {AT_LEAST}): {met}")
    return 0 if ratio >= AT_LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
