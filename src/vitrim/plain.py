"""Literal text in figures: names of files and classes are not mathematics. Importing this module imports matplotlib."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import wraps
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter

UNPRINTABLE = {"Cc", "Cs", "Cn"}
"""Unicode categories of control characters, surrogates (from file names that are not UTF-8) and unassigned ones."""


def plain(text: str) -> str:
    """Text that matplotlib draws literally: dollar signs escaped, unprintable characters replaced.

    Example:
        >>> print(plain("$x^$.png"), plain("a\\udcffb") == "a\\ufffdb")
        \\$x^\\$.png True
    """
    letters = (
        letter if letter == "\n" or unicodedata.category(letter) not in UNPRINTABLE else "\ufffd" for letter in text
    )
    return re.sub(r"(?<!\\)\$", r"\\$", "".join(letters))


class Sheet(Figure):
    """A figure that draws all its texts literally; every figure of vitrim is one.

    Texts are escaped when the figure is drawn, so callers need not escape titles and labels. Matplotlib formats numeric
    tick labels; names as tick labels are escaped.

    Example:
        >>> sheet = Sheet()
        >>> title = sheet.suptitle("$\\\\badmacro$")
        >>> sheet.draw_without_rendering()
        >>> print(title.get_text())
        \\$\\badmacro\\$
    """

    def draw(self, renderer: Any) -> None:
        for axes in self.axes:
            for axis in (axes.xaxis, axes.yaxis):
                formatter = axis.get_major_formatter()
                if isinstance(formatter, FuncFormatter) and not hasattr(formatter.func, "__wrapped__"):
                    formatter.func = _plainly(formatter.func)
        for text in self.findobj(Text):
            text.set_text(plain(text.get_text()))
        super().draw(renderer)


def _plainly(formatter: Callable[..., str]) -> Callable[..., str]:
    """Wrap ``formatter`` to escape its results."""

    @wraps(formatter, assigned=())
    def named(*place: Any) -> str:
        return plain(formatter(*place))

    return named
