"""A folder whose files enter themselves into a table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vitrim.core.tables import discover, enter, entry_of


def test_every_file_of_a_package_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "vitrim_table"
    package.mkdir()
    for name in ("__init__", "one", "two"):
        (package / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    discover("vitrim_table")
    assert {"vitrim_table.one", "vitrim_table.two"} <= set(sys.modules)


def test_a_key_is_entered_once() -> None:
    table = {"a": int}
    with pytest.raises(ValueError, match=r"^thing 'a' is registered twice, by .*int.* and .*float"):
        enter(table, "a", float, "thing 'a'")
    enter(table, "b", float, "thing 'b'")
    assert table == {"a": int, "b": float}


def test_the_nearest_class_counts() -> None:
    assert entry_of({object: 0, int: 1}, bool) == 1
    assert entry_of({object: 0, bool: 2, int: 1}, bool) == 2
    assert entry_of({int: 1}, str) is None
