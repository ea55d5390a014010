"""Every method has its page, and the page names every option."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitrim.config import MethodConfig
from vitrim.registry import methods

PAGES = Path(__file__).parents[1] / "docs" / "methods"
SHARED_PAGE = {"l1": "fixed_radial", "l2": "fixed_radial", "linf": "fixed_radial"}


@pytest.mark.parametrize("name", methods())
def test_page_names_every_option(name: str) -> None:
    page = (PAGES / f"{SHARED_PAGE.get(name, name)}.md").read_text()
    own = [field for field in methods()[name].model_fields if field not in MethodConfig.model_fields]
    missing = [field for field in own if f"`{field}`" not in page]
    assert not missing


@pytest.mark.parametrize("name", methods())
def test_index_links_the_page(name: str) -> None:
    assert f"({SHARED_PAGE.get(name, name)}.md)" in (PAGES / "README.md").read_text()
