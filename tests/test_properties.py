"""What must hold for any configuration: random small Llama-, GPT-2-, Gemma-2- and Mixtral-like models, and random batches.

The seed is fixed, so a run is the same everywhere; `make test-slow` draws more examples.
"""

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import streamlens as sl
from streamlens.models.discover import discover
from streamlens.models.loaded import Model
from streamlens.models.verify import probe_ids, prove
from tests.models.tiny import randomise
from tests.tolerances import ADDITIVITY

LIMIT = ADDITIVITY[torch.float32]
COMMON = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}
FEW = settings(max_examples=10, phases=[Phase.generate], **COMMON)  # a failure is shrunk by the slow run
MANY = settings(max_examples=60, **COMMON)


@dataclass(frozen=True)
class Sizes:
    family: str
    n_kv: int
    group: int  # query heads that share one key and value
    d_head: int
    d_model: int
    n_layers: int
    n_vocab: int
    tied: bool
    biases: bool
    seed: int

    @property
    def n_heads(self):
        return self.n_kv * self.group


@st.composite
def sizes(draw):
    family = draw(st.sampled_from(["llama", "gpt2", "gemma2", "mixtral"]))
    n_kv, group, d_head = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([2, 4, 8]))
    if family == "gpt2":
        n_kv, group = n_kv * group, 1
    return Sizes(
        family, n_kv, group, d_head,
        d_model=n_kv * d_head if family == "gpt2" else 4 * n_kv * group * draw(st.integers(1, 2)),
        n_layers=draw(st.integers(1, 3)), n_vocab=draw(st.integers(16, 40)),
        tied=draw(st.booleans()), biases=draw(st.booleans()), seed=draw(st.integers(0, 99)),
    )  # fmt: skip


def build(s):
    ends = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": s.n_vocab, "tie_word_embeddings": s.tied}
    small = ends | {"hidden_size": s.d_model, "num_hidden_layers": s.n_layers, "num_attention_heads": s.n_heads, "head_dim": s.d_head}
    small |= {"num_key_value_heads": s.n_kv, "intermediate_size": 2 * s.d_model, "max_position_embeddings": 32}
    cap = 2.0 if s.biases else None
    config = {
        "llama": lambda: transformers.LlamaConfig(**small, attention_bias=s.biases, mlp_bias=s.biases),
        "gpt2": lambda: transformers.GPT2Config(n_embd=s.d_model, n_layer=s.n_layers, n_head=s.n_heads, n_positions=32, **ends),
        "gemma2": lambda: transformers.Gemma2Config(
            **small, attention_bias=s.biases, final_logit_softcapping=cap, attn_logit_softcapping=5.0, sliding_window=3
        ),
        "mixtral": lambda: transformers.MixtralConfig(**small, num_local_experts=3, num_experts_per_tok=1 + s.seed % 2),
    }[s.family]()
    torch.manual_seed(s.seed)
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomise(module, s.seed)
    return module


def opened(module):
    """The model without the proof of its stream, which the sum rule's examples have."""
    anatomy, proof = prove(module, discover(module, probe_ids(module)), skip=True)
    return Model(module, None, "tiny", "tiny", None, anatomy, proof)


def prompts(n_vocab, min_size=1):
    return st.lists(st.lists(st.integers(0, n_vocab - 1), min_size=2, max_size=7), min_size=min_size, max_size=3)


def table(model, ids, target=3, versus=5):
    """Contributions by row key; their sizes at each (prompt, position), and the logits there."""
    df = sl.attribute(model, ids, target=target, versus=versus, positions="all")
    keys = ["prompt", "position", "component", "layer", "sublayer", "head"]
    return df.set_index(keys).contribution


def same(ours, theirs):
    """Row by row, relative to the sum of |parts| at that position."""
    assert ours.index.sort_values().equals(theirs.index.sort_values())
    size = ours.abs().groupby(["prompt", "position"]).transform("sum")
    assert ((ours - theirs.reindex(ours.index)).abs() / size).max() <= 2 * LIMIT


# -- the properties --------------------------------------------------------------------------------------------------
def contributions_sum_to_the_printed_logit(data):
    s = data.draw(sizes())
    model = sl.load(build(s))
    ids = data.draw(prompts(s.n_vocab))
    target = data.draw(st.integers(0, s.n_vocab - 1))
    versus = data.draw(st.none() | st.integers(0, s.n_vocab - 1).filter(lambda v: v != target))
    df = sl.attribute(model, ids, target=target, versus=versus, positions="all", check=False)
    rows = df.groupby(["prompt", "position"])
    gap, size = (rows.contribution.sum() - rows.logit.first()).abs(), rows.contribution.agg(lambda c: c.abs().sum())
    assert (gap / size).max() <= LIMIT
    for number, prompt in enumerate(ids):
        with torch.no_grad():
            logits = model.module(torch.tensor([prompt])).logits[0].double()
        printed = logits[:, target] - (0 if versus is None else logits[:, versus])
        ours = rows.logit.first()[number].to_numpy()
        assert np.abs(ours - printed.numpy()).max() <= 2 * LIMIT * float(logits.abs().max() + size[number].max())


