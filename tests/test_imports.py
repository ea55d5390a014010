"""Imports point downwards; nothing is imported that is not used, and nothing that is not installed is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "vitrim"
ROOMS = (
    "version", "errors", "checked", "files", "yaml_files", "report", "results", "progress", "core", "plain", "style",
    "methods",
    "selectors", "data", "tasks", "weights", "models", "hosts", "loading", "engines", "measure", "plots", "training",
    "analysis", "tuning", "serving", "app", "", "cli", "__main__",
)  # fmt: skip
"""From the ground up. Without a name: the package itself, whose public names are those of rooms far below."""

MEASURE = ("SearchSpec", "analyze_records", "compare_analyses", "evaluate", "train_grid", "tune_grid")
"""Public names other than commands that need torchmetrics."""
READ = ("DataSpec", "Exported", "FileSpec", "JudgedData", "PageData", "ScoredData", "open_data")
"""Public names that need torchvision's transforms, and nothing of `UNUSED`."""
UNUSED = ("transformers", "torchvision.models.vision_transformer", "timm.models.eva", "datasets", "matplotlib")

WITHOUT_TRANSFORMERS = "import sys; sys.modules['transformers'] = None"
"""Imports of it fail and its spec is not found, as where it is not installed."""


ADDED = f"""
import sys
before = set(sys.modules)
import vitrim
from vitrim.cli import COMMANDS
for name in set(vitrim.__all__) - {{*{MEASURE}, *{READ}, *COMMANDS}}:
    getattr(vitrim, name)
vitrim.ToMe
new = set(sys.modules) - before
print([name for name in {UNUSED} if name in new])
print(sorted({{name.partition(".")[0] for name in new}} & {{"timm", "torchvision", "transformers"}}))
model = timm.create_model("test_vit", num_classes=3)
vitrim.reduce_(model, "tome:r=4")
vitrim.restore_(model)
new = set(sys.modules) - before
print([name for name in ("transformers", "torchvision.models.vision_transformer") if name in new])
for name in {READ}:
    getattr(vitrim, name)
print([name for name in {UNUSED} if name in set(sys.modules) - before])

from transformers import ViTConfig, ViTModel
from vitrim.core.registry import ask, find_host
model = ViTModel(ViTConfig(num_hidden_layers=1))
find_host(model), ask(model)
print(sorted(name for name in sys.modules if name.startswith("vitrim.hosts.transformers.")))
"""

WITHOUT = f"""
{WITHOUT_TRANSFORMERS}
import vitrim
from vitrim.cli import main

model = timm.create_model("test_vit", num_classes=3).eval()
vitrim.reduce_(model, "tome:r=4")
assert model(torch.zeros(1, 3, 160, 160)).shape == (1, 3)
for arguments in (["list", "hosts"], ["list", "methods"], ["profile", "test_vit"]):
    sys.argv = ["vitrim", *arguments]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, (arguments, stop.code)
sys.argv = ["vitrim", "profile", "hf:some/name"]
try:
    main()
except SystemExit as stop:
    print("exit code", stop.code)
"""

FORKED = """
import os, sys, timm, torch
for code in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(code)
        break
    assert not os.waitpid(child, 0)[1]
    print("----", flush=True)
"""
"""Runs every program in a process that has imported torch and timm, which takes longer than the rest."""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What `ADDED` and `WITHOUT` print."""
    command = [sys.executable, "-c", FORKED, ADDED, WITHOUT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("----\n")[:-1]


@pytest.mark.slow  # `test_public_api.py` starts a process that imports vitrim; rooms are read from the sources below
def test_importing_and_using_vitrim_adds_no_library_to_torch_and_timm(printed: list[str]) -> None:
    """Nor do the public names, which are resolved on first use, nor reducing a timm model.

    But for commands, and what they search by and read: what measures and draws needs the libraries for it, and
    torchmetrics imports transformers. Of a library that is used, only the file of the model's family is imported.
    """
    *added, files = printed[0].splitlines()
    assert added == ["[]", "[]", "[]", "[]"]
    assert files == str([f"vitrim.hosts.transformers.{file}" for file in ("common", "library", "versions", "vit")])


@pytest.mark.slow  # starts a process that imports every library; see above
def test_everything_else_works_without_transformers(printed: list[str]) -> None:
    out = printed[1]
    assert "timm VisionTransformer" in out
    missing = out.partition("not installed, so their families are not listed: ")[2].partition("\n")[0]
    assert "transformers" in missing.split(", ")
    assert "tome" in out
    assert out.strip().splitlines()[-1] == "exit code 2"


# ---- rooms, read from the sources ------------------------------------------------------------------------------------


def modules() -> dict[str, Path]:
    """Every module of the package, and its file."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(text: str, known: Iterable[str], package: str = "vitrim") -> set[str]:
    """The modules of a package that a source names, wherever in it, for types alone and as text for `import_module`."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            found |= {given.value for given in node.args[:1] if isinstance(given, ast.Constant)}
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else str(node.module) for name in names}
    return {name for name in found if name.split(".")[0] == package}


@cache
def arrows() -> dict[str, set[str]]:
    """What every module imports."""
    known = modules()
    return {name: imported(path.read_text(encoding="utf-8"), known) for name, path in known.items()}


def room(module: str) -> str:
    return (*module.split("."), "")[1]


def test_imports_are_read() -> None:
    source = """
from typing import TYPE_CHECKING
import a.x, os
if TYPE_CHECKING:
    from a.y import One
def f(name):
    from a import y, Two
    import_module("a.z")
    importlib.import_module("a.v.w", package)
    import_module(name)
"""
    assert imported(source, {"a.x", "a.y"}, "a") == {"a.x", "a.y", "a", "a.z", "a.v.w"}


def test_every_room_has_its_floor() -> None:
    assert {room(name) for name in modules()} == set(ROOMS)


def test_imports_point_downwards() -> None:
    """Between rooms; those for types alone, and those within functions, count."""
    floor = {name: number for number, name in enumerate(ROOMS)}
    up = [
        f"{name} imports {other}"
        for name, others in sorted(arrows().items())
        for other in sorted(others)
        if floor[room(other)] > floor[room(name)]
    ]
    assert not up


def test_there_is_no_circle() -> None:
    """Of modules: imports of the package above count, and those within functions, for types and by a string."""
    TopologicalSorter(arrows()).prepare()
