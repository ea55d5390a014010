"""ViTDet: pyramid, anchors, heads against torchvision's own, cascade, soft-NMS, losses, whole models."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.ops import MultiScaleRoIAlign, box_iou

import vitrim
from vitrim.loading import create_model
from vitrim.models.vitdet import Detector, SimpleFeaturePyramid, StridedAnchors
from vitrim.models.vitdet_heads import roi_reader, soft_nms
from vitrim.tasks.step import Step

TINY = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
SMALL = {"channels": 16, "hidden": 32, "rpn_layers": 1, "box_layers": 1}
KINDS: dict[str, dict[str, Any]] = {
    "boxes": {},
    "masks": {"masks": True},
    "cascade": {"masks": True, "cascade": True},
}


def detector(num_classes: int = 3, **options: Any) -> Detector:
    torch.manual_seed(0)
    model = create_model(
        "vitdet:vit_tiny_patch16_224", options={**TINY, **SMALL, "num_classes": num_classes, **options}
    )
    assert isinstance(model, Detector)
    return model


def scene() -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Two images of 64 px: two squares of different classes, and nothing."""
    images = torch.zeros(2, 3, 64, 64)
    boxes = torch.tensor([[8.0, 8.0, 28.0, 28.0], [34.0, 30.0, 60.0, 56.0]])
    masks = torch.zeros(2, 64, 64, dtype=torch.bool)
    for index, (left, top, right, bottom) in enumerate(boxes.long().tolist()):
        images[0, index, top:bottom, left:right] = 1.0
        masks[index, top:bottom, left:right] = True
    none = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long), "masks": torch.zeros(0, 64, 64)}
    return images, [{"boxes": boxes, "labels": torch.tensor([0, 2]), "masks": masks}, none]


