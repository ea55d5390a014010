"""Engines in several precisions: the baseline among all of them, what one lacks, and what a dense model loses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import vitrim
from image_files import encoded, write_noise
from vitrim.core.method import MethodConfig
from vitrim.core.reduce import reduced
from vitrim.core.registry import parse_method
from vitrim.data import ImageDataset, batches, eval_transform, load_images
from vitrim.engines.engine import Eager, Engine, FileEngine, engines_named
from vitrim.engines.formats import formats
from vitrim.engines.runnable import Module, Runnable
from vitrim.errors import VitrimError
from vitrim.loading import create_model
from vitrim.measure import timing
from vitrim.measure.bench import bench
from vitrim.measure.compare import compare
from vitrim.measure.comparison_figure import draw
from vitrim.measure.contestants import Contestant
from vitrim.measure.probes import PairedLoss
from vitrim.measure.records import as_batches
from vitrim.measure.run import Measurement
from vitrim.measure.timing import measure
from vitrim.tasks import make_task

OPTIONS = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 2}
METHODS = {"tome:r=2": parse_method("tome:r=2")}
THIRD = {round(59 * place / 19) for place in range(20)}
"""Of 60 images, those that calibrate int8: every third, from the first to the last."""


class Rounding(Engine):
    """An engine that computes on images which it rounds, the more the lower its precision; int8 needs calibration."""

    label = "rounding"
    precisions = ("fp32", "bf16", "int8")

    def __init__(self, precision: str = "fp32") -> None:
        super().__init__(precision)
        self.seen: list[list[int]] = []

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def check(self, device: torch.device) -> None:
        pass

    def prepare(self, model: nn.Module, images: Tensor, folder: Path, calibration: Tensor | None = None) -> Runnable:
        self.seen.append([] if calibration is None else [round(each) for each in calibration[:, 0, 0, 0].tolist()])
        step = {"fp32": 0.0, "bf16": 0.25, "int8": 2.0}[self.precision]

        def run(given: Tensor) -> Any:
            assert len(given) == len(images)
            return model((given / step).round() * step if step else given)

        return Module(model, self.label, self.precision, len(images), run)


class Grey:
    """The value of an image's pixels, 0 to 255."""

    def __call__(self, image: Image.Image) -> Tensor:
        value = float(np.asarray(image)[0, 0, 0])
        return torch.full((3, 32, 32), value)


