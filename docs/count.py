"""Count what the design promises: lines, raise statements, names with two meanings, members of contracts, walks.

    python docs/count.py            # a table in Markdown; --walks follows the walks, too
    python docs/count.py --src DIR  # of another copy of the package, for a comparison

A walk is what Python runs while one thing is done: the functions of the package that are entered, and who calls whom.
A climb on it is a call from a file to one on a higher floor (`ROOMS` in `tests/test_imports.py`).
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
MANY = 10
"""Parameters that a function may have."""
CONTRACTS = (("Host", "core/host.py"), ("MethodConfig", "core/method.py"))
"""Classes that others subclass, and where they are."""

FOLLOW = """
import json, sys
from pathlib import Path
calls = set()
package = Path({package!r})

def enter(frame, event, argument):
    if event == "call" and frame.f_code.co_flags & 1:  # of a function: bodies of modules and classes are not
        code, caller = frame.f_code, frame.f_back and frame.f_back.f_code
        calls.add((caller and caller.co_filename, caller and caller.co_qualname, code.co_filename, code.co_qualname))

def inside(name):
    return name and Path(name).is_relative_to(package) and str(Path(name).relative_to(package))

def walk():
    return sorted({{(inside(a) or "", b or "", inside(c), d) for a, b, c, d in calls if inside(c)}})
"""
"""``calls`` holds who called whom, as (file, function, file, function)."""

IMAGES = """
import os, tempfile
from PIL import Image
root = Path(tempfile.mkdtemp())
for name in "abc":
    (root / name).mkdir()
    for number in range(12):
        Image.new("RGB", (160, 160), (number * 20, ord(name), 0)).save(root / name / f"{number}.png")
from vitrim.cli import main

def command(*arguments):
    sys.argv = ["vitrim", *arguments]
    out = os.dup(1); os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.setprofile(enter)
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, stop.code
    finally:
        sys.setprofile(None)
        os.dup2(out, 1)
"""

WALKS = {
    "of `r`, from its text to the number of tokens a block keeps": """
import timm, torch, vitrim
model = timm.create_model("test_vit").eval()
vitrim.reduce_(model, "tome:r=8"); model(torch.zeros(1, 3, 160, 160)); vitrim.restore_(model)
sys.setprofile(enter)
config = vitrim.parse_method("tome:r=8")
sys.setprofile(None)
from vitrim.core.registry import host_of
from vitrim.core.plan import plan
facts = host_of(model).facts(model)
sys.setprofile(enter)
layers = plan(config, facts, 4)
layers[1].keep(config, 100, 92)
sys.setprofile(None)
""",
    "of a token through a reduced block of ToMe": """
import timm, torch, vitrim
model = timm.create_model("test_vit").eval()
vitrim.reduce_(model, "tome:r=8"); x = torch.randn(1, 3, 160, 160)
with torch.no_grad():
    model(x)
    block = model.blocks[1]
    block.register_forward_pre_hook(lambda *_: sys.setprofile(enter))
    block.register_forward_hook(lambda *_: sys.setprofile(None))
    model(x)
""",
    "of `vitrim eval`": IMAGES
    + """
command("eval", "test_vit", "-m", "tome:r=8", "--data", str(root), "--model-option", "num_classes=3")
""",
    "of `vitrim optimize`": IMAGES
    + """
command("optimize", "test_vit", "-m", "tome:r=8", "--images", str(root), "--model-option", "num_classes=3",
        "--no-labels", "--max-loss", "100", "--few-images", "--engine", "openvino", "--precision", "fp32")
""",
}
LEFT_OUT = ("core", "hosts", "methods", "data", "models")


def sources(package: Path) -> dict[Path, str]:
    """The text of every file of the package."""
    return {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}


parsed = cache(ast.parse)
"""The tree of a source, which several measures walk."""


def lines_of_code(text: str) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    return len(code_of(text))


@cache
def code_of(text: str) -> frozenset[int]:
    """The numbers of these lines, from 1."""
    strings = {
        line
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return frozenset(
        number
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip() and not line.lstrip().startswith("#") and number not in strings
    )


def docstrings(text: str) -> int:
    """Lines of docstrings and of texts that stand below a name."""
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )


def parameters(text: str) -> dict[str, int]:
    """The number of parameters of every public function and constructor, `self` left out; of one name the most."""
    found: dict[str, int] = {}

    def visit(node: ast.AST, within: str) -> None:
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.ClassDef):
                visit(each, each.name)
            elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                given = each.args
                names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                name = within if each.name == "__init__" else each.name
                if not name.startswith("_"):
                    found[name] = max(found.get(name, 0), len(names) - (names[:1] in (["self"], ["cls"])))

    visit(parsed(text), "")
    return found


def members(package: Path, name: str, place: str) -> tuple[int, int]:
    """Class attributes and methods of a class, with those of the bases that stand in the same file.

    Fields of a config, validators and names with an underscore are left out.
    """
    classes = {
        node.name: node
        for node in ast.parse((package / place).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    attributes: set[str] = set()
    methods: set[str] = set()
    todo = [name]
    while todo:
        node = classes.get(todo.pop())
        if node is None:
            continue
        todo += [base.id for base in node.bases if isinstance(base, ast.Name)]
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
                methods.add(item.name)
            elif isinstance(item, ast.AnnAssign) and "ClassVar" in ast.unparse(item.annotation):
                attributes.add(ast.unparse(item.target))
    return len({name for name in attributes if not name.startswith("_")}), len(methods)


def walk(package: Path, code: str) -> list[tuple[str, str, str, str]]:
    """The calls on a walk, in a process of its own: the caller's file and function, then those called."""
    program = f"{FOLLOW.format(package=str(package))}{code}\nprint(json.dumps(walk()))"
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": str(package.parent), "PATH": "/usr/bin:/bin", "HOME": folder, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=False, cwd=folder,
        )  # fmt: skip
    if run.returncode:
        raise SystemExit(run.stderr)
    return [tuple(call) for call in json.loads(run.stdout.strip().splitlines()[-1])]