# ---- pyramid, anchors, readers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [(8, 8), (7, 10), (1, 1)])
def test_maps_have_scales_4_2_1_and_a_half(grid: tuple[int, int]) -> None:
    maps = SimpleFeaturePyramid(16, channels=8)(torch.randn(2, 16, *grid))
    height, width = grid
    up = [-(-height // 2), -(-width // 2)]
    expected = [[4 * height, 4 * width], [2 * height, 2 * width], [height, width], up, [-(-side // 2) for side in up]]
    assert [list(found.shape[2:]) for found in maps.values()] == expected
    assert list(maps) == ["p2", "p3", "p4", "p5", "p6"]
    assert torch.equal(maps["p6"], maps["p5"][:, :, ::2, ::2])


def test_the_pyramid_has_the_published_layers_and_no_bias() -> None:
    pyramid = SimpleFeaturePyramid(16, channels=8)
    shapes = {name: tuple(value.shape) for name, value in pyramid.named_parameters()}
    assert shapes["p2.0.weight"] == (16, 8, 2, 2)
    assert shapes["p2.3.weight"] == (8, 4, 2, 2)
    assert shapes["p3.0.weight"] == (16, 8, 2, 2)
    convolutions = [name for name, shape in shapes.items() if len(shape) == 4 and shape[0] == 8 and shape[2] in (1, 3)]
    assert len(convolutions) == 8
    assert all(name.replace("weight", "bias") not in shapes for name in convolutions)


def test_fewer_proposals_of_one_detector_change_no_other() -> None:
    few = detector()
    few.rpn._pre_nms_top_n.update(training=5, testing=4)
    few.rpn._post_nms_top_n.update(training=3, testing=2)
    other = detector()
    assert other.rpn._pre_nms_top_n == {"training": 2000, "testing": 1000}  # torchvision's defaults of Faster R-CNN
    assert other.rpn._post_nms_top_n == {"training": 2000, "testing": 1000}


def test_anchors_are_torchvisions_where_its_strides_divide() -> None:
    strides = [4.0, 8.0, 16.0]
    maps = [torch.zeros(2, 1, 64 // int(stride), 64 // int(stride)) for stride in strides]
    batch = ImageList(torch.zeros(2, 3, 64, 64), [(64, 64), (60, 50)])
    theirs = AnchorGenerator(((32.0,), (64.0,), (128.0,)), ((0.5, 1.0, 2.0),) * 3)(batch, maps)
    ours = StridedAnchors(strides)(batch, maps)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_readers_are_torchvisions_where_it_guesses_the_strides_right() -> None:
    torch.manual_seed(0)
    maps = {f"p{level}": torch.randn(1, 2, 128 >> level, 128 >> level) for level in (2, 3, 4, 5)}
    boxes = [torch.tensor([[3.0, 5.0, 30.0, 40.0], [0.0, 0.0, 120.0, 126.0], [50.0, 50.0, 58.0, 57.0]])]
    theirs = MultiScaleRoIAlign(["p2", "p3", "p4", "p5"], 7, 2)(maps, boxes, [(128, 128)])
    torch.testing.assert_close(roi_reader(7, [4.0, 8.0, 16.0, 32.0])(maps, boxes, [(128, 128)]), theirs)


@pytest.mark.parametrize("patch", [14, 16])
def test_what_is_read_of_a_box_follows_it_at_any_patch_size(patch: int) -> None:
    """A map that says where it is, read in a box: places of torchvision's guess would lie elsewhere at 14 px."""
    strides = [patch / 4, patch / 2, float(patch), patch * 2.0]
    side = 8 * patch
    maps = {}
    for level, stride in enumerate(strides, 2):
        places = (torch.arange(round(side / stride)) + 0.5) * stride
        maps[f"p{level}"] = places.expand(1, 1, len(places), -1).contiguous()
    box = torch.tensor([[2.0 * patch, 2.0 * patch, 6.0 * patch, 6.0 * patch]])
    read = roi_reader(7, strides)(maps, [box], [(side, side)])[0, 0, 3]
    step = 4.0 * patch / 7
    torch.testing.assert_close(read, 2.0 * patch + step * (torch.arange(7) + 0.5), atol=patch / 2, rtol=0)
    assert all(after > before for before, after in pairwise(read.tolist()))


# ---- detections ------------------------------------------------------------------------------------------------------


def test_detections_are_torchvisions() -> None:
    model = detector()
    heads = model.roi_heads
    torch.manual_seed(1)
    proposals = [torch.rand(30, 4) * 20, torch.rand(20, 4) * 20]
    for boxes in proposals:
        boxes[:, 2:] += boxes[:, :2] + 2
    logits, changes = 3 * torch.randn(50, 4), torch.randn(50, 16)
    args = (logits, changes, proposals, [(40, 36), (30, 40)])
    theirs = RoIHeads.postprocess_detections(heads, *args)
    for ours, expected in zip(heads.postprocess_detections(*args), theirs, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))
        assert sum(map(len, ours)) > 0


def test_soft_nms_against_the_rule_in_plain_lines() -> None:
    torch.manual_seed(0)
    boxes = torch.rand(25, 4) * 10
    boxes[:, 2:] += boxes[:, :2] + 5
    scores, labels = torch.rand(25), torch.randint(0, 2, (25,))
    kept, lowered = soft_nms(boxes, scores, labels, 0.3, 0.05, 10)
    left = {index: float(score) for index, score in enumerate(scores)}
    expected = []
    while len(expected) < 10:
        best = max(left, key=lambda index: left[index])
        if left[best] <= 0.05:
            break
        expected.append((best, left.pop(best)))
        for other in left:
            iou = float(box_iou(boxes[best : best + 1], boxes[other : other + 1]))
            if labels[other] == labels[best] and iou > 0.3:
                left[other] *= 1 - iou
    assert kept.tolist() == [index for index, _ in expected]
    assert lowered[kept].tolist() == pytest.approx([score for _, score in expected], rel=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_is_the_same_in_training_mode(kind: str) -> None:
    model = detector(**KINDS[kind])
    images, _ = scene()
    with torch.no_grad():
        found, again = model.eval()(images), model.train()(images)
    assert model.rpn.training
    assert model.roi_heads.training
    names = {"boxes", "labels", "scores"} | ({"masks"} if model.masks else set())
    for one, other in zip(found, again, strict=True):
        assert set(one) == names
        assert all(torch.equal(one[name], other[name]) for name in names)
        assert one["boxes"].shape == (len(one["labels"]), 4)
        assert ((one["boxes"] >= 0) & (one["boxes"] <= 64)).all()
        assert ((one["labels"] >= 0) & (one["labels"] < 3)).all()
        if model.masks:
            assert one["masks"].shape == (len(one["labels"]), 64, 64)
            assert one["masks"].dtype == torch.bool


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["masks", "cascade"])
def test_boxes_are_computed_in_float32_where_the_model_is_in_half_precision(kind: str, dtype: torch.dtype) -> None:
    """Places in bfloat16 are whole pixels from 128 on; torchvision has no NMS in either dtype on CPUs."""
    model = detector(**KINDS[kind]).to(dtype)
    with torch.no_grad():
        found = model(scene()[0].to(dtype))
    for one in found:
        assert len(one["boxes"]) > 0
        assert one["boxes"].dtype == one["scores"].dtype == torch.float32
        assert one["boxes"].isfinite().all()
        assert not torch.equal(one["boxes"], one["boxes"].to(dtype).float())  # finer than that


def test_boxes_stay_in_the_valid_part_of_padded_images() -> None:
    model = detector()
    with torch.no_grad():
        found = model(torch.randn(2, 3, 60, 64), [(60, 64), (30, 40)])
    assert len(found[1]["boxes"]) > 0
    assert (found[1]["boxes"] <= torch.tensor([40.0, 30.0, 40.0, 30.0])).all()


def test_maskness_lowers_scores_of_unsure_masks() -> None:
    images, _ = scene()
    with torch.no_grad():
        plain, weighed = detector(masks=True)(images), detector(masks=True, maskness=0.5)(images)
        soft = detector(masks=True, soft_nms=0.6)(images)
    assert torch.equal(plain[0]["boxes"], weighed[0]["boxes"])
    assert (weighed[0]["scores"] <= plain[0]["scores"]).all()
    assert len(soft[0]["boxes"]) >= len(plain[0]["boxes"])


def test_maskness_is_the_mean_of_what_is_above_it() -> None:
    masks = torch.tensor([[[[0.9, 0.7], [0.4, 0.5]]], [[[0.1, 0.2], [0.3, 0.5]]]])
    heads = detector(masks=True, maskness=0.5).roi_heads
    rescored = heads.rescored([{"masks": masks, "scores": torch.tensor([1.0, 1.0])}])
    torch.testing.assert_close(rescored[0]["scores"], torch.tensor([0.8, 0.0]))


def test_boxes_without_an_area_are_no_detections() -> None:
    """As torchvision's own heads drop them, though they have the best scores."""
    heads = detector().roi_heads
    boxes = torch.tensor([[[5.0, 5.0, 5.0, 30.0]], [[8.0, 9.0, 20.0, 9.0]], [[1.0, 2.0, 30.0, 40.0]]])
    scores = torch.tensor([[0.0, 0.9, 0.1, 0.0], [0.0, 0.0, 0.8, 0.2], [0.3, 0.1, 0.6, 0.0]])
    found, score, label = heads.choose(boxes, scores, (64, 64))
    assert found.tolist() == [[1.0, 2.0, 30.0, 40.0]] * 2
    torch.testing.assert_close(score, torch.tensor([0.6, 0.1]))
    assert label.tolist() == [2, 1]


def test_a_cascade_scores_by_the_mean_of_its_stages() -> None:
    """Cascade R-CNN, section 4.3: the three classifiers vote on the boxes of the last stage."""
    model: Any = detector(cascade=True)
    with torch.no_grad():
        for stage, predictor in enumerate(model.roi_heads.box_predictors):  # so that they disagree
            predictor.cls_score.bias += torch.eye(4)[stage] * 4
    plain, votes = model.roi_heads.predict, []

    def predict(*args: Any) -> tuple[Tensor, Tensor]:
        logits, deltas = plain(*args)
        votes.append(logits.softmax(-1))
        return logits, deltas

    model.roi_heads.predict = predict
    with torch.no_grad():
        (found,) = model(scene()[0][:1])
    assert len(votes) == 3
    mean = ((votes[0] + votes[1] + votes[2]) / 3)[:, 1:]
    assert len(found["scores"]) > 0
    for score, label in zip(found["scores"], found["labels"], strict=True):
        assert (mean[:, label] - score).abs().min() < 1e-6


def test_anchors_of_maps_in_half_precision_are_those_of_float32() -> None:
    """512 px need nine bits, and bfloat16 has eight."""
    anchors = StridedAnchors([5.3, 11.7])
    found = [
        anchors(ImageList(torch.zeros(1, 3, 512, 512), [(512, 512)]), [torch.zeros(1, 8, 40, 40, dtype=dtype)] * 2)[0]
        for dtype in (torch.bfloat16, torch.float32)
    ]
    assert torch.equal(*found)


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_reach_every_parameter_images_without_objects_included(kind: str) -> None:
    model = detector(**KINDS[kind]).train()
    images, targets = scene()
    losses = model.losses(Step(model, None, images, targets, lambda *pair: pair[0]))
    names = {"total", "rpn_objectness", "rpn_box", "roi_class", "roi_box"} | ({"roi_mask"} if model.masks else set())
    assert set(losses) == names
    torch.testing.assert_close(losses["total"], sum(value for name, value in losses.items() if name != "total"))
    losses["total"].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    empty = model.criterion(images, [targets[1], targets[1]])
    assert all(value.isfinite() for value in empty.values())
    empty["total"].backward()


@pytest.mark.parametrize("kind", KINDS)
def test_losses_look_for_objects_in_the_valid_part_of_padded_images(kind: str) -> None:
    model = detector(**KINDS[kind])
    images, targets = scene()
    small = [{**targets[0], "boxes": targets[0]["boxes"] * 0.5, "size": torch.tensor([30, 40])}, targets[1]]
    seen: list[tuple[Any, ...]] = []
    model.roi_heads.register_forward_pre_hook(lambda module, args: seen.append(args))
    model.criterion(torch.randn_like(images), small)
    _, proposals, sizes, _ = seen[0]
    assert [tuple(size) for size in sizes] == [(30, 40), (64, 64)]
    assert (proposals[0] <= torch.tensor([40.0, 30.0, 40.0, 30.0])).all()
    assert (proposals[1] > 40).any()


def test_every_stage_of_a_cascade_gives_the_maps_its_share_of_the_gradient() -> None:
    """Three heads read one map: each adds a third of its gradient, as the authors' `_ScaleGradient`."""
    model: Any = detector(cascade=True)
    heads = model.roi_heads
    generator = torch.Generator().manual_seed(1)
    maps = {
        name: torch.randn(1, 16, size, size, generator=generator, requires_grad=True)
        for name, size in zip(heads.box_roi_pool.featmap_names, (32, 16, 8, 4), strict=False)
    }
    boxes = [torch.tensor([[4.0, 4.0, 40.0, 30.0], [0.0, 10.0, 60.0, 62.0]])]
    for stage in range(3):
        plain = heads.box_predictors[stage](heads.box_heads[stage](heads.box_roi_pool(maps, boxes, [(64, 64)])))
        mine = heads.predict(stage, maps, boxes, [(64, 64)])
        torch.testing.assert_close(mine, tuple(plain))
        whole, third = (
            torch.autograd.grad(sum(part.square().sum() for part in out), list(maps.values()), allow_unused=True)
            for out in (plain, mine)
        )
        assert any(one is not None and one.any() for one in whole)
        for one, other in zip(whole, third, strict=True):
            if one is not None:
                torch.testing.assert_close(other, one / 3)


def test_boxes_around_many_objects_teach_nothing() -> None:
    model = detector()
    images, targets = scene()
    crowd = [{**target, "iscrowd": torch.arange(len(target["boxes"])) > 0} for target in targets]
    assert model._target(crowd[0])["boxes"].tolist() == [[8.0, 8.0, 28.0, 28.0]]
    assert model.criterion(images, crowd)["total"].isfinite()


def test_labels_are_shifted_inside_only_and_targets_are_left_as_they_are() -> None:
    model = detector()
    images, targets = scene()
    before = [{name: value.clone() for name, value in target.items()} for target in targets]
    model.criterion(images, targets)
    assert all(torch.equal(old[name], new[name]) for old, new in zip(before, targets, strict=True) for name in old)
    assert model._target(targets[0])["labels"].tolist() == [1, 3]


def test_masks_are_learned_from_masks() -> None:
    images, targets = scene()
    bare = [{name: value for name, value in target.items() if name != "masks"} for target in targets]
    with pytest.raises(vitrim.VitrimError, match="the targets have none: set masks=false"):
        detector(masks=True).criterion(images, bare)


# ---- reduced, and options --------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["tome:r=8", "topk:blocks=[1],restore=last_block", "evit:blocks=[1]"])
def test_reduced_detectors_detect_and_learn(method: str) -> None:
    model = detector().train()
    vitrim.reduce_(model, method)
    images, targets = scene()
    model.criterion(images, targets)["total"].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        assert len(model.eval()(images)) == 2
