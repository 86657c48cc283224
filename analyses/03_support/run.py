"""Every variant of the tests' zoo: what streamlens serves, how exactly, and what TransformerLens makes of the same tiny model.

python run.py [VARIANT ...] [--out DIR] [--fresh]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import pandas as pd
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from theirs import Probe, judge  # noqa: E402

import streamlens as sl  # noqa: E402
from streamlens.errors import UnsupportedModelError  # noqa: E402
from tests import zoo  # noqa: E402

SECONDS = 30
"""Longer than this neither side may take over one variant."""

COUNTS = ("layers", "attentions", "heads", "rows")
ERRORS = ("sum_error", "intervention_error", "removal_error")

PROBE = Probe(torch.randperm(90, generator=torch.Generator().manual_seed(0))[:48].reshape(2, 24) + 5, target=17, versus=41)


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds."""

    def stop(*_):
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ours(module: torch.nn.Module) -> tuple[sl.Model | None, pd.DataFrame | None, dict[str, object]]:
    """The proven model, its rows for the probe, and what the table says of it; neither where there are no rows."""
    model = None
    try:
        with at_most(SECONDS):
            model = sl.load(module)
            rows = sl.attribute(model, PROBE.ids, target=PROBE.target, versus=PROBE.versus, positions="all", check="full")
    except UnsupportedModelError as error:
        if model is None:
            return None, None, {"support": "refused", "reason": str(error)}
        return None, None, {"support": "blocks", "reason": str(error), "layers": model.n_layers, "removal_error": model.proof.replay}
    writes = [write for _, write in model.anatomy.writes() if write.kind == "attn"]
    with_heads = sum(bool(write.n_heads) for write in writes)
    facts = {
        "support": "heads" if writes and with_heads == len(writes) else "no heads",
        "reason": "" if writes and with_heads == len(writes) else f"{len(writes) - with_heads} of {len(writes)} attentions are one row",
        "layers": model.n_layers,
        "attentions": len(writes),
        "heads": sum(write.n_heads for write in writes),
        "rows": len(rows) // PROBE.ids.numel(),
        "sum_error": rows.attrs["additivity_error"],
        "intervention_error": model.proof.interventions,
        "removal_error": model.proof.replay,
    }
    if not writes:
        facts["reason"] = "no attention"
    return model, rows, facts


def measure(name: str) -> dict[str, object]:
    """One row of the table."""
    module, start = zoo.build(name), time.monotonic()
    head = {"variant": name, "family": module.config.model_type, "architecture": type(module).__name__}
    model, rows, facts = ours(module)
    with at_most(SECONDS):
        verdict = judge(module, model, rows, PROBE)
    theirs = {f"theirs_{key}" if key != "verdict" else "theirs": value for key, value in asdict(verdict).items()}
    return head | facts | theirs | {"seconds": time.monotonic() - start}


def collect(names: list[str], folder: Path) -> pd.DataFrame:
    """One file a finished variant, so that an interrupted run is taken up where it stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names, 1):
        path = folder / f"{name}.json"
        if path.is_file():
            continue
        row = measure(name)
        unfinished = path.with_suffix(".partial")
        unfinished.write_text(json.dumps(row))
        os.replace(unfinished, path)
        print(f"{number}/{len(names)} {name}: {row['support']}; TransformerLens {row['theirs']} ({row['seconds']:.1f} s)", file=sys.stderr)
    rows = [json.loads((folder / f"{name}.json").read_text()) for name in names]
    numbers = {**dict.fromkeys(COUNTS, 0), **dict.fromkeys(ERRORS, float("nan"))}  # of a refused model
    df = pd.DataFrame([numbers | row for row in rows])
    df.attrs = {package: metadata.version(package).split("+")[0] for package in ("transformers", "transformer-lens", "torch")}
    return df


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help="of tests/zoo.py; default: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="resumed here (default: results)")
    parser.add_argument("--fresh", action="store_true", help="measure again what an earlier run finished")
    args = parser.parse_args(argv)
    names = args.variants or list(zoo.VARIANTS)
    if unknown := sorted(set(names) - set(zoo.VARIANTS)):
        print(f"error: VARIANT must be a row of tests/zoo.py; got {', '.join(unknown)}", file=sys.stderr)
        return 2
    if args.fresh:
        shutil.rmtree(args.out / "rows", ignore_errors=True)
    df = collect(names, args.out / "rows")
    df.to_parquet(args.out / "support.parquet", index=False)
    print(df.groupby(["support", "theirs"]).size().unstack(fill_value=0).to_string())
    return 0


if __name__ == "__main__":
    sys.exit(main())
