"""Text in figures as it is: names of files and classes are no mathematics. Importing this imports matplotlib."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import wraps
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter

__all__ = ["Sheet", "plain"]

UNPRINTABLE = {"Cc", "Cs", "Cn"}
"""Categories of control characters, halves of characters (of file names that are no UTF-8) and of none at all."""


def plain(text: str) -> str:
    """Text that matplotlib draws as it is: no dollar begins mathematics, and what no font can draw is a replacement.

    Example:
        >>> print(plain("$x^$.png"), plain("a\\udcffb") == "a\\ufffdb")
        \\$x^\\$.png True
    """
    letters = (letter if letter == "\n" or _printable(letter) else "\ufffd" for letter in text)
    return re.sub(r"(?<!\\)\$", r"\\$", "".join(letters))


def _printable(letter: str) -> bool:
    return unicodedata.category(letter) not in UNPRINTABLE


class Sheet(Figure):
    """A figure whose texts are drawn as they are, wherever they were set: every figure of vitrim is one.

    It looks at them when it is drawn, so nobody who writes a title or a label has to think of it. Numbers at the ticks
    of an axis are left to matplotlib, names given for them are not.

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
    """A function that names ticks, and names them in plain text."""

    @wraps(formatter, assigned=())
    def named(*place: Any) -> str:
        return plain(formatter(*place))

    return named
