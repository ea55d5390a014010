"""Standard errors of changes, and warnings that speak of the images at hand."""

from __future__ import annotations

import warnings

import pytest
import timm
import torch

import vitrim
from vitrim.measure.contestants import Output, contestants
from vitrim.measure.probes import PairedIoU, TaskMetrics
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
    dense, reduced = (Output(torch.nn.functional.one_hot(each, classes).permute(0, 3, 1, 2)) for each in guesses)
    gauge = PairedIoU(task)
    for start in range(0, count, 8):
        part = slice(start, start + 8)
        batch = Batch(torch.zeros(8, 3, 12, 12), labels[part], torch.arange(count)[part], start // 8)
        gauge.see(batch, Output(reduced.prediction[part]), Output(dense.prediction[part]))

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
