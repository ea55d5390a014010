"""The wheel: built offline as `pip wheel` would, whole, small, and of use without this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "vitrim"
BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
LIMIT = 10 * 1000**2  # bytes

IMPORT_ALL = """
import importlib, pkgutil, vitrim
names = [module.name for module in pkgutil.walk_packages(vitrim.__path__, "vitrim.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
from vitrim.core.registry import methods
from vitrim.training.recipe import load_recipe
print(vitrim.__file__, len(names), len(methods()), load_recipe("study/coco/topk@25").recipe.model)
"""

pytestmark = pytest.mark.xdist_group("wheel")  # built once


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = subprocess.run([sys.executable, "-c", BUILD, folder], cwd=ROOT, capture_output=True, text=True)
    assert build.returncode == 0, build.stderr
    return folder / build.stdout.split()[-1]


def test_it_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    """Modules of all subpackages, recipes, the demo's and the reference model's weights, py.typed."""
    expected = {
        path.relative_to(PACKAGE.parent).as_posix(): path.stat().st_size
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with ZipFile(wheel) as archive:
        found = {info.filename: info.file_size for info in archive.infolist()}
    about = {name for name in found if name.partition("/")[0].endswith(".dist-info")}
    assert {name: size for name, size in found.items() if name not in about} == expected
    assert {name.partition("/")[2] for name in about} >= {"METADATA", "entry_points.txt", "licenses/LICENSE"}
    for name in (
        "py.typed",
        "training/recipes/deit_small.yaml",
        "training/recipes/study.csv",
        "reference/cifar10_vit/model.safetensors",
    ):
        assert f"vitrim/{name}" in found


def test_it_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < LIMIT


def test_it_works_unpacked(wheel: Path, tmp_path: Path) -> None:
    """Every module imports from there, not from this folder."""
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-W", "error::UserWarning:vitrim", "-c", IMPORT_ALL]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    place, modules, methods, model = run.stdout.split()
    assert Path(place) == tmp_path / "site" / "vitrim" / "__init__.py"
    assert int(modules) > 100
    assert int(methods) > 20
    assert model.startswith("deit_small")
