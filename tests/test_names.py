"""A name stands for one thing, and what it names exists."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "vitrim"
FOR_CONTRIBUTORS = ["CONTRIBUTING.md", *(f"docs/{name}.md" for name in ("architecture", "design/decisions"))]
FOR_CONTRIBUTORS += ["docs/design/libraries.md"]


def test_no_two_classes_have_the_same_name() -> None:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall(r"^ *class (\w+)[(:]", path.read_text(encoding="utf-8"), re.MULTILINE):
            places[name].append(path.relative_to(PACKAGE).as_posix())
    assert len(places) > 300
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def files() -> set[str]:
    """Every file of the repository that a page may name, and each of its endings: ``a/b.py`` and ``b.py``."""
    found = (
        path for folder in ("src", "tests", "docs", "benchmarks", "examples", ".github") for path in files_in(folder)
    )
    parts = [path.relative_to(ROOT).parts for path in [*found, *ROOT.glob("*.*")]]
    return {"/".join(each[start:]) for each in parts for start in range(len(each))}


def files_in(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*.*") if path.is_file()]


@pytest.mark.parametrize("page", FOR_CONTRIBUTORS)
def test_files_that_a_page_names_exist(page: str) -> None:
    """But for those that a reader is to write: methods/NAME.py."""
    named = re.findall(r"`([\w./-]+\.(?:py|md|ya?ml|toml))`", (ROOT / page).read_text(encoding="utf-8"))
    assert named
    assert sorted({name for name in named if not re.search(r"NAME|LIBRARY", name)} - files()) == []
