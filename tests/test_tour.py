"""The notebook of examples/ runs from top to bottom, and is kept without outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "tour.ipynb"


def cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_it_is_kept_without_outputs() -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells())


@pytest.mark.slow
def test_it_runs_in_a_kernel(tmp_path: Path) -> None:
    """As a reader runs it; its cells are those of `docs/start.md`, which `test_site.py` runs."""
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    client.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
