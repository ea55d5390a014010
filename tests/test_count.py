"""The counting script counts what it says, and the counts that the design promises hold."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, get_args

import pytest

import tiny
import vitrim
from vitrim.core.block import Site

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
    assert count.docstrings('def f():\n    """One.\n\n    Two.\n    """\n\nA = 1\n"""Of A."""\n') == 5
    body = ["", "    # a comment", *(f"    a = {number}" for number in range(40))]
    long = "\n".join(["def f():", '    """Of', '    two lines."""', *body])
    assert (count.long_functions(long), count.long_functions(long + "\n    return a")) == (0, 1)
    wide = "class A:\n    def __init__(self, a, *, b): ...\n    def f(self, a, /, b, *c, d=1): ..."
    wide += "\ndef _g(a): ...\ndef f(): ..."
    assert count.parameters(wide) == {"A": 2, "f": 3}
    (tmp_path / "kind.py").write_text(SOURCE)
    assert count.members(tmp_path, "Kind", "kind.py") == (1, 2)


def test_imports_by_a_string_make_a_circle(tmp_path: Path) -> None:
    package = tmp_path / "own"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from own import b")
    (package / "b.py").write_text("import importlib\n\ndef late():\n    importlib.import_module('own.c')")
    (package / "c.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from own.b import late")
    assert count.imports(package) == {"own": set(), "own.a": {"own.b"}, "own.b": {"own.c"}, "own.c": {"own.b"}}
    assert count.circles(count.imports(package)) == 1
    assert count.circles({"a": {"a.x"}, "a.x": {"a.y"}, "a.y": set()}) == 0
    assert count.circles({"x": {"y"}, "y": {"z"}, "z": {"y"}, "w": {"w"}}) == 2


def test_a_walk_is_the_files_whose_functions_are_entered(tmp_path: Path) -> None:
    package = tmp_path / "own"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from own.b import two\n\ndef one():\n    return two()")
    (package / "b.py").write_text("class Body:\n    pass\n\ndef two():\n    return 2")
    (package / "c.py").write_text("class Body:\n    pass")
    code = "import own.a, own.c\nsys.setprofile(enter)\nown.a.one()\nsys.setprofile(None)"
    assert count.walk(package, code) == ["a.py", "b.py"]


@pytest.mark.slow  # `test_imports.py` refuses arrows that point upwards, without which there is no circle between rooms
def test_every_measure_has_a_value_and_there_is_no_circle() -> None:
    found = dict(count.rows(PACKAGE, walks=False))
    assert found["circles of modules, imports for types and by string too"] == "0"
    assert all(value[0].isdigit() for value in found.values())
    assert count.table(iter(found.items())).count("\n") == len(found) + 2


# ---- the architecture page says what the code does -------------------------------------------------------------------

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


TITLES = {"The walk of one `r`": "of `r`", "The walk of one token": "of a token"}


@pytest.fixture(scope="module")
def walks() -> dict[str, list[str]]:
    """The files on each walk, found in one process: importing takes longer than walking."""
    programs = [next(code for what, code in count.WALKS.items() if what.startswith(which)) for which in TITLES.values()]
    both = "\nfirst = walk(); entered.clear()\n".join(programs) + "\nwalk = lambda second=walk(): [first, second]"
    return dict(zip(TITLES, count.walk(PACKAGE, both), strict=True))


@pytest.mark.slow  # starts a process for each walk
@pytest.mark.parametrize("title", TITLES)
def test_the_walks_of_the_page_are_those_of_the_code(title: str, walks: dict[str, list[str]]) -> None:
    section = PAGE.partition(f"### {title}\n")[2].partition("\n#")[0]
    named = {
        file for line in section.splitlines() if line[:3] == "| `" for file in re.findall(r"`(\w+/\S+?\.py)`", line)
    }
    assert named == set(walks[title]) - {"__init__.py"}


def test_the_picture_of_the_page_is_the_order_in_which_a_block_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = re.sub(r"\s+", " ", PAGE.partition("\n       x, state -> ")[2].partition("\n")[0])
    stages = [stage.strip() for stage in picture.split("->") if stage.strip() != "+"]
    model = tiny.HOSTS["hf_vit"]()
    vitrim.reduce_(model, "tome:r=4")
    block: Any = tiny.blocks(model)[1]
    seen: list[str] = []

    def watch(owner: Any, name: str, label: str | None = None) -> None:
        own = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(label or str(args[0]))
            return own(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    watch(block.reducer, "reduce")
    watch(block, "project", "project q, k, v")
    watch(block.reducer, "attend", "attend")
    watch(block, "mlp_branch", "MLP")
    model(tiny.images())
    assert seen == [stage for stage in stages if stage != "query"]  # where ToMe does nothing
    assert [stage for stage in stages if stage in get_args(Site)] == list(get_args(Site))


def test_every_room_and_every_file_of_the_core_is_on_the_page() -> None:
    rooms = PAGE.partition("## The rooms")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([\w/]+?)(?:\.py|/|/LIBRARY/)`", rooms))
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"} <= named
    assert {path.stem for path in (PACKAGE / "core").glob("*.py") if path.name != "__init__.py"} <= named