def files(calls: list[tuple[str, str, str, str]]) -> list[str]:
    """The files on a walk."""
    return sorted({called for _, _, called, _ in calls})


def floor(name: str, rooms: Sequence[str]) -> int:
    """The place of a file's room, counted from the ground."""
    parts = Path(name).with_suffix("").parts
    return rooms.index("" if parts == ("__init__",) else parts[0])


def steps(calls: list[tuple[str, str, str, str]], rooms: Sequence[str]) -> str:
    """Functions on a walk outside `LEFT_OUT`; its climbs; functions that ask the registry there."""
    outside = [call for call in calls if call[0].split("/")[0] not in LEFT_OUT]
    functions = {call[2:] for call in outside if call[2].split("/")[0] not in LEFT_OUT}
    climbs = {call for call in calls if call[0] and floor(call[0], rooms) < floor(call[2], rooms)}
    visits = {call[:2] for call in outside if call[2] == "core/registry.py"}
    return f"{len(functions)}; {len(climbs)}; {len(visits)}"


def rooms_of(root: Path) -> list[str]:
    """The rooms from the ground up, as the test of imports lists them."""
    tree = ast.parse((root / "tests" / "test_imports.py").read_text(encoding="utf-8"))
    values = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "ROOMS"]
    return list(ast.literal_eval(values[0]))


def shared_names(texts: Mapping[Path, str]) -> dict[str, list[Path]]:
    """Names of classes and aliases, without a leading underscore, that several files define."""
    places: dict[str, list[Path]] = {}
    for path, text in texts.items():
        for name in {*classes(parsed(text)), *aliases(parsed(text).body)}:
            places.setdefault(name.lstrip("_"), []).append(path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def classes(tree: ast.Module) -> Iterator[str]:
    """Names of classes, at any depth."""
    return (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def aliases(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names in CamelCase that a module gives to types."""
    for node in body:
        if isinstance(node, ast.If):
            yield from aliases([*node.body, *node.orelse])
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value and "TypeVar" not in ast.unparse(node.value):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            if re.fullmatch(r"_?[A-Z]+[a-z]\w*", name):
                yield name


def comments(texts: Iterable[str]) -> int:
    """Lines that hold a comment alone."""
    return sum(line.lstrip().startswith("#") for text in texts for line in text.splitlines())


def rows(package: Path, *, walks: bool = False) -> Iterator[tuple[str, str]]:
    """Every measure and its value."""
    root = package.parents[1]
    texts = sources(package)
    code = sum(lines_of_code(text) for text in texts.values())
    own_lines = comments(texts.values())
    raises = sum(isinstance(node, ast.Raise) for text in texts.values() for node in ast.walk(parsed(text)))
    yield "lines of code in `src` (no docstring, comment, blank line)", f"{code:,}"
    yield "lines of docstrings", f"{sum(map(docstrings, texts.values())):,}"
    yield "comments that have a line of their own, for 100 lines of code", f"{100 * own_lines / code:.1f}"
    yield "folders of `src/vitrim`", str(sum((package / name).is_dir() for name in rooms_of(root) if name))
    yield "raise statements: one in so many lines of code", f"{code / raises:.0f}"
    yield "names of classes and types that mean two things", str(len(shared_names(texts)))
    wide = {name: count for text in texts.values() for name, count in parameters(text).items() if count > MANY}
    yield f"functions and constructors with more than {MANY} parameters", str(len(wide))
    for name, place in CONTRACTS:
        attributes, methods = members(package, name, place)
        yield f"class attributes and methods of `{name}`", f"{attributes} and {methods}"
    if walks:
        for what, program in WALKS.items():
            calls = walk(package, program)
            if "vitrim" in what:
                yield f"walk {what}: functions; climbs; visits of the registry", steps(calls, rooms_of(root))
            else:
                yield f"files on the walk {what}", str(len(files(calls)))
    for folder in ("tests", "benchmarks"):
        scripts = [path.read_text(encoding="utf-8") for path in sorted((root / folder).rglob("*.py"))]
        lines = sum(map(lines_of_code, scripts)), sum(text.count("\n") for text in scripts)
        yield f"lines of code under `{folder}`; lines in all", f"{lines[0]:,}; {lines[1]:,}"
    made = {"api", "reference", "changelog.md", "measures.md"}  # by docs/generate.py
    pages = [path for path in (root / "docs").rglob("*.md") if not made & set(path.parts)]
    yield "words in `docs`", f"{sum(len(path.read_text(encoding='utf-8').split()) for path in pages):,}"


def table(found: Iterator[tuple[str, str]]) -> str:
    """The measures as a table in Markdown."""
    return "| measure | value |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in found) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--src", type=Path, default=ROOT / "src", help="folder that holds the package")
    parser.add_argument("--walks", action="store_true", help="follow the walks, which takes minutes")
    given = parser.parse_args()
    print(table(rows((given.src / "vitrim").resolve(), walks=given.walks)), end="")