def heads_that_change_places_with_their_weights_take_their_rows_along(data):
    s = data.draw(sizes())
    module, ids = build(s), data.draw(prompts(s.n_vocab))
    kv = data.draw(st.permutations(range(s.n_kv)))
    order = [g * s.group + i for g in kv for i in data.draw(st.permutations(range(s.group)))]  # the new head h is the old order[h]
    moved = copy.deepcopy(module)
    permute(moved, s, order, kv)
    before, after = table(opened(module), ids), table(opened(moved), ids)
    old_head = np.array([order[h] if h >= 0 else h for h in after.index.get_level_values("head")])
    index = after.index.to_frame()
    index["head"] = old_head.astype(np.int32)
    same(before, after.set_axis(type(after.index).from_frame(index)))


@torch.no_grad()
def permute(module, s, order, kv):
    q = torch.tensor([h * s.d_head + i for h in order for i in range(s.d_head)])
    k = torch.tensor([h * s.d_head + i for h in kv for i in range(s.d_head)])
    for name, part in module.named_modules():
        if name.endswith("c_attn"):
            columns = torch.cat([q, q + s.d_model, q + 2 * s.d_model])
            part.weight.copy_(part.weight[:, columns])
            part.bias.copy_(part.bias[columns])
        elif name.endswith("attn.c_proj"):
            part.weight.copy_(part.weight[q])
        elif name.endswith(("q_proj", "k_proj", "v_proj")):
            rows = q if name.endswith("q_proj") else k
            part.weight.copy_(part.weight[rows])
            if part.bias is not None:
                part.bias.copy_(part.bias[rows])
        elif name.endswith("o_proj"):
            part.weight.copy_(part.weight[:, q])


def a_vector_added_to_every_row_of_the_unembedding_changes_no_difference(data):
    s = data.draw(sizes())
    module, ids = build(s), data.draw(prompts(s.n_vocab))
    shifted = copy.deepcopy(module)
    shift = torch.randn(s.d_model, generator=torch.Generator().manual_seed(s.seed))
    # A weight of its own: a tied one would change the embedding as well.
    shifted.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach() + shift)
    before, after = (table(opened(m), ids) for m in (module, shifted))
    bent = before.index.get_level_values("component") == "softcap"  # a cap bends logits, not differences
    same(before[~bent], after[~bent])


def rows_do_not_change_when_later_tokens_do(data):
    s = data.draw(sizes())
    model, ids = opened(build(s)), data.draw(prompts(s.n_vocab))
    cut = [data.draw(st.integers(1, len(prompt) - 1)) for prompt in ids]
    token = st.integers(0, s.n_vocab - 1)
    later = [p[:n] + [data.draw(token) for _ in p[n:]] for p, n in zip(ids, cut, strict=True)]
    before, after = table(model, ids), table(model, later)
    kept = before.index.get_level_values("position") < np.array(cut)[before.index.get_level_values("prompt")]
    assert kept.any()
    same(before[kept], after[kept])


def rows_do_not_depend_on_the_batch(data):
    s = data.draw(sizes())
    model, ids = opened(build(s)), data.draw(prompts(s.n_vocab, min_size=2))
    together = table(model, ids)
    for number, prompt in enumerate(ids):
        alone = table(model, [prompt])
        same(alone, together.loc[[number]].rename(index={number: 0}, level="prompt"))


PROPERTIES = [
    contributions_sum_to_the_printed_logit,
    heads_that_change_places_with_their_weights_take_their_rows_along,
    a_vector_added_to_every_row_of_the_unembedding_changes_no_difference,
    rows_do_not_change_when_later_tokens_do,
    rows_do_not_depend_on_the_batch,
]
every_property = pytest.mark.parametrize("holds", PROPERTIES, ids=lambda holds: holds.__name__)


@every_property
@FEW
@given(data=st.data())
def test_property(holds, data):
    holds(data)


@pytest.mark.slow
@every_property
@MANY
@given(data=st.data())
def test_property_on_many_examples(holds, data):
    holds(data)
