"""Removal and norms over the bundled prompts for any models: one Parquet a model and table, finished models skipped.

python run.py MODEL [MODEL ...] [--out DIR] [--seed N]
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path

import pandas as pd

import streamlens as sl
from streamlens.errors import StreamLensError
from streamlens.folder import output_folder

UNITS = ("block", "attn", "mlp")
EVERYWHERE = ["loss", "kl", "top1_agree"]


def slug(source: str) -> str:
    """A folder name for a model: readable, and different for two paths that end alike."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", source).strip("-.")
    return name if name == source else f"{name[-60:]}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def removal(model, prompts: pd.DataFrame) -> pd.DataFrame:
    """Each block, attention and MLP removed: what happens at every position, and to the answer at the last."""
    plain = prompts.drop(columns=["target", "versus"])
    parts = []
    for unit in UNITS:
        parts.append(sl.ablate(model, plain, unit=unit, positions="all", metrics=EVERYWHERE, progress=True))
        parts.append(sl.ablate(model, prompts, unit=unit, positions="last", metrics=["logit_diff"], progress=True))
    return sl.schema.concat(parts, "ablation")


def profile(source: str, folder: Path, seed: int) -> None:
    """Measure one model and write ablation.parquet, norms.parquet and card.parquet into `folder`."""
    model = sl.load(source)
    prompts, left_out = sl.prompts.all_bundled(model.tokenizer, seed=seed)
    print(f"{source}: {len(prompts)} prompts, {left_out} left out", file=sys.stderr)
    sl.schema.write_parquet(removal(model, prompts), folder / "ablation.parquet")
    sl.schema.write_parquet(sl.norms(model, prompts, progress=True), folder / "norms.parquet")
    sl.schema.write_parquet(sl.card(model), folder / "card.parquet")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL", help="anything that sl.load opens")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="results are resumed here (default: results)")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts (default 0)")
    args = parser.parse_args(argv)
    failed = 0
    for source in args.models:
        folder = args.out / slug(source)
        if folder.is_dir():
            print(f"{source}: finished, skipped", file=sys.stderr)
            continue
        try:
            with output_folder(folder) as work:
                profile(source, work, args.seed)
        except StreamLensError as error:
            print(f"{source}: {error}", file=sys.stderr)
            failed += 1
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
