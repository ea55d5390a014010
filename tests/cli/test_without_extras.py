"""Commands in an environment without extras: each works, or ends in the line that installs what it needs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from PIL import Image

import vitrim
from cli_runs import exit_code
from vitrim import cli
from vitrim.errors import EXTRAS, MissingPackageError, check_installed

ROOT = Path(__file__).parents[2]
IMPORTED = {"scikit-learn": "sklearn", "POT": "ot", "open_clip_torch": "open_clip", "pillow": "PIL"}
"""Names of modules that differ from those of their distributions."""
TOGETHER = {"all", "dev", "docs"}
"""Extras for nothing that the program imports."""


def extras() -> dict[str, set[str]]:
    """The modules that each extra of pyproject.toml installs by itself."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        extra: {str(re.split(r"[^A-Za-z0-9_-]", one)[0]) for one in needs if not one.startswith("vitrim[")}
        for extra, needs in found.items()
        if extra not in TOGETHER
    }
    return {extra: {IMPORTED.get(name, name) for name in names} for extra, names in named.items()}


def test_every_package_of_an_extra_is_known_by_one_that_installs_it() -> None:
    """Both ways, so that an extra that is added, renamed or emptied is seen."""
    declared = extras()
    known = {module: extra for module, extra in EXTRAS.items() if module != "pyarrow"}  # it comes with datasets
    assert set(known) == {module for modules in declared.values() for module in modules}
    for module, extra in known.items():
        assert module in declared[extra]


@pytest.mark.parametrize("module", EXTRAS)
def test_a_command_that_misses_a_package_names_the_extra(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it is imported; a package that is there and lacks another one of its own is a bug to be seen."""
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == module else SimpleNamespace())
    missing = [module]

    def imports() -> None:
        raise ModuleNotFoundError(f"No module named '{missing[0]}.inner'", name=f"{missing[0]}.inner")

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(imports)
    monkeypatch.setattr(cli, "app", typer.main.get_command(app))
    assert exit_code(monkeypatch) == 2
    line = f"error: this needs the package '{module}': pip install '.[{EXTRAS[module]}]'"
    assert capsys.readouterr().err.strip() == line
    for other in ("a_package_of_theirs", next(name for name in EXTRAS if name != module)):
        missing[0] = other
        with pytest.raises(ModuleNotFoundError):
            exit_code(monkeypatch)


def test_what_is_missing_is_named_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In Python as on the command line, with an own extra where the function has one."""
    monkeypatch.setattr(vitrim.errors, "find_spec", lambda name: None)
    for call, said in (
        (lambda: vitrim.train("finetune", tmp_path), r"^training needs .*'accelerate': pip install '.\[train\]'$"),
        (lambda: vitrim.Running(tmp_path, tensorboard=True), r"^training needs .*'accelerate'"),
        (lambda: vitrim.show("test_vit", ["none"], tmp_path), r"^a picture needs .*'\.\[analysis\]'$"),
    ):
        with pytest.raises(MissingPackageError, match=said):
            call()  # type: ignore[no-untyped-call]
    with pytest.raises(MissingPackageError, match=r"pip install '.\[app\]'$"):
        check_installed("the page", "matplotlib", extra="app")


MODEL = ["test_vit", "--model-option", "img_size=32", "--model-option", "patch_size=8", "--model-option"]
MODEL += ["num_classes=2"]


def commands(root: Path) -> list[tuple[list[str], str | None]]:
    """Runs of the command line, and the end of the line that each ends in; None where it works."""
    data = ["--data", str(root / "photos")]
    return [
        (["train", "finetune", *data, "--out", f"{root}/run"], "'accelerate': pip install '.[train]'"),
        (["train", "finetune", *data, "--dry-run"], "'accelerate': pip install '.[train]'"),
        (["train", "finetune", "--show"], None),
        (["profile", "hf:google/vit"], "pip install '.[hf]'"),
        (["profile", "open_clip:ViT-B-32"], "pip install '.[clip]'"),
        (["eval", *MODEL, "--data", "hfds/a/b"], "'datasets': pip install '.[data]'"),
        (["eval", *MODEL, *data, "--predictions", f"{root}/p.parquet"], "pip install '.[data]'"),
        (["demo", "--out", f"{root}/demo"], "'sklearn': pip install '.[demo]'"),
        (["analyze", *MODEL, *data, "--out", f"{root}/analysis"], "'scipy': pip install '.[analysis]'"),
        (
            ["show", *MODEL, str(root / "photos" / "a" / "0.png"), "--out", f"{root}/show"],
            "pip install '.[analysis]'",
        ),
        (
            ["bench", *MODEL, "-m", "tome:r=1", "--figure", f"{root}/b.png"],
            "'matplotlib': pip install '.[analysis]'",
        ),
        (["compare", *MODEL, "-m", "tome:r=1", *data, "--figure", f"{root}/c.png"], "pip install '.[analysis]'"),
        (["tune", *MODEL, *data, "-m", "tome", "--target", "macs=0.8"], "'optuna': pip install '.[tune]'"),
        (["export", *MODEL, "--out", f"{root}/m.onnx"], "pip install '.[export]'"),
        (["export", *MODEL, "--out", f"{root}/m.xml"], "pip install '.[openvino]'"),
        (["app"], "'gradio': pip install '.[app]'"),
        (["eval", *MODEL, *data, "-m", "tome:r=1"], None),
        (["env"], None),
        (["list", "hosts"], None),
    ]


@pytest.mark.slow
def test_no_command_ends_in_a_traceback_without_extras(tmp_path: Path) -> None:
    """In a process whose interpreter finds none of the packages that extras install, nor what comes with them."""
    for name in "ab":
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (24, 24)).save(tmp_path / "photos" / name / "0.png")
    # timm itself needs torchvision, which needs pillow, and torch jinja2
    hidden = sorted({*EXTRAS, *IMPORTED, "pyarrow", "pandas"} - {"torchvision", "PIL", "pillow", "jinja2"})
    wanted = commands(tmp_path)
    run = [sys.executable, str(ROOT / "tests" / "bare_worker.py"), json.dumps(hidden)]
    done = subprocess.run([*run, json.dumps([command for command, _ in wanted])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(wanted)
    for (command, end), (code, _, err) in zip(wanted, found, strict=True):
        assert "Traceback" not in err, (command, err)
        if end is None:
            assert code == 0, (command, err)
        else:
            assert code == 2, (command, err)
            assert err.strip().splitlines()[-1].endswith(end), (command, err)
    assert not (tmp_path / "run").exists()
