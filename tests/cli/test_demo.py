from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cli_runs import exit_code
from vitrim.app import demo as run

SPEED = [
    {"model": run.SPEED_MODEL, "batch_size": 8, "dtype": "fp32", "method": "dense", "images_per_second": 10.0}
    | {"speedup": 1.0, "macs_speedup": 1.0},
    {"model": run.SPEED_MODEL, "batch_size": 8, "dtype": "fp32", "method": "tome:r=13", "images_per_second": 17.0}
    | {"speedup": 1.7, "macs_speedup": 1.74},
]


def test_demo_prints_one_table_and_writes_record_and_figures(monkeypatch, capsys, tmp_path) -> None:
    """The digits half runs for real on two methods; the timing half, which takes a minute, is given."""
    monkeypatch.setattr(run, "DIGITS_METHODS", (*run.DIGITS_METHODS[1:2], *[run.DIGITS_METHODS[-1]] * 3))
    monkeypatch.setattr(run, "measure_speed", lambda seed: SPEED)
    assert exit_code(monkeypatch, "demo", "--out", tmp_path) == 0
    record = json.loads((tmp_path / "demo.json").read_text())
    dense, random, atm = record["digits"][:3]
    assert dense["method"] == "dense"
    assert dense["top1"] > 0.99
    assert random["top1"] < 0.95 < atm["top1"]
    assert 0.45 < sum(atm["gmacs"].values()) / sum(dense["gmacs"].values()) < 0.55
    assert record["speed"] == SPEED
    for name in ("accuracy_over_macs.png", "merged_patches.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "digits ViT on 450 images it never saw" in capsys.readouterr().out


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Twenty pictures of ten classes in the form of CIFAR-10."""
    generator = np.random.default_rng(0)
    for label, index in product(range(10), range(2)):
        folder = tmp_path / "photographs" / "test" / f"class{label}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    return tmp_path / "photographs"


def test_other_images_than_cifar10_are_refused_before_anything_is_measured(monkeypatch, capsys, photographs, tmp_path):
    shutil.rmtree(photographs / "test" / "class3")
    assert exit_code(monkeypatch, "demo", "--out", tmp_path / "out", "--cifar10", photographs) == 2
    assert "has 9 classes: it is not CIFAR-10" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "message"), [("file", "is a file"), ("file/deep", "file is a file")])
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_measured(
    monkeypatch, capsys, tmp_path, name, message
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(run, "digits", lambda: pytest.fail("it has begun"))
    assert exit_code(monkeypatch, "demo", "--out", tmp_path / name) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
