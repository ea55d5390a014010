"""Figures as they are when they are written."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure

from vitrim import style


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would have been written, in their order."""
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    monkeypatch.setattr(style, "write", lambda content, path: None)
    return figures
