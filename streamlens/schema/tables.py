"""The tidy tables: their columns with dtype, unit and meaning, what identifies a row, and which call fills them."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from streamlens.errors import choice

NONE = -1  # an integer column's "none": no layer, no head, no versus; groupby would lose a null
MEAN = -2  # `versus` where the logit is centred over the vocabulary


@dataclass(frozen=True)
class Column:
    """One column; `optional` ones stand in a table only when the call asks for them."""

    name: str
    dtype: str  # "int32" | "float64" | "category" | "bool"
    unit: str
    meaning: str
    key: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Table:
    """One tidy table; `call` is the public call that fills it."""

    name: str
    columns: tuple[Column, ...]
    call: str = ""

    def __getitem__(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def key(self, df: pd.DataFrame) -> list[str]:
        """The columns that identify a row of `df`: its key columns that are there, led by `model` in a frame of several models."""
        names = [column.name for column in self.columns if column.key and column.name in df.columns]
        return ["model", *names] if "model" in df.columns and "model" not in names else names


def _id(name: str, meaning: str, optional: bool = False) -> Column:
    return Column(name, "int32", "index", meaning, key=True, optional=optional)


def _kind(name: str, meaning: str, optional: bool = False) -> Column:
    return Column(name, "category", "", meaning, key=True, optional=optional)


def _text(name: str, meaning: str, optional: bool = False) -> Column:
    return Column(name, "category", "", meaning, optional=optional)


def _value(name: str, unit: str, meaning: str, optional: bool = False) -> Column:
    return Column(name, "float64", unit, meaning, optional=optional)


_PLACE = (
    _id("prompt", "index of the input row"),
    _text("prompt_text", "its text"),
    _id("position", "position within the prompt, 0 is its first token"),
    _text("token", "the tokenizer's decoding of the id at this position"),
)
_TARGET = (_id("target", "token id whose logit is read; -1 for none"), _text("target_token", "its text"))
_VERSUS = (
    _id("versus", "token id whose logit is subtracted; -1 for none, -2 for the mean over the vocabulary"),
    _text("versus_token", "its text"),
)
_LAYER = _id("layer", "application of a block, in execution order; -1 for none")
_SUBLAYER = _id("sublayer", "which attention or MLP of the block; -1 for none")
_HEAD = _id("head", "attention head; -1 for none")
_UNIT_PLACE = (_LAYER, _SUBLAYER, _HEAD)
_COMPONENT = _kind("component", "what wrote: embed, pos_embed, head, attn, attn_bias, mlp, mixer, norm_bias, unembed_bias, softcap, ...")
_SITE = _kind(
    "site",
    "embed, resid_pre, attn_out, mixer_out, resid_mid, mlp_out, other_out, resid_post, final (not yet normed), head_out, norm, pattern",
)
_METRIC_UNIT = "the metric's own: nats for loss, kl and js, logits for target_logit and logit_diff"

ATTRIBUTION = Table("attribution", (
    *_PLACE, *_TARGET, *_VERSUS, _COMPONENT, *_UNIT_PLACE,
    _id("neuron", "neuron of the MLP; -1 for none", optional=True),
    _id("expert", "expert of the mixture; -1 for none", optional=True),
    _id("source", "position that the head reads from; -1 for none", optional=True),
    _text("source_token", "the tokenizer's decoding of the id at source; empty for none", optional=True),
    _value("attention", "probability", "attention weight from position to source; null for a row without source", optional=True),
    _value("contribution", "logits", "this component's share of the logit; a group's shares sum to it"),
    _value("logit", "logits", "the model's own logit, or difference of logits, of the group"),
    _value("log_probability", "nats", "of target, with scale='logprob': `logit` is then this plus the entropy of p", optional=True),
), "attribute")  # fmt: skip

ABLATION = Table("ablation", (
    *_PLACE, *_TARGET, *_VERSUS,
    _kind("unit", "what was changed: block, attn, mlp, mixer, head, expert, or the order of blocks"),
    _kind("method", "how: remove, zero, mean, positional_mean, resample, gradient, rearrange, or how blocks were chosen for pruning"),
    _LAYER, _SUBLAYER,
    _id("span", "number of neighbouring layers changed together, from layer on"),
    _HEAD,
    _kind("together", "name of several units changed together, which have no layer or head of their own", optional=True),
    _id("expert", "expert of the mixture; -1 for none", optional=True),
    _id("at", "position at which the change was made; -1 for every position, -2 for several", optional=True),
    _text("at_token", "the tokenizer's decoding of the id at `at`; empty for several", optional=True),
    _kind("reference", "name of the prompts that the replacement comes from", optional=True),
    _id("sample", "number of the resampled replacement; -1 for none", optional=True),
    _id("seed", "seed of the draw; -1 for none", optional=True),
    _kind("blocks", "the blocks that ran, in a rearranged run", optional=True),
    _id("n_removed", "number of blocks that a pruned model lacks", optional=True),
    _kind("metric", "loss, kl, js, top1_agree, l2, target_logit, target_logprob, logit_diff, target_rank, or a function's name"),
    _value("clean", _METRIC_UNIT, "the metric of the untouched model"),
    _value("ablated", _METRIC_UNIT, "the metric after the change"),
    _value("delta", _METRIC_UNIT, "ablated - clean"),
    _value("recovered", "fraction", "(ablated - corrupted) / (clean - corrupted): 1 where nothing is lost", optional=True),
), "ablate")  # fmt: skip

NORMS = Table("norms", (
    *_PLACE, *_UNIT_PLACE, _SITE,
    _kind("measure", "l2, rms, mean, std, max_abs, max_index, massive, relative, cosine, along, across, scale, gain or to_first"),
    _value("value", "the stream's own, or none", "the measure at this site of this layer and position"),
), "norms")  # fmt: skip

_OF_MEASURE = "the measure's own"
NORM_SUMMARY = Table("norm_summary", (
    _id("position", "0 for the first; -1 for all later ones together, or each one's own"),
    *_UNIT_PLACE, _SITE,
    _kind("measure", "as in the norms table, but for max_index"),
    Column("n", "int32", "count", "values: positions of all prompts"),
    Column("n_prompts", "int32", "count", "prompts that have such a position"),
    _value("mean", _OF_MEASURE, "arithmetic mean over the values"),
    _value("std", _OF_MEASURE, "their standard deviation"),
    _value("geometric_mean", _OF_MEASURE, "geometric mean; null where a value is not above 0"),
    _value("min", _OF_MEASURE, "the smallest"),
    *(_value(f"q{q:02}" if q != 50 else "median", _OF_MEASURE, f"{q}% quantile, to a relative 0.5%") for q in (5, 25, 50, 75, 95)),
    _value("max", _OF_MEASURE, "the largest"),
), "norm_summary")  # fmt: skip

NORM_PARTS = Table("norm_parts", (
    *_PLACE,
    _kind("component", "what was added to the stream: embed (all that enters the first block), block, attn, mlp, mixer or other"),
    _LAYER, _SUBLAYER,
    _kind("component_to", "an addend before it, or itself"),
    _id("layer_to", "its layer; -1 for embed"),
    _id("sublayer_to", "its sublayer; -1 for none"),
    _value("value", "squared norm", "the squared length of an addend, or twice its inner product with an earlier one; they sum to total"),
    _value("total", "squared norm", "the squared norm of the stream before the final norm"),
), "decompose_norm")  # fmt: skip

DEPTH_USE = Table("depth_use", (
    _id("prompt", "index of the input row"),
    _text("prompt_text", "its text"),
    _kind("unit", "what was taken away: block, attn, mlp, mixer or head"),
    _LAYER, _SUBLAYER, _HEAD,
    _id("layer_to", "the later layer whose write is compared; n_layers for the predictions"),
    _kind("positions", "all: taken away and measured at every position but the first; future: taken away up to cut, measured after it"),
    _id("cut", "the last position at which it was taken away; -1 for every one"),
    _kind("measure", "write, the relative change of the later block's write, or prediction, the distance of the distributions"),
    _kind("statistic", "max or mean over the prompt's positions"),
    _value("value", "", "||write - write'|| / ||write||, or ||softmax - softmax'||, both in L2"),
), "depth_use")  # fmt: skip

GRADIENTS = Table("gradients", (
    *_PLACE, _LAYER,
    _kind("site", "resid_pre, or final (after the last block, layer n_layers)"),
    _value("value", "nats per unit of the stream", "L2 norm of the gradient of the prompt's mean next-token loss"),
    _value("loss", "nats", "the prompt's mean next-token loss"),
), "gradient_norms")  # fmt: skip

EFFECTS = Table("effects", (
    *_PLACE, *_TARGET, *_VERSUS, _COMPONENT, *_UNIT_PLACE,
    _kind("method", "how the component was ablated"),
    _value("direct", "logits", "clean - ablated through the frozen readout alone; the attribution's contribution under zero ablation"),
    _value("direct_recomputed", "logits", "the same with the final norm recomputed"),
    _value("total", "logits", "clean - ablated, with everything after it recomputed"),
    _value("indirect", "logits", "total - direct"),
    _value("repair_heads", "logits", "the part of indirect that later heads make"),
    _value("repair_mlps", "logits", "the part of indirect that later MLPs make"),
    _value("repair_norm", "logits", "the part of indirect that the final norm makes"),
), "effects")  # fmt: skip

SIMILARITY = Table("similarity", (
    *_PLACE, _LAYER,
    _id("layer_to", "the layer compared with; n_layers is the stream before the final norm"),
    _kind("measure", "block_influence, angular_distance or relative_magnitude"),
    _value("value", "none", "the measure between the streams that enter the two layers"),
), "similarity")  # fmt: skip

LENS = Table("lens", (
    *_PLACE, _LAYER, _SITE,
    _kind("norm", "which norm the stream went through before the unembedding"),
    *_TARGET,
    _id("k", "place among the top k; -1 for the row of a named target"),
    Column("rank", "int32", "count", "number of tokens with a strictly greater logit"),
    _value("logit", "logits", "the logit of target at this site"),
    _value("probability", "probability", "its softmax over the vocabulary"),
), "lens")  # fmt: skip

PROMOTES = Table("promotes", (
    *_PLACE, _COMPONENT, *_UNIT_PLACE,
    _kind("direction", "up or down"),
    _id("k", "place among the tokens that are moved most in this direction"),
    _id("target", "token id that is moved"), _text("target_token", "its text"),
    _value("contribution", "logits", "what the component adds to its logit, less the mean over the vocabulary"),
), "promotes")  # fmt: skip

TRAINING = Table("training", (
    _id("step", "update, from 0; measured before it"),
    _LAYER,
    _kind("measure", "loss, gradient_norm, learning_rate, attention_logit or stream_norm"),
    _value("value", "the measure's own: nats for loss, logits for attention_logit", "the measure at this step, by layer where it has one"),
), "train")  # fmt: skip

# A card has one further column a fact, which differ by architecture; they follow as extra columns.
CARD = Table("card", (_kind("model", "the model's name"),), "card")

_TABLES = (
    ATTRIBUTION,
    ABLATION,
    NORMS,
    NORM_SUMMARY,
    NORM_PARTS,
    DEPTH_USE,
    GRADIENTS,
    EFFECTS,
    SIMILARITY,
    LENS,
    PROMOTES,
    TRAINING,
    CARD,
)
TABLES = {table.name: table for table in _TABLES}


def table(name: str) -> Table:
    """The table of this name. Raises InputError for an unknown one."""
    choice("table_name", name, TABLES)
    return TABLES[name]


def describe(table_name: str) -> pd.DataFrame:
    """What each column of a table means: one row a column with column, dtype, unit, meaning, key, optional."""
    columns = table(table_name).columns
    fields = ("name", "dtype", "unit", "meaning", "key", "optional")
    return pd.DataFrame([[getattr(c, f) for f in fields] for c in columns], columns=["column", *fields[1:]])
