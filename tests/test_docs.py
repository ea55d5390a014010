"""Every method has its page, and the page names every option."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from vitrim.core.method import MethodConfig
from vitrim.core.registry import methods

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "methods"
SHARED_PAGE = {"l1": "fixed_radial", "l2": "fixed_radial", "linf": "fixed_radial"}
SOURCES = {
    "A": r"(?!.*(none|independent|TokenReduction|as re-implemented|in the PiToMe))",
    "S": ".*TokenReduction",
    "P": ".*in the PiToMe repository",
    "R": ".*independent|none - one reading",
}
"""What `source` of tests/golden/index.json says of the files behind a letter of the table of methods."""
FILES = {
    **dict.fromkeys(("l1", "l2", "linf"), "heuristic"),
    "dpc_knn": "dpcknn",
    "gtp": "gtp_vit",
    "bat": "bat units",
    "zero_tprune": "zero_tprune units",
    "none": "none",
}
"""What the index calls a method, where it is another name."""


@pytest.mark.parametrize("name", methods())
def test_page_names_every_option(name: str) -> None:
    page = (PAGES / f"{SHARED_PAGE.get(name, name)}.md").read_text()
    own = [field for field in methods()[name].model_fields if field not in MethodConfig.model_fields]
    missing = [field for field in own if f"`{field}`" not in page]
    assert not missing


@pytest.mark.parametrize("name", methods())
def test_index_links_the_page(name: str) -> None:
    assert f"({SHARED_PAGE.get(name, name)}.md)" in (PAGES / "README.md").read_text()


@pytest.mark.parametrize("name", methods())
def test_a_method_is_checked_against_what_the_table_says(name: str) -> None:
    """A letter stands there if and only if there are vectors of that source; F, by hand, if there are none."""
    table = (PAGES / "README.md").read_text().splitlines()
    row = next(line for line in table if line.startswith("| [") and f"]({SHARED_PAGE.get(name, name)}.md)" in line)
    letters = set(re.findall(r"[A-Z]", row.split("|")[-2]))
    index = json.loads((ROOT / "tests" / "golden" / "index.json").read_text())["files"]
    called = {FILES.get(name, name), {"dynamicvit": "dyvit"}.get(name, name)}
    sources = [
        row["source"]
        for row in index
        if row["method"].removesuffix(" (not official)") in called and not row["file"].startswith("analysis")
    ]
    found = {letter for letter, pattern in SOURCES.items() if any(re.match(pattern, source) for source in sources)}
    assert letters == (found or {"F"})


def test_pruned_patches_are_said_to_be_zeros() -> None:
    for page in ("README.md", "docs/hosts.md", "docs/architecture.md"):
        assert "zeros" in (ROOT / page).read_text(), page
