"""Docstrings begin with a verb or a noun, as a person would say what a thing does or is."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLAUSES = {
    "As",
    "For",
    "From",
    "How",
    "In",
    "Of",
    "On",
    "What",
    "When",
    "Where",
    "Whether",
    "Which",
    "Who",
    "Why",
    "With",
}
"""First words of clauses and of phrases without a noun."""


def first_words(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The first word of every docstring, and of every text below a name, with its line."""
    for node in ast.walk(tree):
        for each in getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else ():
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                yield (each.value.value.split() or [""])[0], each.lineno


def test_first_words_are_found() -> None:
    text = '"""What it is."""\nclass A:\n    """A thing."""\n    b = 1\n    """Of it."""\n    def f(self):\n        """Do."""'
    assert [word for word, _ in first_words(ast.parse(text))] == ["What", "A", "Of", "Do."]


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    files = [file for folder in ("src", "benchmarks", "docs", "examples") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {word}"
        for file in files
        for word, line in first_words(ast.parse(file.read_text(encoding="utf-8")))
        if word in CLAUSES
    ]
    assert wrong == []
