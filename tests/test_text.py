"""What the terminal shows, on hand-made tables."""

from types import SimpleNamespace

import pandas as pd

from streamlens import text


def attribution(contributions, versus=-1):
    n = len(contributions)
    components = [("embed", -1, -1, -1), ("head", 0, 0, 0), ("head", 0, 0, 1), ("mlp", 0, 0, -1), ("mlp", 0, 1, -1)][:n]
    place = pd.DataFrame(components, columns=["component", "layer", "sublayer", "head"])
    told = {"prompt": 0, "prompt_text": "x" * 80, "position": 4, "token": " of", "target": 7, "target_token": " Paris", "versus": versus}
    return place.assign(**told, versus_token="" if versus == -1 else " Rome", contribution=contributions, logit=sum(contributions))


def test_attribution_lists_the_largest_and_sums_the_rest():
    lines = text.attribution_text(attribution([0.5, -3.0, 1.0, 2.0, 0.25]), top=3).splitlines()
    assert lines[0] == f"prompt 0: '...{'x' * 57}', position 4 (' of')"
    assert lines[1] == "logit of ' Paris'"
    assert [line.split() for line in lines[2:]] == [
        ["L0", "head", "0", "-3.0000"],
        ["L0", "mlp", "2.0000"],
        ["L0", "head", "1", "1.0000"],
        ["2", "others", "0.7500"],
        ["sum", "0.7500"],
        ["logit", "0.7500"],
    ]


def test_attribution_names_versus_second_sublayer_and_embedding():
    shown = text.attribution_text(attribution([0.5, 0.1, 0.2, 0.3, 0.4], versus=9))
    assert "logit of ' Paris' - ' Rome'" in shown
    assert "L0 mlp.1" in shown
    assert "  embed " in shown
    assert "others" not in shown


def test_each_logit_has_its_own_block():
    frames = [attribution([1.0, 2.0]), attribution([3.0, 4.0]).assign(target=8, target_token=" Lyon")]
    assert text.attribution_text(pd.concat(frames)).count("logit of") == 2


def test_ablation_averages_positions_within_a_prompt_first():
    rows = [(0, 0, 0.0), (0, 1, 3.0), (1, 0, 1.0)]
    df = pd.DataFrame(rows, columns=["prompt", "position", "delta"])
    df = df.assign(unit="block", method="mean", layer=2, sublayer=-1, span=1, head=-1, metric="loss", clean=[4.0, 6.0, 1.0])
    lines = text.ablation_text(df).splitlines()
    assert lines[0] == "untouched model: loss 3.0000"
    assert lines[1] == "mean (ablated - clean), mean over 2 prompts"
    assert lines[-1].split() == ["block", "2", "1.2500"]


def norms(rows):
    return pd.DataFrame(rows, columns=["position", "layer", "sublayer", "site", "value"]).assign(prompt=0, measure="l2")


def test_norms_have_one_line_a_layer_and_leave_out_the_first_position():
    later = [(1, 0, -1, "resid_pre", 2.0), (1, 0, 0, "mlp_out", 5.0), (1, 1, -1, "final", 7.0)]
    shown = text.norms_text(norms([(0, 0, -1, "resid_pre", 900.0), *later]))
    lines = [line.split() for line in shown.splitlines()]
    assert shown.startswith("mean over 1 prompt, position 0 left out")
    assert lines[1:] == [["measure", "layer", "resid_pre", "mlp_out", "final"], ["l2", "0", "2.0000", "5.0000"], ["l2", "1", "7.0000"]]


def test_norms_of_single_tokens_keep_the_first_position():
    shown = text.norms_text(norms([(0, 0, -1, "resid_pre", 900.0)]))
    assert "left out" not in shown
    assert "900.0000" in shown


def test_card_is_one_fact_a_line():
    assert text.card_text(pd.DataFrame({"model": ["m"], "n_layers": [3]})).splitlines() == ["model     m", "n_layers  3"]


def test_heads_and_spans_keep_their_columns():
    rows = [("head", 2, 0, 0.5), ("head", 2, 1, 1.5)]
    df = pd.DataFrame(rows, columns=["unit", "layer", "head", "delta"])
    df = df.assign(prompt=0, position=0, method="zero", sublayer=0, span=1, metric="loss", clean=1.0)
    lines = text.ablation_text(df).splitlines()
    assert [line.split() for line in lines[-3:]] == [
        ["unit", "layer", "head", "loss"],
        ["head", "2", "0", "0.5000"],
        ["head", "2", "1", "1.5000"],
    ]


def test_lens_is_one_line_a_layer():
    rows = [(0, "resid_pre", 1, " b", 0.25), (0, "resid_pre", 0, " a", 0.5), (1, "final", 0, " c", 0.75), (1, "final", -1, " d", 0.1)]
    df = pd.DataFrame(rows, columns=["layer", "site", "k", "target_token", "probability"])
    df = df.assign(rank=[1, 0, 0, 7], prompt=0, prompt_text="text", position=3, token="x")
    lines = text.lens_text(df).splitlines()
    assert lines[0] == "prompt 0: 'text', position 3 ('x')"
    assert [" ".join(line.split()) for line in lines[1:]] == ["0 resid_pre ' a' 0.500 ' b' 0.250", "1 final ' c' 0.750 | ' d' 0.100 rank 7"]
    assert " ".join(text.lens_text(df[df.k < 0]).splitlines()[1].split()) == "1 final | ' d' 0.100 rank 7"


def test_finer_rows_are_named():
    row = {"layer": 3, "component": "neuron", "sublayer": 0, "head": -1, "neuron": 12}
    assert text.component_name(SimpleNamespace(**row)) == "L3 neuron 12"
    row = {"layer": 3, "component": "head", "sublayer": 0, "head": 2, "source": 4, "source_token": " a"}
    assert text.component_name(SimpleNamespace(**row)) == "L3 head 2 <- ' a' at 4"


def test_effects_list_the_largest_totals():
    rows = [("mlp", 3, -1, 1.0, -3.0), ("head", 2, 1, 0.5, 0.25)]
    df = pd.DataFrame(rows, columns=["component", "layer", "head", "direct", "indirect"])
    df = df.assign(total=df.direct + df.indirect, repair_heads=0.0, repair_mlps=0.0, repair_norm=df.indirect, sublayer=0, method="zero")
    df = df.assign(prompt=0, prompt_text="text", position=3, token="x", target=5, target_token=" a", versus=-1, versus_token="")
    lines = text.effects_text(df, top=1).splitlines()
    assert lines[1:3] == ["logit of ' a'", "clean - ablated (zero), 1 of 2 components"]
    assert lines[-1].split() == ["L3", "mlp", "1.0000", "-3.0000", "-2.0000", "0.0000", "0.0000", "-3.0000"]
    assert len(text.effects_text(df).splitlines()) == len(lines) + 1


def test_similarity_is_that_of_neighbours():
    rows = [(0, 0, 1, 9.0), (1, 0, 1, 0.25), (2, 0, 1, 0.75), (1, 0, 2, 5.0)]
    df = pd.DataFrame(rows, columns=["position", "layer", "layer_to", "value"]).assign(prompt=0, measure="block_influence")
    assert text.similarity_text(df).splitlines()[-1].split() == ["0", "0.5000"]
