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
from cli_runs import Run, runner
from full_matrix import cells
from image_files import write_noise
from vitrim.data import ImageDataset
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


@pytest.fixture
def run_shallow(run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """As `run`, of one block: every export takes half the time."""
    return runner(monkeypatch, capfd, "export", *words(SHALLOW))


def test_a_file_and_its_record(run: Run) -> None:
    code, out, err = run("-m", "tome:r=2", "--out", "m.pt2", "--check", "5", "--images", "images", "--json", "r.json")
    assert code == 0, err
    assert "m.pt2: pt2 for torch.export" in out
    assert "tokens per block: [15, 13]" in out
    assert "5 images in batches of 1, 2: largest difference" in out
    record = json.loads(Path("r.json").read_text())
    assert record["command"] == "export"
    assert record["file"]["method"] == "tome:r=2"
    assert record["file"]["classes"] == ["a", "b"]
    file = vitrim.Exported.open("m.pt2", trust=True)
    assert file.run(np.zeros((3, 3, 32, 32), np.float32)).shape == (3, 2)


@pytest.mark.slow
def test_dense_for_one_batch_timed(run_shallow: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """And compared on as many images as fill a batch of the file, more than were asked for."""
    monkeypatch.setattr("vitrim.measure.latency.Budget.spent", lambda self, rounds, *_: rounds >= 2)
    given = ["--images", "images", "--image-size", "32", "--check", "2", "--preprocess", "--bench"]
    code, out, err = run_shallow("--out", "m.pt2", "--batch", "7", *given, "--json", "r.json")
    assert code == 0, err
    assert "7 images in batches of 7: largest difference" in out
    rows = json.loads(Path("r.json").read_text())["rows"]
    assert [(row["engine"], row["batch_size"]) for row in rows] == [("eager", 7), ("torch.export", 7)]


@pytest.mark.full  # the command calls the function, `test_commands.py`
def test_the_function_does_what_the_command_does(run_shallow: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrim.measure.latency.Budget.spent", lambda self, rounds, *_: rounds >= 2)
    given = ["-m", "tome:r=2", "--out", "m.pt2", "--check", "5", "--images", "images", "--bench"]
    code, out, err = run_shallow(*given, "--seed", "3", "--json", "r.json")
    assert code == 0, err
    record, state = json.loads(Path("r.json").read_text()), torch.get_rng_state()
    file = vitrim.export(
        vitrim.ModelSpec("test_vit", options=SHALLOW), "tome:r=2", "n.pt2", check=5, images="images", bench=True, seed=3
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert file.report is not None
    own = json.loads(json.dumps(file.report.record))
    assert {**own["file"], "path": "m.pt2", "bytes": record["file"]["bytes"]} == record["file"]
    assert {**own, "file": None, "rows": None} == {**record, "file": None, "rows": None}
    assert [(row["engine"], row["method"], row["batch_size"]) for row in own["rows"]] == [
        (row["engine"], row["method"], row["batch_size"]) for row in record["rows"]
    ]
    assert len(own["rows"]) == 8
    assert out.splitlines()[1:4] == str(file.report).splitlines()[1:4]
    assert "speed-up" in out
    with_weights = np.random.default_rng(0).normal(size=(2, 3, 32, 32)).astype(np.float32)
    first, second = (one.run(with_weights) for one in (file, vitrim.Exported.open("m.pt2", trust=True)))
    np.testing.assert_array_equal(first, second)  # the same random weights


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
    assert [row["promised_speedup"] for row in file.report.rows] == pytest.approx([1.0, 1.0, promise, promise])
    assert vitrim.get_reduction(model) is reduction


@pytest.mark.slow
@pytest.mark.parametrize("how", cells([["--freeze"], ["--capacity", "0.9"]], [["--freeze"]]))
def test_an_adaptive_method(run: Run, how: list[str]) -> None:
    method = "atm:alpha=0.5,beta=0.1,theta_min=0.2,splitting_layer=2"
    given = ["-m", method, "--out", "m.pt2", "--images", "images", "--limit", "6", "--check", "6", *how]
    code, _, err = run(*given)
    assert code == 0, err
    known = vitrim.Exported.open("m.pt2").metadata["method"]
    assert ("r=[" in known) == (how == ["--freeze"])
    assert ("capacity=[" in known) == (how != ["--freeze"])


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
    code, _, err = run("--checkpoint", "learned", *given)
    assert code == 0, err
    assert vitrim.Exported.open("m.pt2").metadata["method"] == "ia_red2:r=[15,0]"


@pytest.mark.slow
def test_images_that_only_name_the_classes_need_no_size(run: Run) -> None:
    given = ["--image-size", "48", "--model-option", "dynamic_img_size=true", "--batch", "9", "--check", "0"]
    code, _, err = run("--out", "m.pt2", "--images", "images", *given)
    assert code == 0, err
    assert vitrim.Exported.open("m.pt2").metadata["classes"] == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "m.txt"], "cannot tell the format of m.txt: end it in .onnx, .pt2, .xml, or say it with --to"),
        (["--out", "m.onnx", "--to", "pt2"], "a file of format pt2 ends in .pt2, and m.onnx does not"),
        (["--out", "m.onnx", "--to", "onx"], "unknown format 'onx'; did you mean 'onnx'?"),
        (["--out", "images/a.onnx/m.onnx", "--opset", "9"], "opset=9: must be at least 18"),
        (["--out", "images/a/0.png/m.onnx"], "images/a/0.png is a file"),
        (["--out", "/proc/m.onnx"], "cannot write"),
        (["--out", "m.onnx", "--batch", "0"], "unexpected --batch '0': write dynamic, or the only size of a batch"),
        (["--out", "m.onnx", "--batch", "-1"], "unexpected --batch '-1'"),
        (["--out", "m.onnx", "--batch", "many"], "unexpected --batch 'many'"),
        (
            ["--out", "m.onnx", "--dtype", "bf16"],
            "unknown precision of onnx files 'bf16'; did you mean 'fp16'? valid: fp16, fp32, int8",
        ),
        (["--out", "m.onnx", "--check", "-1"], "--check"),
        (["--out", "m.onnx", "--image-size", "33"], "takes no images of 33 x 33: "),
        (
            ["--out", "m.pt2", "--image-size", "48", "--images", "images", "--model-option", "dynamic_img_size=true"],
            "--images are prepared at the model's own 32 x 32, not at --image-size 48: make the model of that size, ",
        ),
        (
            ["--out", "m.pt2", "--batch", "9", "--images", "images"],
            "images has 8 images, too few to compare a file for batches of 9: give more, or --check 0",
        ),
        (["--out", "m.onnx", "-m", "tomme"], "unknown method 'tomme'"),
        (["--out", "m.onnx", "-m", "atm"], "atm cannot be exported: how many tokens it keeps depends on the images; "),
        (["--out", "m.onnx", "-m", "a_vit"], "a_vit cannot be exported: an image is done when its class token halts"),
        (["--out", "m.onnx", "-m", "random"], "give it a seed, as in random:seed=0"),
        (["--out", "m.onnx", "-m", "atm", "--freeze"], "--freeze finds counts on images: give --images too"),
        (["--out", "m.onnx", "-m", "atm", "--capacity", "0"], "--capacity 0.0 must be above 0 and at most 1"),
        (["--out", "m.onnx", "--freeze", "--images", "images"], "--freeze is for a method that adapts"),
        (["--out", "m.onnx", "-m", "tome", "--freeze", "--images", "images"], "its counts are fixed already"),
        (["--out", "m.onnx", "-m", "a_vit", "--freeze", "--images", "images"], "a_vit cannot be frozen: an image"),
        (["--out", "m.onnx", "-m", "atm", "--freeze", "--capacity", "0.9"], "give either --freeze or --capacity"),
        (["--out", "m.onnx", "-m", "tome", "--limit", "5"], "--limit says on how many images"),
        (["--out", "m.onnx", "-m", "tome:r=-1"], "r must not be negative"),
        ([], "--out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(run: Run, arguments: list[str], message: str) -> None:
    before = sorted(Path().rglob("*"))
    code, out, err = run(*arguments)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(Path().rglob("*")) == before


def test_a_missing_package_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrim.engines.formats import formats

    monkeypatch.setattr(formats()["onnx"], "needs", ("no_such_runtime",))
    code, _, err = run("-m", "tome:r=2", "--out", "m.onnx")
    assert code == 2
    assert err == "error: onnx needs no_such_runtime: pip install 'vitrim[export]'\n"


def test_a_file_holds_one_method(run: Run) -> None:
    code, out, err = run("-m", "tome:r=2", "-m", "topk", "--out", "m.pt2")
    assert (code, out) == (2, "")
    assert err == "error: a file holds one method, got 2: tome:r=2, topk\n"
    assert not Path("m.pt2").exists()


def test_as_many_images_as_a_batch_are_enough() -> None:
    dataset: Any = [None] * 5
    exporting._check_images(dataset, nn.Identity(), None, 4, 5)


@pytest.mark.parametrize(("limit", "images"), [(None, exporting.FITTED), (3, 3)])
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
