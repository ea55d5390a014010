"""README and docs type what is understood: commands, methods, selectors, recipes, scripts and short Python."""

from __future__ import annotations

import argparse
import ast
import re
import runpy
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import timm
from torch import nn

import vitrim
from cli_runs import built
from full_matrix import cells
from vitrim.core.registry import parse_method, parse_selector
from vitrim.loading import check_name
from vitrim.training.recipe import load_recipe
from vitrim.tuning.result import Target
from vitrim.tuning.sweep import parse_grid

ROOT = Path(__file__).parents[1]
GENERATED = ("docs/api/", "docs/reference/", "docs/changelog.md", "docs/design/measures.md")
"""Written by docs/generate.py before a build."""
TEXTS = {
    name: path.read_text(encoding="utf-8")
    for path in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    if not (name := path.relative_to(ROOT).as_posix()).startswith(GENERATED)
}
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n(?:\n+(?= {4}))?)+")
INLINE = re.compile(r"`([^`]+)`")
LAUNCHERS = ("vitrim", "accelerate", "torchrun")
FIELDS = {"eval": "methods", "train": "method"}
READERS = ("METHOD", "SETTING", "mine", "shift", "@")
"""Beginnings of methods that are the reader's own, or a file's."""
SLOW = ("docs/methods/algm.md", "benchmarks/vlm_prefill.py")
"""A segmenter of DeiT-S at 512 px; a script that imports every vision-language model."""
NO_MODEL = ("", "MODEL", "RECIPE")


def blocks(text: str) -> list[str]:
    """The fenced and the indented blocks of a page, without their indent."""
    return [*FENCED.findall(text), *map(textwrap.dedent, INDENTED.findall(FENCED.sub("", text)))]


def spans(text: str) -> list[str]:
    """The texts between backticks within sentences, each on one line."""
    prose = INDENTED.sub("", FENCED.sub("", text))
    return [" ".join(span.split()) for span in INLINE.findall(prose)]


def lines_of(shell: str) -> Iterator[list[str]]:
    """The words of every line; one goes on after a backslash, and `...` stands for more of the same."""
    for line in shell.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # an apostrophe of what is no shell
            continue
        before = ["", *words]
        given = [
            "METHOD" if last == "-m" and word == "..." else word for last, word in zip(before, words, strict=False)
        ]
        yield [word for word in given if word != "..."]


def command_of(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """The command of vitrim that a line starts, alone or by a launcher, and its arguments."""
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if not words or words[0] not in LAUNCHERS or "vitrim" not in words:
        return None
    place = words.index("vitrim") + 1
    return (words[place], list(words[place + 1 :])) if words[place:] and re.fullmatch("[a-z]+", words[place]) else None


def commands(shells: Sequence[str]) -> list[tuple[str, list[str]]]:
    return [found for shell in shells for words in lines_of(shell) if (found := command_of(words)) is not None]


def check(name: str, given: dict[str, Any]) -> None:
    """Raise `VitrimError` for a model, method, selector, target, grid or recipe that does not exist."""
    methods = given.get("methods") or given.get("method") or ()
    for text in [methods] if isinstance(methods, str) else methods:
        if not text.startswith(READERS) and text != "all":
            parse_method(text)
    selectors = given.get("select") or ()
    for text in [selectors] if isinstance(selectors, str) else selectors:
        parse_selector(text)
    if given.get("target"):
        Target.parse(given["target"])
    if given.get("grid"):
        parse_grid(given["grid"], recipe=bool(given.get("train")))
    models = given.get("models") or (given.get("name"),)
    for model in (one for one in models if one and ":" not in one and one not in NO_MODEL):
        if not model.endswith((".onnx", ".xml")):
            check_name(model)
    recipe = given.get("recipe" if name == "train" else "train")
    if recipe and recipe not in NO_MODEL:
        load_recipe(recipe, [change.replace("=MODEL", "=test_vit") for change in given.get("changes") or ()])


@pytest.mark.parametrize("page", [page for page in TEXTS if commands(blocks(TEXTS[page]))])
def test_commands_of_blocks_are_understood(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that they need; a recipe that a page writes is the reader's file."""
    monkeypatch.chdir(tmp_path)
    for block in blocks(TEXTS[page]):
        if block.startswith("# mine.yaml\n"):
            (tmp_path / "mine.yaml").write_text(block.partition("\n\n")[0])
        for name, arguments in commands([block]):
            if arguments:
                check(name, built().commands[name].make_context(name, arguments).params)


def test_commands_of_sentences_have_the_options_they_name() -> None:
    """They may leave out arguments, and the value of an option that ends them."""
    found = [command for text in TEXTS.values() for command in commands(spans(text))]
    assert len(found) > 100
    for name, arguments in found:
        command = built().commands[name]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in arguments if word.startswith("-")} <= known, (name, arguments)
        methods = [value for option, value in pairwise(arguments) if option == "-m"]
        check(name, {"methods": methods})


def test_selectors_of_servers_are_understood() -> None:
    found = [spec for text in TEXTS.values() for spec in re.findall(r"VITRIM_SELECT=([a-z]\S*?)`?\s", text)]
    assert found
    for spec in found:
        parse_selector(spec)


SCRIPTS = [
    words[1:]
    for text in TEXTS.values()
    for block in blocks(text)
    for words in ([word for word in words if not re.match(r"[A-Z_]+=", word)] for words in lines_of(block))
    if len(words) > 1 and Path(words[0]).name == "python" and words[1].startswith(("benchmarks/", "examples/"))
]


class Understood(Exception):
    """The arguments of a script have been read."""


TOLD = sorted({words[0] for words in SCRIPTS})


@pytest.mark.parametrize("script", cells(TOLD, set(TOLD) - set(SLOW)))
def test_scripts_take_what_pages_give_them(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = argparse.ArgumentParser.parse_args

    def only_read(*given: Any) -> None:
        read(*given)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_read)
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    for words in SCRIPTS:
        if words[0] == script:
            monkeypatch.setattr(sys, "argv", words)
            with pytest.raises(Understood):
                runpy.run_path(str(ROOT / script), run_name="__main__")


def python(text: str) -> Iterator[ast.Module]:
    """The blocks of a page that are Python and use vitrim."""
    for block in blocks(text):
        if "vitrim" in block:
            try:
                yield ast.parse(block)
            except SyntaxError:
                continue


def test_names_of_vitrim_in_python_exist() -> None:
    """Of every block, also of those that are not run."""
    found = [node for text in TEXTS.values() for tree in python(text) for node in ast.walk(tree)]
    used = {node.attr for node in found if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "vitrim"}
    assert len(used) > 40
    assert {name for name in used if not hasattr(vitrim, name)} <= {"models"}  # a module, imported there
    for node in found:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vitrim"):
            assert all(hasattr(import_module(str(node.module)), alias.name) for alias in node.names)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224").eval()


OF_METHODS = [page for page in TEXTS if page.startswith("docs/methods/") and [*python(TEXTS[page])]]


@pytest.mark.parametrize("page", cells(OF_METHODS, set(OF_METHODS) - set(SLOW)))
def test_python_of_methods_runs(page: str, model: nn.Module) -> None:
    names: dict[str, Any] = {"vitrim": vitrim, "model": model}
    try:
        for tree in python(TEXTS[page]):
            exec(compile(tree, page, "exec"), names)
    finally:
        vitrim.restore_(model.eval())
