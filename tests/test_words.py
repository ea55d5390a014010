"""Words that the source compares with: where a name is declared as a `Literal`, each is one of its words.

mypy says so for ``==`` and typed values; not for ``in ("a", "b")``, nor for what was read out of an untyped place.
"""

import ast
from collections import defaultdict
from pathlib import Path

import vitrim

FOREIGN = {("kind", word) for word in ("iu", "biu", "f", "u", "U")}
"""Words of other packages: kinds of numpy's dtypes."""
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in Path(vitrim.__file__).parent.rglob("*.py")}


def texts(node: ast.expr) -> set[str]:
    """The texts of a constant, or of a sequence of them."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def names(annotation: ast.expr) -> set[str]:
    """The names in an annotation."""
    return {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}


def words_of(annotation: ast.expr, aliases: dict[str, set[str]]) -> set[str]:
    """The words of all `Literal` in an annotation, by their aliases too."""
    found = set()
    for node in ast.walk(annotation):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
            found |= texts(node.slice)
        elif isinstance(node, ast.Name):
            found |= aliases.get(node.id, set())
    return found


def declared() -> dict[str, set[str]]:
    """The words of every attribute that classes declare as a `Literal`, and none as any text."""
    aliases: dict[str, set[str]] = defaultdict(set)
    for _ in range(2):  # an alias may be of an alias
        for tree in TREES.values():
            for node in tree.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    aliases[node.targets[0].id] |= words_of(node.value, aliases)
    found: dict[str, list[set[str]]] = defaultdict(list)
    for tree in TREES.values():
        for kind in ast.walk(tree):
            for node in kind.body if isinstance(kind, ast.ClassDef) else ():
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    words, free = words_of(node.annotation, aliases), {"str", "Any"} & names(node.annotation)
                    if words or free:
                        found[node.target.id].append(set() if free else words)
    return {name: set().union(*words) for name, words in found.items() if all(words)}


def compared(tree: ast.AST) -> list[tuple[str, set[str], int]]:
    """Attributes, the texts that they are compared with, and the line."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute):
            words = set().union(*(texts(other) for other in node.comparators))
            found.append((node.left.attr, words, node.lineno))
    return found


def test_words_that_are_compared_exist():
    known = declared()
    assert {"prune", "merge", "none"} <= known["kind"]
    wrong = [
        f"{path.name}:{line}: {name} is compared with {word!r}; it is one of {', '.join(sorted(known[name]))}"
        for path, tree in TREES.items()
        for name, words, line in compared(tree)
        if name in known
        for word in sorted(words - known[name])
        if (name, word) not in FOREIGN
    ]
    assert not wrong, "\n".join(wrong)
