"""``vitrim eval`` as a user runs it, on made images."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.metrics import average_precision_score

import vitrim
from cli_runs import exit_code
from vitrim import reduce_
from vitrim.data import batches, eval_transform, load_data, load_images
from vitrim.errors import VitrimError
from vitrim.measure.decisions import Decisions
from vitrim.measure.evaluation import evaluate
from vitrim.measure.inputs import DataSpec
from vitrim.measure.records import Batch
from vitrim.measure.run import Measurement
from vitrim.report import Report

MODEL = "test_vit"
SIZE = ["--model-option", "img_size=64"]  # 17 tokens
SMALL = [*SIZE, "--model-option", "num_classes=6"]  # as many classes as `folder` has
CLASSES = ("ant", "bee", "cat", "dog", "eel", "fox")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Keep what `datasets` writes out of the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """12 images, two of each of six classes."""
    root = tmp_path / "images"
    for label, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for index in range(2):
            picture(2 * label + index).save(root / name / f"{index}.png")
    return root


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((64, 64), Image.Resampling.NEAREST)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Exit code of ``vitrim eval`` with these arguments."""
    return exit_code(monkeypatch, "eval", *arguments)


def the_error(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of the error, after which nothing comes."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert sum(line.startswith("error: ") for line in lines) == 1, lines
    assert lines[-1].startswith("error: "), lines
    return lines[-1].removeprefix("error: ")


def read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


# ---- results


def test_the_dense_model_alone(folder, tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    assert run(monkeypatch, MODEL, *SMALL, "--data", folder, "--json", out) == 0
    assert [row["method"] for row in read(out)["rows"]] == ["dense"]


def test_record_and_table(folder, tmp_path, monkeypatch, capsys):
    methods = ["none", "tome:r=[4,2]", "random:keep_rate=0.5"]
    out = tmp_path / "results" / "out.json"
    arguments = [MODEL, *SMALL, "--data", folder, "--batch-size", 5, "--json", out]
    assert run(monkeypatch, *arguments, *(word for method in methods for word in ("-m", method)), "--seed", 3) == 0

    record = read(out)
    keys = {"command", "environment", "weights", "model_options", "untrained", "task", "data", "complete"}
    assert set(record) == {*keys, "doubts", "rows"}
    assert len(record["doubts"]) == 1
    assert record["doubts"][0].startswith("the model has random weights")
    assert record["untrained"] == []
    assert (record["command"], record["complete"], record["weights"]) == ("eval", True, "random")
    assert record["model_options"] == {"img_size": 64, "num_classes": 6}
    assert record["data"] == {"source": str(folder), "split": None, "images": 12, "classes": 6, "batch_size": 5}
    assert (record["environment"]["dtype"], record["environment"]["seed"]) == ("float32", 3)

    torch.manual_seed(3)
    model = timm.create_model(MODEL, img_size=64, num_classes=6).eval()
    dataset = load_images(folder)
    dataset.transform = eval_transform(model)
    rows = evaluate(model, methods, batches(dataset, 5), seed=3).rows
    assert record["rows"] == rows
    for row in record["rows"]:
        assert set(row) == {
            *("model", "method", "images", "top1", "top5", "agreement", "cosine"),
            *("gmacs", "gmacs_images", "tokens_per_block", "tokens_at_end", "loss", "loss_error", "kl", "saved"),
        }
        assert set(row["gmacs"]) == {"linear", "attention", "matching", "norm"}
        assert all(0 <= row[key] <= 1 for key in ("top1", "top5", "agreement"))
    assert [row["tokens_per_block"] for row in record["rows"][:3]] == [[17] * 6, [17] * 6, [13] + [11] * 5]

    table = capsys.readouterr().out
    assert f"{MODEL} on {folder}: 12 images in batches of 5" in table
    lines = {line.split("│")[1].strip(): line for line in table.splitlines() if line.startswith("│")}
    assert list(lines) == ["dense", *methods]
    tome, dense = record["rows"][2], record["rows"][0]
    cells = [cell.strip() for cell in lines["tome:r=[4,2]"].split("│")[2:-1]]
    total, full = sum(tome["gmacs"].values()), sum(dense["gmacs"].values())
    change = tome["top1"] - dense["top1"]
    unchanged = change == 0 and tome["loss_error"] == 1 / 12
    assert cells == [
        f"{100 * tome['top1']:.2f}",
        f"{100 * tome['top5']:.2f}",
        # one image that changed has the error 1/n, and so does none: then the cell says what 12 images allow
        "+0.00 (none; <25.00)" if unchanged else f"{100 * change:+.2f}±{100 * tome['loss_error']:.2f}",
        f"{100 * tome['agreement']:.1f}",
        f"{tome['cosine']:.4f}",
        f"{total:.4f}",
        f"{100 * (1 - total / full):.1f}",
        "11",
    ]
    assert "random weights" in table
    assert "accuracy is meaningless" in table


def test_the_record_alone_on_standard_output(folder, monkeypatch, capsys):
    assert run(monkeypatch, MODEL, *SMALL, "-m", "tome:r=2", "--data", folder, "--json", "-") == 0
    shown = capsys.readouterr()
    assert [row["method"] for row in json.loads(shown.out)["rows"]] == ["dense", "tome:r=2"]
    assert "tome:r=2" in shown.err


def test_a_checkpoint_is_evaluated(folder, tmp_path, monkeypatch, capsys):
    """A head that always says class 2 is right for 2 of 12 images."""
    model = timm.create_model(MODEL, img_size=64, num_classes=6)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor([0.0, 1.0, 9.0, 2.0, 3.0, 4.0]))
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    out = tmp_path / "out.json"
    arguments = [MODEL, *SMALL, "-m", "tome:r=2", "--data", folder, "--json", out]
    assert run(monkeypatch, *arguments, "--checkpoint", tmp_path / "weights.safetensors") == 0
    record = read(out)
    assert record["weights"] == str(tmp_path / "weights.safetensors")
    for row in record["rows"]:
        assert (row["top1"], row["top5"], row["agreement"]) == (2 / 12, 10 / 12, 1.0)
    assert "random weights" not in capsys.readouterr().out


def test_parquet_columns_split_limit_and_dtype(tmp_path, monkeypatch):
    features = datasets.Features({"left": datasets.Image(), "right": datasets.Image(), "fine": datasets.Value("int64")})
    table = {"left": [picture(i) for i in range(9)], "right": [picture(50 + i) for i in range(9)], "fine": [7] * 9}
    datasets.Dataset.from_dict(table, features=features).to_parquet(tmp_path / "thing-test.parquet")
    out = tmp_path / "out.json"
    arguments = [MODEL, *SIZE, "-m", "tome:r=2", "--data", tmp_path / "thing-test.parquet", "--json", out]
    wanted = ["--image-column", "right", "--label-column", "fine", "--split", "test"]
    assert run(monkeypatch, *arguments, *wanted, "--limit", 4, "--batch-size", 3, "--dtype", "bf16") == 0
    record = read(out)
    assert record["data"]["split"] == "test"
    assert record["data"]["images"] == 4
    assert record["data"]["classes"] is None
    assert record["environment"]["dtype"] == "bfloat16"
    assert {row["images"] for row in record["rows"]} == {4}


def test_few_classes_have_no_top_5(folder, tmp_path, monkeypatch, capsys):
    for name in CLASSES[3:]:
        (folder / name).rename(tmp_path / name)
    out = tmp_path / "out.json"
    arguments = [MODEL, *SIZE, "--model-option", "num_classes=3", "-m", "none", "--data", folder, "--json", out]
    assert run(monkeypatch, *arguments) == 0
    assert [[key for key in row if key.startswith("top")] for row in read(out)["rows"]] == [["top1"]] * 2
    table = capsys.readouterr().out
    assert "top-1" in table
    assert "top-3" not in table
    assert "top-5" not in table


def test_another_number_of_classes_is_pointed_out_where_labels_are_numbers(folder, tmp_path, monkeypatch, capsys):
    given = [MODEL, *SIZE, "--data", folder, "--data-option", "by_number=true", "--json", tmp_path / "out.json"]
    assert run(monkeypatch, *given) == 0
    words = "the data has 6 classes and the model 1000"
    assert words in capsys.readouterr().out
    assert any(words in doubt for doubt in read(tmp_path / "out.json")["doubts"])


# ---- what was gathered is kept


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_keeps_what_came_before(folder, tmp_path, monkeypatch, capsys, workers):
    broken = folder / "dog" / "1.png"  # image 7: in the third batch of three
    broken.write_bytes(broken.read_bytes()[:60])
    out = tmp_path / "out.json"
    arguments = [MODEL, *SMALL, "-m", "tome:r=2", "--data", folder, "--batch-size", 3, "--json", out]
    assert run(monkeypatch, *arguments, "--workers", workers) == 2
    shown = capsys.readouterr()
    assert "6 of 12 images" in shown.out
    assert "tome:r=2" in shown.out
    errors = shown.err.strip().splitlines()
    assert len(errors) == 1
    assert errors[0].startswith(f"error: cannot read image 7 of {folder} ({broken}): ")
    record = read(out)
    assert record["complete"] is False
    assert f"error: {record['error']}" == errors[0]
    assert [(row["method"], row["images"]) for row in record["rows"]] == [("dense", 6), ("tome:r=2", 6)]


def test_nothing_gathered_leaves_an_older_record_alone(folder, tmp_path, monkeypatch, capsys):
    (folder / "ant" / "0.png").write_bytes(b"no image")
    out = tmp_path / "out.json"
    out.write_text("an older record")
    assert run(monkeypatch, MODEL, *SMALL, "-m", "tome:r=2", "--data", folder, "--json", out) == 2
    assert the_error(capsys).endswith("not an image of a known format")
    assert out.read_text() == "an older record"


def test_an_interruption_keeps_what_came_before(folder, tmp_path, monkeypatch, capsys):
    update = Measurement.update

    def interrupted(self: Measurement, batch: Batch) -> None:
        if self.images:
            raise KeyboardInterrupt
        update(self, batch)

    monkeypatch.setattr(Measurement, "update", interrupted)
    out = tmp_path / "out.json"
    arguments = [MODEL, *SMALL, "-m", "none", "--data", folder, "--batch-size", 4, "--json", out]
    assert run(monkeypatch, *arguments) == 130
    record = read(out)
    assert (record["complete"], record["error"], record["rows"][0]["images"]) == (False, "stopped before the end", 4)
    shown = capsys.readouterr()
    assert "4 of 12 images" in shown.out
    assert shown.err.strip().endswith("interrupted")


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "tomme"], "unknown method 'tomme'; did you mean 'tome'? valid: "),
        (["-m", "tome:rr=3"], "unknown option of tome 'rr'; did you mean 'r'? valid: "),
        (["-m", "tome:r=2", "--dtype", "fp31"], "unknown dtype 'fp31'; did you mean 'fp32'? valid: bf16, fp32"),
        (["-m", "tome:r=2", "--device", "warp"], "unknown device 'warp'; valid: cpu"),
        (["-m", "tome:r=2", "--split", "dev"], "no split 'dev' in "),
        (["-m", "tome:r=2", "--split", ""], "has an empty name: name one, or leave it out"),
        (["-m", "tome:r=2", "--data", ""], "the images have an empty name"),
        (["-m", "tome:r=2", "--data", "hfds/"], "hfds/ names no dataset: write hfds/owner/name"),
        (["-m", "tome:r=2", "-m", "tome:r=2"], "method tome:r=2 is given twice"),
        (["-m", "tome:r=2", "--model-option", "img_size=32"], "model option img_size is given twice"),
        (["-m", "tome:r=2", "--model-option", "num_heads=0"], "num_heads=0 must be a whole number from 1"),
        (["-m", "tome:r=2", "--seed", "9" * 23], "--seed"),
        (["-m", "tome:r=2", "--label-column", "label"], "is a folder of images, without columns"),
        (["-m", "tome:r=2", "--data", "/no/such/place"], "/no/such/place does not exist: "),
        (["-m", "tome:r=2", "--model-option", "img_size"], "cannot read 'img_size': write key=value"),
        (["-m", "tome:r=2", "--checkpoint", "/no/weights.safetensors"], "no checkpoint at /no/weights.safetensors"),
        (["-m", "tome:r=2", "--checkpoint", "/w", "--pretrained"], "either pretrained weights or a checkpoint"),
        (
            ["-m", "tome:r=2", "--data-option", "by_number=true", "--model-option", "num_classes=4"],
            "is beyond the model's 4 classes, 0 to 3; use a model of these classes, e.g. model option num_classes=6",
        ),
        (["-m", "evit", "--model-option", "class_token=false", "--model-option", "global_pool=avg"], "class token"),
    ],
)
def test_bad_input_is_one_line(folder, tmp_path, monkeypatch, capsys, arguments, message):
    out = tmp_path / "out.json"
    size = SIZE if "num_classes=4" in arguments else SMALL
    assert run(monkeypatch, MODEL, *size, "--data", folder, "--json", out, *arguments) == 2
    assert message in the_error(capsys)
    assert not out.exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [("test_vitt", "unknown model 'test_vitt'; did you mean"), ("test_resnet", "its layers are convolutions")],
)
def test_bad_models_are_one_line(folder, monkeypatch, capsys, model, message):
    assert run(monkeypatch, model, "--data", folder, "-m", "tome", "--model-option", "num_classes=6") == 2
    assert message in the_error(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["-m", "none", "--batch-size", "0"], "--batch-size"), (["-m", "none", "--wat"], "--wat")],
)
def test_wrong_usage_is_one_line(folder, monkeypatch, capsys, arguments, message):
    assert run(monkeypatch, MODEL, "--data", folder, *arguments) == 2
    assert message in the_error(capsys)


