"""Standard errors of changes, and warnings that speak of the images at hand."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import timm
import torch

import vitrim
from vitrim.measure.contestants import ModelOutput, contestants
from vitrim.measure.probes import PairedAP, PairedIoU, TaskMetrics
from vitrim.measure.records import Batch
from vitrim.measure.run import run
from vitrim.tasks import make_task


def test_the_error_of_a_change_of_miou_is_that_of_leaving_images_out() -> None:
    """The oracle: mIoU of torchmetrics' confusion over all images but one, for every image (the jackknife)."""
    generator, count, classes = torch.Generator().manual_seed(0), 40, 3
    labels = torch.randint(0, classes, (count, 12, 12), generator=generator)
    labels[:, 0] = 255
    noise = [torch.rand(count, 12, 12, generator=generator) < share for share in (0.2, 0.3)]
    guesses = [torch.where(where, (labels + 1) % classes, labels).clamp_max(classes - 1) for where in noise]
    task = make_task("segmentation", classes)
    dense, reduced = (ModelOutput(torch.nn.functional.one_hot(each, classes).permute(0, 3, 1, 2)) for each in guesses)
    gauge = PairedIoU(task)
    for start in range(0, count, 8):
        part = slice(start, start + 8)
        batch = Batch(torch.zeros(8, 3, 12, 12), labels[part], torch.arange(count)[part], start // 8)
        gauge.see(batch, ModelOutput(reduced.prediction[part]), ModelOutput(dense.prediction[part]))

    def change(without: int) -> float:
        rest = [place for place in range(count) if place != without]
        found = []
        for output in (dense, reduced):
            metrics = task.metrics()
            task.update(metrics, output.prediction[rest], labels[rest])
            found.append(float(metrics.compute()["mIoU"]))
        return found[1] - found[0]

    each = torch.tensor([change(place) for place in range(count)], dtype=torch.float64)
    jackknife = ((count - 1) / count * ((each - each.mean()) ** 2).sum()).sqrt().item()
    assert gauge.result()["loss_error"] == pytest.approx(jackknife, rel=0.05)


def _ranked(name: str, count: int) -> tuple[Any, list[Any], Any]:
    """A task, what two models predict, and the labels of so many images."""
    generator = torch.Generator().manual_seed(1)
    task = make_task(name, 3)
    if name == "multilabel":
        labels = (torch.rand(count, 3, generator=generator) < 0.4).float()
        return task, [labels + torch.randn(count, 3, generator=generator) for _ in range(2)], labels
    truth: list[Any] = []
    found: tuple[list[Any], list[Any]] = ([], [])
    for image in range(count):
        corner = torch.randint(0, 20, (3, 2), generator=generator).float()
        own = {"boxes": torch.cat([corner, corner + 12], 1), "labels": torch.randint(0, 3, (3,), generator=generator)}
        truth.append(own | {"masks": _filled(own["boxes"]), "iscrowd": torch.tensor([0, 0, int(image % 7 == 0)])})
        for guesses in found:
            number = 0 if image == 5 else 3  # nothing is found in one image
            boxes = own["boxes"][:number] + 3 * torch.randn(number, 4, generator=generator)
            boxes = torch.cat([boxes[:, :2], torch.maximum(boxes[:, 2:], boxes[:, :2] + 2)], 1).round()
            scores = torch.rand(number, generator=generator)
            guesses.append(
                {"boxes": boxes, "masks": _filled(boxes), "labels": own["labels"][:number], "scores": scores}
            )
    return task, list(found), truth


def _filled(boxes: torch.Tensor) -> torch.Tensor:
    """Masks (n, 40, 40) of boxes."""
    masks = torch.zeros(len(boxes), 40, 40, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes.clamp(0, 40).int().tolist(), strict=True):
        mask[top:bottom, left:right] = True
    return masks


# with 27 images groups are of one and of two; the groups of masks are those of boxes
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "count"),
    [
        *product(("detection", "multilabel"), (9, 27)),
        ("instances", 9),
        pytest.param("instances", 27, marks=pytest.mark.slow),
    ],
)
def test_the_error_of_a_change_of_ap_is_that_of_leaving_images_out(name: str, count: int) -> None:
    """The oracle: the task's own metric of all images but those of one group, for every group."""
    task, (reduced, dense), labels = _ranked(name, count)
    gauge = PairedAP(task)
    for start in range(0, count, 7):
        part = slice(start, start + 7)
        batch = Batch(torch.zeros(len(labels[part]), 3, 40, 40), labels[part], torch.arange(count)[part], start // 7)
        gauge.see(batch, ModelOutput(reduced[part]), ModelOutput(dense[part]))
    groups = min(20, count)

    def change(without: int) -> float:
        rest = [place for place in range(count) if place % groups != without]
        found = []
        for predictions in (dense, reduced):
            metrics = task.metrics()
            for place in rest:
                one = slice(place, place + 1)
                task.update(metrics, predictions[one], labels[one])
            found.append(float(metrics.compute()[task.selects_by]))
        return found[1] - found[0]

    each = torch.tensor([change(group) for group in range(groups)], dtype=torch.float64)
    jackknife = ((groups - 1) / groups * ((each - each.mean()) ** 2).sum()).sqrt().item()
    assert jackknife > 0.005
    assert gauge.result()["loss_error"] == pytest.approx(jackknife, rel=1e-5)


@pytest.mark.parametrize("name", ["detection", "multilabel"])
def test_the_change_of_ap_of_one_image_has_no_error(name: str) -> None:
    task, (reduced, dense), labels = _ranked(name, 1)
    gauge = PairedAP(task)
    gauge.see(Batch(torch.zeros(1, 3, 40, 40), labels, torch.arange(1), 0), ModelOutput(reduced), ModelOutput(dense))
    assert gauge.result() == {}


def test_warnings_of_amounts_speak_of_the_images_at_hand() -> None:
    model = timm.create_model("test_vit", dynamic_img_size=True, num_classes=4).eval()  # 100 patches of 160 pixels
    task, batch = make_task("classification", 4), (torch.rand(2, 3, 64, 64), torch.tensor([0, 1]))
    with pytest.warns(vitrim.ReductionWarning, match="asks for more than 16 patch tokens allow") as found:
        run(model, ["tome:r=8"], [batch, batch], [TaskMetrics(task)], task=task)
    assert len(found) == 1
    small = timm.create_model("test_vit", img_size=64, dynamic_img_size=True, num_classes=4).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        contestants(small, ["tome:r=8"], task)
        run(small, ["tome:r=8"], [(torch.rand(1, 3, 320, 320), torch.tensor([0]))], [TaskMetrics(task)], task=task)
