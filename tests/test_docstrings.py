"""Docstrings begin with a verb or a noun, as a person would say what a thing does or is."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUESTIONS = {"How", "What", "When", "Where", "Whether", "Which", "Who", "Why"}
PREPOSITIONS = {"As", "For", "From", "In", "Of", "On", "With"}
"""First words of clauses, and of phrases without a noun."""


def first_words(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The first word of every docstring, and of every text below a name, with its line."""
    for node in ast.walk(tree):
        text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
        if isinstance(text, str):
            yield (text.split() or [""])[0], node.lineno


def test_first_words_are_found() -> None:
    lines = ('"""What it is."""', "class A:", '    """A thing."""', "    b = 1", '    """Of it."""')
    assert sorted(first_words(ast.parse("\n".join(lines)))) == [("A", 3), ("Of", 5), ("What", 1)]


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    files = [file for folder in ("src", "benchmarks", "docs", "examples") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {word}"
        for file in files
        for word, line in first_words(ast.parse(file.read_text(encoding="utf-8")))
        if word in QUESTIONS | PREPOSITIONS
    ]
    assert wrong == []
