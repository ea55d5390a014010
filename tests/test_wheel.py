"""The wheel: built offline as `pip wheel` would, whole, small, and of use without this folder or git."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "vitrim"
BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
LIMIT = 10 * 1000**2  # bytes

IMPORT = """
import importlib, pkgutil, sys, vitrim
names = ["vitrim.cli"]
if "all" in sys.argv:
    names = [module.name for module in pkgutil.walk_packages(vitrim.__path__, "vitrim.")]
for name in names:
    if not name.endswith("__main__") and not name.startswith("vitrim.serving."):  # servers are installed elsewhere
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
        "models/cifar10_vit/model.safetensors",
    ):
        assert f"vitrim/{name}" in found


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        return message_from_bytes(
            archive.read(next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA")))
        )


def test_it_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < LIMIT


def test_it_says_what_it_is(wheel: Path) -> None:
    """Licence, Python versions, and extras of which `all` leaves out none that a user needs."""
    about = metadata(wheel)
    assert (about["Name"], about["License-Expression"], about["Requires-Python"]) == ("vitrim", "Apache-2.0", ">=3.11")
    assert about["Version"] == wheel.name.split("-")[1]
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)}
    assert versions <= set(about.get_all("Classifier", []))
    needed: dict[str, set[str]] = {}
    for line in about.get_all("Requires-Dist", []):
        requirement, _, extra = line.partition("; extra == ")
        needed.setdefault(extra.strip("'"), set()).add(requirement)
    for_users = needed.keys() - {"", "all", "dev", "docs", "ray", "vllm"}  # for one example; pins its torch
    assert needed["all"] == set().union(*(needed[extra] for extra in for_users))


def test_without_history_the_version_is_the_fallback(tmp_path: Path) -> None:
    """An archive of the sources, on a machine that has no git."""
    source = tmp_path / "source"
    shutil.copytree(PACKAGE, source / "src" / "vitrim", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-c", BUILD, tmp_path]
    build = subprocess.run(command, cwd=source, env={**os.environ, "PATH": ""}, capture_output=True, text=True)
    assert build.returncode == 0, build.stderr
    assert build.stdout.split()[-1].startswith("vitrim-0.0.0-")


@pytest.mark.slow
@pytest.mark.parametrize("modules", ["all", "few"])
def test_it_works_unpacked(modules: str, wheel: Path, tmp_path: Path) -> None:
    """Modules import from there, not from this folder."""
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    # host files import their library: those that no index has stand in `recreated`
    paths = [str(tmp_path / "site"), str(ROOT / "tests" / "recreated")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "error::UserWarning:vitrim", "-c", IMPORT, modules]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    place, found, methods, model = run.stdout.split()
    assert Path(place) == tmp_path / "site" / "vitrim" / "__init__.py"
    assert int(found) > 100 or modules == "few"
    assert int(methods) > 20
    assert model.startswith("deit_small")


def test_it_installs_into_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """The version needs no other package. The commands find theirs in the environment that runs the tests."""
    pytest.importorskip("uv")
    place = tmp_path / "empty"
    venv.create(place, with_pip=False)
    scripts = place / ("Scripts" if os.name == "nt" else "bin")
    install = [sys.executable, "-m", "uv", "pip", "install", "--offline", "--no-deps", "--python", scripts / "python"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def output(*command: object) -> str:
        run = subprocess.run([*map(str, command)], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout

    output(*install, wheel)
    version = metadata(wheel)["Version"]
    assert output(scripts / "python", "-c", "import vitrim; print(vitrim.__version__)").strip() == version
    site = Path(output(scripts / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    assert output(scripts / "vitrim", "--version") == f"vitrim {version}\n"
    assert "digits" in output(scripts / "vitrim", "demo", "--help")
