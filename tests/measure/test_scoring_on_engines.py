"""Models scored on engines, against loops of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_precisions import Rounding, Single
from torch import Tensor

import tiny
import vitrim
from vitrim.core.registry import parse_method
from vitrim.measure.compare import on_engine
from vitrim.measure.comparison import dominates
from vitrim.measure.contestants import Contestant
from vitrim.measure.probes import PairedLoss
from vitrim.measure.run import Measurement
from vitrim.measure.speed_report import ms_per_image
from vitrim.tasks import make_task

LEARNED = "dynamicvit:keep_rate=0.5,blocks=[0]"


def model() -> Any:
    found: Any = tiny.HOSTS["vit"]()
    tiny.drop_last_block(found)
    tiny.drop_last_block(found)
    return found


def data() -> tuple[Tensor, Tensor]:
    return tiny.images(10), torch.arange(10) % 5


def scored(methods: list[str], engine: Any, folder: Path, **how: Any) -> list[Any]:
    """Rows of the dense model in fp32, and of methods on an engine."""
    images, labels = data()
    task, given = make_task("classification", 5), {**how, "folder": folder}
    configs = [parse_method(text) for text in methods]
    on = [on_engine(model(), config, engine, task, images[:4], **given) for config in configs]
    measurement = Measurement([Contestant(model(), task), *on], [PairedLoss(task, labels=True)], task)
    measurement.follow(zip(images.split(4), labels.split(4), strict=True))
    return measurement.rows()


def kl(found: Tensor, dense: Tensor) -> Any:
    one, other = found.double().log_softmax(1), dense.double().log_softmax(1)
    return pytest.approx(float(F.kl_div(one, other, log_target=True, reduction="batchmean")), rel=1e-6)


def test_a_learned_method_is_scored_with_what_it_has_learned(tmp_path: Path) -> None:
    """And not with parameters that are drawn again for every engine."""
    trained = model()
    torch.manual_seed(7)
    vitrim.reduce_(trained, LEARNED).save(tmp_path)
    images, _ = data()
    with torch.no_grad():
        dense = model()(images)
        expected = trained((images / 2.0).round() * 2.0)
    torch.manual_seed(1)
    rows = {row.method: row for row in scored([LEARNED], Rounding("int8"), tmp_path, learned=tmp_path)}
    assert rows[parse_method(LEARNED).describe()]["kl"] == kl(expected, dense)
    torch.manual_seed(1)
    (_, other) = scored([LEARNED], Rounding("int8"), tmp_path)
    assert other["kl"] != kl(expected, dense)  # random parameters do show


def test_int8_is_calibrated_on_the_images_for_that_and_a_method_of_single_images_runs_on_those(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    images, _ = data()
    chosen = images[::3]
    engine = Single("int8")
    given: list[Any] = []
    prepare = engine.prepare

    def watched(model: Any, images: Tensor, folder: Path, calibration: Tensor | None = None) -> Any:
        given.append((len(images), calibration))
        return prepare(model, images, folder, calibration)

    monkeypatch.setattr(engine, "prepare", watched)
    method = "atm:alpha=0.9,beta=0.2,theta_min=0.1"
    rows = scored([method], engine, tmp_path, calibration=chosen)
    assert [size for size, _ in given] == [1]
    for _, calibration in given:
        assert torch.equal(calibration, chosen)
    reduced = model()
    vitrim.reduce_(reduced, method)
    with torch.no_grad():
        dense = model()(images)
        alone = torch.cat([reduced((image[None] / 2.0).round() * 2.0) for image in images])
    assert rows[1]["kl"] == kl(alone, dense)


# ---- which of two is better ------------------------------------------------------------------------------------------


def timed(loss: float, error: float | None, speed: float, spread: float = 0.1) -> dict[str, Any]:
    quartiles = {"speedup": speed, "speedup_q1": speed - spread, "speedup_q3": speed + spread}
    return {"loss": loss, "loss_error": error, "speeds": [quartiles]}


@pytest.mark.parametrize(
    ("other", "row", "expected"),
    [
        (timed(0.0, 0.003, 1.5), timed(0.006, 0.004, 1.45), True),  # beyond 0.005, the error of the difference
        (timed(0.0, 0.003, 1.5), timed(0.0045, 0.004, 1.45), False),  # beyond the error of either one
        (timed(0.0, 0.003, 1.5), timed(0.0001, 0.004, 1.29), True),  # quartiles apart: 1.4 and 1.39
        (timed(0.0, 0.003, 1.5), timed(0.0001, 0.004, 1.31), False),
        (timed(0.001, 0.0, 9.0), timed(0.0, 0.0, 1.0), False),  # it loses more
        (timed(0.0, 0.0, 1.0), timed(0.5, 0.0, 1.1), False),  # it is slower
        (timed(0.0, None, 1.0), timed(0.1, None, 1.0), True),
    ],
)
def test_a_method_is_dominated_by_what_is_clearly_better(other: Any, row: Any, expected: bool) -> None:
    assert dominates(other, row, 0) is expected
    assert not dominates(row, row, 0)


def test_times_of_an_image_are_those_of_its_batch_over_its_size() -> None:
    assert ms_per_image({"latency_ms": {"p50": 12.0}, "batch_size": 8}) == 1.5
