"""Names in figures are drawn as they are, wherever they stand; matplotlib itself says what it would draw."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.cbook import is_math_text
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from made_tables import tables
from vitrim.analysis.family import Tables
from vitrim.analysis.figures import drawn
from vitrim.app.messages import PlottedPoint
from vitrim.app.uploads import _picture
from vitrim.plain import Sheet, plain
from vitrim.plots.charts import plot_accuracy_over_macs
from vitrim.plots.dense import Column, compare
from vitrim.plots.tuning import plot_front, plot_heat, plot_schedule
from vitrim.report import Table
from vitrim.style import encoded, sheet

ROOT = Path(__file__).parents[1]
NAMES = (
    r"$\badmacro$",
    "$x^$",
    "a $5$ bill",
    "\udcff.jpg",
    "tab\tand\x00null",
    r"\$",
    "$$",
    r"\\$a$",
    "_plain",
    "50 %",
)


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def set_everywhere(axis: Any, name: str) -> None:
    """Every way of matplotlib to put a text into a figure that vitrim uses, or may come to use."""
    figure = axis.figure
    axis.set_title(name)
    axis.set_title(name, loc="left")
    figure.suptitle(name)
    figure.supxlabel(name)
    figure.supylabel(name)
    axis.set_xlabel(name)
    axis.set_ylabel(name)
    axis.text(0, 0, name)
    figure.text(0, 0, name)
    axis.annotate(name, (0, 0))
    (drawn,) = axis.plot([0, 1], [0, 1], label=name)
    axis.legend(handles=[drawn], title=name)
    figure.legend(handles=[drawn], loc="outside lower center")
    axis.set_xticks([0, 1], [name, name])
    axis.set_yticks([0, 1])
    axis.set_yticklabels([name, name])
    figure.colorbar(axis.imshow(np.zeros((2, 2))), label=name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_is_no_mathematics_wherever_it_stands(name: str) -> None:
    figure = sheet(5, 4)
    set_everywhere(figure.subplots(), name)
    figure.set_layout_engine("none")
    for kind in ("png", "svg"):
        encoded(figure, kind)  # which raises where mathematics are not valid, and for halves of characters
    shown = texts(figure)
    assert not any(is_math_text(text) for text in shown)
    assert sum(text == plain(name) for text in shown) >= 15
    if name.isprintable() and "\\" not in name:  # what is drawn, which loses no letter
        assert plain(name).replace(r"\$", "$") == name


def test_a_text_is_drawn_as_matplotlib_draws_it_without_mathematics() -> None:
    def pixels(figure: Any, **options: Any) -> Any:
        figure.text(0.1, 0.5, "$x^2$ costs 5$", **options)
        figure.canvas.draw()
        return np.asarray(figure.canvas.buffer_rgba())

    from matplotlib.backends.backend_agg import FigureCanvasAgg

    one, other, mathematics = (kind(figsize=(2, 1)) for kind in (Sheet, Figure, Figure))
    for figure in (one, other, mathematics):
        FigureCanvasAgg(figure)
    drawn = pixels(one)
    assert np.array_equal(drawn, pixels(other, parse_math=False))
    mathematics.text(0.1, 0.5, "$x^2$ costs 5")
    mathematics.canvas.draw()
    assert not np.array_equal(drawn, np.asarray(mathematics.canvas.buffer_rgba()))


@pytest.mark.slow
def test_numbers_at_ticks_are_left_as_they_are() -> None:
    found = []
    for kind in (Sheet, Figure):
        figure = kind(figsize=(3, 3), layout="constrained")
        axis: Any = figure.subplots()
        axis.plot([1, 1000], [1, 2])
        axis.set_xscale("log")
        encoded(figure)
        found.append(encoded(figure))  # drawn twice, as for two formats
        assert r"$\mathdefault{10^{2}}$" in [label.get_text() for label in axis.get_xticklabels()]
    assert found[0] == found[1]


def drawn_of_records() -> list[Any]:
    """Every figure over records whose names are hostile."""
    made = tables()
    names = {name: f"{name} $x^$ \udcff" for table in made.values() for row in table.rows for name in row[:2]}

    def renamed(table: Table) -> Table:
        rows = [tuple(names[value] if isinstance(value, str) and ":" in value else value for value in row)
                for row in table.rows]  # fmt: skip
        return Table(table.name, table.title, table.columns, rows, table.shown)

    hostile = Tables({name: renamed(table) for name, table in made.items()})
    families = ("patterns", "depth", "counts", "features")
    return [figure for family in families for _, figure in drawn(family, hostile)]


@pytest.mark.slow  # every kind of figure is drawn above
def test_figures_of_an_analysis_are_such_sheets() -> None:
    figures = drawn_of_records()
    assert len(figures) > 8
    assert all(isinstance(figure, Sheet) for figure in figures)
    encoded(figures[0])
    assert any("\ufffd" in text for text in texts(figures[0]))
    assert not any(is_math_text(text) for text in texts(figures[0]))


BAD = r"$\badmacro$ \udcff".replace(r"\udcff", "\udcff")
PICTURE = np.zeros((4, 4, 3))
WRITTEN: dict[str, Callable[[Path], Any]] = {
    "tradeoff": lambda path: plot_accuracy_over_macs([(BAD, 1.0, 0.5)], (2.0, 0.6), path, title=BAD),
    "front": lambda path: plot_front([("constant", 0.5, 0.1)], path, front=[(0.5, 0.1)], damage=BAD),
    "schedule": lambda path: plot_schedule({BAD: [3.0, 2.0]}, 4, path, title=BAD),
    "heat": lambda path: plot_heat([[0.1, 0.2]], (BAD, [BAD]), (BAD, [BAD, 2]), path, label=BAD),
    "compare": lambda path: compare(
        PICTURE, [Column(BAD, PICTURE, note=BAD)], classes=[(BAD, (0.0, 0.0, 1.0)), ("_b", (0.0, 1.0, 0.0))], title=BAD
    ).savefig(path),
    "page": lambda path: path.write_bytes(_picture([PlottedPoint(BAD, BAD, BAD, 0.5, 0.5, True, True)], BAD, BAD)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WRITTEN)
def test_other_figures_are_written_with_hostile_names(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        WRITTEN[name](tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as image:
        assert np.asarray(image.convert("L")).std() > 0


def test_nobody_makes_a_figure_of_another_class() -> None:
    """A figure of pyplot, or matplotlib's own, would read names as mathematics."""
    found = []
    for file in [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "matplotlib" in text else ():
            if isinstance(node, ast.ImportFrom) and node.module in ("matplotlib", "matplotlib.figure"):
                found += [(file.name, name.name) for name in node.names if name.name in ("pyplot", "Figure", "figure")]
            elif isinstance(node, ast.Import):
                found += [(file.name, name.name) for name in node.names if name.name.startswith("matplotlib.")]
            elif isinstance(node, ast.ImportFrom) and node.module == "matplotlib.pyplot":
                found.append((file.name, node.module))
    assert found == [("plain.py", "Figure")]
