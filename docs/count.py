"""Count what the design promises: lines of code, functions, files, members of contracts, circles, files on a walk.

    python docs/count.py            # a table in Markdown
    python docs/count.py --src DIR  # of another copy of the package, for a comparison

A walk is what Python runs: the files of the package with a function that is entered while one thing is done.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("core", "cli", "tuning", "analysis")
MANY = 10
"""Parameters that a function may have."""
LONG = 40
"""Lines of code in a body, above which a function should be several."""
CONTRACTS = (("Host", "core/host.py"), ("MethodConfig", "core/method.py"))
"""Classes that others subclass, and where they are."""

FOLLOW = """
import json, sys
from pathlib import Path
entered = set()
package = Path({package!r})

def enter(frame, event, argument):
    if event == "call" and frame.f_code.co_flags & 1:  # of a function: bodies of modules and classes are not
        entered.add(frame.f_code.co_filename)

def walk():
    names = (Path(name) for name in entered)
    return sorted(str(name.relative_to(package)) for name in names if name.is_relative_to(package))
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
    "of `vitrim eval`, outside core, hosts, methods, data and models": """
import os, tempfile, timm
from PIL import Image
root = Path(tempfile.mkdtemp())
for name in "abc":
    (root / name).mkdir()
    Image.new("RGB", (160, 160)).save(root / name / "0.png")
from vitrim.cli import main
sys.argv = ["vitrim", "eval", "test_vit", "-m", "tome:r=8", "--data", str(root), "--model-option", "num_classes=3"]
out = os.dup(1); os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
sys.setprofile(enter)
try:
    main()
except SystemExit:
    pass
sys.setprofile(None)
os.dup2(out, 1)
entered = {name for name in entered if not any(f"/vitrim/{room}/" in name for room in ROOMS_LEFT_OUT)}
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


def long_functions(text: str) -> int:
    """Functions whose body has more than `LONG` lines of code."""
    bodies = (
        range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return sum(len(code_of(text).intersection(body)) > LONG for body in bodies)


def functions(text: str) -> int:
    """Functions and methods, those within others too."""
    return sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(parsed(text)))


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


def imports(package: Path) -> dict[str, set[str]]:
    """The imports of every module of the package, in functions, for types alone and by a literal string too."""
    modules = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        found: set[str] = set()
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    found.add(full if full in modules else str(node.module))
            elif (
                isinstance(node, ast.Call)
                and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module"
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                found.add(str(node.args[0].value))
        graph[module] = {name for name in found if name in modules}
    return graph


def circles(graph: dict[str, set[str]]) -> int:
    """Sets of modules that reach each other."""
    reach = {}
    for start in graph:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = graph.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        reach[start] = seen
    return len({frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in reach if a in reach[a]})


def walk(package: Path, code: str) -> list[str]:
    """The files on a walk, in a process of its own."""
    before = FOLLOW.format(package=str(package)) + f"ROOMS_LEFT_OUT = {LEFT_OUT!r}\n"
    program = f"{before}{code}\nprint(json.dumps(walk()))"
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": str(package.parent), "PATH": "/usr/bin:/bin", "HOME": folder, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=True, cwd=folder,
        )  # fmt: skip
    files: list[str] = json.loads(run.stdout.strip().splitlines()[-1])
    return files


def rows(package: Path, *, walks: bool = True, show: bool = False) -> Iterator[tuple[str, str]]:
    """Every measure and its value."""
    texts = sources(package)
    code = sum(lines_of_code(text) for text in texts.values())
    yield "lines of code (no docstring, comment, blank line)", f"{code:,}"
    yield "lines of docstrings", f"{sum(map(docstrings, texts.values())):,}"
    wide = {name: count for text in texts.values() for name, count in parameters(text).items() if count > MANY}
    made = {name: count for name, count in wide.items() if name[0].isupper()}
    most = max((count for name, count in wide.items() if name not in made), default=0)
    yield f"functions with more than {MANY} parameters; most", f"{len(wide) - len(made)}; {most}"
    yield f"constructors with more than {MANY}", str(len(made))
    yield "functions per 1,000 lines of code", f"{1000 * sum(map(functions, texts.values())) / code:.0f}"
    yield f"functions with more than {LONG} lines in their body", str(sum(map(long_functions, texts.values())))
    for room in ROOMS:
        folder = package / room
        count = sum(1 for path in folder.rglob("*.py") if path.name != "__init__.py" or path.parent == folder)
        yield f"files of `{room}/`", str(count)
    for name, place in CONTRACTS:
        attributes, methods = members(package, name, place)
        yield f"class attributes and methods of `{name}`", f"{attributes} and {methods}"
    yield "circles of modules, imports for types and by string too", str(circles(imports(package)))
    if walks:
        for what, program in WALKS.items():
            files = walk(package, program)
            yield f"files on the walk {what}", str(len(files)) + (f" ({', '.join(files)})" if show else "")
    page = package.parents[1] / "docs" / "architecture.md"
    if page.is_file():
        yield "lines of `docs/architecture.md`", str(len(page.read_text(encoding="utf-8").splitlines()))


def table(found: Iterator[tuple[str, str]]) -> str:
    """The measures as a table in Markdown."""
    return "| measure | value |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in found) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--src", type=Path, default=ROOT / "src", help="folder that holds the package")
    parser.add_argument("--files", action="store_true", help="name the files on the walks")
    given = parser.parse_args()
    print(table(rows((given.src / "vitrim").resolve(), show=given.files)), end="")
