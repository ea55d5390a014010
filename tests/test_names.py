"""A name stands for one thing."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "vitrim"


def test_no_two_classes_have_the_same_name() -> None:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall(r"^ *class (\w+)[(:]", path.read_text(encoding="utf-8"), re.MULTILINE):
            places[name].append(path.relative_to(PACKAGE).as_posix())
    assert len(places) > 300
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
