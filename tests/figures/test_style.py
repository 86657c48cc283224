"""Sizes and fonts of a style, and files that are the same twice."""

import io
import subprocess
import sys
from itertools import pairwise

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from streamlens import figures
from streamlens.errors import InputError

STYLES = [(name, columns) for name in ("paper", "notebook", "talk") for columns in (1, 2)]


@pytest.fixture
def drawn(attribution, ablation, norms):
    """All four figures in the style at hand."""

    def draw():
        return [
            figures.heads(attribution(positions=(3, 4, 5))),
            figures.waterfall(attribution(prompts=1)),
            figures.removal(ablation()),
            figures.growth(norms(), fit=(5, 25)),
        ]

    return draw


@pytest.mark.parametrize(("columns", "inches"), [(1, 3.25), (2, 6.75)])
def test_a_paper_has_the_width_of_its_columns_and_small_type(drawn, columns, inches):
    with figures.style("paper", columns=columns):
        for ax in drawn():
            assert ax.figure.get_size_inches()[0] == inches
            assert 7 <= ax.xaxis.label.get_fontsize() <= 8
            assert 7 <= ax.get_xticklabels()[0].get_fontsize() <= 8


def test_a_style_ends_with_its_block():
    before = dict(mpl.rcParams)
    with pytest.raises(RuntimeError, match="inside"), figures.style("talk"):
        assert mpl.rcParams["font.size"] == 15
        raise RuntimeError("inside")
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    ("arguments", "message"), [(("poster",), "name must be one of 'paper', .*'poster'"), (("paper", 3), "columns .* got 3")]
)
def test_an_unknown_style_is_named(arguments, message):
    with pytest.raises(InputError, match=message), figures.style(*arguments):
        pass


@pytest.mark.parametrize(("name", "columns"), STYLES)
def test_nothing_is_clipped_and_no_ticks_overlap(drawn, name, columns):
    with figures.style(name, columns):
        for ax in drawn():
            figure = ax.figure
            figure.canvas.draw()
            renderer, page = figure.canvas.get_renderer(), figure.bbox
            box = figure.get_tightbbox(renderer).transformed(figure.dpi_scale_trans)
            assert box.x0 >= page.x0 - 0.5
            assert box.y0 >= page.y0 - 0.5
            assert box.x1 <= page.x1 + 0.5
            assert box.y1 <= page.y1 + 0.5
            for axis, low, high in ((ax.xaxis, "x0", "x1"), (ax.yaxis, "y0", "y1")):
                boxes = [label.get_window_extent(renderer) for label in axis.get_ticklabels() if label.get_text()]
                boxes = sorted((b for b in boxes if b.width), key=lambda b: getattr(b, low))
                assert len(boxes) > 1
                assert all(getattr(a, high) < getattr(b, low) for a, b in pairwise(boxes))


def test_without_axes_a_figure_shows_itself_as_png(drawn):
    for ax in drawn():
        png = ax.figure._repr_png_()
        pixels = imread(io.BytesIO(png))
        assert pixels.shape[:2] == tuple(np.round(ax.figure.get_size_inches() * ax.figure.dpi).astype(int)[::-1])
        assert pixels.std() > 0.01


def test_given_axes_are_drawn_on(attribution, ablation, norms):
    axes = Figure(layout="constrained").subplots(2, 2)
    assert figures.heads(attribution(), axes[0, 0]) is axes[0, 0]
    assert figures.waterfall(attribution(prompts=1), axes[0, 1]) is axes[0, 1]
    assert figures.removal(ablation(), ax=axes[1, 0]) is axes[1, 0]
    assert figures.growth(norms(), ax=axes[1, 1]) is axes[1, 1]
    assert all(ax.has_data() for ax in axes.flat)


def test_saving_twice_gives_the_same_bytes(tmp_path, norms):
    with figures.style("paper"):
        ax = figures.growth(norms(layers=4))
    for folder in ("one", "two"):
        paths = figures.save(ax, tmp_path / folder / "growth.l2", formats=("pdf", "png", "svg"))
        assert [path.name for path in paths] == ["growth.l2.pdf", "growth.l2.png", "growth.l2.svg"]
    for name in ("growth.l2.pdf", "growth.l2.png", "growth.l2.svg"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_pdf_embeds_truetype(tmp_path, norms):
    (path,) = figures.save(figures.growth(norms(layers=4)).figure, tmp_path / "growth", formats="pdf")
    assert b"/CIDFontType2" in path.read_bytes()
    assert b"/Type3" not in path.read_bytes()


def test_save_refuses_what_it_cannot_write(tmp_path, norms):
    ax = figures.growth(norms(layers=4))
    with pytest.raises(InputError, match=r"formats must be one of 'pdf', 'svg', 'png'; got 'jpg'"):
        figures.save(ax, tmp_path / "x", formats=("png", "jpg"))
    assert not list(tmp_path.iterdir())


def test_figures_import_neither_pyplot_nor_torch():
    code = "import sys, streamlens.figures; print(sorted({'matplotlib.pyplot', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
