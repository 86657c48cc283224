"""Which heads of `induction-2l` do induction: by what they attend to, by what they write, and by what breaks without them.

python heads.py [--prompts N]
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import pandas as pd

import streamlens as sl
from streamlens.decoder.data import batch_of
from streamlens.decoder.tasks import RepeatedTokens

PERIOD = 24
TASK = RepeatedTokens(length=2 * PERIOD + 1, shortest=PERIOD, longest=PERIOD)  # a first token, then the same tokens twice
READ = list(range(PERIOD + 1, 2 * PERIOD))  # where the next token is known from the first round


def prompts(n: int = 8) -> list[list[int]]:
    """Rows that training has not drawn: its seed is 0."""
    return batch_of(TASK, n, seed=1, step=0).ids.tolist()


def by_attention(model: sl.Model, rows: list[list[int]]) -> pd.DataFrame:
    """How much each head attends to the token before, and to the one after this token's last occurrence: [0, 1]."""
    patterns = sl.record(model, rows, sites=["pattern"])
    query, scores = np.array(READ), []
    for layer in range(model.n_layers):
        pattern = patterns[f"blocks.{layer}.attn.hook_pattern"].mean(0).numpy()
        scores.append(
            pd.DataFrame({"previous": pattern[query, :, query - 1].mean(0), "induction": pattern[query, :, query - PERIOD + 1].mean(0)})
        )
    return pd.concat(scores, keys=range(model.n_layers), names=["layer", "head"])


def by_attribution(model: sl.Model, rows: list[list[int]]) -> pd.DataFrame:
    """What each head writes into the next token's logit, above the mean over the vocabulary.

    `previous`: the share that comes from the token before, of all that the head writes; `induction`: logits from the token after this
    token's last occurrence.
    """
    df = sl.attribute(model, rows, target="next", versus="mean", positions=READ, by="source")
    df = df[(df.component == "head") & (df.source >= 0)].assign(size=lambda d: d.contribution.abs())
    heads = df.groupby(["layer", "head"])
    before, copied = df[df.source == df.position - 1], df[df.source == df.position - PERIOD + 1]
    previous = before.groupby(["layer", "head"])["size"].sum() / heads["size"].sum()
    induction = copied.groupby(["layer", "head"]).contribution.sum() / (len(rows) * len(READ))
    return pd.DataFrame({"previous": previous, "induction": induction})


def by_ablation(model: sl.Model, rows: list[list[int]]) -> pd.DataFrame:
    """Logits that the next token loses without each head."""
    df = sl.ablate(model, rows, unit="head", positions=READ, target="next", metrics=["target_logit"])
    return -df.groupby(["layer", "head"]).delta.mean().to_frame("lost")


def found(model: sl.Model, rows: list[list[int]]) -> pd.DataFrame:
    """One row a way, each (layer, head): the previous-token head, the induction head, and the induction heads from strong to weak.

    The first two are those with the largest value. Ablation does not say what a head does, so there they are the largest of the first
    and of the second layer: what an induction head reads must have been written before it.
    """
    attention, attribution, lost = by_attention(model, rows), by_attribution(model, rows), by_ablation(model, rows).lost
    first = lost.index.get_level_values("layer") == 0
    ways = {
        "attention": (attention.previous, attention.induction),
        "attribution": (attribution.previous, attribution.induction),
        "ablation": (lost[first], lost[~first]),
    }
    table = {
        way: [previous.idxmax(), copying.idxmax(), tuple(copying.loc[[1]].sort_values().index[::-1])]
        for way, (previous, copying) in ways.items()
    }
    return pd.DataFrame.from_dict(table, orient="index", columns=["previous", "induction", "by_strength"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    args = parser.parse_args(argv)
    model, rows = sl.load("induction-2l", device="cpu"), prompts(args.prompts)
    table = pd.concat(
        {"attention": by_attention(model, rows), "attribution": by_attribution(model, rows), "ablation": by_ablation(model, rows)}, axis=1
    )
    print(table.round(3).to_string())
    print(found(model, rows).to_string())
    return 0


if __name__ == "__main__":
    sys.exit(main())
