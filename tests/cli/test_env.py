"""``vitrim env``: what a report of a problem needs."""

from __future__ import annotations

import json
import os
import platform
import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vitrim
from cli_runs import Run, runner, succeeded
from vitrim.cli import env
from vitrim.core.tables import libraries
from vitrim.engines.machine import PACKAGES

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys, "env")


def lines(out: str) -> dict[str, str]:
    """What it prints, by name."""
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in out.splitlines())  # type: ignore[misc]


def test_every_line_has_a_name_and_a_value(run: Run) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    shown = lines(out)
    assert shown["vitrim"] == vitrim.__version__
    assert shown["python"].startswith(platform.python_version())
    assert shown["timm"] == f"{version('timm'):<14} tried: 1.0.22 to {env.PACKAGES['timm'][1]}"
    assert shown["cores"].startswith(f"{os.cpu_count()}, ")
    assert shown["cores"].endswith(f"threads of torch: {torch.get_num_threads()}")
    assert shown["capability"] == torch.backends.cpu.get_cpu_capability()
    assert shown["devices"].split(", ")[0] == "cpu"


def test_every_package_that_vitrim_asks_for_is_listed() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    chosen = ("hf", "data", "demo", "train", "clip", "app")
    wanted = [*project["dependencies"], *(need for extra in chosen for need in extras[extra])]
    names = {re.split(r"[\[<>=]", need)[0].lower() for need in wanted} - {"vitrim", "jinja2"}
    hosts = {PACKAGES.get(library, library) for library in libraries()} - {"vitrim", "dinov2", "dinov3"}  # no packages
    assert names | hosts <= {package.lower() for package in env.PACKAGES}


def test_a_package_that_is_missing_is_said_to_be(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(env, "PACKAGES", {"torch": ("1.0", "999.0"), "no-such-package": ("any", "1.0")})
    out = succeeded(run, "--json", tmp_path / "env.json")
    assert lines(out)["no-such-package"] == "not installed  tried: any to 1.0"
    assert "warning" not in out
    assert json.loads((tmp_path / "env.json").read_text())["packages"]["no-such-package"] is None


@pytest.mark.parametrize(
    ("lowest", "newest", "outside"), [("999.0", "999.1", True), ("any", "1.0", True), ("1.0", "999", False)]
)
def test_versions_outside_of_those_that_were_tried_get_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, lowest: str, newest: str, outside: bool
) -> None:
    monkeypatch.setattr(env, "PACKAGES", {"torch": (lowest, newest), "timm": ("1.0", "999")})
    _, out, _ = run()
    warned = [line for line in out.splitlines() if "warning" in line]
    assert warned == (["warning: outside of the versions that were tried: torch"] if outside else [])


def test_what_was_tried_is_what_the_tests_install() -> None:
    """The lowest and the newest versions are those of the two files of constraints."""
    for bound, file in enumerate(("constraints-oldest.txt", "constraints.txt")):
        pinned = dict(line.split("==") for line in PROJECT.with_name(file).read_text().splitlines() if line[0] != "#")
        pinned = {package.lower(): number for package, number in pinned.items()}
        for package, tried in env.PACKAGES.items():
            assert tried[bound] == pinned.get(package.lower(), "any"), package


def test_record_alone_on_standard_output(run: Run) -> None:
    code, out, err = run("--json", "-")
    record = json.loads(out)
    assert code == 0
    assert record.pop("command") == "env"
    assert set(record) == {"vitrim", "python", "platform", "packages", "tried", "untried", "cpu", "devices", "cuda"}
    assert set(record["cpu"]) == {"name", "cores", "usable_cores", "threads", "capability"}
    assert lines(err)["torch"].split()[0] == record["packages"]["torch"]


def test_devices_of_cuda(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    code, out, _ = run()
    shown = lines(out)
    assert code == 0
    assert shown["devices"] == "cpu, cuda"
    assert shown["torch is for"].startswith("cuda 12.8")
    assert shown["cuda:0"] == shown["cuda:1"] == "NVIDIA H100, 80.0 GiB, capability 9.0"
