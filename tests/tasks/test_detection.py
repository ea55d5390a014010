"""Boxes of objects, and their outlines."""

from __future__ import annotations

from math import nan
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from pycocotools.mask import encode
from torch import Tensor, nn
from torch.nn import functional as F

from dense_files import photo
from image_files import encoded
from vitrim.data import Boxes, DataError, DetectionDataset, ImageDataset
from vitrim.errors import VitrimError
from vitrim.tasks import make_task, tasks
from vitrim.tasks.detection import Detection, DetectionScores, Instances, in_stored_pixels
from vitrim.tasks.options import DenseAugment, Loss, Mix, Protocol

LOSS = Loss(name="rcnn")
OUTLINE = b"[[4, 6, 20, 6, 20, 26, 4, 26]]"


def boxes(count: int, generator: torch.Generator) -> Tensor:
    corner = 60 * torch.rand(count, 2, generator=generator)
    return torch.cat([corner, corner + 4 + 36 * torch.rand(count, 2, generator=generator)], dim=1)


def filled(given: Tensor) -> Tensor:
    rows, columns = torch.arange(100)[:, None], torch.arange(100)[None]
    return torch.stack([(columns >= x1) & (columns < x2) & (rows >= y1) & (rows < y2) for x1, y1, x2, y2 in given])


def scenes(count: int = 6, *, masks: bool = False) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Targets, and predictions that are these moved about, with some left out and some of no object."""
    generator = torch.Generator().manual_seed(0)
    predictions, targets = [], []
    for image in range(count):
        true = boxes(5, generator)
        labels = torch.randint(3, (5,), generator=generator)
        found = torch.cat([true[:4] + torch.randn(4, 4, generator=generator), boxes(2, generator)])
        guesses = torch.cat([labels[:4], torch.randint(3, (2,), generator=generator)])
        target = {"boxes": true, "labels": labels, "iscrowd": torch.tensor([0, 0, 0, 0, image % 2])}
        target["area"] = 0.8 * (true[:, 2] - true[:, 0]) * (true[:, 3] - true[:, 1])
        prediction = {"boxes": found, "labels": guesses, "scores": torch.rand(6, generator=generator)}
        if image == count - 1:  # nothing is there, nothing is found
            target = {name: value[:0] for name, value in target.items()}
            prediction = {name: value[:0] for name, value in prediction.items()}
        if masks:
            target["masks"] = filled(target["boxes"]) if len(target["boxes"]) else torch.zeros(0, 100, 100).bool()
            some = len(prediction["boxes"])
            prediction["masks"] = filled(prediction["boxes"]) if some else torch.zeros(0, 100, 100).bool()
        targets.append(target)
        predictions.append(prediction)
    return predictions, targets


# ---- scores ----------------------------------------------------------------------------------------------------------


def coco(objects: list[dict[str, Tensor]], *, outlines: bool) -> Any:
    """The objects of 100 x 100 images as pycocotools reads them."""
    data = COCO()
    images = [{"id": image, "height": 100, "width": 100} for image in range(1, len(objects) + 1)]
    data.dataset = {"images": images, "categories": [{"id": label} for label in range(3)], "annotations": []}
    for image, own in zip(images, objects, strict=True):
        for place, (x1, y1, x2, y2) in enumerate(own["boxes"].tolist()):
            one = {
                "id": len(data.dataset["annotations"]) + 1,
                "image_id": image["id"],
                "bbox": [x1, y1, x2 - x1, y2 - y1],
            }
            one |= {"category_id": int(own["labels"][place]), "iscrowd": int(own.get("iscrowd", torch.zeros(9))[place])}
            one["score"] = float(own["scores"][place]) if "scores" in own else 1.0
            drawn = float(own["masks"][place].sum()) if outlines else (x2 - x1) * (y2 - y1)
            one["area"] = float(own["area"][place]) if "area" in own else drawn
            if outlines:
                one["segmentation"] = encode(np.asfortranarray(own["masks"][place].numpy().astype(np.uint8)))
            data.dataset["annotations"].append(one)
    data.createIndex()
    return data


@pytest.mark.parametrize("masks", [False, True])
def test_scores_are_those_of_coco(masks: bool) -> None:
    """The oracle: COCO's own evaluation, its thresholds in float64."""
    predictions, targets = scenes(masks=masks)
    scores = DetectionScores(masks=masks)
    for part in range(0, 6, 2):
        scores.update(predictions[part : part + 2], targets[part : part + 2])
    found, per_class = scores.compute(), scores.per_class()
    endings = ["", "50", "75", "_small", "_medium", "_large"]  # in the order of COCO's summary
    kinds = {"box": "bbox", "mask": "segm"} if masks else {"box": "bbox"}
    assert set(found) == {f"{kind}_AP{ending}" for kind in kinds for ending in endings}
    for kind, theirs in kinds.items():
        library = COCOeval(coco(targets, outlines=masks), coco(predictions, outlines=masks), theirs)
        library.evaluate()
        library.accumulate()
        library.summarize()
        for ending, value in zip(endings, library.stats, strict=False):
            assert found[f"{kind}_AP{ending}"].item() == pytest.approx(nan if value < 0 else value, nan_ok=True)
            assert found[f"{kind}_AP{ending}"].dtype == torch.float64
        assert list(per_class[kind]) == [0, 1, 2]
        precision = library.eval["precision"][..., 0, -1]
        assert list(per_class[kind].values()) == pytest.approx(precision.mean((0, 1)).tolist())
    assert 0.1 < found["box_AP"] < 0.9
    assert found["box_AP_large"].isnan()


