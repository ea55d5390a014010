"""Files scored as they run: the oracle is a loop of one's own with the engine."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from timm.data.transforms_factory import create_transform

import vitrim
from cli_runs import exit_code
from made_files import file as in_memory
from vitrim.data import ImageDataset
from vitrim.errors import VitrimError
from vitrim.measure.timing import Sized, _file_entries
from vitrim.models.references import source_of
from vitrim.weights import RESULT

pytestmark = pytest.mark.xdist_group("onnx")  # its libraries, which take seconds to import, in one process
OPTIONS = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 3}


def photograph(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((60, 44)).save(file := io.BytesIO(), "png")
    return file.getvalue()


@pytest.fixture(scope="module")
def data() -> ImageDataset:
    return ImageDataset([photograph(seed) for seed in range(13)], [seed % 3 for seed in range(13)])


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    found: Any = vitrim.create_model("test_vit", options=OPTIONS).eval()
    torch.nn.init.normal_(found.head.weight)  # classes differ between images
    return found


@pytest.fixture(scope="module")
def file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> vitrim.Exported:
    return vitrim.export(model, "tome:r=3", tmp_path_factory.mktemp("files") / "m.onnx", check=0)


def own_loop(file: vitrim.Exported, data: ImageDataset) -> np.ndarray:
    """Logits of every image, as somebody without vitrim computes them: timm's transform, and onnxruntime."""
    known = file.metadata["preprocessing"]
    transform = create_transform(
        (3, 32, 32), interpolation=known["interpolation"], mean=known["mean"], std=known["std"],
        crop_pct=known["crop_share"],
    )  # fmt: skip
    session = onnxruntime.InferenceSession(str(file.path))
    images = [transform(Image.open(io.BytesIO(png)).convert("RGB")).numpy() for png in map(photograph, range(13))]
    return np.concatenate([session.run(None, {"image": image[None]})[0] for image in images])


@pytest.mark.slow
def test_a_file_alone_scores_as_a_loop_of_ones_own(file: vitrim.Exported, data: ImageDataset) -> None:
    row = vitrim.evaluate(file, None, vitrim.ScoredData(data, batch_size=5)).rows[0]
    right = own_loop(file, data).argmax(1) == np.array(data.labels)
    assert (row["method"], row["images"], row["top1"]) == (str(file.path), 13, right.mean())
    assert row["tokens_per_block"] == file.metadata["tokens_per_block"]
    assert sum(row["gmacs"].values()) == pytest.approx(file.metadata["gmacs"], rel=1e-6)


def test_beside_its_model_with_the_error_of_the_difference(
    model: Any, file: vitrim.Exported, data: ImageDataset
) -> None:
    report = vitrim.evaluate(model, ["tome:r=3", file], vitrim.ScoredData(data, batch_size=4))
    dense, reduced, own = report.rows
    loop = own_loop(file, data).argmax(1)
    transform = vitrim.data.eval_transform(model)
    images = torch.stack([transform(Image.open(io.BytesIO(png))) for png in map(photograph, range(13))])
    with torch.no_grad():
        plain = model(images).argmax(1).numpy()
    labels = np.array(data.labels)
    losses = (plain == labels).astype(float) - (loop == labels)
    assert own["loss"] == pytest.approx(losses.mean())
    assert own["loss_error"] == pytest.approx(max(losses.std() / 13**0.5, 1 / 13))
    assert own["agreement"] == (plain == loop).mean()
    assert {name: own[name] for name in ("top1", "gmacs", "tokens_per_block")} == {
        name: pytest.approx(reduced[name]) if name == "gmacs" else reduced[name]
        for name in ("top1", "gmacs", "tokens_per_block")
    }
    assert dense["method"] == "dense"
    assert f"{file.path} is tome:r=3 of test_vit on onnxruntime in fp32" in report.notes


@pytest.mark.slow
def test_a_file_for_a_batch_that_reads_bytes_scores_alike(model: Any, data: ImageDataset, tmp_path: Path) -> None:
    made = vitrim.export(
        model, "tome:r=3", tmp_path / "m.onnx", check=0, file=vitrim.FileSpec(batch=4, preprocess=True)
    )
    rows = vitrim.evaluate(model, ["tome:r=3", made], vitrim.ScoredData(data, batch_size=5)).rows
    assert rows[2]["top1"] == rows[1]["top1"]
    assert rows[2]["agreement"] == rows[1]["agreement"]


