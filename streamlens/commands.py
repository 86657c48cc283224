"""What each command of the command line does once its arguments are read."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

import streamlens as sl
from streamlens import figures, promptfile, text
from streamlens.errors import InputError
from streamlens.folder import output_folder
from streamlens.schema import write_parquet

WATERFALLS = 8  # figures a call draws at most, one a logit
Given = list[str] | pd.DataFrame | None  # prompts as the command line gives them
TABLE_OF = {"attribute": "attribution", "ablate": "ablation"}  # the others have their command's name


def run(args: argparse.Namespace) -> None:
    """Run the command of `args`: results to `--out`, or as readable text to stdout. Raises StreamLensError for bad input."""
    with _notices(args.quiet):
        prompts = _prompts(args)  # before the model, which takes longer to open than a file to be found missing
        if args.command == "report":
            _report(args, prompts)
        else:
            _measure(args, prompts)


def _measure(args: argparse.Namespace, prompts: Given) -> None:
    with output_folder(args.out, args.overwrite) if args.out else nullcontext() as folder:
        model = _load(args)
        frame = MEASURES[args.command](model, prompts, args)
        if folder is None:
            print(frame.to_csv(index=False) if args.csv else TEXTS[args.command](frame, args), end="" if args.csv else "\n")
        else:
            save(frame, folder, TABLE_OF.get(args.command, args.command), csv=args.csv)
            if args.command in FIGURES:
                with figures.style("paper", columns=2):
                    FIGURES[args.command](frame, folder)
    if args.out:
        print(f"written to {args.out}")


def save(frame: pd.DataFrame, folder: Path, name: str, csv: bool = False) -> None:
    """Write one table as Parquet and, where asked, as CSV."""
    write_parquet(frame, folder / f"{name}.parquet")
    if csv:
        frame.to_csv(folder / f"{name}.csv", index=False)


@contextmanager
def _notices(quiet: bool) -> Iterator[None]:
    """Warnings, and what takes long and happens once (unpacking the default model), as single lines on stderr."""
    log, handler = logging.getLogger("streamlens"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("streamlens: %(message)s"))
    level = log.level
    with warnings.catch_warnings():
        warnings.showwarning = _one_line
        log.addHandler(handler)
        log.setLevel(logging.WARNING if quiet else logging.INFO)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)


def _one_line(message, category, filename, lineno, file=None, line=None) -> None:
    print(f"streamlens: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _load(args: argparse.Namespace):
    return sl.load(args.model, device=args.device, dtype=args.dtype)


def _prompts(args: argparse.Namespace) -> Given:
    if args.command == "card":
        return None
    if getattr(args, "top", 1) < 1:
        raise InputError(f"top must be 1 or more; got {args.top}")
    return promptfile.read_prompts(args.prompts) if args.prompts else args.prompt


def _one_or_each(tokens: list[str] | None) -> str | list[str] | None:
    """A single `--target` serves every prompt; several are one a prompt."""
    return tokens[0] if tokens and len(tokens) == 1 else tokens


def _read_at(args: argparse.Namespace) -> dict[str, object]:
    """The arguments that attribute and ablate share."""
    return {
        "target": _one_or_each(args.target),
        "versus": _one_or_each(args.versus),
        "positions": args.positions,
        "progress": not args.quiet,
    }


def _attribute(model, prompts: Given, args: argparse.Namespace) -> pd.DataFrame:
    return sl.attribute(model, prompts, by=args.by, top_k=args.top_k, **_read_at(args))


def _ablate(model, prompts: Given, args: argparse.Namespace) -> pd.DataFrame:
    reference = _reference(args)
    chosen = {"layers": args.layers, "heads": args.heads, "span": args.span, "metrics": args.metrics}
    return sl.ablate(model, prompts, args.unit, args.method, reference=reference, seed=args.seed, **chosen, **_read_at(args))


def _reference(args: argparse.Namespace) -> Given | str:
    return args.reference if args.reference in (None, "paired") else promptfile.read_prompts(args.reference)


def _effects(model, prompts: Given, args: argparse.Namespace) -> pd.DataFrame:
    return sl.effects(model, prompts, method=args.method, reference=_reference(args), layers=args.layers, **_read_at(args))


def _similarity(model, prompts: Given, args: argparse.Namespace) -> pd.DataFrame:
    return sl.similarity(model, prompts, positions=args.positions, progress=not args.quiet)


def _lens(model, prompts: Given, args: argparse.Namespace) -> pd.DataFrame:
    read = {"target": _one_or_each(args.target), "positions": args.positions or "last", "progress": not args.quiet}
    return sl.lens(model, prompts, norm=args.norm, top_k=args.top_k, **read)


def _norms(model, prompts: Given, args: argparse.Namespace) -> pd.DataFrame:
    return sl.norms(model, prompts, positions=args.positions, progress=not args.quiet)


MEASURES = {
    "attribute": _attribute,
    "ablate": _ablate,
    "lens": _lens,
    "effects": _effects,
    "similarity": _similarity,
    "norms": _norms,
    "card": lambda model, prompts, args: sl.card(model),
}
TEXTS = {
    "attribute": lambda frame, args: text.attribution_text(frame, args.top),
    "ablate": lambda frame, args: text.ablation_text(frame),
    "lens": lambda frame, args: text.lens_text(frame),
    "effects": lambda frame, args: text.effects_text(frame, args.top),
    "similarity": lambda frame, args: text.similarity_text(frame),
    "norms": lambda frame, args: text.norms_text(frame),
    "card": lambda frame, args: text.card_text(frame),
}


def _draw_attribution(frame: pd.DataFrame, folder: Path) -> None:
    """A head map where each prompt has one target, and a waterfall and the split of each logit, of the first few where there are many."""
    groups = [rows for _, rows in frame.groupby(["prompt", "position", "target", "versus"], sort=False)]
    single = frame.drop_duplicates(["prompt", "position", "target", "versus"])
    if (frame["head"] >= 0).any() and not single.duplicated(["prompt", "position"]).any():
        figures.save(figures.heads(frame), folder / "heads")
    split = _split(frame)
    for number, rows in enumerate(groups[:WATERFALLS]):
        figures.save(figures.waterfall(rows), folder / f"waterfall_{number}")
        if split is not None:
            figures.save(split(rows), folder / f"{split.__name__}_{number}")


def _split(frame: pd.DataFrame) -> Callable[[pd.DataFrame], Axes] | None:
    """The figure of what `--by` has split."""
    if "source" in frame.columns:
        return figures.sources if (frame["head"] >= 0).any() else figures.tokens
    return next((draw for column, draw in {"neuron": figures.neurons, "expert": figures.experts}.items() if column in frame.columns), None)


def _draw_ablation(frame: pd.DataFrame, folder: Path) -> None:
    """Curves of layers, a map of heads, the triangle of spans; experts have no figure."""
    unit = frame.unit.iloc[0]
    name, draw = "removal", figures.removal
    if unit == "head":
        name, draw = "ablated_heads", figures.ablated_heads
    elif frame.span.nunique() > 1:
        name, draw = "spans", figures.spans
    for metric in frame.metric.unique() if unit != "expert" else ():
        if name != "spans" or frame.loc[frame.metric == metric, "delta"].max() > 0:
            figures.save(draw(frame, metric=metric), folder / f"{name}_{metric}")


def _draw_lens(frame: pd.DataFrame, folder: Path) -> None:
    """The likeliest tokens of each prompt, or without them its target where it has one a position."""
    show = "top" if (frame.k >= 0).any() else "target"
    for prompt, rows in list(frame.groupby("prompt"))[:WATERFALLS]:
        if show == "top" or not rows.duplicated(["position", "layer"]).any():
            figures.save(figures.lens(rows, show=show), folder / f"lens_{prompt}")


def _draw_effects(frame: pd.DataFrame, folder: Path) -> None:
    """Means over prompts where each has one target, otherwise each logit, of the first few where there are many."""
    key = ["prompt", "position", "target", "versus"]
    if not frame[key].drop_duplicates().duplicated(["prompt", "position"]).any():
        figures.save(figures.effects(frame), folder / "effects")
        return
    for number, (_, rows) in enumerate(list(frame.groupby(key, sort=False))[:WATERFALLS]):
        figures.save(figures.effects(rows), folder / f"effects_{number}")


FIGURES = {  # a card and a similarity have none of their own
    "attribute": _draw_attribution,
    "ablate": _draw_ablation,
    "lens": _draw_lens,
    "effects": _draw_effects,
    "norms": lambda frame, folder: figures.save(figures.growth(frame), folder / "growth"),
}


def _report(args: argparse.Namespace, prompts: Given) -> None:
    from streamlens.report import report

    asked = {"target": _one_or_each(args.target), "versus": _one_or_each(args.versus), "progress": not args.quiet}
    opened = {"device": args.device, "dtype": args.dtype, "seed": args.seed}
    done = report(args.model, prompts, args.out, **asked, **opened, csv=args.csv, overwrite=args.overwrite)
    print(f"{done.summary}\n\ntables, figures and the page index.html are in {done.folder}")
