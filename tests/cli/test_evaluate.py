"""``vitrim eval`` as a user runs it, on made images."""

from __future__ import annotations

import json
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

import vitrim
from cli_runs import exit_code
from vitrim import reduce_
from vitrim.data import batches, eval_transform, load_images
from vitrim.errors import VitrimError
from vitrim.measure.decisions import Decisions
from vitrim.measure.evaluation import evaluate
from vitrim.measure.inputs import DataSpec
from vitrim.measure.records import Batch
from vitrim.measure.run import Measurement

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


def test_record_and_table(folder, tmp_path, monkeypatch, capsys):
    methods = ["none", "tome:r=[4,2]", "random:keep_rate=0.5"]
    out = tmp_path / "results" / "out.json"
    arguments = [MODEL, *SMALL, "--data", folder, "--batch-size", 5, "--json", out]
    assert run(monkeypatch, *arguments, *(word for method in methods for word in ("-m", method)), "--seed", 3) == 0

    record = read(out)
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
        assert set(row["gmacs"]) == {"linear", "attention", "matching", "norm"}
        assert all(0 <= row[key] <= 1 for key in ("top1", "top5", "agreement"))
    assert [row["tokens_per_block"] for row in record["rows"][:3]] == [[17] * 6, [17] * 6, [13] + [11] * 5]

    table = capsys.readouterr().out
    assert f"{MODEL} on {folder}: 12 images in batches of 5" in table
    assert all(f"│ {row['method']} " in table for row in record["rows"])
    assert "random weights" in table
    assert "accuracy is meaningless" in table


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


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "tomme"], "unknown method 'tomme'; did you mean 'tome'? valid: "),
        (["-m", "tome:r=2", "--model-option", "img_size=32"], "model option img_size is given twice"),
        (["-m", "tome:r=2", "--label-column", "label"], "is a folder of images, without columns"),
        (["-m", "tome:r=2", "--checkpoint", "/w", "--pretrained"], "either pretrained weights or a checkpoint"),
        (
            ["-m", "tome:r=2", "--data-option", "by_number=true", "--model-option", "num_classes=4"],
            "is beyond the model's 4 classes, 0 to 3; use a model of these classes, e.g. model option num_classes=6",
        ),
    ],
)
def test_bad_input_is_one_line(folder, tmp_path, monkeypatch, capsys, arguments, message):
    out = tmp_path / "out.json"
    size = SIZE if "num_classes=4" in arguments else SMALL
    assert run(monkeypatch, MODEL, *size, "--data", folder, "--json", out, *arguments) == 2
    assert message in the_error(capsys)
    assert not out.exists()


# ---- several labels, partial results, decisions


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


# ---- the same from Python


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": {"pretrained": True}}, "say how to create a model: give its name"),
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
