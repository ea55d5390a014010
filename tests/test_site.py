"""The documentation site: complete, built from the code as it is, without a broken link, and its Python runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from full_matrix import cells

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
UNTRACKED = ("docs/api/", "docs/reference/", "docs/changelog.md", "docs/design/measures.md")
"""Written by docs/generate.py before a build."""
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *DOCS.rglob("*.md")]
    if not path.relative_to(ROOT).as_posix().startswith(UNTRACKED)
)
FENCE = re.compile(r"(?:^<!-- not run: (?P<reason>.+?) -->\n)?^```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
"""A comment in the line before a fence says what it needs that is not there."""


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load(DOCS / "generate.py", "docs_generate")


def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module docs/build.py, which finds docs/generate.py beside itself."""
    monkeypatch.syspath_prepend(str(DOCS))
    return load(DOCS / "build.py", "docs_build")


def entries(nav: Any) -> list[str]:
    """The pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in entries(part)]


def test_the_navigation_has_every_page_once() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    given = entries(yaml.safe_load(settings[settings.index("\nnav:") :])["nav"])
    made = ["changelog.md", "design/measures.md", *(f"api/{name}" for name in generate.api_pages())]
    made += [f"reference/{name}" for name in generate.REFERENCE]
    assert sorted(given) == sorted([*(page.removeprefix("docs/") for page in PAGES if page != "README.md"), *made])


@pytest.mark.parametrize("page", sorted(generate.pages()))
def test_pages_of_methods_have_the_options_of_the_code(page: str) -> None:
    text = (DOCS / "methods" / f"{page}.md").read_text()
    assert generate.BEGIN in text
    current = generate.page_with_block(text, generate.pages()[page])
    assert text == current, "run `python docs/generate.py`"


def test_the_list_of_methods_is_that_of_the_code() -> None:
    text = (DOCS / "methods" / "README.md").read_text()
    assert text == generate.filled(text, generate.methods_list()), "run `python docs/generate.py`"


def test_numbers_in_the_text_are_those_of_the_code() -> None:
    for path in generate.counted_pages():
        assert path.read_text() == generate.with_counts(path.read_text()), f"{path.name}: run `python docs/generate.py`"
    assert all("model families" in (ROOT / page).read_text() for page in ("README.md", "docs/index.md"))


def test_a_number_is_that_of_the_rows_of_its_table() -> None:
    page = "\n".join(generate._hosts()).partition("## Whole vision-language models")[0]
    families = re.findall(r"^\| (?!family)\w", page, re.MULTILINE)
    assert generate.with_counts("for 5 model families") == f"for {len(families)} model families"
    listed = [row.split(" | ") for row in generate.methods_list().splitlines()[2:] if not row.startswith("| [none]")]
    assert generate.with_counts("5 methods for") == f"{len(listed)} methods for"
    untrained = [row for row in listed if row[3] == "no"]
    assert generate.with_counts("5 methods need no training") == f"{len(untrained)} methods need no training"


@pytest.mark.parametrize(
    ("page", "has"),
    [
        ("commands.md", "-m, --method METHOD   e.g. tome:r=13, or @FILE; may repeat"),
        ("hosts.md", "| torchvision VisionTransformer | `VisionTransformer` | class token | ViT-B, L, H. "),
        ("selectors.md", "* `pivots` = `4` (integer >= 0): "),
        ("recipes.md", "| `evit_deit_small` | deit_small_patch16_224 | evit:keep_rate=0.7 | 30 | 1024 |"),
        ("recipes.md", "| `optimizer.momentum` | - | of SGD and Muon"),
        ("presets.md", "| `mctf:r=16` | deit_small_patch16_224 | 2.60 | 79.21 |"),
    ],
)
def test_the_reference_is_of_the_code(page: str, has: str) -> None:
    assert has in "\n".join(generate.REFERENCE[page]())


def test_values_are_put_into_words() -> None:
    assert generate._values({"type": "number", "exclusiveMinimum": 0.0, "maximum": 1.0}) == "number > 0, <= 1"
    assert generate._values({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}) == "`a`, `b`"
    assert generate._values({"anyOf": [{"type": "integer"}, {"type": "number"}]}) == "number"
    assert generate._values({"enum": ["a", "b", "c"]}, "b") == "or `a`, `c`"


def test_the_drawing_is_what_its_script_draws() -> None:
    drawing = load(DOCS / "draw_data_flow.py", "docs_draw_data_flow")
    assert drawing.FILE.read_text() == drawing.seeded_draws()


@pytest.mark.parametrize(
    ("remote", "page"),
    [
        ("https://github.com/owner/name.git\n", "https://github.com/owner/name"),
        ("https://user:key@host.org/owner/name", "https://host.org/owner/name"),
        ("git@github.com:owner/name.git", "https://github.com/owner/name"),
        ("ssh://git@host.org/owner/name.git", "https://host.org/owner/name"),
        ("../name", ""),
        ("", ""),
    ],
)
def test_the_link_of_the_site_is_the_remote_without_a_user(
    remote: str, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build(monkeypatch).web_address(remote) == page


def test_what_is_wrong_with_a_site_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.html").write_text("<table></table>")
    check = build(monkeypatch).check
    assert check(tmp_path) == 0
    (tmp_path / "table.html").write_text("<p>| a |\n|---|</p>")
    (tmp_path / "font.html").write_text('<link href="//fonts.host.org/a.css">')
    (tmp_path / "count.cpython-311.pyc").write_bytes(b"")
    assert check(tmp_path) == 1
    named = [line.removeprefix(f"{tmp_path}/").partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert named == ["font.html", "table.html", "count.cpython-311.pyc"]


WITH_PYTHON = [page for page in PAGES if "```python" in (ROOT / page).read_text()]
SLOW = ("docs/show.md",)
"""Pages whose examples `plots/test_show.py` has, too."""


@pytest.mark.parametrize("page", cells(WITH_PYTHON, set(WITH_PYTHON) - set(SLOW)))
def test_python_in_pages_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fence after fence, as a reader would; random weights do where a page downloads those of timm."""
    import timm

    from vitrim.core import registry

    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **options: create(name, **options))
    monkeypatch.setattr(registry, "_METHODS", dict(registry.methods()))  # a page may register one of its own
    monkeypatch.setattr(registry, "_REDUCERS", dict(registry._REDUCERS))
    monkeypatch.setattr(registry._HOSTS, "entries", dict(registry._HOSTS.entries))
    monkeypatch.setattr(registry._LIBRARIES, "entries", dict(registry._LIBRARIES.entries))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page}
    for fence in FENCE.finditer((ROOT / page).read_text()):
        if fence["reason"] is None:
            exec(compile(fence["code"], page, "exec"), names)