def test_areas_are_by_default_those_of_outlines_or_boxes() -> None:
    predictions, targets = scenes(masks=True)
    for masks in (False, True):
        plain = [{name: value for name, value in each.items() if name not in ("area", "iscrowd")} for each in targets]
        scores = DetectionScores(masks=masks)
        scores.update(predictions, plain)
        expected = (targets[0]["boxes"][:, 2:] - targets[0]["boxes"][:, :2]).prod(1)
        if masks:
            expected = targets[0]["masks"].flatten(1).sum(1).float()
        torch.testing.assert_close(scores.true_area[0], expected)
        assert not scores.true_iscrowd[0].any()


@pytest.mark.parametrize(("area", "size"), [(None, "medium"), (500.0, "small"), (1600.0, "medium"), (9500.0, "large")])
def test_an_object_is_as_large_as_the_data_say(area: float | None, size: str) -> None:
    """COCO's areas are of outlines: one that fills little of its box of 40 x 40 is small, below 32 x 32."""
    target = {"boxes": torch.tensor([[0.0, 0, 40, 40]]), "labels": torch.tensor([0])}
    prediction = {**target, "scores": torch.ones(1)}
    scores = DetectionScores()
    scores.update([prediction], [target if area is None else {**target, "area": torch.tensor([area])}])
    found = {name: scores.compute()[f"box_AP_{name}"].item() for name in ("small", "medium", "large")}
    assert found == pytest.approx({name: 1.0 if name == size else nan for name in found}, nan_ok=True)


def test_what_two_saw_adds_up() -> None:
    predictions, targets = scenes(masks=True)
    whole, parts = DetectionScores(masks=True), [DetectionScores(masks=True) for _ in range(2)]
    whole.update(predictions, targets)
    for place, part in enumerate(parts):
        part.update(predictions[3 * place : 3 * place + 3], targets[3 * place : 3 * place + 3])
    for name, value in parts[0].metric_state.items():
        assert all(isinstance(each, Tensor) for each in value)
        setattr(parts[0], name, [*value, *parts[1].metric_state[name]])
    torch.testing.assert_close(parts[0].compute(), whole.compute(), equal_nan=True)


