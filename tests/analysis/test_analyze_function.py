"""The functions behind ``vitrim analyze``, as a notebook calls them; the command has tests of its own."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import vitrim
from vitrim.analysis.analyze import analyze, analyze_records, compare_analyses
from vitrim.analysis.record import Record
from vitrim.data import ImageDataset
from vitrim.errors import VitrimError
from vitrim.loading import ModelSpec, PlacedModel, ScoredModel
from vitrim.measure.run import Measurement
from vitrim.report import Report

IMAGES = 10


@pytest.fixture(scope="module", autouse=True)
def _without_figures() -> Iterator[None]:
    """They take most of the time, and the command has them drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrim.analysis.output.drawn", lambda family, tables: [])
        yield


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(3)
    found: nn.Module = timm.create_model("test_vit", img_size=64, num_classes=3)  # 16 patches, in training mode
    return found


@pytest.fixture(scope="module")
def images() -> ImageDataset:
    found = []
    for seed in range(IMAGES):
        pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(stream := io.BytesIO(), "png")
        found.append(stream.getvalue())
    return ImageDataset(found, np.arange(IMAGES) % 3, source="made")


@pytest.fixture(scope="module")
def report(model: nn.Module, images: ImageDataset, tmp_path_factory: pytest.TempPathFactory) -> Report:
    out = tmp_path_factory.mktemp("report")
    return analyze(
        model,
        ["topk:keep_rate=0.5", vitrim.ToMe(r=2)],
        vitrim.ScoredData(images, batch_size=4),
        out=out,
        only="counts,depth",
    )


