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


def load() -> Any:
    spec = importlib.util.spec_from_file_location("docs_count", ROOT / "docs" / "count.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


count = load()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of three files: `b` calls up to `a`; `a` and `c` give one name two meanings."""
    package = tmp_path / "src" / "own"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text('"""A module."""\n\n# why\nGrid = tuple[int, int]\n\n\ndef one():\n    return 1\n')
    (package / "b.py").write_text("def two():\n    from own.a import one\n    return one()\n")
    (package / "c.py").write_text(
        "class _Grid:\n    kind: ClassVar[str] = 'a'\n    option: int = 3\n    def f(self, a, *, b): ...\n"
    )
    return package


def test_lines_names_and_members_are_counted(package: Path) -> None:
    texts = count.sources(package)
    first, last = texts[package / "a.py"], texts[package / "c.py"]
    assert (count.lines_of_code(first), count.docstrings(first), count.comments([first])) == (3, 1, 1)
    assert count.shared_names(texts) == {"Grid": [package / "a.py", package / "c.py"]}
    assert count.parameters(last) == {"f": 2}
    assert count.members(package, "_Grid", "c.py") == (1, 1)


def test_a_walk_is_the_calls_that_python_makes(package: Path) -> None:
    calls = count.walk(package, "import own.b\nsys.setprofile(enter)\nown.b.two()\nsys.setprofile(None)")
    assert count.files(calls) == ["a.py", "b.py"]
    assert [call for call in calls if call[0]] == [("b.py", "two", "a.py", "one")]
    assert count.steps(calls, ["b", "a", "c", ""]) == "2; 1; 0"  # with `a` above `b`
    assert count.steps(calls, ["a", "b", "c", ""]) == "2; 0; 0"


@pytest.mark.slow  # reads every file
def test_every_measure_has_a_value() -> None:
    measures = dict(count.rows(PACKAGE, walks=False))
    assert all(value[0].isdigit() for value in measures.values())


# ---- the architecture page says what the code does -------------------------------------------------------------------

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


TITLES = {"The walk of one `r`": "of `r`", "The walk of one token": "of a token"}


@pytest.fixture(scope="module")
def walks() -> dict[str, list[str]]:
    """The files on each walk."""
    programs = [next(code for what, code in count.WALKS.items() if what.startswith(which)) for which in TITLES.values()]
    return {title: count.files(count.walk(PACKAGE, code)) for title, code in zip(TITLES, programs, strict=True)}


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