# ---- data ------------------------------------------------------------------------------------------------------------


def dataset(*, outlines: bool = False) -> DetectionDataset:
    images = [encoded(photo(row, (40, 60))) for row in range(2)]
    given = [[OUTLINE], []] if outlines else None
    return DetectionDataset(images, [[[4, 6, 20, 26]], []], [[2], []], num_classes=3, outlines=given, source="there")


@pytest.mark.parametrize("name", ["detection", "instances"])
def test_batches(name: str) -> None:
    task = make_task(name, 3)
    data = dataset(outlines=name == "instances")
    task.check(data)
    geometry = SimpleNamespace(size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
    data.transform = task.train_transform(geometry, DenseAugment(crop="jitter", range=(0.8, 1.2)))
    images, objects = task.collate([data[0], data[1]])
    assert images.shape == (2, 3, 32, 32)
    task.check_targets(objects, 2)
    assert [len(each["labels"]) for each in objects] == [1, 0]
    data.transform = task.eval_transform(geometry)
    images, objects = task.collate([data[0], data[1]])
    assert images.shape == (2, 3, 32, 32)
    assert objects[0]["size"].tolist() == [21, 32]
    assert ("masks" in objects[0]) == (name == "instances")


def test_what_is_refused() -> None:
    task = Detection(4)
    with pytest.raises(VitrimError, match=r"^there has 3 classes, but the training data has 4 classes$"):
        task.check(dataset())
    with pytest.raises(VitrimError, match=r"^memory has no boxes, which task detection learns$"):
        task.check(ImageDataset([b""], [0]))
    with pytest.raises(VitrimError, match=r"^there has boxes without outlines, which task instances learns$"):
        Instances(3).check(dataset())
    with pytest.raises(VitrimError, match=r"^task instances does not mix images"):
        Instances(3).mixer(Mix(cutmix=1.0))
    with pytest.raises(VitrimError, match="this model has no losses of its own, which detection needs"):
        task.criterion(LOSS)(torch.zeros(1, 4), Boxes())
    with pytest.raises(DataError, match="expected the boxes of 2 images, got Tensor"):
        task.check_targets(torch.zeros(2), 2)
    with pytest.raises(DataError, match="image 1 of a batch has a box of label 4, beyond the model's 4 classes"):
        task.check_targets(Boxes({"labels": torch.tensor([label])} for label in (3, 4)), 2)


def test_the_auxiliary_loss_is_of_the_classes_that_are_there() -> None:
    auxiliary = Detection(3).auxiliary(LOSS)
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    targets = Boxes([{"labels": torch.tensor([2, 0, 2])}, {"labels": torch.zeros(0, dtype=torch.int64)}])
    expected = F.binary_cross_entropy_with_logits(logits, torch.tensor([[1.0, 0, 1], [0, 0, 0]]))
    torch.testing.assert_close(auxiliary(logits, targets), expected)
    torch.testing.assert_close(auxiliary(logits[:, None], targets), expected)
    with pytest.raises(VitrimError, match=r"expected one output \(B, K\) per image, got \(2, 4, 3\): set num"):
        auxiliary(torch.zeros(2, 4, 3), targets)


# ---- predictions -----------------------------------------------------------------------------------------------------


def test_predictions_are_scored_in_the_stored_pixels() -> None:
    """A detector that finds what is there in the padded input scores 1, at any size."""
    task = Instances(3)
    data = dataset(outlines=True)
    data.transform = task.eval_transform(SimpleNamespace(size=(80, 96), mean=(0.5,) * 3, std=(0.5,) * 3))
    images, objects = task.collate([data[0], data[1]])
    factor = 96 / 60
    masks = torch.zeros(1, 80, 96, dtype=torch.bool)
    masks[0, round(6 * factor) : round(26 * factor), round(4 * factor) : round(20 * factor)] = True
    there: dict[str, Any] = {"boxes": factor * objects[0]["boxes"], "labels": torch.tensor([2]), "masks": masks}
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0).long(), "masks": torch.zeros(0, 80, 96).bool()}

    class Oracle(nn.Module):
        def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
            return [there | {"scores": torch.ones(1)}, nothing | {"scores": torch.zeros(0)}]

    metrics = task.metrics()
    prediction = task.predict(Oracle(), images)
    task.update(metrics, prediction, objects)
    found = metrics.compute()
    assert found["box_AP"].item() == pytest.approx(1)
    assert found["mask_AP"].item() == pytest.approx(1)
    moved = in_stored_pixels(prediction[0], objects[0])
    torch.testing.assert_close(moved["boxes"], objects[0]["boxes"])
    assert (moved["masks"] != objects[0]["masks"]).sum() < 30


