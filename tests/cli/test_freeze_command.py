"""`vitrim freeze` from images to a file that other commands read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import vitrim
from cli_runs import Run, refused, runner, succeeded
from image_files import write_noise

OPTIONS = ("img_size=32", "patch_size=4", "depth=3", "embed_dim=32", "num_heads=2", "num_classes=2")
SMALL = [part for option in OPTIONS for part in ("--model-option", option)]
FREEZE = ["freeze", "test_vit", *SMALL, "-m", "atm:alpha=0.3,beta=0,theta_min=0"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    write_noise(tmp_path / "images", 5)
    monkeypatch.chdir(tmp_path)
    return runner(monkeypatch, capfd)


def test_it_prints_the_setting_and_saves_it(run: Run) -> None:
    out = succeeded(run, *FREEZE, "--images", "images", "--limit", 4, "--json", "record.json")
    assert len(json.loads(Path("record.json").read_text())["rows"]) == 3
    found = vitrim.parse_method("@frozen.json")
    assert not found.is_adaptive()
    assert f"{found.describe()} saves" in out
    assert "on 4 images, one by one" in out
    assert "use it as -m @frozen.json" in out


def test_it_needs_images(run: Run) -> None:
    refused(run, "Missing option '--images'", *FREEZE)
