"""`vitrim export` from a model to a file that answers, and what it refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import vitrim
from cli_runs import Run, refused, runner, succeeded
from image_files import write_noise
from vitrim.data import ImageDataset
from vitrim.engines.static import FITTED
from vitrim.loading import create_model
from vitrim.measure import export as exporting

pytestmark = pytest.mark.xdist_group("onnx")  # its libraries, which take seconds to import, in one process
OPTIONS = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 2}
SHALLOW = {**OPTIONS, "depth": 1}


def words(options: dict[str, int]) -> list[str]:
    """The tiny model, as the command takes it."""
    return ["test_vit", *(part for key, value in options.items() for part in ("--model-option", f"{key}={value}"))]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """``vitrim export`` of a tiny model, in a folder with the folder ``images`` of two classes."""
    write_noise(tmp_path / "images", 4)
    monkeypatch.chdir(tmp_path)
    return runner(monkeypatch, capfd, "export", *words(OPTIONS))


def test_a_file_and_its_record(run: Run) -> None:
    out = succeeded(run, "-m", "tome:r=2", "--out", "m.pt2", "--check", "5", "--images", "images", "--json", "r.json")
    assert "m.pt2: pt2 for torch.export" in out
    assert "tokens per block: [15, 13]" in out
    assert "5 images in batches of 1, 2: largest difference" in out
    record = json.loads(Path("r.json").read_text())
    assert record["command"] == "export"
    assert record["file"]["method"] == "tome:r=2"
    assert record["file"]["classes"] == ["a", "b"]
    file = vitrim.Exported.open("m.pt2", trust=True)
    assert file.run(np.zeros((3, 3, 32, 32), np.float32)).shape == (3, 2)


def test_a_reduced_model_is_timed_against_itself_made_dense(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrim.measure.latency.Budget.spent", lambda self, rounds, *_: rounds >= 2)
    model = create_model("test_vit", options=SHALLOW)
    reduction = vitrim.reduce_(model, "tome:r=2")
    file = vitrim.export(model, None, "m.pt2", check=0, bench=True, file=vitrim.FileSpec(batch=2))
    assert file.report is not None
    assert [(row["method"], row["engine"]) for row in file.report.rows] == [
        (method, engine) for method in ("dense", "tome:r=2") for engine in ("eager", "torch.export")
    ]
    promise = file.metadata["dense_gmacs"] / file.metadata["gmacs"]
    assert [row["macs_speedup"] for row in file.report.rows] == pytest.approx([1.0, 1.0, promise, promise])
    assert vitrim.get_reduction(model) is reduction


@pytest.mark.slow
def test_counts_are_frozen_under_what_a_run_learned(run: Run) -> None:
    """The run's interpreters let only the best patch stay; random ones would let about half of the 16 stay."""
    model = create_model("test_vit", options=OPTIONS)
    Path("learned").mkdir()
    save_file(model.state_dict(), "learned/model.safetensors")
    reduction = vitrim.reduce_(model, "ia_red2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("interpreter.bias"):
                parameter.fill_(-20.0)
    reduction.save("learned")
    given = ["-m", "ia_red2", "--out", "m.pt2", "--images", "images", "--check", "4", "--freeze"]
    succeeded(run, "--checkpoint", "learned", *given)
    assert vitrim.Exported.open("m.pt2").metadata["method"] == "ia_red2:r=[15,0]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "tome:r=2", "-m", "topk", "--out", "m.pt2"], "a file holds one method, got 2: tome:r=2, topk"),
        (["--out", "m.txt"], "cannot tell the format of m.txt: end it in .onnx, .pt2, .xml, or say it with --to"),
        (["--out", "m.onnx", "--to", "pt2"], "a file of format pt2 ends in .pt2, and m.onnx does not"),
        (["--out", "images/a/0.png/m.onnx"], "images/a/0.png is a file"),
        (["--out", "m.onnx", "--batch", "0"], "unexpected --batch '0': write dynamic, or the only size of a batch"),
        (["--out", "m.onnx", "--batch", "many"], "unexpected --batch 'many'"),
        (["--out", "m.pt2", "--img-size", "50"], "50 px is not a multiple of the patch size"),
        (
            ["--out", "m.pt2", "--batch", "9", "--images", "images"],
            "images has 8 images, too few to compare a file for batches of 9: give more, or --check 0",
        ),
        (["--out", "m.onnx", "-m", "atm", "--freeze"], "--freeze finds counts on images: give --images too"),
        (["--out", "m.onnx", "--freeze", "--images", "images"], "--freeze is for a method that adapts"),
        (["--out", "m.onnx", "-m", "atm", "--freeze", "--capacity", "0.9"], "give either --freeze or --capacity"),
        (["--out", "m.onnx", "-m", "tome", "--limit", "5"], "--limit says on how many images"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(run: Run, arguments: list[str], message: str) -> None:
    before = sorted(Path().rglob("*"))
    refused(run, message, *arguments)
    assert sorted(Path().rglob("*")) == before


def test_as_many_images_as_a_batch_are_enough() -> None:
    dataset: Any = [None] * 5
    exporting._check_images(dataset, nn.Identity(), None, 4, 5)


@pytest.mark.parametrize(("limit", "images"), [(None, FITTED), (3, 3)])
def test_counts_are_found_on_so_many_images(
    limit: int | None, images: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Asked(Exception):
        """Carries the limit, and spares the export."""

    def asked(dataset: object, size: int, limit: int) -> None:
        raise Asked(limit)

    monkeypatch.setattr(exporting, "batches", asked)
    with pytest.raises(Asked, match=f"^{images}$"):
        vitrim.export(
            create_model("test_vit", options=SHALLOW),
            "atm",
            tmp_path / "m.pt2",
            freeze=True,
            check=0,
            images=vitrim.DataSpec(ImageDataset([Image.new("RGB", (32, 32))], [0]), limit=limit),
        )


@pytest.mark.parametrize("record", ["m.pt2.json", "./m.pt2.json"])
def test_a_record_does_not_replace_the_file(run: Run, record: str) -> None:
    code, _, err = run("--out", "m.pt2", "--check", "0", "--json", record)
    assert code == 2
    assert f"--json {record} is a file of this command itself: give the record another name" in err
    assert not Path(record).exists()
