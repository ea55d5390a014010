"""Accuracy and time of several methods at once: numbers of an evaluation and of a bench, what they come to in words,
and where they stand in the picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import vitrim
from image_files import write_noise
from vitrim.data import load_images
from vitrim.errors import VitrimError
from vitrim.loading import create_model
from vitrim.measure import compare as comparing
from vitrim.measure import timing
from vitrim.measure.bench import bench
from vitrim.measure.compare import compare
from vitrim.measure.comparison import in_words
from vitrim.measure.comparison_figure import draw
from vitrim.measure.latency import Budget

OPTIONS = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 32, "num_heads": 2, "num_classes": 2}
METHODS = ["tome:r=1", "tome:r=4", "topk:keep_rate=0.6"]
MS = {"dense (fused)": 6.0, "dense (unfused)": 5.0, "tome:r=1": 4.0, "tome:r=4": 2.5, "topk:keep_rate=0.6": 8.0}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_noise(tmp_path / "images", 5)
    return tmp_path / "images"


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Every round takes these milliseconds for one image, a tenth more in the second; the names of every call."""
    names: list[list[str]] = []

    def fake(runs: Mapping[str, Callable[[], Any]], device: object, budget: Budget) -> dict[str, Any]:
        names.append(list(runs))
        for run in runs.values():
            run()
        return {name: MS[name.partition(" on ")[0]] * np.array([1.0, 1.1, 1.0]) for name in runs}

    monkeypatch.setattr(timing, "time_interleaved", fake)
    return names


def model() -> nn.Module:
    torch.manual_seed(0)
    return create_model("test_vit", options=OPTIONS)


def test_accuracy_is_that_of_every_model_alone(source: Path) -> None:
    """Counted here image by image from the logits of the models themselves."""
    from vitrim.core.reduce import reduce_
    from vitrim.data import eval_transform

    host = model()
    report = compare(host, METHODS, vitrim.ScoredData(str(source), batch_size=3), at=2)
    dataset = load_images(source)
    dataset.transform = eval_transform(host)
    images = torch.stack([dataset[place][0] for place in range(len(dataset))])
    labels = torch.tensor([dataset[place][1] for place in range(len(dataset))])
    answers = []
    for method in (None, *METHODS):
        alone = model()
        if method is not None:
            reduce_(alone, method)
        with torch.inference_mode():
            answers.append(alone(images).argmax(1))
    first = answers[0] == labels
    for row, answer in zip(report.rows, answers, strict=True):
        lost = first.double() - (answer == labels).double()
        right, same = (answer == labels).float().mean().item(), (answer == answers[0]).float().mean().item()
        assert row["top1"] == pytest.approx(right)
        assert row["agreement"] == pytest.approx(same)
        assert row["loss"] == pytest.approx((answers[0] == labels).float().mean().item() - right)
        assert row["loss_error"] == pytest.approx(max(lost.std(correction=0).item() / 10**0.5, 1 / 10))


@pytest.mark.slow
def test_speeds_are_the_rows_of_bench(source: Path, timed: list[list[str]]) -> None:
    report = compare(model(), METHODS, str(source), at=[1, 2])
    rows = bench(model(), METHODS, batch_size=[1, 2], images=str(source)).rows
    assert timed[0] == timed[1] == list(MS)
    own = {(row["method"], row["batch_size"]): dict(row) for row in rows}
    for row in report.rows:
        for speed in row["speeds"]:
            alone = own[row["method"], speed["batch_size"]]
            changing = {"prepare_seconds", "peak_memory_mib", "model"}
            assert {key: value for key, value in speed.items() if key not in changing} == {
                key: value for key, value in alone.items() if key not in changing
            }
    assert report.rows[0]["speeds"][0]["dense_kernel"] == "unfused"
    assert [row["speeds"][0]["speedup"] for row in report.rows] == pytest.approx([1.0, 5 / 4, 2.0, 5 / 8])


@pytest.mark.slow
def test_what_is_known_is_handed_over_after_every_setting(source: Path) -> None:
    seen: list[tuple[int, int]] = []
    told: list[str] = []
    compare(
        model(),
        METHODS[:1],
        str(source),
        at=[1, 2],
        on_report=lambda report: seen.append((len(report.rows), len(report.rows[0]["speeds"]))),
        on_progress=told.append,
    )
    assert seen == [(2, 0), (2, 1), (2, 2)]
    assert "10 of 10 images" in told
    assert "2 of 2, batch 2: making tome:r=1 ready, 3 of 3" in told


# ---- in words --------------------------------------------------------------------------------------------------------


def row(method: str, loss: float, *speeds: float, error: float | None = 0.001, spread: float = 0.02) -> dict[str, Any]:
    """A row as `compare` has them; one speed-up per batch size."""
    return {
        "method": method,
        "precision": "fp32",
        "engine": None,
        "loss": loss,
        "loss_error": error,
        "images": 1001,
        "speeds": [
            {
                "batch_size": size,
                "speedup": speed,
                "speedup_q1": speed - spread * (method != "dense"),
                "speedup_q3": speed + spread * (method != "dense"),
                "latency_ms": {"p50": 80.0 / speed},
            }
            for size, speed in zip((1, 8), speeds, strict=False)
        ],
    }


