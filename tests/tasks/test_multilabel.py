"""Any number of labels per image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import golden_files
from vitrim.data import ImageDataset, MultiLabelDataset
from vitrim.errors import VitrimError
from vitrim.tasks import make_task
from vitrim.tasks.multilabel import MeanAveragePrecision
from vitrim.tasks.options import Loss, Mix


@golden_files.cases(["training/losses_metrics_a"], arrays=("asl/*",))
def test_the_asymmetric_loss_and_its_gradient_are_the_published_ones(ref: golden_files.Reference) -> None:
    logits = golden_files.tensor(ref, "asl/logits").double().requires_grad_()
    criterion = make_task("multilabel", logits.shape[1]).criterion(Loss(name="asl"))
    loss = criterion(logits, golden_files.tensor(ref, "asl/targets").double())
    loss.backward()
    ref.check("asl/loss", loss)
    ref.check("asl/grad", logits.grad)


@golden_files.cases(["training/losses_metrics_a"], arrays=("map/*",))
def test_average_precisions_are_the_published_ones(ref: golden_files.Reference) -> None:
    scores, targets = golden_files.tensor(ref, "map/scores"), golden_files.tensor(ref, "map/targets")
    metrics = make_task("multilabel", scores.shape[1]).metrics()
    for part in range(0, len(scores), 4):
        metrics.update(scores[part : part + 4], targets[part : part + 4])
    ref.check("map/value", 100 * metrics.compute()["mAP"])
    ref.check("map/ap", metrics["mAP"].average_precisions().double())


def average_precision(scores: Tensor, targets: Tensor) -> float:
    """The definition: the mean, over the positives, of the precision down to each."""
    ranked = targets[scores.argsort(descending=True)]
    precisions = [ranked[: place + 1].float().mean().item() for place in range(len(ranked)) if ranked[place]]
    return sum(precisions) / len(precisions)


@given(st.integers(0, 2**31 - 1), st.integers(2, 12), st.integers(1, 5), st.floats(0.1, 100.0))
def test_the_mean_of_average_precisions(seed: int, images: int, classes: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(images, classes, generator=generator) * spread
    targets = (torch.rand(images, classes, generator=generator) < 0.3).float()
    metrics = make_task("multilabel", classes).metrics()
    metrics.update(scores, targets)
    precisions = [average_precision(scores[:, k], targets[:, k]) for k in range(classes) if targets[:, k].any()]
    found = {name: value.item() for name, value in metrics.compute().items()}
    assert found["mAP"] == pytest.approx(sum(precisions) / classes, abs=1e-5)
    assert found["mAP_occurring"] == pytest.approx(sum(precisions) / max(len(precisions), 1), abs=1e-5)


def test_a_batch_of_logits_between_0_and_1_is_of_logits_too() -> None:
    scores = torch.tensor([[0.9], [0.2], [-0.5], [3.0]])
    targets = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    metric = MeanAveragePrecision()
    for part in (slice(0, 2), slice(2, 4)):  # the first could be of probabilities
        metric.update(scores[part], targets[part])
    assert metric.compute()["mAP"].item() == 0.5


@pytest.mark.parametrize(
    ("found", "dense", "share"),
    [
        ("ab", "ab", 1),
        ("", "", 1),  # both see nothing
        ("a", "", 0),
        ("", "a", 0),
        ("abc", "a", 1 / 3),  # what was not there before counts, too
        ("a", "abc", 1 / 3),
        ("ab", "bc", 1 / 3),
        ("abcd", "cd", 1 / 2),
        ("a", "d", 0),
    ],
)
def test_agreement_is_the_intersection_over_the_union(found: str, dense: str, share: float) -> None:
    """A logit of 0 is a probability of 1/2, which is not above it."""
    letters = "abcd"
    logits = [torch.tensor([[2.0 if letter in each else 0.0 for letter in letters]]) for each in (found, dense)]
    (agreement,) = make_task("multilabel", 4).agreement(*logits, None).tolist()
    assert agreement == pytest.approx(share)


def test_no_class_occurs() -> None:
    metrics = make_task("multilabel", 2).metrics()
    metrics.update(torch.zeros(3, 2), torch.zeros(3, 2))
    assert {name: value.item() for name, value in metrics.compute().items()} == {"mAP": 0, "mAP_occurring": 0}


def test_metrics_start_anew() -> None:
    metrics = make_task("multilabel", 1).metrics()
    metrics.update(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [0.0]]))
    metrics.reset()
    metrics.update(torch.tensor([[0.0]]), torch.tensor([[1.0]]))
    assert metrics.compute()["mAP"].item() == 1


@pytest.mark.parametrize(("sum_classes", "factor"), [(False, 1), (True, 3)])
def test_smoothed_binary_cross_entropy(sum_classes: bool, factor: int) -> None:
    logits, targets = torch.randn(4, 3), torch.tensor([[1.0, 0, 1]] * 4)
    loss = make_task("multilabel", 3).criterion(Loss(name="bce", smoothing=0.2, sum_classes=sum_classes))
    expected = F.binary_cross_entropy_with_logits(logits, torch.tensor([[0.9, 0.1, 0.9]] * 4))
    torch.testing.assert_close(loss(logits, targets), factor * expected)


def test_the_asymmetric_loss_has_no_smoothing() -> None:
    with pytest.raises(VitrimError, match=r"^loss asl has no smoothing \(got loss.smoothing=0.1\): set it to 0$"):
        make_task("multilabel", 3).criterion(Loss(name="asl", smoothing=0.1))


def test_mixed_labels() -> None:
    mixer = make_task("multilabel", 3).mixer(Mix(mixup=1.0))
    assert mixer is not None
    np.random.seed(0)
    images, targets = torch.rand(2, 3, 4, 4), torch.tensor([[1.0, 1, 0], [0, 1, 0]])
    mixed, soft = mixer(images.clone(), targets)
    share = soft[0, 0].item()
    assert 0 < share < 1
    torch.testing.assert_close(soft, torch.tensor([[share, 1, 0], [1 - share, 1, 0]]))
    torch.testing.assert_close(mixed[0], share * images[0] + (1 - share) * images[1])


def test_data_of_the_task() -> None:
    task = make_task("multilabel", 3)
    task.check(MultiLabelDataset([b""], [[1, 0, 0]]))
    with pytest.raises(VitrimError, match=r"^there has 2 classes, but the training data has 3 classes$"):
        task.check(MultiLabelDataset([b""], [[1, 0]], source="there"))
    with pytest.raises(VitrimError, match=r"has no table of classes per image, which task multilabel learns$"):
        task.check(ImageDataset([b""], [0]))
