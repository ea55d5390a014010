"""Files and functions stay short enough to be read at once."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import vitrim

SOURCE = Path(vitrim.__file__).parent
FILES = {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}

LONGEST_FILE = 400
"""Lines, all of them."""

LONGEST_FUNCTION = 60
"""Lines of code, from ``def`` on."""

LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def code_lines(text: str) -> set[int]:
    """The numbers of the lines that hold code: none that is blank, or only comment or docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def functions(text: str) -> Iterator[tuple[str, int]]:
    """The functions of a source, those within others too, and their lines of code."""
    lines = code_lines(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, len(lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))


def test_lines_are_counted() -> None:
    text = '''"""A file."""

def one(
    a: int,
) -> str:
    """Docstring
    of two lines."""
    # a comment

    text = """no
    docstring"""  # a remark
    return text

x = 1
'''
    assert code_lines(text) == {3, 4, 5, 10, 11, 12, 14}
    assert list(functions(text)) == [("one", 6)]


def test_no_file_and_no_function_is_too_long() -> None:
    files = {name: len(text.splitlines()) for name, text in FILES.items()}
    assert {name: lines for name, lines in files.items() if lines > LONGEST_FILE} == {}
    every = {(name, function): lines for name, text in FILES.items() for function, lines in functions(text)}
    assert {where: lines for where, lines in every.items() if lines > LONGEST_FUNCTION} == {}


def test_a_method_that_prunes_by_a_score_is_short() -> None:
    """Top-K below its config: its reducer."""
    text = FILES["methods/topk.py"]
    config = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "TopK")
    assert config.end_lineno is not None
    assert len(text.splitlines()) - config.end_lineno <= 25
