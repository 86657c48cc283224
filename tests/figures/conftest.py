"""Tables as the calls fill them, with made-up numbers: 30 layers of 9 heads, several prompts of several positions."""

import numpy as np
import pandas as pd
import pytest

from streamlens import schema

LAYERS, HEADS, PROMPTS = 30, 9, 6


def _parts(layers, heads):
    rows = [("embed", -1, -1)]
    rows += [("head", layer, head) for layer in range(layers) for head in range(heads)]
    rows += [("mlp", layer, -1) for layer in range(layers)]
    rows += [("attn_bias", layer, -1) for layer in range(layers)] + [("unembed_bias", -1, -1)]
    return pd.DataFrame(rows, columns=["component", "layer", "head"])


def attribution_table(layers=LAYERS, heads=HEADS, prompts=PROMPTS, positions=(7,), seed=0):
    rng, frames = np.random.default_rng(seed), []
    centre = rng.normal(size=len(_parts(layers, heads))) ** 3 * 0.15
    for prompt in range(prompts):
        for position in positions:
            part = _parts(layers, heads)
            part["contribution"] = centre + rng.normal(size=len(part)) * 0.05
            frames.append(part.assign(prompt=prompt, position=position, logit=part["contribution"].sum()))
    df = pd.concat(frames).assign(sublayer=0, target=6342, target_token=" Paris", versus=7321, versus_token=" Rome", token=" of")
    df["prompt_text"] = "prompt " + df["prompt"].astype(str)
    df.attrs = {"model": "made-up", "additivity_error": 1e-7}
    return schema.apply(df, "attribution")


def ablation_table(layers=LAYERS, prompts=PROMPTS, positions=(0, 1, 2), units=("block", "attn", "mlp"), seed=0):
    rng = np.random.default_rng(seed)
    index = pd.MultiIndex.from_product(
        [range(prompts), positions, units, range(layers), ["loss", "kl"]], names=["prompt", "position", "unit", "layer", "metric"]
    )
    df = index.to_frame(index=False)
    size = df["unit"].map({"block": 1.0, "attn": 0.3, "mlp": 0.6}).astype(float)
    df["delta"] = size * (0.2 + 3 * np.exp(-df["layer"] / 2.0) + 0.05 * rng.normal(size=len(df)))
    df["clean"] = np.where(df["metric"] == "loss", 3.0, 0.0)
    df = df.assign(
        ablated=df["clean"] + df["delta"],
        method="remove",
        span=1,
        sublayer=np.where(df["unit"] == "block", -1, 0),
        head=-1,
        token="x",
        prompt_text="p",
    )
    df = df.assign(target=-1, target_token="", versus=-1, versus_token="")
    df.attrs = {"model": "made-up"}
    return schema.apply(df, "ablation")


def norms_table(layers=LAYERS, prompts=PROMPTS, positions=range(8), rate=1.05, spread=0.1, seed=0):
    rng = np.random.default_rng(seed)
    index = pd.MultiIndex.from_product([range(prompts), positions, range(layers + 1)], names=["prompt", "position", "layer"])
    df = index.to_frame(index=False)
    own = rng.normal(size=prompts)[df["prompt"]] * spread
    df["value"] = 10 * np.exp(np.log(rate) * df["layer"] + own) * np.where(df["position"] == 0, 80, 1)
    df["site"] = np.where(df["layer"] == layers, "final", "resid_pre")
    df = df.assign(measure="l2", sublayer=-1, head=-1, token="x", prompt_text="p")
    df.attrs = {"model": "made-up"}
    return schema.apply(df, "norms")


@pytest.fixture
def attribution():
    """`attribution(...)` makes a table; the others alike."""
    return attribution_table


@pytest.fixture
def ablation():
    return ablation_table


@pytest.fixture
def norms():
    return norms_table