def test_objects_of_the_data_s_classes_stay_with_its_labels() -> None:
    """The model knows five classes, and the data two of them: 4 is its 0, 1 is its 1."""
    found = {
        "boxes": torch.arange(24.0).view(6, 4),
        "labels": torch.tensor([4, 0, 1, 2, 4, 3]),
        "scores": torch.arange(6) / 10,
    }

    class Known(nn.Module):
        def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
            return [found]

    task = Detection(2)
    task.labels = torch.tensor([-1, 1, -1, -1, 0])
    (own,) = task.predict(Known(), torch.zeros(1, 3, 8, 8))
    assert own["labels"].tolist() == [0, 1, 0]
    assert torch.equal(own["boxes"], found["boxes"][[0, 2, 4]])
    assert torch.equal(own["scores"], found["scores"][[0, 2, 4]])


@pytest.mark.parametrize("name", sorted(tasks()))
def test_images_of_their_own_sizes_and_protocols_come_one_by_one(name: str) -> None:
    task = make_task(name, 3)
    assert task.eval_batch(8) == 8
    task.unpadded = True
    assert task.eval_batch(8) == 1
    task.unpadded, task.protocol = False, Protocol(flip=True)
    assert task.eval_batch(8) == 1


def test_each_side_is_scaled_by_its_own_factor() -> None:
    """Three times as wide and twice as tall, cut at the image's border: by hand."""
    prediction = {"boxes": torch.tensor([[1.0, 2, 5, 4], [6, -1, 9, 9]])}
    target = {"size": torch.tensor([4, 8]), "original": torch.tensor([8, 24])}
    expected = torch.tensor([[3.0, 4, 15, 8], [18, 0, 24, 8]])
    assert torch.equal(in_stored_pixels(prediction, target)["boxes"], expected)
    masks = torch.zeros(1, 6, 8, dtype=torch.bool)  # the last two rows are padding
    masks[:, 1:3, 2:4] = True
    moved = in_stored_pixels({**prediction, "masks": masks}, target)["masks"]
    rows, columns = moved[0].any(1).nonzero().flatten(), moved[0].any(0).nonzero().flatten()
    assert (moved.shape, rows.tolist(), columns.tolist()) == ((1, 8, 24), [2, 3, 4, 5], [6, 7, 8, 9, 10, 11])


def test_agreement_with_dense() -> None:
    dense = {
        "boxes": torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30], [5, 5, 9, 9]]),
        "labels": torch.tensor([0, 1, 2]),
    }
    dense["scores"] = torch.tensor([0.9, 0.8, 0.4])  # the last one does not count
    found = {"boxes": torch.tensor([[0.0, 0, 10, 5], [20, 20, 30, 30]]), "labels": torch.tensor([0, 0])}
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0).long(), "scores": torch.zeros(0)}
    task = Detection(3)
    assert task.agreement([found], [dense], None).tolist() == [0.5, 0.0]
    assert task.agreement([nothing, dense], [dense, dense], None).tolist() == [0, 0, 1, 1]
    assert task.agreement([found], [nothing], None).shape == (0,)