@pytest.mark.slow
def test_a_model_is_left_as_it_was(model: nn.Module, report: Report, images: ImageDataset, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    analyze(vitrim.ScoredModel(model, dtype="bf16"), "topk", images, out=tmp_path, only=["counts"])
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert vitrim.get_reduction(model) is None


@pytest.mark.slow
@torch.no_grad()
def test_a_report_has_what_the_command_writes(model: nn.Module, report: Report, images: ImageDataset) -> None:
    assert (report.command, report.facts["model"], report.facts["weights"]) == ("analyze", "test_vit", "given")
    counts = [row for row in report.rows if row["table"] == "counts"]
    assert [row["tokens"] for row in counts if row["method"] == "tome:r=2"] == [15, 13, 11, 9, 7, 5]
    assert all(file.is_file() for file in report.files)
    folder = report.files[0].parent
    assert {"index.html", "report.md", "analysis.json", "record_dense.npz"} <= {file.name for file in report.files}
    stored = json.loads((folder / "analysis.json").read_text())
    plain, reduced = (Record.load(folder / f"record_{name}.npz") for name in ("dense", "tome_r_2"))
    assert stored["complete"]
    assert stored["tables"]["counts"] == [{key: row[key] for key in row if key != "table"} for row in counts]
    assert str(report).startswith("Accuracy, cost, and time of one image")
    [dense, tome] = [row for row in report.tables[0].records() if row["method"] in ("dense", "tome:r=2")]
    change = 100 * (reduced.correct().mean() - plain.correct().mean())
    assert tome["change"] == pytest.approx(change)
    assert tome["MACs saved %"] == pytest.approx(100 * (1 - tome["gmacs"] / dense["gmacs"]))
    assert len(str(report).splitlines()) <= 40
    assert "open" in str(report).splitlines()[-1]
    assert "note: counts: estimated from 10 images" in str(report)
    logits = Record.load(folder / "record_dense.npz").arrays["logits"]
    transform = timm.data.create_transform(**{**timm.data.resolve_data_config(model=model), "input_size": (3, 64, 64)})
    plain = [transform(Image.open(io.BytesIO(content))) for content in images.images]
    expected = model.eval()(torch.stack(plain))
    model.train()
    assert np.allclose(logits, expected.numpy(), atol=2e-3)  # stored as float16


def test_records_and_folders_are_analysed_again(report: Report, tmp_path: Path) -> None:
    folder = report.files[0].parent
    files = [file for file in report.files if file.suffix == ".npz"]
    again = analyze_records([Record.load(files[0]), *files[1:]], out=tmp_path / "again", only="counts,depth")
    assert again.rows == report.rows
    with pytest.raises(VitrimError, match="two finished analyses or more, got 1"):
        compare_analyses([folder], out=tmp_path / "one")
    with pytest.raises(VitrimError, match="router runs the model, which stored records do not hold"):
        analyze_records(files, out=tmp_path / "no", only="router")
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_two_models_are_compared(model: nn.Module, images: ImageDataset, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = analyze(
        [model, "vit_tiny_patch16_224"],
        (),
        vitrim.ScoredData(images, limit=4, batch_size=3),
        out=tmp_path / "two",
        only="counts",
        on_progress=lambda *numbers: seen.append(numbers),
    )
    assert seen == [(3, 8), (4, 8), (7, 8), (8, 8)]
    assert Record.load(tmp_path / "two" / "record_test_vit_dense.npz").arrays["ids"].tolist() == [0, 3, 6, 9]
    assert {row["method"] for row in found.rows} == {"dense on test_vit", "dense on vit_tiny_patch16_224"}
    other = analyze("vit_tiny_patch16_224", (), vitrim.DataSpec(images, limit=4), out=tmp_path / "other", only="counts")
    compared = compare_analyses([tmp_path / "two", tmp_path / "other"], out=tmp_path / "all", only="counts")
    assert len({row["method"] for row in compared.rows}) == 3
    assert compared.facts["compared"] == [str(tmp_path / name) for name in ("two", "other")]
    assert other.facts["model"] == "vit_tiny_patch16_224"


def test_what_was_gathered_is_kept(
    model: nn.Module, images: ImageDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Measurement.update

    def stops(self: Measurement, batch: Any) -> None:
        if self.turns == 1:
            raise torch.OutOfMemoryError
        update(self, batch)

    monkeypatch.setattr(Measurement, "update", stops)
    kept: list[Report] = []
    with pytest.raises(VitrimError, match="out of memory at this batch size; what was gathered is kept"):
        analyze(
            model,
            "tome:r=2",
            vitrim.ScoredData(images, batch_size=4),
            out=tmp_path,
            only="counts",
            on_report=kept.append,
        )
    assert [row["images"] for row in kept[0].rows] == [4] * 12
    assert kept[0].facts["complete"] is False
    assert len(Record.load(tmp_path / "record_dense.npz")) == 4
    with pytest.raises(VitrimError, match="was stopped before all images were seen"):
        compare_analyses([tmp_path, tmp_path], out=tmp_path / "compared")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": ["tome:r=2", "tome:r=2"]}, "method tome:r=2 is given twice"),
        ({"methods": "tome:r=x"}, "r"),
        ({"only": "depths"}, "unknown family 'depths'"),
        (
            {"only": ["counts"], "sizes": (64,)},
            "sizes are those of the family throughput, which runs only if it is named",
        ),
        (
            {"only": ["counts"], "blocks": (1,)},
            "blocks are those of the families attention and router, which run only if they are named",
        ),
        ({"only": "router", "blocks": (0, 6)}, "there is no block 6 to draw; valid: 0 to 5"),
        ({"model": PlacedModel("test_vit", device="nowhere")}, "unknown device 'nowhere'"),
        ({"model": 3}, "models=3: must be a torch.nn.Module"),
        ({"model": ["test_vit", "test_vit"]}, "model test_vit is given twice"),
        ({"model": ModelSpec(["test_vit", "vit_tiny_patch16_224"], checkpoint="x")}, "weights of one model; 2 models"),
        ({"model": []}, "name at least one model"),
        ({"data": "none"}, "none"),
        ({"data": 5}, "expected a source of images or a dataset of vitrim.data, got int"),
        ({"methods": 5}, "methods=5: must be a MethodConfig"),
        ({"out": 5}, "out=5: must be a text, or a path"),
        ({"out": None}, "out=null: must be a text, or a path"),
        ({"only": 5}, "only=5: must be a text, or a list"),
        ({"only": "throughput", "sizes": ["a"]}, "sizes=a: must be a whole number"),
        ({"model": ScoredModel("test_vit", dtype="fp8")}, "unknown dtype 'fp8'"),
        ({"model": PlacedModel("test_vit", device=5)}, "unknown device '5'"),
        ({"on_progress": 5}, "on_progress=5: must be a function"),
    ],
)
def test_bad_input_writes_nothing(
    model: nn.Module, images: ImageDataset, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"model": model, "methods": (), "data": images, "out": tmp_path / "new", **arguments}
    positional: Sequence[Any] = [given.pop(name) for name in ("model", "methods", "data")]
    with pytest.raises(VitrimError, match=message) as caught:
        analyze(*positional, **given)
    assert "--" not in str(caught.value)  # arguments have no dashes
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (analyze_records, 5, "records=5: must be a list"),
        (analyze_records, [5], "records=5: must be a Record, or a text, or a path"),
        (analyze_records, "record.npz", "records=record.npz: must be a list"),
        (compare_analyses, 5, "analyses=5: must be a list"),
        (compare_analyses, [5], "analyses=5: must be a text, or a path"),
    ],
)
def test_what_is_no_list_of_records_or_folders(
    function: Callable[..., Report], given: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(VitrimError, match=message):
        function(given, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_tower_is_scored_by_its_embeddings_and_its_records_keep_the_scores(
    images: ImageDataset, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    tower = timm.create_model("test_vit", img_size=64, num_classes=0).eval()
    methods = ["topk:keep_rate=0.5", "tome:r=2"]
    found = analyze(tower, methods, vitrim.ScoredData(images, batch_size=4), out=tmp_path / "report", only="counts")
    wanted = vitrim.evaluate(tower, methods, vitrim.ScoredData(images, batch_size=4)).rows
    rows = list(found.tables[0].records())
    assert [row["method"] for row in rows] == ["dense", *methods]
    for row, own in zip(rows, wanted, strict=True):
        assert row["recall1 %"] == pytest.approx(100 * own["recall1"])
        assert row["change"] == pytest.approx(-100 * own["loss"])
        assert (row["agree %"], row["cosine"]) == pytest.approx((100 * own["neighbours"], own["cosine"]))
    assert [row["error"] for row in rows] == [None, *(pytest.approx(100 * own["loss_error"]) for own in wanted[1:])]
    assert "recall@1" in found.words[0]
    again = analyze_records(sorted((tmp_path / "report").glob("record_*.npz")), out=tmp_path / "again", only="counts")
    assert {row["method"]: row for row in again.tables[0].records()} == {row["method"]: row for row in rows}


def test_an_analysis_replaces_the_one_in_its_folder(model: nn.Module, images: ImageDataset, tmp_path: Path) -> None:
    """Its tables, arrays and figures go; other files stay."""
    given = vitrim.ScoredData(images, batch_size=4)
    analyze(model, "topk:keep_rate=0.5", given, out=tmp_path, only="counts,depth")
    for place in ("figures/old.png", "arrays/old.npz", "tables/mine.txt"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).touch()
    found = analyze(model, "tome:r=2", given, out=tmp_path, only="counts")
    left = {file for file in tmp_path.rglob("*") if file.is_file()}
    assert left == {*found.files, tmp_path / "tables" / "mine.txt"}
