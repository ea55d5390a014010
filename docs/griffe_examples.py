"""Let the site show docstrings as they are meant: examples as code, several names in a row, links from their page."""

from __future__ import annotations

import re
from typing import Any

import griffe

NAMES = r"^( +)(\w+(?:, \w+)+): "
"""A line of ``Args:`` or ``Attributes:`` that describes several names at once."""


class Examples(griffe.Extension):
    """Changes docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the text of the docstring of ``obj``, if it has one."""
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        # at a plain space the names would be cut into a name and a type
        text = re.sub(NAMES, lambda found: f"{found[1]}{found[2].replace(' ', chr(0xA0))}: ", text, flags=re.MULTILINE)
        if obj.path.startswith("vitrim.hosts"):  # their links are written for docs; the API is a folder deeper
            text = re.sub(r"\]\((\w+(?:/\w+)?\.md)", r"](../\1", text)
        obj.docstring.value = text
