"""The counting script counts what it says, and the counts that the design promises hold."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import vitrim

ROOT = Path(__file__).parents[1]
PACKAGE = Path(vitrim.__file__).parent
SOURCE = '''"""A module."""

import os  # counted

# not counted


class Kind(Base):
    """Nor this."""

    name: ClassVar[str] = "a"
    option: int = 3

    @classmethod
    def one(cls):
        """Nor this,
        on two lines."""
        return os.name

    def _own(self):
        return lambda: 0


class Base:
    def one(self): ...
    def two(self): ...
'''


def load() -> Any:
    spec = importlib.util.spec_from_file_location("docs_count", ROOT / "docs" / "count.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


count = load()


def test_lines_functions_and_members_are_counted(tmp_path: Path) -> None:
    assert count.lines_of_code(SOURCE) == 12
    assert count.functions(SOURCE) == 4
    (tmp_path / "kind.py").write_text(SOURCE)
    assert count.members(tmp_path, "Kind", ("kind.py", "old.py")) == (1, 2)


def test_imports_by_a_string_make_a_circle(tmp_path: Path) -> None:
    package = tmp_path / "own"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from own import b")
    (package / "b.py").write_text("import importlib\n\ndef late():\n    importlib.import_module('own.c')")
    (package / "c.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from own.b import late")
    assert count.imports(package) == {"own": set(), "own.a": {"own.b"}, "own.b": {"own.c"}, "own.c": {"own.b"}}
    assert count.circles(count.imports(package)) == 1


def test_a_walk_is_the_files_whose_functions_are_entered(tmp_path: Path) -> None:
    package = tmp_path / "own"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from own.b import two\n\ndef one():\n    return two()")
    (package / "b.py").write_text("class Body:\n    pass\n\ndef two():\n    return 2")
    (package / "c.py").write_text("class Body:\n    pass")
    code = "import own.a, own.c\nsys.setprofile(enter)\nown.a.one()\nsys.setprofile(None)"
    assert count.walk(package, code) == ["a.py", "b.py"]


def test_there_is_no_circle() -> None:
    assert count.circles(count.imports(PACKAGE)) == 0


def test_every_measure_has_a_value() -> None:
    found = dict(count.rows(PACKAGE, walks=False))
    assert all(value[0].isdigit() for value in found.values())
    assert count.table(iter(found.items())).count("\n") == len(found) + 2
