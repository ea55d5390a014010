"""What one model of a comparison is asked, and what it draws, on tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
import vitrim
from vitrim.core.registry import host_of
from vitrim.engines.macs import count_macs
from vitrim.measure.contestants import ModelOutput, contestants
from vitrim.measure.decisions import DecisionsProbe
from vitrim.measure.inputs import open_images
from vitrim.measure.probes import Agreement, MacsProbe, PairedLoss
from vitrim.measure.records import Batch
from vitrim.measure.run import Measurement
from vitrim.tasks import make_task

TASK = make_task("classification", 5)
ATM = "atm:alpha=0.9,beta=0.2,theta_min=0.1"


def test_the_feature_of_two_classifiers_is_the_mean_of_what_they_read() -> None:
    model: Any = tiny.HOSTS["distilled"]()
    read: list[torch.Tensor] = []
    for head in (model.head, model.head_dist):
        head.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    with torch.no_grad():
        model(tiny.images())
        own = read.copy()
        (dense,) = contestants(model, [], TASK)
        found = dense.run(tiny.images()).feature
    assert not torch.allclose(own[0], own[1])
    torch.testing.assert_close(found, (own[0] + own[1]) / 2)


def test_macs_of_a_method_that_adapts_are_those_of_all_images_of_a_batch() -> None:
    """And those of another method once for each shape; both per image, over batches of three and of one."""
    images = torch.cat([tiny.images(3), torch.zeros_like(tiny.images(1))])
    models = contestants(tiny.HOSTS["vit"](), [ATM, "tome:r=4"], TASK)
    measurement = Measurement(models, [MacsProbe()], TASK)
    measurement.follow([(part, torch.zeros(len(part), dtype=torch.int64)) for part in (images[:3], images[3:])])
    dense, adaptive, fixed = (sum(row["gmacs"].values()) for row in measurement.rows())
    assert [row["gmacs_images"] for row in measurement.rows()] == [1, 4, 1]
    plain = tiny.HOSTS["vit"]()
    assert dense == pytest.approx(count_macs(plain, images[:1]).total / 1e9)
    with vitrim.reduced(plain, "tome:r=4"):
        assert fixed == pytest.approx(count_macs(plain, images[:1]).total / 1e9)
    with vitrim.reduced(plain, ATM):
        parts = [count_macs(plain, part).total for part in (images[:3], images[3:])]
    assert parts[0] != parts[1]
    assert adaptive == pytest.approx((3 * parts[0] + parts[1]) / 4 / 1e9)


def test_draws_follow_from_the_seed_and_the_number_of_the_batch() -> None:
    """The same image in two batches is pruned differently, and in one batch of two passes alike."""
    image, label = tiny.images(1), torch.zeros(1, dtype=torch.int64)

    def sources(seed: int, *indices: int) -> list[list[int]]:
        models = contestants(tiny.HOSTS["vit"](), ["random:keep_rate=0.5"], TASK)
        measurement = Measurement(models, [DecisionsProbe()], TASK, seed=seed)
        for place, index in enumerate(indices):
            measurement.update(Batch(image, label, torch.tensor([place]), index))
        found = measurement.findings().gauges[1][0].decisions()  # type: ignore[attr-defined]
        return found.source.reshape(len(indices), -1).tolist()

    first, second = sources(3, 0, 1)
    assert first != second
    assert sources(3, 1) == [second]
    assert sources(4, 0) == [second]  # seed and number are added
    assert sources(9, 0) != [first]


def test_cosines_of_dense_features_are_means_over_patches() -> None:
    one, other = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    gauge = Agreement(TASK)
    batch = Batch(torch.zeros(4, 3, 2, 2), torch.zeros(4, dtype=torch.int64), torch.arange(4), 0)
    logits = torch.randn(4, 5)
    gauge.see(batch, ModelOutput(logits, one), ModelOutput(logits, other))
    by_hand = [float(a @ b / a.norm() / b.norm()) for a, b in zip(one.flatten(0, 1), other.flatten(0, 1), strict=True)]
    assert gauge.result() == {"agreement": 1.0, "cosine": pytest.approx(sum(by_hand) / 24)}


def test_a_transform_that_was_set_is_kept() -> None:
    from vitrim.data import ImageDataset

    own = ImageDataset([b"no image"], [0], transform=lambda image: image)
    model = tiny.HOSTS["vit"]()
    assert open_images(model, own).transform is own.transform
    plain = ImageDataset([b"no image"], [0])
    before = plain.transform
    assert open_images(model, plain).transform is not before
    assert plain.transform is before  # the dataset itself stays as it was


def test_products_of_a_predictor_are_layers_and_of_a_decision_matching() -> None:
    """ToMe's similarities of 18 sources and 18 destinations of width 8, in four blocks of ever fewer tokens."""
    model = tiny.HOSTS["vit"]()
    width = host_of(model).facts(model).dim // host_of(model).facts(model).num_heads
    with vitrim.reduced(model, "tome:r=4"):
        found = count_macs(model, tiny.images(1))
    left = [36, 32, 28, 24]
    assert found.matching == sum((patches // 2) * (patches - patches // 2) * width for patches in left)


@pytest.mark.parametrize("iterations", [1, 5])
def test_products_of_what_scores_early_are_matching(iterations: int) -> None:
    """Zero-TPrune's, of two heads of width 16 and 37 tokens: the map once more, and a row by it for each iteration."""
    model = tiny.HOSTS["vit"]()
    with vitrim.reduced(model, f"zero_tprune:blocks=[1],num_similar=0,keep_rate=0.5,iterations={iterations}"):
        assert count_macs(model, tiny.images(1)).matching == 2 * 37 * 37 * (16 + iterations)


def test_the_loss_is_what_the_dense_model_got_right_and_this_one_did_not() -> None:
    """Of five images the dense model has three right, and the other one two, of which one is new: 1, 1, -1, 0, 0."""
    labels = torch.tensor([0, 1, 2, 0, 1])
    dense = torch.eye(3)[torch.tensor([0, 1, 0, 1, 1])] * 2
    found = torch.eye(3)[torch.tensor([1, 2, 2, 2, 1])] * 3
    gauge = PairedLoss(make_task("classification", 3), labels=True)
    gauge.see(Batch(torch.zeros(5, 3, 2, 2), labels, torch.arange(5), 0), ModelOutput(found), ModelOutput(dense))
    result = gauge.result()
    assert result["loss"] == pytest.approx(0.2)
    assert result["loss_error"] == pytest.approx((3 / 5 - 0.04) ** 0.5 / 5**0.5)
    own, other = (each.double().softmax(1) for each in (found, dense))
    assert result["kl"] == pytest.approx(float((other * (other / own).log()).sum(1).mean()))
    agreement = PairedLoss(make_task("classification", 3), labels=False)
    agreement.see(Batch(torch.zeros(5, 3, 2, 2), labels, torch.arange(5), 0), ModelOutput(found), ModelOutput(dense))
    assert agreement.result()["loss"] == pytest.approx(0.8)
