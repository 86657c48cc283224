"""The figures of the removal profile, from the Parquet files alone: no model is opened.

python figures.py [DIR]
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

import streamlens as sl
from streamlens.errors import InputError, StreamLensError

METRICS = ("loss", "kl", "logit_diff")


def read(results: Path, table: str) -> pd.DataFrame:
    """One table of all finished models, with a column `model` where there are several."""
    paths = sorted(path for path in results.glob(f"*/{table}.parquet") if not path.parent.name.startswith("."))
    if not paths:
        raise InputError(f"results must be a folder with */{table}.parquet, which run.py writes; got {str(results)!r}")
    return sl.schema.concat([sl.schema.read_parquet(path, table) for path in paths], table)


def draw(results: Path) -> list[Path]:
    """Removal curves (a figure a metric and model), all models' block removal and norm growth together. Gives the paths."""
    ablation, norms = read(results, "ablation"), read(results, "norms")
    several = "model" in ablation.columns
    by = "model" if several else None
    written = []
    with sl.figures.style("paper", columns=2):
        for metric in METRICS:
            blocks = ablation[(ablation.unit == "block") & (ablation.metric == metric)]
            written += sl.figures.save(sl.figures.removal(blocks, metric=metric, by=by), results / f"removal_{metric}")
            for name, rows in ablation.groupby("model", observed=True) if several else []:
                written += sl.figures.save(sl.figures.removal(rows, metric=metric), results / f"removal_{metric}_{name}")
        written += sl.figures.save(sl.figures.growth(norms, by=by), results / "growth")
    return written


def main(argv: list[str]) -> int:
    results = Path(argv[0]) if argv else Path(__file__).parent / "results"
    try:
        paths = draw(results)
        print(sl.growth_rate(read(results, "norms")).to_string(index=False))
    except StreamLensError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, paths)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
