"""Files that documents name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/*.md")])
NAMED = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|pyi|md|ya?ml|toml|css|js|html))`")
RUN = re.compile(r"python ((?:benchmarks|docs|examples)/\S+\.py)")
PLACEHOLDERS = re.compile(r"NAME|LIBRARY|MODEL|RECIPE")
OTHERS = {"tests/test_modeling_common.py", "tests/test_models.py", "mine.py", "report.md"}
"""Files of the host libraries, of a reader, and of a command."""


def files() -> list[str]:
    kept = ("src", "tests", "docs", "benchmarks", "examples", ".github")
    inside = (path for folder in kept for path in (ROOT / folder).rglob("*") if path.is_file())
    return [f"/{path.relative_to(ROOT)}" for path in (*inside, *(each for each in ROOT.iterdir() if each.is_file()))]


FILES = files()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_document_names_exist(document: Path) -> None:
    named = {*NAMED.findall(document.read_text()), *RUN.findall(document.read_text())}
    missing = [
        name
        for name in sorted(named)
        if name not in OTHERS and not PLACEHOLDERS.search(name) and not any(file.endswith(f"/{name}") for file in FILES)
    ]
    assert not missing