def test_bench_times_files_beside_their_model_and_alone(model: Any, file: vitrim.Exported) -> None:
    short: dict[str, Any] = {"batch_size": 2, "budget": vitrim.Budget(1, min_seconds=0)}
    rows = vitrim.bench(model, ["tome:r=3", file], **short).rows
    assert [(row["method"], row["engine"]) for row in rows] == [
        ("dense", "eager"), ("tome:r=3", "eager"), (str(file.path), "onnxruntime"),
    ]  # fmt: skip
    assert rows[2]["macs_speedup"] == pytest.approx(rows[1]["macs_speedup"])
    report = vitrim.bench(file, **short)
    assert [(row["method"], row["engine"]) for row in report.rows] == [("dense", "onnxruntime")]
    assert (
        report.notes[0]
        == f"{file.path} is tome:r=3 of test_vit on onnxruntime in fp32; the row dense is the first of them, though "
        "it is reduced"
    )


def test_compare_holds_files_and_models_in_one_table(model: Any, file: vitrim.Exported, data: ImageDataset) -> None:
    report = vitrim.compare(model, ["tome:r=3", file], data, at=2, budget=vitrim.Budget(1, min_seconds=0))
    alone = vitrim.evaluate(model, ["tome:r=3", file], data).rows
    for row, own in zip(report.rows, alone, strict=True):
        assert (row["method"], row["top1"], row.get("loss_error")) == (own["method"], own["top1"], own["loss_error"])
        assert [speed["batch_size"] for speed in row["speeds"]] == [2]
    assert (report.rows[2]["engine"], report.rows[2]["precision"]) == ("onnxruntime", "fp32")
    assert len(report.tables[0].cells()[1]) == 3


def run(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> int:
    return exit_code(monkeypatch, *arguments)


def made(
    name: str,
    method: str = "none",
    *,
    precision: str = "fp32",
    gmacs: float = 4.0,
    dense_gmacs: float | None = 4.0,
    weights: float = 1.0,
    **known: Any,
) -> vitrim.Exported:
    """A file that was not written: a linear classifier of the first three pixels."""
    counted = {"gmacs": gmacs, "gmacs_parts": {"linear": gmacs}}
    prepared = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_share": 1.0}
    known = {"method": method, "precision": precision, **counted, "preprocessing": prepared, **known}
    known |= {} if dense_gmacs is None else {"dense_gmacs": dense_gmacs}
    return in_memory(lambda images: images[:, 0, 0, :3] * [1.0, weights, 1.0], ("batch", 3, 32, 32), name, **known)


COMPARED = {"agreement", "cosine", "loss", "loss_error", "kl"}


@pytest.mark.parametrize(
    ("file", "saved"),
    [
        (made("r.onnx", "tome:r=3", gmacs=1.0), 0.75),
        (made("i.onnx", precision="int8"), 0.0),  # other numbers than those of its model, which is in fp32
        (made("old.onnx", "tome:r=3", dense_gmacs=None), None),
    ],
)
def test_a_file_alone_tells_what_it_saves_and_not_what_it_changes(
    file: vitrim.Exported, saved: float | None, data: ImageDataset
) -> None:
    report = vitrim.evaluate(file, None, data)
    (row,) = report.rows
    assert row["saved"] == saved
    assert not COMPARED & set(row)
    assert 0.0 <= row["top1"] <= 1.0
    (table,) = report.tables
    assert table.columns == ("method", "top-1", "GMACs", "MACs saved", "tokens")
    assert table.column("MACs saved") == ["-" if saved is None else f"{100 * saved:.1f}"]
    assert "What a file changes is not known without its dense model" in report.notes[0]
    # beside a file that is reduced, too
    rows = vitrim.evaluate(file, made("s.onnx", "topk", gmacs=3.0), data).rows
    assert [row["saved"] for row in rows] == [saved, 0.25]
    assert not COMPARED & (set(rows[0]) | set(rows[1]))


def test_a_file_beside_its_dense_file_is_compared_with_it(data: ImageDataset) -> None:
    dense, other = made("d.onnx"), made("r.onnx", "tome:r=3", gmacs=1.0, weights=-1.0)
    first, second = vitrim.evaluate(dense, other, data).rows
    transform = vitrim.data.eval_transform(dense)
    images = np.stack([transform(Image.open(io.BytesIO(png))).numpy() for png in map(photograph, range(13))])
    found, own = dense.run(images).argmax(1), other.run(images).argmax(1)
    assert (first["agreement"], second["agreement"]) == (1.0, (found == own).mean())
    assert 0.0 < second["agreement"] < 1.0
    assert (first["saved"], second["saved"]) == (0.0, 0.75)
    assert vitrim.evaluate(dense, other, data).tables[0].column("cosine") == ["-", "-"]  # files hand out no features


def test_neighbours_of_files_without_their_dense_model_are_left_out(data: ImageDataset) -> None:
    tower = made("t.onnx", "tome:r=3", gmacs=1.0, output={"name": "features"})
    report = vitrim.evaluate(tower, None, data)
    (row,) = report.rows
    assert {"recall1", "knn", "recall5", "saved"} <= set(row)
    assert not {"neighbours", "recall1_dense", *COMPARED} & set(row)
    assert "recall@1" in report.tables[0].columns


def test_what_a_file_saves_is_what_its_tokens_do(model: Any, file: vitrim.Exported, data: ImageDataset) -> None:
    """Products of a block by hand: n tokens in attention, and n - 3 in the MLP behind the merge."""
    width, hidden, patches = model.embed_dim, model.blocks[0].mlp.fc1.out_features, 16

    def products(tokens: list[tuple[int, int]]) -> int:
        blocks = sum(4 * n * width**2 + 2 * n**2 * width + 2 * m * width * hidden for n, m in tokens)
        return blocks + patches * 3 * 8 * 8 * width + 3 * width

    dense, reduced = products([(17, 17), (17, 17)]), products([(17, 14), (14, 11)])
    (row,) = vitrim.evaluate(file, None, data).rows
    assert row["saved"] == pytest.approx(1 - reduced / dense, abs=0.01)  # norms and the matching besides


def test_a_files_promise_is_over_the_baseline() -> None:
    """A dense file beside a reduced one, which is the baseline, promises to be slower."""
    baseline, dense = made("r.onnx", "tome:r=3", gmacs=1.0), made("d.onnx")
    sized = [Sized(baseline, [torch.zeros(1, 3, 32, 32)])]
    assert [one.promised for one in _file_entries({"d.onnx": dense}, baseline, sized)] == [0.25]
    assert [one.promised for one in _file_entries({"r.onnx": baseline}, torch.nn.Linear(1, 1), sized)] == [4.0]


def test_logits_are_no_embedding(file: vitrim.Exported, data: ImageDataset) -> None:
    with pytest.raises(VitrimError, match="gives logits, and no embedding: export the model without its head"):
        vitrim.evaluate(file, None, vitrim.ScoredData(data, task="embedding"))


def test_what_a_file_cannot_be_asked_for(file: vitrim.Exported, data: ImageDataset) -> None:
    with pytest.raises(vitrim.VitrimError, match=r"m.onnx is an exported file, and runs .*: leave tome:r=2 out$"):
        vitrim.evaluate(file, ["none", "tome:r=2"], data)
    with pytest.raises(vitrim.VitrimError, match=r"m.onnx is an exported file, in a precision of its own"):
        vitrim.evaluate(vitrim.ScoredModel(file, dtype="bf16"), None, data)


def test_a_file_warns_of_the_images_that_its_run_learned_from(data: ImageDataset, tmp_path: Path) -> None:
    """As the run itself does; the file says of which run it is."""
    (tmp_path / RESULT).write_text(json.dumps({"trained_on": source_of(data)}))
    seen = f"run:{tmp_path} was trained on these images"
    for name, known in ((f"run:{tmp_path}", True), ("test_vit", False)):
        dense, reduced = (made(f"{method}.onnx", method, model=name) for method in ("none", "tome:r=3"))
        for files in ([], [reduced]):
            notes = vitrim.evaluate(dense, files, data).notes
            assert sum(note.startswith(seen) for note in notes) == known
