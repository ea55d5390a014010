"""``vitrim show`` as a user runs it, on made images."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from PIL import Image

from cli_runs import Run, refused, runner, succeeded
from dense_files import write_masks_table

SMALL = ("-m", "topk:keep_rate=0.5", "--blocks", "5")
"""A picture with one block, which is drawn quickly."""
MODEL = ("test_vit", "--model-option", "img_size=64", "--model-option", "num_classes=2")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images, of two classes."""
    root = tmp_path_factory.mktemp("images")
    for name in ("ant/0", "bee/0", "bee/1"):
        (root / name).parent.mkdir(exist_ok=True)
        pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((64, 64), Image.Resampling.NEAREST).save(root / f"{name}.png")
    return root


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys, "show", *MODEL)


@pytest.mark.slow
def test_files_and_folders(images: Path, run: Run, tmp_path: Path) -> None:
    """Of files with one name, none is lost."""
    out = tmp_path / "pictures"
    code, printed, error = run(images / "ant" / "0.png", images / "bee", *SMALL, "--out", out)
    assert (code, error) == (0, "")
    assert sorted(file.name for file in out.iterdir()) == ["0.png", "0_2.png", "1.png"]
    assert printed.count("wrote ") == 3
    assert matplotlib.image.imread(out / "0.png").shape[1] > 500


def test_a_dataset(images: Path, run: Run, tmp_path: Path) -> None:
    arguments: list[Any] = ["--data", images, "--limit", 2, "-m", "tome:r=2", "-m", "topk", "--blocks", "1,4"]
    printed = succeeded(run, *arguments, "--format", "svg", "--out", tmp_path, "--json", "-")
    record = json.loads(printed)
    assert [row["image"] for row in record["rows"]] == ["image 0: ant", "image 2: bee"]
    for row in record["rows"]:
        assert Path(row["file"]).read_text().startswith("<?xml")
        assert {row[name].split(" ")[0] for name in ("dense", "tome:r=2", "topk")} <= {"ant", "bee"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "topk"], "give the images to show"),
        (["IMAGES/bee", "--data", "IMAGES", "-m", "topk"], "not both"),
        (["IMAGES/bee", "--split", "test", "-m", "topk"], "split says how to read a dataset"),
        (["IMAGES/none.png", "-m", "topk"], "there is no 'none.png'"),
        (["IMAGES", "-m", "topk"], "no images directly in"),
        (["IMAGES/note.txt", "-m", "topk"], "is no image by its name"),
        (["IMAGES/bee", "-m", "topk", "--blocks", "x"], "got 'x'"),
        (["IMAGES/bee", "-m", "topk", "--out", "IMAGES/note.txt"], "is a file"),
    ],
)
def test_bad_input_is_one_line(images: Path, run: Run, tmp_path: Path, arguments: list[str], message: str) -> None:
    (images / "note.txt").write_text("mine")
    given = [part.replace("IMAGES", str(images)) for part in arguments]
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "new")]
    refused(run, message, *given, *out)
    assert not (tmp_path / "new").exists()
    assert (images / "note.txt").read_text() == "mine"


def test_a_model_that_is_no_classifier(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show = runner(monkeypatch, capsys, "show", "vitrim:camvid_vit")
    code, _, error = show(images / "bee", "-m", "tome:r=2", "--out", tmp_path / "new")
    assert code == 2
    assert "predicts places, which are drawn beside the truth: give images with their masks or boxes, --data" in error


def test_a_model_for_segmentation_is_drawn_beside_the_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_masks_table(tmp_path / "scenes.parquet", [[0, 1], [1, 2]])
    monkeypatch.chdir(tmp_path)
    show = runner(monkeypatch, capsys, "show", "segmenter:test_vit", "--model-option", "num_classes=3")
    options = ("--model-option", "img_size=64", "--data-option", "num_classes=3")
    printed = succeeded(show, "--data", data, "-m", "tome:r=[2]", "--limit", 1, *options)
    assert matplotlib.image.imread("pictures/image_0.png").shape[1] > 500  # the default folder
    assert re.search(r"dense: every token; tome:r=\[2\]: \d+% of the MACs, \d+\.\d% as dense", printed)
