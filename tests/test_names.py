"""A name stands for one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "vitrim"


def test_no_two_classes_have_the_same_name() -> None:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert len(places) > 300
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
