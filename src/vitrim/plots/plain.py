"""Text in figures is literal: names of files and classes are not mathematics. Importing this imports matplotlib."""

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
"""Categories of control characters, halves of characters (of file names that are no UTF-8) and of none at all."""


def plain(text: str) -> str:
    """Text that matplotlib draws as it is: dollars are escaped, and what no font can draw is replaced.

    Example:
        >>> print(plain("$x^$.png"), plain("a\\udcffb") == "a\\ufffdb")
        \\$x^\\$.png True
    """
    letters = (
        letter if letter == "\n" or unicodedata.category(letter) not in UNPRINTABLE else "\ufffd" for letter in text
    )
    return re.sub(r"(?<!\\)\$", r"\\$", "".join(letters))


class Sheet(Figure):
    """A figure whose texts are drawn as they are, wherever they were set: every figure of vitrim is one.

    Texts are escaped when the figure is drawn, so callers need not escape titles and labels. Numbers at ticks are left
    to matplotlib; names given for ticks are escaped.

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
    """``formatter`` with its names escaped."""

    @wraps(formatter, assigned=())
    def named(*place: Any) -> str:
        return plain(formatter(*place))

    return named
