"""The README's code blocks run, in order and in one namespace, as a reader would run them."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from streamlens.cli import parser

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def readme():
    return (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return [code for name, code in FENCE.findall(text) if name == language]


def test_python_blocks_run(readme, smollm2, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for number, code in enumerate(blocks(readme, "python")):
        exec(compile(code, f"README block {number}", "exec"), namespace)
    assert len(capsys.readouterr().out.splitlines()) > 60
    assert {path.name for path in tmp_path.iterdir()} == {"waterfall.pdf", "waterfall.png"}
    assert namespace["df"].attrs["additivity_error"] < 5e-6


def test_shell_blocks_parse(readme):
    """Every `streamlens` line of the README is a legal command."""
    lines = [line for block in blocks(readme, "sh") for line in block.splitlines() if line.startswith("streamlens")]
    assert len(lines) >= 5
    for line in lines:
        assert parser().parse_args(shlex.split(line, comments=True)[1:]).command


def test_make_targets_exist(readme):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", readme, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_and_pictures_exist(readme):
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", readme):
        assert (ROOT / path).exists(), path


def test_two_commands_stand_on_the_first_screen(readme):
    first = "\n".join(readme.splitlines()[:30])
    assert "make demo" in first
    assert "make test" in first


def test_every_dependency_has_its_reason(readme):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = readme[readme.index("| dependency | why |") :]
    for requirement in project["dependencies"]:
        assert re.match(r"[\w-]+", requirement).group() in table
