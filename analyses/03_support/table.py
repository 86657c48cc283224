"""support.md, support.csv and the README's summary, from the Parquet file alone: no model is opened.

python table.py [DIR]
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- support table: begin -->", "<!-- support table: end -->"
TITLES = {
    "heads": "Served, with heads",
    "no heads": "Served, without heads",
    "blocks": "Served by whole blocks",
    "refused": "Refused at load",
}
KEPT = ["family", "architecture", "variant", "support", "reason", "layers", "attentions", "heads", "rows", "sum_error"]
KEPT += ["intervention_error", "removal_error", "theirs", "theirs_miss", "theirs_relative", "theirs_reason"]


def number(x: float) -> str:
    return "0" if x == 0 else f"{x:.0e}".replace("e-0", "e-")


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def plain(reason: str) -> str:
    """A refusal without the model's name before it, which stands beside it."""
    return reason.split("exactly: ", 1)[-1].split("cannot be read: ", 1)[-1]


def brief(reason: str) -> str:
    """The same without module paths and limits, which stand in brackets."""
    text, shorter = "", plain(reason)
    while text != shorter:  # brackets within brackets
        text, shorter = shorter, re.sub(r" ?\([^()]*\)", "", shorter)
    return text


def theirs(row: pd.Series) -> str:
    """TransformerLens on this variant, in words."""
    if row.theirs == "exact":
        return "exact"
    if row.theirs == "wrong":
        return f"**wrong** by {row.theirs_miss:.2g} logits ({row.theirs_reason})"
    return cell(f"{row.theirs}: {row.theirs_reason.split('. ')[0].split(' (')[0][:110]}")


COLUMNS: dict[str, dict[str, Callable[[pd.Series], str]]] = {
    "heads": {
        "sum": lambda row: number(row.sum_error),
        "zeroing": lambda row: number(row.intervention_error),
        "heads": lambda row: str(row["heads"]),
        "removal": lambda row: number(row.removal_error),
        "TransformerLens": theirs,
    },
    "no heads": {
        "sum": lambda row: number(row.sum_error),
        "zeroing": lambda row: number(row.intervention_error),
        "why": lambda row: row.reason,
        "removal": lambda row: number(row.removal_error),
        "TransformerLens": theirs,
    },
    "blocks": {
        "why": lambda row: cell(plain(row.reason)),
        "removal": lambda row: number(row.removal_error),
        "TransformerLens": theirs,
    },
    "refused": {"reason": lambda row: cell(plain(row.reason)), "TransformerLens": theirs},
}


def markdown(df: pd.DataFrame, columns: dict[str, Callable[[pd.Series], str]]) -> str:
    """One line a variant, the families in alphabetical order."""
    columns = {"family": lambda row: row.family, "variant": lambda row: row.variant} | columns
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for _, row in df.sort_values(["family", "variant"]).iterrows():
        lines.append("| " + " | ".join(write(row) for write in columns.values()) + " |")
    return "\n".join(lines)


def counts(df: pd.DataFrame) -> str:
    """The sentences about both sides."""
    support, served = df.support.value_counts(), df[df.support.isin(["heads", "no heads"])]
    found, wrong = df.theirs.value_counts(), df[df.theirs == "wrong"].theirs_miss
    sums, zeroing, removal = (number(served[f"{name}_error"].max()) for name in ("sum", "intervention", "removal"))
    blocks = f", and {support['blocks']} more by whole blocks" if "blocks" in support else ""
    text = (
        f"Of {len(df)} tiny random models of {df.architecture.nunique()} architectures streamlens serves {len(served)}, "
        f"{support.get('heads', 0)} of them with heads{blocks}, and refuses {support.get('refused', 0)} by name. Rows sum to the logit "
        f"within {sums} of sum|parts|, a zeroed write moves it by its row within {zeroing}, and removal equals a hooked forward pass"
        f"{'' if removal == '0' else ' within ' + removal}.\n"
        f"TransformerLens {df.attrs.get('transformer-lens', '')}'s own attribution on the same models is exact on "
        f"{found.get('exact', 0)}, refuses {found.get('refused', 0)}, crashes on {found.get('crash', 0)}, "
        f"and gives wrong numbers without refusing on {len(wrong)}"
    )
    text += f" (off by {wrong.min():.1g} to {wrong.max():.1g} logits)." if len(wrong) else "."
    return text + (f" On {found['answers']} it answers where nothing can be compared." if "answers" in found else "")


def page(df: pd.DataFrame) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in df.attrs.items())
    parts = [
        "# Which models are served\n",
        "Written by `analyses/03_support` from one run over `tests/zoo.py`; do not edit. Versions: " + versions + ".\n",
        counts(df) + "\n",
        "- **sum**: worst |sum of rows − logit| / sum|parts| over two prompts of 24 tokens, all positions.\n"
        "- **zeroing**: worst |fall of the logit − row| / sum|parts| where one write is zeroed with norms frozen (a sample of each kind).\n"
        "- **heads**: rows of heads a position.\n"
        "- **removal**: worst difference between a replayed removal and a hooked forward pass, over the largest value.\n"
        "- **TransformerLens**: its `direct_logit_attribution` by component and by head, for a logit difference, so that centred logits "
        "count as exact; so does a value bias moved to the output bias. Wrong: by how much at worst, and which row misses most.\n",
    ]
    for support, title in TITLES.items():
        chosen = df[df.support == support]
        parts.append(f"## {title} ({len(chosen)})\n\n{markdown(chosen, COLUMNS[support])}\n")
    return "\n".join(parts)


def summary(df: pd.DataFrame) -> str:
    """What the README shows: the counts, and who is refused and why."""
    refused = df[df.support == "refused"].sort_values(["family", "variant"])
    refused = refused.assign(brief=refused.reason.map(brief))
    lines = ["| refused at load | what does not add up |", "|---|---|"]
    for _, alike in refused.groupby(["family", refused.brief.str.replace(r"[\d.e+-]+|inf", "", regex=True)], sort=False):
        lines.append(f"| {', '.join(alike.variant)} | {cell(alike.brief.iloc[0])} |")
    text = f"{counts(df)} [All of them](analyses/03_support/support.md), one by one."
    if blocks := sorted(df[df.support == "blocks"].variant):
        text += f"\nBy whole blocks, since they keep several vectors a token: {', '.join(blocks)}."
    text = "\n".join(textwrap.fill(line, 140) for line in text.split("\n"))
    return f"{BEGIN}\n{text}\n\n" + "\n".join(lines) + f"\n{END}"


def into_readme(text: str, new: str) -> str:
    """The README with its summary exchanged. Raises ValueError where the marks are missing."""
    start, end = text.index(BEGIN), text.index(END) + len(END)
    return text[:start] + new + text[end:]


def main(argv: list[str], root: Path = ROOT) -> int:
    path = (Path(argv[0]) if argv else Path(__file__).parent / "results") / "support.parquet"
    if not path.is_file():
        print(f"error: DIR must hold support.parquet, which run.py writes; got {str(path.parent)!r}", file=sys.stderr)
        return 2
    df, readme = pd.read_parquet(path), root / "README.md"
    (root / "analyses" / "03_support" / "support.md").write_text(page(df), encoding="utf-8")
    df[KEPT].to_csv(root / "analyses" / "03_support" / "support.csv", index=False, float_format="%.3g")
    readme.write_text(into_readme(readme.read_text(encoding="utf-8"), summary(df)), encoding="utf-8")
    print(counts(df))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
