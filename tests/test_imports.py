"""What may import what, how light `import streamlens` is, and that shapes are checked while tests run."""

import subprocess
import sys

import jaxtyping
import pytest

import streamlens as sl


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_contracts_hold(pytestconfig, tmp_path):
    command = ["lint-imports", "--config", str(pytestconfig.rootpath / "pyproject.toml"), "--cache-dir", str(tmp_path)]
    code = f"import sys; from importlinter.cli import lint_imports_command as run; sys.argv = {command!r}; run()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=pytestconfig.rootpath, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", ["streamlens", "streamlens.cli", "streamlens.errors"])
def test_importing_brings_nothing_heavy(module):
    heavy = "torch, transformers, transformer_lens, pandas, numpy, matplotlib, pyarrow"
    loaded = run_python(f"import sys, {module}; print([m for m in {heavy.split(', ')!r} if m in sys.modules])")
    assert loaded == "[]"


@pytest.mark.parametrize("module", ["stats", "schema", "figures"])
def test_tables_and_figures_need_no_torch(module):
    assert run_python(f"import sys, streamlens as sl; sl.{module}; print('torch' in sys.modules)") == "False"


def test_import_is_quick():
    code = "import time; start = time.perf_counter(); import streamlens; print(time.perf_counter() - start)"
    assert min(float(run_python(code)) for _ in range(3)) < 0.2


@pytest.mark.parametrize("name", sl.__all__)
def test_public_names_exist_and_are_listed(name):
    assert name in dir(sl)
    assert getattr(sl, name) is not None


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'atribute'"):
        sl.atribute  # noqa: B018


def test_version_is_that_of_the_package():
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("streamlens")
    except PackageNotFoundError:
        pytest.skip("streamlens is run from its folder, not installed")
    assert sl.__version__ == installed


def test_shape_checker_is_on():
    """The canary: under pytest a wrong type in a signature raises, else every other shape check is asleep."""
    from streamlens.errors import choice

    with pytest.raises(jaxtyping.TypeCheckError):
        choice(parameter=3, value=1, legal=[1])