def model() -> nn.Module:
    torch.manual_seed(0)
    return create_model("test_vit", options=OPTIONS)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_noise(tmp_path / "images", 30)
    return tmp_path / "images"


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The milliseconds of every model by a part of its name, of several the last one; 10 of all others."""
    known: dict[str, float] = {}

    def fake(runs: Mapping[str, Callable[[], Any]], device: object, budget: object) -> dict[str, Any]:
        found = {name: [value for part, value in known.items() if part in name] for name in runs}
        return {name: np.full(3, values[-1] if values else 10.0) for name, values in found.items()}

    monkeypatch.setattr(timing, "time_interleaved", fake)
    return known


# ---- engines by name and precision -----------------------------------------------------------------------------------


def test_what_an_engine_lacks_is_said_and_the_others_run() -> None:
    found, lacking = engines_named(["eager", "torch.export"], ["fp32", "bf16"])
    assert [str(one) for one in found] == ["eager", "eager bf16", "torch.export"]
    assert lacking == ["torch.export runs fp32 here: not timed in bf16"]


def test_what_the_machine_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = formats()["openvino"]
    monkeypatch.setattr(kind, "missing", classmethod(lambda _: None))
    monkeypatch.setattr(kind, "lacks", classmethod(lambda _, precision: "no bf16" if precision == "bf16" else None))
    found, lacking = engines_named(["openvino"], ["bf16", "fp32"])
    assert [str(one) for one in found] == ["openvino"]
    assert lacking == ["no bf16: not timed in bf16"]
    with pytest.raises(VitrimError, match=r"^no bf16: openvino cannot run in bf16$"):
        engines_named(["openvino"], ["bf16"])


@pytest.mark.parametrize(
    ("precisions", "message"),
    [
        (["fp8"], "unknown precision 'fp8'.* valid: bf16, fp16, fp32, int8"),
        (["int8"], "^eager runs fp32 and bf16 and fp16 here: eager cannot run in int8$"),
        (["bf16", "bf16"], "engine eager bf16 is given twice"),
    ],
)
def test_wrong_precisions(precisions: list[str], message: str) -> None:
    with pytest.raises(VitrimError, match=message):
        engines_named(["eager"], precisions)


def test_an_engine_of_files_computes_in_fp32_weights() -> None:
    engine = FileEngine(formats()["onnx"], "int8")
    assert (engine.dtype, engine.lacks()) == (torch.float32, None)
    assert Eager("bf16").dtype == torch.bfloat16


# ---- bench -----------------------------------------------------------------------------------------------------------


def test_the_baseline_is_the_fastest_engine_in_the_fastest_precision(times: dict[str, float]) -> None:
    times |= {"rounding": 8.0, "rounding int8": 4.0, "rounding bf16": 5.0, "tome:r=2 on rounding bf16": 2.0}
    engines = [Eager(), *(Rounding(one) for one in Rounding.precisions)]
    rows = measure(model(), METHODS, torch.zeros(2, 3, 32, 32), engines=engines)
    assert {(row["dense_engine"], row["dense_precision"]) for row in rows} == {("rounding", "int8")}
    speeds = {(row["method"], row["engine"], row["precision"]): row for row in rows}
    assert {place: row["speedup"] for place, row in speeds.items() if place[0] == "dense"} == {
        ("dense", "eager", "fp32"): 0.4,
        ("dense", "rounding", "fp32"): 0.5,
        ("dense", "rounding", "bf16"): 0.8,
        ("dense", "rounding", "int8"): 1.0,
    }
    best = speeds["tome:r=2", "rounding", "bf16"]
    assert (best["speedup"], best["engine_speedup"], best["dense_p50_ms"]["fused"]) == (2.0, 2.5, 5.0)


def test_a_dense_model_in_a_precision_is_compared_with_fp32(source: Path, times: dict[str, float]) -> None:
    """Agreement and top-1 are those of plain torch on the images that int8 was not calibrated on."""
    host = model()
    int8 = Rounding("int8")
    report = bench(host, "tome:r=2", batch_size=5, engine=[int8, Rounding()], images=str(source))
    first, second, *others = report.rows
    assert [len(each) for each in int8.seen[:2]] == [20, 20]
    dataset = load_images(source)
    dataset.transform = eval_transform(host)
    every = [dataset[place] for place in range(60) if place not in THIRD]
    images = torch.stack([image for image, _ in every])
    labels = torch.tensor([label for _, label in every])
    with torch.inference_mode():
        exact, coarse = (host(given).argmax(1) for given in (images, (images / 2.0).round() * 2.0))
    assert 0 < (exact == coarse).double().mean() < 1
    assert first["agreement"] == pytest.approx((exact == coarse).double().mean().item())
    assert first["top1"] == pytest.approx((coarse == labels).double().mean().item())
    assert (second["agreement"], first["scored"]) == (1.0, 40)
    assert second["top1"] == pytest.approx((exact == labels).double().mean().item())
    assert not any("agreement" in row for row in others)
    text = str(report)
    assert "agree %: images with the same top-1 as the dense model in fp32" in text


@pytest.mark.slow
def test_the_measure_of_agreement_is_not_rounded_itself(source: Path, times: dict[str, float]) -> None:
    """The model as it was given, and not what is left of it after bf16, even if nothing runs in fp32."""
    host = model()
    with torch.no_grad():
        for parameter in host.parameters():
            parameter.mul_(1.7)
    report = bench(host, "tome:r=2", batch_size=5, precision="bf16", images=str(source))
    dataset = load_images(source)
    dataset.transform = eval_transform(host)
    images = torch.stack([dataset[place][0] for place in range(60) if place not in THIRD])
    with torch.inference_mode():
        exact = host(images).argmax(1)
        rounded = model().bfloat16()
        rounded.load_state_dict(host.state_dict())
        found = rounded(images.bfloat16()).argmax(1)
    assert report.rows[0]["agreement"] == pytest.approx((exact == found).double().mean().item(), abs=1e-9)


def test_int8_on_random_images_says_so(times: dict[str, float]) -> None:
    report = bench(model(), "tome:r=2", batch_size=1, engine=[Rounding("int8")])
    assert any(note.startswith("int8: ranges of activations are those of random images") for note in report.notes)
    assert report.rows[0]["engine"] == "rounding"


# ---- compare ---------------------------------------------------------------------------------------------------------


class Single(Rounding):
    """Rounding, that runs methods which follow the image on single images alone, as the engines of files do."""

    def obstacle(self, config: MethodConfig, batch: int) -> str | None:
        return "for single images" if config.traits.single_images and batch > 1 else None


@pytest.mark.slow
def test_rows_of_a_lower_precision_are_scored_on_their_engine(source: Path, times: dict[str, float]) -> None:
    # of every name the last entry that is in it
    times |= {"rounding": 8.0, "rounding int8": 4.0, "tome:r=2 on rounding int8": 3.0}
    host = model()
    report = compare(
        host, "tome:r=2", vitrim.ScoredData(str(source), batch_size=7), at=1, engine=[Rounding(), Rounding("int8")]
    )
    assert [(row["method"], row["precision"], row["engine"]) for row in report.rows] == [
        ("dense", "fp32", None),
        ("tome:r=2", "fp32", None),
        ("dense", "int8", "rounding"),
        ("tome:r=2", "int8", "rounding"),
    ]
    dataset = load_images(source)
    dataset.transform = eval_transform(host)
    images = torch.stack([dataset[place][0] for place in range(60)])
    labels = torch.tensor([dataset[place][1] for place in range(60)])
    coarse = (images / 2.0).round() * 2.0
    answers = []
    with torch.inference_mode():
        answers += [host(images).argmax(1)]
        with reduced(host, "tome:r=2"):
            answers += [host(images).argmax(1)]
        answers += [host(coarse).argmax(1)]
        with reduced(host, "tome:r=2"):
            answers += [host(coarse).argmax(1)]
    right = [(answer == labels).double().mean().item() for answer in answers]
    for row, answer, own in zip(report.rows, answers, right, strict=True):
        assert row["top1"] == pytest.approx(own)
        assert row["loss"] == pytest.approx(right[0] - own)
        assert row["agreement"] == pytest.approx((answer == answers[0]).double().mean().item())
    assert [row["speeds"][0]["speedup"] for row in report.rows] == pytest.approx([0.5, 0.5, 1.0, 4 / 3])
    assert report.rows[3]["saved"] == report.rows[1]["saved"] > 0
    text = str(report)
    assert "tome:r=2 on rounding int8" in text
    assert report.words[-1].startswith("least loss for the time at batch 1: ")


def test_precisions_of_other_tasks_are_refused(source: Path) -> None:
    host = create_model("segmenter:vit_tiny_patch16_224", options={**OPTIONS, "num_classes": 3})
    with pytest.raises(VitrimError):
        compare(host, "tome:r=2", str(source), at=1, engine=[Rounding("int8")])


def row(method: str, loss: float, speed: float, precision: str = "fp32") -> dict[str, Any]:
    spread = 0.0 if speed == 1.0 else 0.01
    return {
        "method": method, "precision": precision, "engine": None if precision == "fp32" else "openvino", "loss": loss,
        "loss_error": 0.002, "images": 1000,
        "speeds": [
            {
                "batch_size": 1, "engine": "openvino", "precision": precision, "speedup": speed,
                "speedup_q1": speed - spread, "speedup_q3": speed + spread, "latency_ms": {"p50": 10.0 / speed},
            }
        ],
    }  # fmt: skip


ROWS = [
    row("dense", 0.0, 0.5),
    row("tome:r=8", 0.01, 0.7),
    row("dense", 0.001, 1.0, "bf16"),
    row("tome:r=8", 0.011, 1.25, "bf16"),
    row("tome:r=12", 0.03, 1.4, "bf16"),
]


def test_every_dense_model_is_a_star_and_precisions_are_joined_apart() -> None:
    figure = draw(ROWS, "top1")
    (axis,) = figure.axes
    stars = {
        (float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in axis.lines if line.get_marker() == "*"
    }
    assert stars == {(20.0, 0.0), (10.0, 0.1)}
    joined = [line for line in axis.lines if line.get_linestyle() == "-" and line.get_marker() == "None"]
    assert [sorted(line.get_ydata()) for line in joined if len(line.get_xdata()) == 2][-1] == pytest.approx([1.1, 3.0])
    assert {text.get_text() for text in axis.texts} == {"openvino", "openvino bf16"}


# ---- the loss, image by image ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [True, False])
def test_paired_loss_against_plain_numpy(labels: bool) -> None:
    """Twenty lines that know nothing of the probe."""
    host, task = model(), make_task("classification", 2)
    images = torch.randn(23, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(23) % 2
    runs = [None, lambda given: host((given / 2).round() * 2)]
    models = [Contestant(host, task), *(Contestant(Module(host, batch=4, call=run), task) for run in runs)]
    measurement = Measurement(models, [PairedLoss(task, labels=labels)], task)
    data = [(images[start : start + 4], targets[start : start + 4]) for start in range(0, 23, 4)]
    measurement.follow(as_batches(data))
    rows = measurement.rows()

    with torch.inference_mode():
        numbers = [host(given).double().numpy() for given in (images, images, (images / 2).round() * 2)]
    truth = targets.numpy()
    for found, own in zip(rows, numbers, strict=True):
        first = numbers[0]
        if labels:
            each = (first.argmax(1) == truth).astype(float) - (own.argmax(1) == truth).astype(float)
        else:
            each = 1.0 - (first.argmax(1) == own.argmax(1)).astype(float)
        wanted = np.log(np.exp(first) / np.exp(first).sum(1, keepdims=True))
        given = np.log(np.exp(own) / np.exp(own).sum(1, keepdims=True))
        kl = (np.exp(wanted) * (wanted - given)).sum(1).mean()
        assert found["loss"] == pytest.approx(each.mean())
        spread = math.sqrt(((each - each.mean()) ** 2).mean() / len(each))
        assert found["loss_error"] == pytest.approx(max(spread, 1 / 23))
        assert found["kl"] == pytest.approx(kl, abs=1e-6)


@pytest.mark.parametrize("limit", [None, 80])
def test_int8_is_calibrated_on_images_of_all_classes(limit: int | None, times: dict[str, float]) -> None:
    """Of 240 images, sorted by class, the ranges are those of 64 from the first to the last; or of 80 of them."""
    pixels = [np.full((8, 8, 3), number, np.uint8) for number in range(240)]
    data = ImageDataset([encoded(Image.fromarray(each)) for each in pixels], [number // 120 for number in range(240)])
    data.transform = Grey()
    engine = Rounding("int8")
    compare(model(), "tome:r=2", vitrim.DataSpec(data, limit=limit), at=1, engine=engine)
    compared = engine.seen[0]  # later ones are those of bench, which times
    assert compared == engine.seen[1]
    read = [round(239 * place / 79) for place in range(80)] if limit else list(range(240))
    wanted = [read[round((len(read) - 1) * place / 63)] for place in range(64)]
    assert np.abs(np.array(compared) - wanted).max() <= (4 if limit else 1)  # rounding of halves
    assert (len(compared), compared[0], compared[-1]) == (64, 0, 239)


def test_embeddings_are_compared_in_lower_precisions(source: Path) -> None:
    """Recall by the engine's embeddings, and their cosine to the dense model's in fp32."""
    torch.manual_seed(0)
    tower = create_model("test_vit", options={**OPTIONS, "num_classes": 0}).eval()
    data = load_images(str(source))
    report = compare(tower, "tome:r=2", data, at=1, engine=Rounding("bf16"), budget=vitrim.Budget(1, min_seconds=0))
    data.transform = eval_transform(tower)
    images, labels = next(iter(batches(data, len(data))))
    with torch.no_grad():
        dense, rounded = tower(images), tower((images / 0.25).round() * 0.25)
    directions = nn.functional.normalize(rounded.double(), dim=1)
    nearest = (directions @ directions.T - 2 * torch.eye(len(images))).argmax(1)
    (row,) = [row for row in report.rows if row["method"] == "dense" and row["precision"] == "bf16"]
    assert row["recall1"] == pytest.approx((labels[nearest] == labels).double().mean().item())
    assert row["cosine"] == pytest.approx(nn.functional.cosine_similarity(dense, rounded).mean().item(), abs=1e-6)
    with pytest.raises(VitrimError, match="engines give this classifier's logits, and not what it reads"):
        compare(model(), "tome:r=2", vitrim.ScoredData(data, task="embedding"), at=1, engine=Rounding("bf16"))
