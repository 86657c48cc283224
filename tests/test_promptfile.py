import pandas as pd
import pytest

from streamlens.errors import InputError
from streamlens.promptfile import read_prompts


def test_csv_keeps_text_to_the_letter(tmp_path):
    (tmp_path / "p.csv").write_text("prompt,target,versus,position,set\n007 is, Bond, None,-1,spies\nNA,nan,1,0,odd\n")
    df = read_prompts(tmp_path / "p.csv")
    assert df.to_dict("list") == {
        "prompt": ["007 is", "NA"],
        "target": [" Bond", "nan"],
        "versus": [" None", "1"],
        "position": [-1, 0],
        "set": ["spies", "odd"],
    }


def test_jsonl_takes_texts_and_ids(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "2024", "target": " a"}\n{"prompt": [1, 2, 3], "target": 4}\n')
    df = read_prompts(tmp_path / "p.jsonl")
    assert df["prompt"].tolist() == ["2024", [1, 2, 3]]
    assert df["target"].tolist() == [" a", 4]


def test_text_is_one_prompt_a_line(tmp_path):
    (tmp_path / "p.txt").write_text("one \n\ntwo\n")
    assert read_prompts(tmp_path / "p.txt")["prompt"].tolist() == ["one ", "two"]


def test_parquet(tmp_path):
    pd.DataFrame({"prompt": ["a"], "target": [" b"]}).to_parquet(tmp_path / "p.parquet")
    assert read_prompts(str(tmp_path / "p.parquet"))["target"].tolist() == [" b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.xlsx", "x", "ends in .csv, .jsonl, .parquet, .txt"),
        ("p.csv", "text,target\na,b\n", "must have a column 'prompt'; got text, target"),
        ("p.csv", "prompt\n", "at least one prompt"),
        ("p.csv", "", "must be a readable .csv file"),
        ("p.jsonl", '{"prompt": ', "must be a readable .jsonl file"),
        ("p.parquet", "not parquet", "must be a readable .parquet file"),
        ("p.txt", "\n\n", "at least one prompt"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        read_prompts(tmp_path / name)


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match="must be a file that exists"):
        read_prompts(tmp_path / "none.csv")


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfThe capital\n")
    assert read_prompts(tmp_path / "p.txt")["prompt"].tolist() == ["The capital"]
