"""Frozen schedules: means over images, as a file, and beside the adaptive method where methods are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import vitrim
from image_files import write_noise
from vitrim.data import eval_transform, load_images
from vitrim.errors import VitrimError
from vitrim.loading import create_model
from vitrim.measure import timing
from vitrim.measure.compare import compare
from vitrim.measure.freeze import freeze
from vitrim.measure.latency import Budget

OPTIONS = {"img_size": 32, "patch_size": 4, "depth": 3, "embed_dim": 32, "num_heads": 2, "num_classes": 2}
ATM = "atm:alpha=0.7,beta=0,theta_min=0,last_block=full"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_noise(tmp_path / "images", 5)
    return tmp_path / "images"


def model() -> nn.Module:
    torch.manual_seed(0)
    return create_model("test_vit", options=OPTIONS)


@torch.no_grad()
def patches(method: str, source: Path) -> Any:
    """(I, L) patches behind every block, of every image by itself."""
    host = model().eval()
    dataset = load_images(source)
    dataset.transform = eval_transform(host)
    reduction = vitrim.reduce_(host, method, record=True)
    found = []
    for place in range(len(dataset)):
        host(dataset[place][0][None])
        found.append([state.num_patches for state in reduction.states[1:]])
    return np.array(found)


def test_the_schedule_is_the_mean_and_its_file_is_a_method(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "frozen.json"
    report = freeze(model(), ATM, str(source), out=file)
    own = patches(ATM, source)
    assert [row["mean"] for row in report.rows] == pytest.approx(own.mean(0).tolist())
    assert [(row["least"], row["most"]) for row in report.rows] == list(zip(own.min(0), own.max(0), strict=True))
    counts = np.floor(own.mean(0) + 0.5)
    assert [row["frozen"] for row in report.rows] == counts.tolist()
    assert vitrim.parse_method(f"@{file}").describe() == report.best.describe()
    assert report.best.r == tuple(-np.diff([64, *counts]))
    said = json.loads(file.read_text())["tuned"]
    assert (said["adaptive"], said["images"]["count"]) == (vitrim.parse_method(ATM).describe(), len(own))
    with pytest.warns(vitrim.ReductionWarning, match="was found for"):
        vitrim.reduce_(create_model("test_vit", options={**OPTIONS, "img_size": 64}), f"@{file}")


def test_multiples_are_those_above_the_means(source: Path) -> None:
    """The means are of the method without rounding: rounded twice, they would be a multiple too high."""
    found = freeze(model(), f"{ATM},align=6", str(source), out=None)
    means = np.floor(patches(ATM, source).mean(0) + 0.5) + 1
    assert [row["frozen"] + 1 for row in found.rows] == np.minimum(np.ceil(means / 6) * 6, 65).tolist()
    assert found.best.align == 6


@pytest.mark.parametrize(
    ("method", "images", "message"),
    [
        ("tome:r=2", "nowhere", "tome cannot be frozen: its counts are fixed already"),
        ("ats", "nowhere", "ats cannot be frozen"),
        ("atm", None, "counts are means over images: give --images DATA"),
    ],
)
def test_what_cannot_be_frozen(method: str, images: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(VitrimError, match=message):
        freeze(model(), method, images, out=tmp_path / "frozen.json")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "time_interleaved", lambda runs, *_: {name: np.ones(3) for name in runs})


def methods_of(source: Path, **options: Any) -> tuple[list[str], list[str]]:
    """The methods of the rows of a comparison, and its notes."""
    found = compare(model(), ATM, vitrim.ScoredData(str(source), batch_size=2), budget=Budget(1, 0.0), **options)
    return [row["method"] for row in found.rows], found.notes


@pytest.mark.usefixtures("untimed")
def test_a_comparison_has_the_schedule_beside_the_method_above_batch_1(source: Path) -> None:
    schedule, name = freeze(model(), ATM, str(source), out=None).best.describe(), vitrim.parse_method(ATM).describe()
    rows, notes = methods_of(source, at=(1, 2))
    assert rows == ["dense", name, schedule]
    assert any(f"{schedule} is the schedule of {name}" in note for note in notes)
    assert methods_of(source, at=1)[0] == ["dense", name]


@pytest.mark.slow
@pytest.mark.usefixtures("untimed")
def test_on_engines_that_do_not_follow_images_the_schedule_stands_for_the_method(source: Path) -> None:
    schedule = freeze(model(), ATM, str(source), out=None).best.describe()
    assert methods_of(source, at=(1, 2), engine="torch.export")[0] == ["dense", schedule]


def test_a_profile_and_pictures_name_the_schedule(source: Path) -> None:
    images = sorted(source.rglob("*.png"))
    schedule = freeze(model(), ATM, str(source), out=None).best.describe()
    expected = f"{vitrim.parse_method(ATM).describe()} frozen on these images: {schedule} (vitrim freeze)"
    assert expected in vitrim.profile(model(), [ATM, "tome:r=2"], images=str(source)).notes
    assert vitrim.show(model(), [ATM], images).notes == [expected]
