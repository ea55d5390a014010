"""Figures as they are when they are written."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would have been written, in their order."""
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures
