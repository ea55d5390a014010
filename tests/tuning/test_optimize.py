"""`vitrim optimize`: what is measured, each thing once; what is handed over, and what is said of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitrim
from cli_runs import exit_code
from image_files import write_noise
from vitrim.core.reduce import HANDLE, get_reduction, reduced
from vitrim.data import eval_transform, load_images, spread
from vitrim.engines import Exported
from vitrim.engines.engine import FileEngine
from vitrim.engines.exported import sidecar
from vitrim.errors import VitrimError
from vitrim.loading import ModelSpec, create_model
from vitrim.measure.identity import weights_fingerprint
from vitrim.measure.run import Measurement
from vitrim.measure.task_data import open_task
from vitrim.tuning import optimize_race as racing
from vitrim.tuning.optimize import IMAGES, OptimizeReport, cannot_show, optimize
from vitrim.tuning.optimize_report import draw, loss_cell
from vitrim.tuning.proxy import DatasetImages

OPTIONS = {"img_size": 32, "patch_size": 8, "depth": 4, "embed_dim": 32, "num_heads": 2, "num_classes": 2}
METHODS = ["topk", "evit"]
GIVEN: dict[str, Any] = {"methods": METHODS, "engine": "torch.export", "precision": "fp32", "max_loss": 100.0}
ROUNDS = 8
"""Of a fake clock: as many as rows of a real one have, so that both halves are in what is kept."""
FILES = ["best.json", "loss_over_time.png", "model.pt2", "model.pt2.json", "report.json", "study.jsonl"]

pytestmark = [
    pytest.mark.xdist_group("onnx"),
    pytest.mark.usefixtures("macs_counted_once"),
    pytest.mark.filterwarnings("ignore:the loss is that of:UserWarning"),  # of few images, as all here are
]

EXPORTED: dict[tuple[str, str | None, int], tuple[str, bytes, bytes]] = {}
"""The name and content of every file that was made, and of the one beside it, by weights, method and batch size.

A search that wants the same one finds it where it would write it, as one that is resumed does.
"""


class Stop(Exception):
    """Ends a search, as a machine that fails would."""


class Watch:
    """Counts what is done, and says how long it took: dense files 5 ms, PyTorch 10, reduced files less and less.

    Attributes:
        factor: of the times of reduced files.
        fails_at: so many timings are finished before one fails.
        exports: reduced models are exported, which takes seconds each; otherwise they run in PyTorch, and the file of
            the dense one lies in the place of theirs.
    """

    def __init__(self) -> None:
        self.timed: list[int] = []
        self.made: list[str] = []
        self.scored = 0
        self.factor, self.fails_at, self.exports = 1.0, 99, False

    def times(self, calls: Mapping[str, Callable[[], Any]], **_: Any) -> dict[str, Any]:
        if len(self.timed) == self.fails_at:
            raise Stop
        self.timed.append(len(calls))
        for call in calls.values():
            call()
        if len(self.timed) == 1 and len(calls) == 2:  # PyTorch, and the dense file
            return {"0": np.full(ROUNDS, 10.0), "1": np.full(ROUNDS, 5.0)}
        # a faster machine than in the first run: 4 ms for the dense file, and less for the reduced ones
        return {name: np.full(ROUNDS, (4.0 - int(name) / 5) * (self.factor if int(name) else 1.0)) for name in calls}


def watched(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Watch what is done, and search so little that a test takes seconds."""
    found = Watch()
    prepare, follow = FileEngine.prepare, Measurement.follow

    def prepared(
        self: FileEngine, model: nn.Module, images: Tensor, folder: Path, calibration: Tensor | None = None
    ) -> Exported:
        found.made.append(f"{folder.name} {self}")
        method = get_reduction(model).config.describe() if hasattr(model, HANDLE) else None
        key = (weights_fingerprint(model), method, len(images))
        if method is not None and not found.exports and key not in EXPORTED:
            name, content, beside = EXPORTED[key[0], None, key[2]]
            (folder / name).write_bytes(content)
            sidecar(folder / name).write_bytes(beside)
            # it runs the reduced model, and not the file of the dense one that lies in the place of its own
            made = Exported.open(folder / name, trust=True)
            call = torch.inference_mode()(model)
            vars(made)["_run"] = lambda given: call(torch.from_numpy(given)).numpy()
            return made
        if key not in EXPORTED:
            run = prepare(self, model, images, folder, calibration)
            (file,) = folder.glob("*.pt2")
            EXPORTED[key] = (file.name, file.read_bytes(), sidecar(file).read_bytes())
            return run
        name, content, beside = EXPORTED[key]
        (folder / name).write_bytes(content)
        sidecar(folder / name).write_bytes(beside)
        return prepare(self, model, images, folder, calibration)

    def followed(self: Measurement, *given: Any) -> None:
        found.scored += 1
        follow(self, *given)

    monkeypatch.setattr(FileEngine, "prepare", prepared)
    monkeypatch.setattr(Measurement, "follow", followed)
    monkeypatch.setattr(racing, "time_interleaved", found.times)
    few = {"SHARES": (0.9, 0.7), "KEPT": 1, "TIMED": 2, "FINALISTS": 1, "FEW": {"two blocks": (0.25, 0.5)}}
    for name, value in few.items():
        monkeypatch.setattr(racing, name, value)
    return found


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(monkeypatch)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("images") / "noise"
    write_noise(root, 18)
    return str(root)


def model() -> nn.Module:
    torch.manual_seed(0)
    return create_model("test_vit", options=OPTIONS)


def alone(host: nn.Module) -> ModelSpec:
    """The model at its own image size alone."""
    return ModelSpec(host, img_sizes=(32,))


@dataclass
class Whole:
    """A search that nothing interrupts, and what was seen of it."""

    out: Path
    host: nn.Module
    report: OptimizeReport
    watch: Watch
    told: list[str]


@pytest.fixture(scope="module")
def whole(source: str, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    out, host, told = tmp_path_factory.mktemp("whole") / "out", model(), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        seen = watched(patch)
        seen.exports = True
        report = optimize(alone(host), source, out=out, on_progress=told.append, **GIVEN)
    return Whole(out, host, report, seen, told)


def run(
    source: str, out: Path, images: Mapping[str, Any] = {}, results: Mapping[str, Any] = {}, **changes: Any
) -> OptimizeReport:
    data, place = vitrim.JudgedData(source, **images), vitrim.FileResults(out, **results)
    return optimize(alone(model()), data, out=place, **{**GIVEN, **changes})


def measured(out: Path) -> list[str]:
    """The names of all that the study of a folder holds."""
    lines = [json.loads(line) for line in (out / "study.jsonl").read_text().splitlines()]
    return [line["unit"] for line in lines[1:]]


def test_the_file_the_report_and_the_sentence(source: str, whole: Whole) -> None:
    """The loss on the last third is counted here from the models themselves, image by image."""
    host, report, watch = whole.host, whole.report, whole.watch
    before = model().state_dict()
    assert all(torch.equal(value, before[name]) for name, value in host.state_dict().items())
    assert not hasattr(host, "vitrim_reduction")
    assert sorted(path.name for path in whole.out.iterdir()) == FILES
    assert report.best is not None
    # the file computes what the reduced model does
    dataset = load_images(source)
    dataset.transform = eval_transform(host)
    places = spread(36, 36)[2::3]
    images = torch.stack([dataset[int(place)][0] for place in places])
    labels = torch.tensor([dataset[int(place)][1] for place in places])
    with torch.inference_mode():
        dense = host(images)
        with reduced(host, report.best):
            wanted = host(images)
    again = Exported.open(whole.out / "model.pt2", trust=True)
    assert (again.batch, again.metadata["method"]) == (1, report.best.describe())
    found = np.concatenate([again.run(one[None].numpy()) for one in images])
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-4)
    right, own = (answer.argmax(1) == labels for answer in (dense, wanted))
    last = report.rows[-1]
    assert last["scored_on"] == "check"
    assert (last["loss"], last["images"]) == (pytest.approx((right.double() - own.double()).mean().item()), 12)
    points = 100 * last["loss"]
    assert report.sentence.startswith(
        "10.0 ms per batch of 1 as you run it now (PyTorch, fp32); 5.0 with torch.export in fp32; "
    )
    assert f"with {report.best.describe()} (" in report.sentence
    row = next(row for row in report.rows[2:] if row["method"] == report.best.describe())
    assert f": {10.0 / row['p50_ms']:.1f} times as fast, " in report.sentence
    assert f"{abs(points):.1f} points of top-1 {'fewer' if points >= 0 else 'more'} on 12 images" in report.sentence
    # all that was timed is in the rows
    assert [(row["method"], row["engine"]) for row in report.rows[:2]] == [
        ("dense", "eager"),
        ("dense", "torch.export"),
    ]
    assert len(report.rows) == sum(watch.timed) - 1 + 1  # the dense file is timed once more, beside the others
    record = json.loads((whole.out / "report.json").read_text())
    assert (record["sentence"], record["chosen"]) == (report.sentence, report.best.describe())
    assert vitrim.parse_method(f"@{whole.out / 'best.json'}").describe() == report.best.describe()
    assert str(report).rstrip().endswith(report.sentence.split()[-1])
    assert any(re.fullmatch(r"step 5 of 7, making dense ready on .*, 1 of \d+", text) for text in whole.told)


def test_nothing_is_measured_twice(whole: Whole) -> None:
    assert len(whole.watch.made) == len(set(whole.watch.made))
    names = measured(whole.out)
    assert len(names) == len(set(names))
    assert len(whole.watch.timed) == 2


def test_killed_and_resumed_ends_the_same(source: str, whole: Whole, watch: Watch, tmp_path: Path) -> None:
    watch.fails_at = 1  # while reduced files are timed
    with pytest.raises(Stop):
        run(source, tmp_path / "out")
    assert (tmp_path / "out" / "study.jsonl").exists()
    assert not (tmp_path / "out" / "model.pt2").exists()
    watch.fails_at = 99
    resumed = run(source, tmp_path / "out", results={"resume": True})
    expected = whole.report
    assert (resumed.sentence, resumed.rows, resumed.best) == (expected.sentence, expected.rows, expected.best)
    assert (len(watch.timed), watch.scored) == (len(whole.watch.timed), whole.watch.scored)
    # once more, of a study that is complete
    watch.timed.clear()
    watch.scored = 0
    again = run(source, tmp_path / "out", results={"resume": True})
    assert (again.sentence, again.rows) == (expected.sentence, expected.rows)
    assert (watch.timed, watch.scored) == ([], 0)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    for name in ("best.json", "report.json"):
        one, other = (json.loads((place / name).read_text()) for place in (whole.out, tmp_path / "out"))
        assert one == other


def test_a_race_that_is_stopped_keeps_the_settings_that_it_scored(
    source: str, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrim.measure.store.TOGETHER", 1)
    follow, passes = Measurement.follow, []

    def stopping(self: Measurement, *given: Any) -> None:
        passes.append(self)
        if len(passes) == 4:  # the first is the dense model's
            raise Stop
        follow(self, *given)

    monkeypatch.setattr(Measurement, "follow", stopping)
    with pytest.raises(Stop):
        run(source, tmp_path / "out")
    assert len([name for name in measured(tmp_path / "out") if name.startswith("search 0-")]) == 2


@pytest.mark.slow
def test_dense_is_handed_back_where_nothing_pays(source: str, watch: Watch, tmp_path: Path) -> None:
    watch.factor = 2.0
    report = run(source, tmp_path / "out", methods="topk")
    assert report.best is None
    assert report.file.metadata["method"] in (None, "none")
    assert report.sentence.endswith(
        "; reducing tokens does not pay here within the bound, so the file is of the dense model"
    )
    assert "5.0 with torch.export in fp32, 2.0 times as fast, 0.0 points of top-1 fewer on 12 images" in report.sentence
    with torch.inference_mode():
        wanted = model()(torch.zeros(1, 3, 32, 32))
    found = Exported.open(report.file.path, trust=True).run(np.zeros((1, 3, 32, 32), np.float32))
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)


@pytest.mark.slow  # what is chosen is decided in test_optimize_decisions.py
def test_a_speedup_is_reached_with_the_least_loss_at_another_batch_size(
    source: str, watch: Watch, tmp_path: Path
) -> None:
    given = {**GIVEN, "methods": "topk", "max_loss": None, "speedup": 1.05, "batch_size": 5}
    report = optimize(alone(model()), vitrim.JudgedData(source, labels=False), out=tmp_path / "out", **given)
    assert report.facts["bound"] == {"speedup": 1.05}
    assert report.best is not None
    assert "points of agreement" in report.sentence
    assert report.sentence.startswith("10.0 ms per batch of 5 as")
    assert report.rows[-1]["speedup"] >= 1.05
    assert report.file.batch == 5


def test_every_point_is_in_the_picture(whole: Whole) -> None:
    report = whole.report
    (axis,) = draw(report.rows, report.facts).axes
    marks = {
        (round(float(line.get_xdata()[0]), 4), round(float(line.get_ydata()[0]), 4))
        for line in axis.lines
        if line.get_marker() not in ("None", None, "") and len(line.get_xdata()) == 1
    }
    assert marks >= {(round(row["p50_ms"], 4), round(100 * row["loss"], 4)) for row in report.rows}
    assert {"eager", "torch.export"} <= {text.get_text() for text in axis.texts}


def test_times_of_methods_compare_with_those_of_dense(whole: Whole) -> None:
    """Though the run of the methods was another."""
    dense = whole.report.rows[1]
    for row in whole.report.rows[2:]:
        assert row["p50_ms"] == pytest.approx(dense["p50_ms"] / row["speedup"])


def test_the_table_has_one_baseline_per_column(whole: Whole) -> None:
    columns, rows = whole.report.tables[0].cells()
    cells = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    dense = next(row for row in whole.report.rows[1:] if row["method"] == "dense")
    for row in whole.report.rows[2:]:
        if row["method"] != "dense":
            found = cells[row["method"]]
            assert found["over PyTorch"] == f"{row['speedup'] * dense['speedup']:.2f}"
            assert found["MACs saved %"] == f"{round(100 * row['saved'])}"
            assert found["over dense"].startswith(f"{row['speedup']:.2f} ({row['speedup_q1']:.2f}-")


def test_a_bound_that_few_images_cannot_show_is_said_at_the_start_and_in_the_report(whole: Whole) -> None:
    count = whole.report.facts["images"]["check"]
    assert any(note.startswith(f"the loss is that of {count} images: ") for note in whole.report.notes)


@pytest.mark.slow
def test_a_bound_that_few_images_cannot_show_is_refused_unless_told(source: str, watch: Watch, tmp_path: Path) -> None:
    said = (
        r"a loss of 2 points cannot be seen on 12 images: even where none of them changes it is only known to be "
        r"below 25.0 points \(at 95 %\); give 450 images, 150 for each third, allow more with --max-loss"
    )
    with pytest.raises(VitrimError, match=f"^{said}, or go on with --few-images "):
        run(source, tmp_path / "out", max_loss=2.0)
    assert not (tmp_path / "out").exists()
    watch.fails_at = 0
    with pytest.warns(UserWarning, match=said), pytest.raises(Stop):
        run(source, tmp_path / "out", max_loss=2.0, images={"few": True})
    with pytest.raises(Stop):  # nothing is bounded
        run(source, tmp_path / "fast", max_loss=None, speedup=1.5)


def test_the_smallest_number_of_images_that_show_a_bound() -> None:
    """By the binomial itself: the largest share at which n images without a change are still not unlikely."""
    for bound in (0.5, 1.0, 2.0):
        enough = next(n for n in range(10, 1000) if cannot_show(bound, n) is None)
        assert (1 - bound / 100) ** enough < 0.05
        assert (1 - bound / 100) ** (0.97 * enough) > 0.05


def test_a_loss_that_no_image_shows_has_an_interval() -> None:
    row = {"loss": 0.0, "loss_error": 1 / 20, "images": 20}
    assert loss_cell(row) == "< 15.0"
    assert loss_cell({**row, "loss": 0.05}) == "5.0 ± 5.0"


@pytest.mark.slow
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.filterwarnings("ignore:the model has random weights:UserWarning")
def test_a_tower_is_optimized_by_its_neighbours(labels: bool, watch: Watch, tmp_path: Path) -> None:
    """The loss in the sentence is scikit-learn's on what the file gives."""
    from sklearn.neighbors import NearestNeighbors

    write_noise(tmp_path / "images", 18)
    torch.manual_seed(0)
    host = create_model("test_vit", options={**OPTIONS, "num_classes": 0}).eval()
    watch.exports = True
    report = optimize(
        alone(host), vitrim.JudgedData(str(tmp_path / "images"), labels=labels), out=tmp_path / "out", **GIVEN
    )
    assert report.best is not None
    data = vitrim.open_data(str(tmp_path / "images"))
    task, dataset = open_task(ModelSpec(host).load(), data, embeddings=True)
    third = DatasetImages(dataset, IMAGES // 3, 4, collate=task.collate)
    batches = list(third.batches("check", 0, third.count("check")))
    images, classes = torch.cat([one.images for one in batches]), torch.cat([one.targets for one in batches]).numpy()
    with torch.inference_mode():
        dense = host(images).double().numpy()
    own = np.concatenate([report.file.run(one[None]) for one in images]).astype(np.float64)

    def found(vectors: Any) -> Any:
        near = NearestNeighbors(n_neighbors=min(11, len(vectors)), metric="cosine", algorithm="brute").fit(vectors)
        return near.kneighbors(vectors, return_distance=False)[:, 1:]

    near, like = found(own), found(dense)
    if labels:
        right = [(classes[one[:, 0]] == classes).mean() for one in (like, near)]
        expected = right[0] - right[1]
    else:
        expected = 1 - np.mean([len(set(a) & set(b)) / len(a) for a, b in zip(near, like, strict=True)])
    assert report.rows[-1]["loss"] == pytest.approx(expected, abs=1e-9)
    assert ("points of recall@1" if labels else "points of the dense model's neighbours") in report.sentence
    assert any(note.startswith("the embedding: class token; ") for note in report.notes)


def test_both_towers_of_clip_are_refused_before_anything_is_written(source: str, watch: Watch, tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text, image = {**sizes, "vocab_size": 20}, {**sizes, "image_size": 28, "patch_size": 14}
    host = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=image)).eval()
    images = load_images(source)
    images.transform = eval_transform(create_model("test_vit", options={"img_size": 28, "patch_size": 14}))
    with pytest.raises(VitrimError, match="CLIPModel has a tower for text, too, and a file takes images alone"):
        optimize(host, images, out=tmp_path / "out", **GIVEN)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model has random weights:UserWarning")
def test_the_file_may_take_images_as_they_are_read(whole: Whole, source: str, watch: Watch, tmp_path: Path) -> None:
    report = run(source, tmp_path / "out", results={"preprocess": True})
    file = report.file
    assert (file.metadata["input"]["dtype"], file.shape[1:]) == ("uint8", (32, 32, 3))
    assert report.best is not None
    host = model().eval()
    images = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), dtype=np.uint8)
    mean, std = (np.array(file.metadata["preprocessing"][name], dtype=np.float32) for name in ("mean", "std"))
    normal = torch.from_numpy(((images / 255 - mean) / std).astype(np.float32)).permute(0, 3, 1, 2)
    with vitrim.reduced(host, report.best), torch.inference_mode():
        expected = host(normal).numpy()
    assert np.allclose(file.run(images), expected, atol=1e-4)
    # what was measured is the same: only the way that images come in differs
    assert report.best.describe() == whole.report.best.describe()
    assert report.rows[-1]["loss"] == whole.report.rows[-1]["loss"]
    assert any(note.startswith("the file takes uint8 images") for note in report.notes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_loss": 1.0, "speedup": 1.5}, "give max_loss or speedup, not both"),
        ({"max_loss": -1.0}, "max_loss=-1.0 must be from 0 to 100 points"),
        ({"max_loss": float("nan")}, "max_loss=nan must be from 0 to 100 points"),
        ({"max_loss": None, "speedup": 1.0}, r"speedup=1.0 must be above 1, over the fastest dense model"),
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"images": {"limit": 29}}, "limit=29: must be at least 30"),
        ({"engine": "eager"}, "engine eager runs no files; valid: aoti, onnxruntime, openvino, torch.export"),
        ({"engine": "tensorrt"}, "engine tensorrt runs no files"),
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"precision": "int8"}, "torch.export runs fp32 here: torch.export cannot run in int8"),
        ({"methods": "tomme"}, "unknown method 'tomme'"),
        ({"methods": "atc"}, "atc does not run on torch.export: "),
        ({"methods": "a_vit", "batch_size": 2}, "a_vit learns parameters"),
        ({"methods": "none"}, "there is nothing to tune"),
        ({"methods": "dynamicvit"}, "dynamicvit learns parameters, which would be random here"),
        ({"methods": "topk:keep_rate=0.5,blocks=[7]"}, "block"),
        ({"images": {"split": "nowhere"}}, "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_leaves_the_folder_as_it_was(
    given: dict[str, Any], message: str, source: str, watch: Watch, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(VitrimError, match=message):
        run(source, tmp_path / "out", **given)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    assert (watch.timed, watch.made, watch.scored) == ([], [], 0)


def test_labels_of_other_classes_and_too_few_images(watch: Watch, tmp_path: Path) -> None:
    write_noise(tmp_path / "few", 10)
    least = r"30 are needed, ten for each third$"
    with pytest.raises(VitrimError, match="has 20 images: " + least):
        run(str(tmp_path / "few"), tmp_path / "out", images={"few": True})
    with pytest.raises(VitrimError, match=f"has 20 images: give 900 images, 300 for each third, .* {least}"):
        run(str(tmp_path / "few"), tmp_path / "out", images={"few": False}, max_loss=1.0)
    host = create_model("segmenter:vit_tiny_patch16_224", options=OPTIONS)
    with pytest.raises(VitrimError):
        optimize(host, str(tmp_path / "few"), out=tmp_path / "out", **GIVEN)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_labels_that_may_be_of_other_classes_are_doubted_at_once(source: str, watch: Watch, tmp_path: Path) -> None:
    watch.fails_at = 0
    host = create_model("test_vit", options={**OPTIONS, "num_classes": 5})
    with (
        pytest.warns(UserWarning, match="the data has 2 classes and the model 5: .*; --no-labels compares"),
        pytest.raises(Stop),
    ):
        optimize(host, vitrim.DataSpec(source, options={"by_number": True}), out=tmp_path / "out", **GIVEN)


def test_a_model_in_another_dtype_is_refused(source: str, watch: Watch, tmp_path: Path) -> None:
    with pytest.raises(VitrimError, match="the model is bfloat16 on cpu: give it in float32 on the CPU"):
        optimize(model().bfloat16(), source, out=tmp_path / "out", **GIVEN)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_study_of_another_search_is_refused(source: str, watch: Watch, tmp_path: Path) -> None:
    watch.fails_at = 0
    with pytest.raises(Stop):
        run(source, tmp_path / "out")
    before = (tmp_path / "out" / "study.jsonl").read_text()
    with pytest.raises(VitrimError, match=r"is there already: resume it \(--resume\), or name another folder"):
        run(source, tmp_path / "out")
    with pytest.raises(VitrimError, match="is of another run: its batch_size is 1, and this one's 2"):
        run(source, tmp_path / "out", results={"resume": True}, batch_size=2)
    assert (tmp_path / "out" / "study.jsonl").read_text() == before


def test_measurements_of_other_weights_are_not_taken_over(
    source: str, whole: Whole, watch: Watch, tmp_path: Path
) -> None:
    """The same model, images and search, but one weight is another. Those of the same weights are."""
    (tmp_path / "out").mkdir()
    study, before = tmp_path / "out" / "study.jsonl", (whole.out / "study.jsonl").read_bytes()
    study.write_bytes(before)
    again, other = vitrim.Results(tmp_path / "out", resume=True), model()
    with torch.no_grad():
        other.get_submodule("blocks.1.mlp.fc1").weight[3, 5] += 1e-3
    with pytest.raises(VitrimError):
        optimize(alone(other), source, out=again, **GIVEN)
    assert study.read_bytes() == before
    assert optimize(alone(model()), source, out=again, **GIVEN).best == whole.report.best
    assert (watch.timed, watch.scored) == ([], 0)


@pytest.mark.filterwarnings("ignore:the model has random weights:UserWarning")
def test_the_command(
    source: str, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"--model-option={key}={value}" for key, value in OPTIONS.items()]
    words = ["optimize", "test_vit", *options, "--images", source, "--max-loss", "100", "--batch-size", "1"]
    words += [
        "-m",
        "topk",
        "--img-size",
        "32",
        "--engine",
        "torch.export",
        "--precision",
        "fp32",
        "--out",
        str(tmp_path / "out"),
    ]
    assert exit_code(monkeypatch, *words, "--json", str(tmp_path / "o.json")) == 0
    out = capsys.readouterr().out
    record = json.loads((tmp_path / "o.json").read_text())
    assert record["command"] == "optimize"
    assert record["sentence"] in out.replace("\n", " ")
    assert exit_code(monkeypatch, "optimize", "test_vit") == 2
    assert "Missing option '--images'" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "third"), [(None, 12), (30, 10)])
def test_a_limit_is_that_of_all_three_thirds(source: str, tmp_path: Path, limit: int | None, third: int) -> None:
    images = vitrim.DataSpec(source, limit=limit)
    with pytest.raises(VitrimError, match=f"a loss of 1 point cannot be seen on {third} images"):
        optimize(model(), images, out=tmp_path / "out", methods="topk", engine="torch.export", precision="fp32")


def test_a_dense_model_that_guesses_ends_the_search(tmp_path: Path, watch: Watch) -> None:
    """Its head says class 0 to everything, and all labels are 1: no setting could lose anything against it."""
    write_noise(tmp_path / "images", 48)
    host = create_model("test_vit", options=OPTIONS)
    torch.nn.init.zeros_(host.head.weight)
    host.head.bias.data = torch.tensor([1.0, 0.0])
    data = load_images(str(tmp_path / "images"))
    data.labels[:] = 1
    given = {**GIVEN, "out": tmp_path / "out"}
    with pytest.raises(
        VitrimError, match=r"right on 0\.0 % of 32 images, as if by chance .* \(--no-labels, labels=Fal"
    ):
        optimize(host, data, **given)
    assert measured(tmp_path / "out") == ["top-1 of the dense model"]
    assert watch.timed == []
    without = vitrim.JudgedData(data, labels=False)
    assert optimize(alone(host), without, **{**given, "out": tmp_path / "agreement"}).facts["doubts"] == []


def test_the_command_says_what_labels_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Folders named by numbers are asked about, and the answer is an option of the command, too."""
    given: list[Any] = []

    def taken(model: object, images: object, **how: object) -> object:
        given.append(images)
        raise VitrimError("enough")

    monkeypatch.setattr("vitrim.tuning.optimize.optimize", taken)
    command = ("optimize", "test_vit", "--images", tmp_path, "--data-option", "by_number=names")
    assert exit_code(monkeypatch, *command) == 2
    assert given[0].options == {"by_number": "names"}
