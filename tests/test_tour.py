"""The notebooks of examples/ run from top to bottom, offline, end with their number, and are kept without outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
NUMBERS = {
    "tour_classifier": (r"(\d+) of 450 digits right", 445, 450),  # the demo's model reads 449
    "tour_embeddings": (r"dense index (\S+) % of the time", 98, 100),
    "tour_segmenter": (r"tome:\S+ (\S+) % of the pixels as dense", 90, 99.9),
    "tour_language_model": (r"takes (\S+) times less memory", 3.3, 3.6),  # 608 tokens over 176
}
"""What a notebook prints last, and the least and the most of its number."""


def cells(name: str) -> list[dict[str, Any]]:
    return [one for one in json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"] if one["cell_type"] == "code"]


def test_every_notebook_has_its_number() -> None:
    assert sorted(NUMBERS) == sorted(path.stem for path in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("name", NUMBERS)
def test_it_is_kept_without_outputs(name: str) -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells(name))


@pytest.mark.slow  # up to half a minute each; pages and examples make the same calls
@pytest.mark.parametrize("name", NUMBERS)
def test_it_runs_to_its_number(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cell after cell, as a reader would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {"__name__": name}
    for cell in cells(name):
        capsys.readouterr()
        exec(compile("".join(cell["source"]), f"{name}.ipynb", "exec"), names)
    pattern, least, most = NUMBERS[name]
    found = re.search(pattern, capsys.readouterr().out)
    assert found is not None
    assert least <= float(found[1]) <= most
    assert not list(tmp_path.iterdir())
