"""One label per image."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy

import golden_files
from vitrim.data import ImageDataset, MultiLabelDataset
from vitrim.errors import VitrimError
from vitrim.tasks import make_task, tasks
from vitrim.tasks.options import Loss, Mix


def logits_and_labels(images: int = 6, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(images, classes, generator=generator), torch.randint(classes, (images,), generator=generator)


def test_tasks_by_name() -> None:
    assert all(make_task(name, 3).name == name and make_task(name, 3).num_classes == 3 for name in tasks())
    with pytest.raises(VitrimError, match=r"^unknown task 'multilable'; did you mean 'multilabel'\? valid: "):
        make_task("multilable", 3)
    with pytest.raises(VitrimError, match="classification needs at least 2 classes, got 1"):
        make_task("classification", 1)


@pytest.mark.parametrize("task", ["classification", "multilabel"])
def test_losses_of_a_task(task: str) -> None:
    made = make_task(task, 3)
    for name in ("cross_entropy", "bce", "asl"):
        if name in made.losses:
            assert made.criterion(Loss(name=name))(torch.zeros(2, 3), torch.eye(3)[:2]) > 0
        else:
            with pytest.raises(VitrimError, match=f"unknown loss of {task} '{name}'; .*valid: "):
                made.criterion(Loss(name=name))


@golden_files.cases(["training/losses_metrics_a"], arrays=("ce/*", "distill/none_*"))
def test_cross_entropy_is_the_published_one(ref: golden_files.Reference) -> None:
    logits, labels = golden_files.tensor(ref, "ce/logits").double(), golden_files.tensor(ref, "ce/labels").long()
    task = make_task("classification", logits.shape[1])
    ref.check("ce/smooth01", task.criterion(Loss(smoothing=0.1))(logits, labels))
    ref.check("distill/none_alpha0.5_tau3", task.criterion(Loss())(logits, labels))  # without a teacher


@pytest.mark.parametrize("name", ["cross_entropy", "bce"])
@pytest.mark.parametrize("mix", [Mix(mixup=0.8), Mix(cutmix=1.0), Mix(mixup=0.8, cutmix=1.0)])
def test_smoothing_mixed_labels_is_mixing_smoothed_ones(name: str, mix: Mix) -> None:
    logits, labels = logits_and_labels()
    images = torch.rand(6, 3, 8, 8)
    task = make_task("classification", 7)
    ours, theirs = task.mixer(mix), Mixup(mix.mixup, mix.cutmix, label_smoothing=0.1, num_classes=7)
    assert ours is not None
    np.random.seed(0)
    mixed, targets = ours(images.clone(), labels)
    np.random.seed(0)
    expected_images, smoothed = theirs(images.clone(), labels)
    torch.testing.assert_close(mixed, expected_images, rtol=0, atol=0)
    criterion = SoftTargetCrossEntropy() if name == "cross_entropy" else BinaryCrossEntropy(smoothing=0)
    torch.testing.assert_close(
        task.criterion(Loss(name=name, smoothing=0.1))(logits, targets), criterion(logits, smoothed)
    )
    assert not torch.equal(mixed, images)


@pytest.mark.parametrize("sum_classes", [False, True])
def test_binary_cross_entropy_of_indices_is_that_of_timm(sum_classes: bool) -> None:
    logits, labels = logits_and_labels()
    ours = make_task("classification", 7).criterion(Loss(name="bce", smoothing=0.1, sum_classes=sum_classes))
    torch.testing.assert_close(ours(logits, labels), BinaryCrossEntropy(0.1, sum_classes=sum_classes)(logits, labels))
    torch.testing.assert_close(ours(logits.bfloat16().float(), labels), ours(logits.bfloat16(), labels))


def test_nothing_is_mixed_unless_a_recipe_says_so() -> None:
    for name in tasks():
        assert make_task(name, 3).mixer(Mix()) is None
        assert make_task(name, 3).mixer(Mix(mixup=1.0, probability=0.0)) is None


@pytest.mark.parametrize("classes", [2, 5, 7])
def test_accuracies_are_shares_of_images(classes: int) -> None:
    logits, labels = logits_and_labels(37, classes)
    metrics = make_task("classification", classes).metrics()
    for part in range(0, 37, 10):
        metrics.update(logits[part : part + 10], labels[part : part + 10])
    expected = {"top1": (logits.argmax(dim=1) == labels).float().mean()}
    if classes > 5:  # else it is always 1
        expected["top5"] = (logits.topk(5).indices == labels[:, None]).any(dim=1).float().mean()
    assert {name: value.item() for name, value in metrics.compute().items()} == {
        name: pytest.approx(value.item(), rel=1e-6) for name, value in expected.items()
    }
    assert make_task("classification", classes).selects_by in expected
    assert 0 < expected["top1"] < 1


def test_accuracies_that_agree_on_the_first_batch_are_still_two() -> None:
    metrics = make_task("classification", 6).metrics()
    metrics.update(torch.eye(6), torch.arange(6))
    metrics.update(torch.arange(6.0).expand(6, 6), torch.arange(6))
    assert {name: value.item() for name, value in metrics.compute().items()} == {"top1": 7 / 12, "top5": 11 / 12}


def test_data_of_the_task() -> None:
    task = make_task("classification", 3)
    task.check(ImageDataset([b""] * 2, [0, 2]))
    with pytest.raises(VitrimError, match=r"^image 1 of there has label 3; valid: 0 to 2, the classes of the training"):
        task.check(ImageDataset([b""] * 2, [0, 3], source="there"))
    with pytest.raises(VitrimError, match=r"^image 0 of \w+ has label -1; valid: 0 to 2"):
        task.check(SimpleNamespace(labels=[-1]))
    for other in (MultiLabelDataset([b""], [[1, 0, 1]]), [1, 2]):
        with pytest.raises(VitrimError, match="has no single label per image, which task classification learns"):
            task.check(other)