DENSE = row("dense", 0.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [row("tome:r=8", 0.003, 0.9, 1.21), row("evit", 0.009, 0.8, 1.15)],
            [
                "tome:r=8 loses 0.30 points of top-1 (standard error 0.10): at batch 1 it does not pay: 0.90x the "
                "speed of dense; at batch 8 1.21x as fast as dense, and nothing here is clearly better",
                "evit loses 0.90 points of top-1 (standard error 0.10): at batch 1 it does not pay: 0.80x the speed of "
                "dense; at batch 8 1.15x as fast as dense, dominated by tome:r=8 (1.21x, loses 0.30)",
                "least loss for the time at batch 1: dense; no method here pays",
                "least loss for the time at batch 8: tome:r=8 (1.21x, loses 0.30)",
            ],
        ),
        (  # faster and better than dense; and a speed-up that may be none
            [row("atm", -0.002, 1.3, error=None), row("evit", -0.003, 1.01, error=None)],
            [
                "atm gains 0.20 points of top-1: at batch 1 1.30x as fast as dense, and nothing here is clearly better",
                "evit gains 0.30 points of top-1: at batch 1 1.01x as fast as dense, no clear gain: its quartiles "
                "0.99-1.03 include 1",
                "least loss for the time at batch 1: atm (1.30x, gains 0.20)",
            ],
        ),
        (  # what only shows the cost of vitrim itself is not judged, and judges nothing
            [row("none", 0.0, 0.98), row("evit", 0.01, 1.1)],
            [
                "evit loses 1.00 points of top-1 (standard error 0.10): at batch 1 1.10x as fast as dense, and nothing "
                "here is clearly better",
                "least loss for the time at batch 1: evit (1.10x, loses 1.00)",
            ],
        ),
    ],
)
def test_words(rows: Sequence[Mapping[str, Any]], words: list[str]) -> None:
    sizes = len(rows[0]["speeds"])
    dense = {**DENSE, "speeds": DENSE["speeds"][:sizes]}
    assert list(in_words([dense, *rows], "top1")) == words


# ---- the picture -----------------------------------------------------------------------------------------------------


def test_every_method_has_its_point() -> None:
    rows = [DENSE, row("tome:r=8", 0.003, 0.8, 1.25), row("tome:r=4", 0.001, 1.0, 1.1), row("evit", 0.02, 1.0, 1.6)]
    figure = draw(rows, "top1", "a title")
    first, second = figure.axes
    assert [axis.get_title() for axis in figure.axes] == ["batch 1", "batch 8"]
    assert first.get_ylabel() == "loss of top-1, points"
    for axis, place, size in ((first, 0, 1), (second, 1, 8)):
        marks = {
            (round(float(x), 6), round(float(y), 6))
            for line in axis.lines
            if line.get_marker() not in ("None", None, "")
            for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
        }
        wanted = [(80.0 / each["speeds"][place]["speedup"] / size, 100 * each["loss"]) for each in rows]
        assert marks == {(round(x, 6), round(y, 6)) for x, y in wanted}
        joined = [line for line in axis.lines if line.get_linestyle() == "-" and len(line.get_xdata()) == 2]
        assert [sorted(line.get_ydata()) for line in joined if line.get_marker() == "None"][-1] == pytest.approx(
            [0.1, 0.3]
        )
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["dense", "tome:r=8", "tome:r=4", "evit"]


def test_bars_are_quartiles_of_the_time_and_the_standard_error_of_the_loss() -> None:
    """At batch 8, 80 ms of dense: 64 ms at 1.25 times, 60 and 70 at the quartiles; losses in points."""
    one = row("tome:r=8", 0.02, 1.0, 1.25, error=0.005)
    one["speeds"][1] |= {"speedup_q1": 80 / 70, "speedup_q3": 80 / 60}
    _, axis = draw([DENSE, one], "top1").axes
    (bars,) = axis.containers
    across, upright = (collection.get_segments()[0] for collection in bars.lines[2])
    assert sorted(across[:, 0]) == [pytest.approx(60 / 8), pytest.approx(70 / 8)]
    assert sorted(upright[:, 1]) == [pytest.approx(1.5), pytest.approx(2.5)]
    assert list(upright[:, 0]) == pytest.approx([64 / 8, 64 / 8])
    assert list(across[:, 1]) == pytest.approx([2.0, 2.0])


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"at": ()}, "at=.*at least 1 entries"),
        ({"at": 11}, "has 10 images, too few for a batch of 11"),
        ({"methods": ["tome:r=1", "tome:r=1"]}, "method tome:r=1 is given twice"),
        ({"methods": "ats:variant=published", "at": 2, "engine": "torch.export"}, "published runs on none of these"),
        ({"task": "segmentation"}, "leave task segmentation out"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    given: dict[str, Any], message: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Measurement", "Speeds"):
        monkeypatch.setattr(comparing, name, lambda *_, **__: pytest.fail("ran"))
    options = {"model": model(), "methods": METHODS, **given}
    data = vitrim.ScoredData(str(source), task=options.pop("task", None))
    with pytest.raises(VitrimError, match=message):
        compare(data=data, **options)