def test_a_missing_column_and_an_empty_dataset_are_one_line(tmp_path, monkeypatch, capsys):
    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    table = datasets.Dataset.from_dict({"img": [picture(0)], "label": [0]}, features=features)
    table.to_parquet(tmp_path / "one.parquet")
    table.select([]).to_parquet(tmp_path / "empty.parquet")
    (tmp_path / "folder").mkdir()
    arguments = [MODEL, *SMALL, "-m", "tome:r=2", "--data"]
    assert run(monkeypatch, *arguments, tmp_path / "one.parquet", "--label-column", "fine") == 2
    assert "no 'fine' in " in the_error(capsys)
    assert run(monkeypatch, *arguments, tmp_path / "empty.parquet") == 2
    assert "no rows in " in the_error(capsys)
    assert run(monkeypatch, *arguments, tmp_path / "folder") == 2
    assert "no images (or parquet files) in " in the_error(capsys)


def test_a_missing_package_is_one_line_with_the_remedy(tmp_path, monkeypatch, capsys):
    (tmp_path / "one.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert run(monkeypatch, MODEL, *SMALL, "-m", "tome:r=2", "--data", tmp_path / "one.parquet") == 2
    assert "pip install 'vitrim[data]'" in the_error(capsys)


# ---- several labels, partial results, decisions


@pytest.fixture
def several(tmp_path: Path) -> str:
    """NUS-WIDE as it lies on disk, made: four images of three classes."""
    (tmp_path / "images").mkdir()
    rows = {"a": "['sky', 'clouds']", "b": "['sky']", "c": "['water']", "d": "[]"}
    text = "".join(f'images/{name}.png,"{labels}",val\n' for name, labels in rows.items())
    (tmp_path / "nus_wid_data.csv").write_text(f"filepath,label,split_name\n{text}", encoding="utf-8")
    for seed, name in enumerate(rows):
        picture(seed).save(tmp_path / "images" / f"{name}.png")
    return f"nus_wide:{tmp_path}"


def test_images_of_several_labels_are_scored(several, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    arguments = [MODEL, *SIZE, "--model-option", "num_classes=3", "--data", several, "-m", "tome:r=2", "--json", out]
    assert run(monkeypatch, *arguments) == 0
    record, table = read(out), capsys.readouterr().out
    assert record["task"] == "multilabel"

    torch.manual_seed(0)
    model = timm.create_model(MODEL, img_size=64, num_classes=3).eval()
    dataset = load_data(several)
    dataset.transform = eval_transform(model)
    with torch.no_grad():
        logits = model(torch.stack([image for image, _ in dataset])).double().numpy()
    expected = [average_precision_score(dataset.targets[:, k], logits[:, k]) for k in range(3)]
    dense = record["rows"][0]
    assert dense["mAP"] == pytest.approx(sum(expected) / 3, abs=1e-6)
    assert (dense["images"], dense["agreement"]) == (4, 1.0)
    heading = next(line for line in table.splitlines() if "method" in line and "mAP" in line)
    assert [cell.strip() for cell in heading.split("┃")[1:4]] == ["method", "mAP", "mAP occurring"]
    assert f"{100 * dense['mAP']:.2f}" in table
    assert "overlap of the classes found" in table


def test_a_model_of_other_classes_cannot_be_scored_on_several_labels(several, monkeypatch, capsys):
    assert run(monkeypatch, MODEL, *SMALL, "--data", several) == 2
    assert the_error(capsys).startswith(
        "the data has 3 classes (clouds, sky, water), and the model does not name its 6"
    )
    assert run(monkeypatch, MODEL, *SMALL, "--data", several, "--data-option", "by_number=true") == 2
    assert the_error(capsys).endswith(
        "has 3 classes and the model 6: use a model of these classes, e.g. model option num_classes=3 and its "
        "checkpoint"
    )


def test_an_evaluation_goes_on_where_it_was_stopped(folder, tmp_path, monkeypatch, capsys):
    arguments = [MODEL, *SMALL, "-m", "random:keep_rate=0.5", "--data", folder, "--batch-size", 5]
    assert run(monkeypatch, *arguments, "--json", tmp_path / "whole.json") == 0

    update, ran = Measurement.update, []

    def interrupted(self: Measurement, batch: Batch) -> None:
        if self.images:
            raise KeyboardInterrupt
        update(self, batch)

    def counted(self: Measurement, batch: Batch) -> None:
        ran.append(batch.index)
        update(self, batch)

    keep = [*arguments, "--out", tmp_path / "part", "--json", tmp_path / "out.json"]
    resume = [*keep, "--resume"]
    monkeypatch.setattr(Measurement, "update", interrupted)
    assert run(monkeypatch, *keep) == 130
    assert read(tmp_path / "out.json")["rows"][0]["images"] == 5
    monkeypatch.setattr(Measurement, "update", counted)
    assert run(monkeypatch, *resume) == 0
    assert ran == [1, 2]
    assert read(tmp_path / "out.json") == read(tmp_path / "whole.json")
    assert run(monkeypatch, *resume) == 0  # all is there already: nothing runs
    assert ran == [1, 2]
    assert read(tmp_path / "out.json") == read(tmp_path / "whole.json")

    capsys.readouterr()
    assert run(monkeypatch, *keep) == 2
    assert the_error(capsys).endswith("holds an evaluation: resume it, or name another folder")
    assert run(monkeypatch, *arguments, "--resume") == 2
    assert the_error(capsys) == "resume goes on from what a folder holds, and none is given: give out (--out) too"
    assert run(monkeypatch, *resume, "--limit", 6) == 2
    assert "holds an evaluation with data.images=12, this one has 6: resume with the same" in the_error(capsys)
    picture(99).save(folder / "ant" / "0.png")
    assert run(monkeypatch, *resume) == 2
    assert "holds an evaluation with content.images=" in the_error(capsys)


def test_decisions_are_written_for_every_method(folder, tmp_path, monkeypatch, capsys):
    arguments = [MODEL, *SMALL, "-m", "tome:r=2", "-m", "topk:keep_rate=0.5", "--data", folder]
    assert run(monkeypatch, *arguments, "--decisions", tmp_path / "new") == 0
    files = sorted((tmp_path / "new").iterdir())
    assert [file.name for file in files] == ["tome_r_2.npz", "topk_keep_rate_0.5.npz"]
    assert all(str(file) in "".join(capsys.readouterr().out.split("\n")) for file in files[:1])
    found = Decisions.load(files[0])
    assert (found.header["method"], found.source.shape, found.ids.tolist()) == ("tome:r=2", (12, 6, 17), [*range(12)])
    assert found.num_tokens[0].tolist() == [15, 13, 11, 9, 7, 5]
    assert run(monkeypatch, *arguments, "--decisions", folder / "ant" / "0.png") == 2
    assert "0.png" in the_error(capsys)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_predictions_are_a_row_per_image(folder, tmp_path, monkeypatch, capsys, ending):
    file, record = tmp_path / f"images.{ending}", tmp_path / "record.json"
    arguments = [MODEL, *SMALL, "-m", "tome:r=2", "--data", folder, "--seed", 1]
    assert run(monkeypatch, *arguments, "--batch-size", 5, "--predictions", file, "--json", record) == 0
    assert f"predictions: {file}" in capsys.readouterr().out.replace("\n", "")
    table = pd.read_csv(file) if ending == "csv" else pd.read_parquet(file)
    assert table["image"].tolist() == [*range(12)]
    assert [Path(each).parent.name for each in table["file"]] == [name for name in CLASSES for _ in range(2)]

    torch.manual_seed(1)
    model = timm.create_model(MODEL, img_size=64, num_classes=6).eval()
    dataset = load_images(folder)
    dataset.transform = eval_transform(model)
    images, labels = map(torch.stack, zip(*((x, torch.tensor(y)) for x, y in dataset), strict=True))
    dense = model(images).softmax(1).detach()
    reduce_(model, "tome:r=2")
    reduced = model(images).softmax(1).detach()
    assert table["label"].tolist() == labels.tolist()
    for name, found in (("dense", dense), ("tome:r=2", reduced)):
        assert table[name].tolist() == found.argmax(1).tolist()
        np.testing.assert_allclose(table[f"{name} probability"], found.max(1).values, rtol=1e-4)
    # the paired standard error follows from the file alone
    change = (table["tome:r=2"] == table["label"]).astype(float) - (table["dense"] == table["label"])
    row = read(record)["rows"][1]
    assert row["loss"] == pytest.approx(-change.mean())
    assert row["loss_error"] == pytest.approx(max(change.std(ddof=0) / 12**0.5, 1 / 12))


@pytest.mark.parametrize(
    ("file", "message"), [("images.txt", "ends in .csv or .parquet"), ("ant/0.png/x.csv", "cannot write")]
)
def test_predictions_that_cannot_be_written_are_one_line(folder, monkeypatch, capsys, file, message):
    assert run(monkeypatch, MODEL, *SMALL, "--data", folder, "--predictions", folder / file) == 2
    assert message in the_error(capsys)


# ---- classes by name


def run_folder(path: Path, names: list[str], scores: list[float]) -> Path:
    """A finished run whose model gives every image the same scores of classes with these names."""
    model = timm.create_model(MODEL, img_size=64, num_classes=len(names))
    torch.nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.tensor(scores)
    path.mkdir()
    save_file(model.state_dict(), path / "model.safetensors")
    (path / "recipe.yaml").write_text(
        f"model: {MODEL}\nepochs: 1\nmodel_options: {{img_size: 64, num_classes: {len(names)}}}\n"
    )
    (path / "result.json").write_text(json.dumps({"classes": names}))
    return path


@pytest.mark.slow
def test_names_decide_which_class_is_which(folder, tmp_path, monkeypatch, capsys):
    """The run knows the six classes backwards and says eel to everything: 2 of 12, and 2 of 8 where ant is missing."""
    names, out = list(CLASSES)[::-1], tmp_path / "out.json"
    model = run_folder(tmp_path / "run", names, [0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    part = tmp_path / "part"
    part.mkdir()
    for name in CLASSES[2:]:
        (part / name).symlink_to(folder / name)
    for images, top1 in ((folder, 2 / 12), (part, 2 / 8)):
        assert run(monkeypatch, f"run:{model}", "-m", "tome:r=0", "--data", images, "--json", out) == 0
        assert [row["top1"] for row in read(out)["rows"]] == [pytest.approx(top1)] * 2
        assert "index of the model's class" not in capsys.readouterr().out


def test_a_class_that_the_run_does_not_have_is_one_line(folder, tmp_path, monkeypatch, capsys):
    model = run_folder(tmp_path / "run", [*CLASSES[:5], "yak"], [0.0] * 6)
    assert run(monkeypatch, f"run:{model}", "--data", folder) == 2
    assert the_error(capsys).startswith(
        "the model does not have 1 of the data's 6 classes: fox; found among its 6: ant, bee, cat, dog, eel. "
    )


def test_classes_without_a_name_in_common_are_numbers_only_where_that_is_said(folder, tmp_path, monkeypatch, capsys):
    model = run_folder(tmp_path / "run", [f"n0{number}" for number in range(6)], [0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    given = [f"run:{model}", "--data", folder, "--json", tmp_path / "out.json"]
    assert run(monkeypatch, *given) == 2
    assert "(ant, bee, cat, dog, eel, ...) are none of the model's (n00, n01, n02, n03, n04, ...): " in the_error(
        capsys
    )
    assert run(monkeypatch, *given, "--data-option", "by_number=true") == 0
    assert read(tmp_path / "out.json")["rows"][0]["top1"] == pytest.approx(2 / 12)  # class 1 is bee


@pytest.mark.parametrize(("names", "known"), [
    (("tulip", "oak"), False),
    (("n01440764", "n01443537"), True),  # tench and goldfish
    (("Goldfish", "Granny_Smith"), True),
    (("Tinca tinca", "day bed"), True),  # synonyms
    (("daisy", "tulip"), False),  # only one of them
    (("0", "1"), True),
])  # fmt: skip
def test_photographs_of_other_things_than_imagenets_are_refused(
    folder, tmp_path, monkeypatch, capsys, names: tuple[str, str], known: bool
) -> None:
    for name, old in zip(names, CLASSES, strict=False):
        (tmp_path / "things" / name).mkdir(parents=True)
        (tmp_path / "things" / name / "0.png").symlink_to(next((folder / old).iterdir()))
    code = run(monkeypatch, MODEL, "--data", tmp_path / "things", "--model-option", "img_size=64")
    assert code == (0 if known else 2)
    if not known:
        assert "tulip" in (text := the_error(capsys)).partition(";")[0].partition("):")[0]
        assert "the model does not have" in text or "are none of the model's (tench, goldfish," in text


# ---- the same from Python


@pytest.mark.slow
def test_the_function_gives_the_record_table_and_files_of_the_command(folder, tmp_path, monkeypatch, capsys):
    options = {"img_size": 64, "num_classes": 6}
    methods = ["tome:r=[4,2]", "random:keep_rate=0.5"]
    arguments = [MODEL, "--data", folder, "--batch-size", 5, "--seed", 3, "--json", tmp_path / "out.json"]
    arguments += [f"--model-option={key}={value}" for key, value in options.items()]
    arguments += [word for method in methods for word in ("-m", method)]
    assert run(monkeypatch, *arguments, "--decisions", tmp_path / "a", "--out", tmp_path / "kept") == 0
    seen: list[tuple[int, int | None]] = []
    before = torch.get_rng_state()
    report = evaluate(
        vitrim.ModelSpec(MODEL, options=options),
        methods,
        vitrim.ScoredData(str(folder), batch_size=5),
        seed=3,
        on_progress=lambda images, of: seen.append((images, of)),
        out=vitrim.ScoredResults(decisions=tmp_path / "b"),
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert json.loads(json.dumps(report.record)) == read(tmp_path / "out.json")
    assert capsys.readouterr().out.startswith(str(report))
    assert [file.read_bytes() for file in report.files] == [
        (tmp_path / "a" / file.name).read_bytes() for file in report.files
    ]
    assert len(report.files) == len(methods)
    assert seen == [(5, 12), (10, 12), (12, 12)]
    # what the command had gathered is what the function goes on from
    again = evaluate(
        vitrim.ModelSpec(MODEL, options=options),
        methods,
        vitrim.ScoredData(folder, batch_size=5),
        seed=3,
        out=vitrim.Results(tmp_path / "kept", resume=True),
    )
    assert again.rows == report.rows


@pytest.mark.slow
def test_a_model_and_a_dataset_that_are_there_give_the_same_and_stay_as_they_were(folder):
    torch.manual_seed(0)
    model = timm.create_model(MODEL, img_size=64, num_classes=6).train()
    weights, dataset = {name: value.clone() for name, value in model.state_dict().items()}, load_images(folder)
    transform, mine = dataset.transform, load_images(folder)
    report = evaluate(model, "tome:r=2", vitrim.DataSpec(dataset, limit=4))
    named = evaluate(
        vitrim.ModelSpec(MODEL, options={"img_size": 64, "num_classes": 6}),
        "tome:r=2",
        vitrim.DataSpec(folder, limit=4),
    )
    assert report.rows == named.rows
    assert (report.facts["weights"], report.facts["data"]) == ("given", named.facts["data"])
    assert model.training
    assert type(model) is timm.models.VisionTransformer
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert dataset.transform is transform
    mine.transform = eval_transform(model)  # one that somebody has set is kept
    assert evaluate(model, None, vitrim.DataSpec(mine, limit=4)).rows == named.rows[:1]


def test_what_was_gathered_is_handed_over_when_something_stops_the_pass(folder):
    broken = folder / "dog" / "1.png"  # image 7: in the third batch of three
    broken.write_bytes(broken.read_bytes()[:60])
    kept: list[Report] = []
    with pytest.raises(VitrimError, match="cannot read image 7"):
        evaluate(
            vitrim.ModelSpec(MODEL, options={"img_size": 64, "num_classes": 6}),
            "none",
            vitrim.ScoredData(folder, batch_size=3),
            on_report=kept.append,
        )
    (report,) = kept
    assert report.facts["complete"] is False
    assert [row["images"] for row in report.rows] == [6, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": {"dtype": "fp31"}}, "unknown dtype 'fp31'"),
        ({"model": {"pretrained": True}}, "say how to create a model: give its name"),
        ({"seed": -1}, "seed=-1: must be at least 0"),
        ({"seed": 2**63}, "seed=a number of 64 bits: must be below 9223372036854775808"),
        ({"on_progress": 5}, "on_progress=5: must be a function"),
        (
            {"data": {"split": "test"}},
            "split, columns and data_options say how to read a source, and a dataset is given",
        ),
        ({"data": {"task": "classification"}}, "predicts labels of whole images: leave task classification out"),
    ],
)
def test_arguments_that_say_nothing_are_refused(folder, options, message):
    given = dict(options)
    model = vitrim.ScoredModel(timm.create_model(MODEL, img_size=64, num_classes=6), **given.pop("model", {}))
    data = vitrim.ScoredData(load_images(folder), **given.pop("data", {}))
    with pytest.raises(VitrimError, match=message):
        evaluate(model, "none", data, **given)


def test_a_limit_of_batches_is_refused():
    with pytest.raises(VitrimError, match="limit is for a source of images or a dataset, and batches are given"):
        evaluate(timm.create_model(MODEL, img_size=64, num_classes=6), "none", DataSpec([], limit=3))


@pytest.mark.slow
def test_a_compiled_model_is_evaluated_as_the_model_in_it(folder):
    model = timm.create_model(MODEL, img_size=64, num_classes=6)
    compiled = torch.compile(model, backend="eager")
    rows = [
        evaluate(one, "tome:r=2", vitrim.ScoredData(load_images(folder), batch_size=3)).rows
        for one in (model, compiled)
    ]
    assert rows[0] == rows[1]
