"""The notebooks run from top to bottom, offline, and show what they promise. They are stored without outputs."""

import os
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))


FIGURES = {"start_here": 4, "how_the_stream_grows": 10, "who_wrote_this_logit": 7}
"""How many figures each notebook shows."""


def pictures(cells) -> int:
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.fixture(scope="module", params=FIGURES)
def executed(request, tmp_path_factory):
    """A notebook with its outputs."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{request.param}.ipynb", as_version=4)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONWARNINGS"] = "ignore:IProgress not found"  # of tqdm, where Jupyter's widgets are not installed
    where = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    done = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute(env=environment)
    return request.param, done.cells


def test_every_figure_is_shown(executed):
    name, cells = executed
    assert pictures(cells) == FIGURES[name]


def test_no_noise(executed):
    """No warnings, no progress bars: what stands on stderr would be the first thing a new user sees."""
    noise = [o["text"] for cell in executed[1] for o in cell.get("outputs", []) if o.get("name") == "stderr"]
    assert noise == []


def test_each_figure_is_explained(executed):
    """The cell after a figure says in two sentences what is seen."""
    for cell, following in pairwise(executed[1]):
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", [])):
            assert following.cell_type == "markdown"
            assert following.source.rstrip(".").count(". ") >= 1


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_notebooks_are_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


def test_every_notebook_is_executed():
    assert {path.stem for path in PATHS} == set(FIGURES)
