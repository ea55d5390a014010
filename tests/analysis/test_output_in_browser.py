"""The report of an analysis in a real browser: with all families, it complains of nothing, asks for nothing from
elsewhere, and is as wide as a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from browsers import Watched, chromium
from made_tables import results
from vitrim.analysis.output import write_report
from vitrim.style import encoded

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    long = "x" * 60
    found = {
        "models": [{"model": f"segmenter:vit_{long}", "weights": f"/data/{long}/{long}/weights.safetensors"}],
        "data": {"source": f"/data/{long}/images.parquet", "split": "test", "images": 40, "batch_size": 8},
    }
    made = results()
    made["counts"].notes.append(f"a note on {long}{long}")
    pictures: list[bytes] = []

    def first(figure: Any) -> bytes:
        """One picture in the place of all, which take seconds to be encoded."""
        pictures[:] = pictures or [encoded(figure)]
        return pictures[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrim.analysis.output.encoded", first)
        write_report(out, made, found)
    return out / "index.html"


def test_a_report_in_a_browser(page: Path) -> None:
    with chromium() as browser:
        for width, dark in ((375, False), (1280, True)):
            watched = Watched(browser, width=width, dark=dark)
            watched.page.goto(page.as_uri())
            assert watched.page.locator("figure img").count() > 10
            broken = "[...document.images].filter(one => !one.complete || one.naturalWidth == 0).length"
            assert watched.page.evaluate(broken) == 0
            assert watched.sideways() <= 0
            assert watched.elsewhere() == []
            assert [one for one in watched.asked if one.startswith("file:")] == [page.as_uri()]
            assert watched.complaints == []
            watched.close()
