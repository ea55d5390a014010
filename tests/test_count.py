"""The counting script runs, and the architecture page says what the code does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import vitrim

ROOT = Path(__file__).parents[1]
PACKAGE = Path(vitrim.__file__).parent


def load() -> Any:
    spec = importlib.util.spec_from_file_location("docs_count", ROOT / "docs" / "count.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


count = load()


def test_a_name_of_a_class_or_type_means_one_thing(tmp_path: Path) -> None:
    texts = {tmp_path / "a.py": "Grid = tuple[int, int]", tmp_path / "b.py": "class _Grid: ..."}
    assert set(count.shared_names(texts)) == {"Grid"}
    assert count.shared_names(count.sources(PACKAGE)) == {}


# ---- the architecture page says what the code does -------------------------------------------------------------------

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


TITLES = {"The walk of one `r`": "of `r`", "The walk of one token": "of a token"}


@pytest.fixture(scope="module")
def walks() -> dict[str, list[str]]:
    """The files on each walk."""
    programs = [next(code for what, code in count.WALKS.items() if what.startswith(which)) for which in TITLES.values()]
    return {title: count.files(count.walk(PACKAGE, code)) for title, code in zip(TITLES, programs, strict=True)}


@pytest.mark.slow  # starts a process for each walk
@pytest.mark.parametrize("title", TITLES)
def test_the_walks_of_the_page_are_those_of_the_code(title: str, walks: dict[str, list[str]]) -> None:
    section = PAGE.partition(f"### {title}\n")[2].partition("\n#")[0]
    named = {file for line in section.splitlines() if line[:3] == "| `" for file in re.findall(r"`([\w/]+\.py)`", line)}
    assert named == set(walks[title]) - {"__init__.py"}


def test_every_room_and_every_file_of_the_core_is_on_the_page() -> None:
    rooms = PAGE.partition("## The rooms")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([\w/]+?)(?:\.py|/|/LIBRARY/)`", rooms))
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"} <= named
    assert {path.stem for path in (PACKAGE / "core").glob("*.py") if path.name != "__init__.py"} <= named
