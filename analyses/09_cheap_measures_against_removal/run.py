"""Cheap measures of importance beside what removal really does: stream similarity for blocks, gradients for heads, MLPs and blocks.

python run.py [MODEL] [--prompts N] [--seed N] [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

import streamlens as sl
from streamlens.folder import output_folder

UNITS = ("head", "mlp", "block")


def measure(model, prompts: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """All tables and figures into `folder`; gives the rank agreements."""
    plain = prompts.drop(columns=["target", "versus"])
    removed = sl.ablate(model, plain, metrics=["loss", "kl"], progress=True)
    similar = sl.similarity(model, plain, progress=True)
    agreements = [sl.stats.rank_agreement(removed, similar, metric).assign(against="similarity") for metric in ("loss", "kl")]
    exact, estimates = [], []
    for unit in UNITS:
        for method, tables in (("zero", exact), ("gradient", estimates)):
            tables.append(sl.ablate(model, prompts, unit, method, metrics="logit_diff", progress=True))
        agreements.append(sl.stats.rank_agreement(exact[-1], estimates[-1], "logit_diff").assign(against="gradient"))
    tables = {"ablation": [removed, *exact, *estimates], "similarity": [similar]}
    for name, parts in tables.items():
        for number, df in enumerate(parts):
            sl.schema.write_parquet(df, folder / f"{name}-{number}.parquet")
    found = pd.concat(agreements, ignore_index=True)
    found.to_csv(folder / "agreement.csv", index=False)
    for measure in similar["measure"].unique():
        sl.figures.save(sl.figures.agreement(removed, similar, measure=measure), folder / f"{measure}", formats=("png",))
    sl.figures.save(sl.figures.agreement(exact[0], estimates[0], metric="logit_diff"), folder / "gradient_heads", formats=("png",))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="anything that sl.load opens")
    parser.add_argument("--prompts", type=int, default=12, help="how many of the bundled prompts, drawn with the seed (default 12)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="a folder that is not there yet")
    args = parser.parse_args(argv)
    model = sl.load(args.model)
    every, _ = sl.prompts.all_bundled(model.tokenizer, seed=args.seed)
    prompts = every.sample(min(args.prompts, len(every)), random_state=args.seed).reset_index(drop=True)
    with output_folder(args.out) as work, sl.figures.style("paper"):
        found = measure(model, prompts, work)
    print(found.drop(columns=["n_units", "n_prompts"]).round(2).to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
