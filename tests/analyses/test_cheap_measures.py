"""The script of analyses/09 runs on a tiny model and leaves its tables and figures."""

import runpy
from pathlib import Path

import pandas as pd

FOLDER = Path(__file__).parents[2] / "analyses" / "09_cheap_measures_against_removal"


def test_every_table_and_figure_is_there(tmp_path, smollm2, capsys):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(smollm2.tokenizer), **sizes)).save_pretrained(tmp_path / "tiny")
    smollm2.tokenizer.save_pretrained(tmp_path / "tiny")
    main = runpy.run_path(str(FOLDER / "run.py"))["main"]
    assert main([str(tmp_path / "tiny"), "--prompts", "5", "--out", str(tmp_path / "out")]) == 0
    found = pd.read_csv(tmp_path / "out" / "agreement.csv")
    assert set(found[found.against == "similarity"].measure) == {"block_influence", "angular_distance", "relative_magnitude"}
    assert found[found.against == "gradient"].unit.tolist() == ["head", "mlp", "block"]
    assert found.kendall.between(-1, 1).all()
    assert (found.n_prompts == 5).all()
    assert len(list((tmp_path / "out").glob("*.png"))) == 4
    assert "spearman" in capsys.readouterr().out
