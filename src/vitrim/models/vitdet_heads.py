"""RoI heads of ViTDet on torchvision's: the selection of detections, and three stages that refine boxes (Cascade)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.models.detection._utils import BoxCoder, Matcher
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_inference, maskrcnn_loss
from torchvision.ops import MultiScaleRoIAlign, batched_nms, box_iou, clip_boxes_to_image, remove_small_boxes
from torchvision.ops.poolers import LevelMapper

ROI, MASK_ROI = 7, 14
"""Samples per side of a box, for its class and for its mask."""
PATCH_LEVEL = 4
"""The level whose stride is one patch: boxes of 14 patches are read there (`LevelMapper`)."""

Found = list[dict[str, Tensor]]


class Stage(NamedTuple):
    """One stage of a cascade: the overlap of a proposal with an object, and the weights of its box coordinates."""

    iou: float
    weights: tuple[float, float, float, float]


STAGES = (
    Stage(0.5, (10.0, 10.0, 5.0, 5.0)),
    Stage(0.6, (20.0, 20.0, 10.0, 10.0)),
    Stage(0.7, (30.0, 30.0, 15.0, 15.0)),
)


def wide(x: Tensor) -> Tensor:
    """Convert to at least float32, in which boxes are computed."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class WideReader(MultiScaleRoIAlign):
    """torchvision's RoI align, which has no kernels for bfloat16, in at least float32."""

    def forward(self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]) -> Tensor:
        """Read the maps ``x`` in ``boxes``; the result has the dtype of the maps."""
        kind = next(iter(x.values())).dtype
        read: Tensor = super().forward({name: wide(found) for name, found in x.items()}, boxes, image_shapes)
        return read.to(kind)


class RoIs(RoIHeads):
    """torchvision's RoI heads with two more ways to select boxes in evaluation, see `Detector`."""

    soft_nms: float | None = None
    maskness: float | None = None

    def forward(self, features: Any, proposals: Any, image_shapes: Any, targets: Any = None) -> Any:
        """Detections, or losses in training mode, as torchvision's."""
        found, losses = super().forward(features, proposals, image_shapes, targets)
        return self.rescored(found), losses

    def rescored(self, found: Found) -> Found:
        """Multiply scores by the mean probability of their masks, where it exceeds `maskness`."""
        if self.maskness is None:
            return found
        rescored = []
        for one in found:
            masks = one["masks"]  # (n, 1, 28, 28); the mean is 0 where no probability is high enough
            inside = masks > self.maskness
            # The mean over the pixels that count, one at least.
            mean = (masks * inside).sum((1, 2, 3)) / inside.sum((1, 2, 3)).clamp_min(1)
            rescored.append({**one, "scores": one["scores"] * mean})
        return rescored

    def postprocess_detections(
        self, class_logits: Tensor, box_regression: Tensor, proposals: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        counts = [len(boxes) for boxes in proposals]
        boxes = self.box_coder.decode(wide(box_regression), proposals).split(counts)
        scores = wide(class_logits).softmax(-1).split(counts)
        chosen = [self.choose(*one) for one in zip(boxes, scores, image_shapes, strict=True)]
        return [one[0] for one in chosen], [one[1] for one in chosen], [one[2] for one in chosen]

    def choose(self, boxes: Tensor, scores: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Select the detections of one image: boxes (n, 4), scores (n,), the highest first, and labels (n,) from 1.

        ``boxes`` are (R, K + 1, 4) of R proposals for every class, background first, or (R, 1, 4) for all of them,
        ``scores`` (R, K + 1); boxes are clipped to the image's ``size``.
        """
        # One box per proposal and class, without the background: a proposal may be found as several classes.
        boxes = clip_boxes_to_image(boxes, size).expand(-1, scores.shape[1], -1)[:, 1:].reshape(-1, 4)
        labels = torch.arange(1, scores.shape[1], device=scores.device).expand(len(scores), -1).reshape(-1)
        scores = scores[:, 1:].reshape(-1)
        found = torch.where(scores > self.score_thresh)[0]
        found = found[remove_small_boxes(boxes[found], min_size=1e-2)]
        boxes, scores, labels = boxes[found], scores[found], labels[found]
        if self.soft_nms is None:
            kept = batched_nms(boxes, scores, labels, self.nms_thresh)[: self.detections_per_img]
        else:
            overlap = self.soft_nms
            kept, scores = soft_nms(boxes, scores, labels, overlap, self.score_thresh, self.detections_per_img)
        return boxes[kept], scores[kept], labels[kept]

    def nominal(self, proposals: int, detections: int) -> None:
        """Run the heads on numbers of empty proposals and detections, on the meta device, for counting."""
        self.classify(self.read(proposals, ROI))
        if self.has_mask():
            self.mask_predictor(self.mask_head(self.read(detections, MASK_ROI)))

    def classify(self, features: Tensor) -> None:
        """Run all box heads on the features (R, channels, 7, 7) of R proposals."""
        self.box_predictor(self.box_head(features))

    def read(self, boxes: int, side: int) -> Tensor:
        """An empty (boxes, channels, side, side) on the device of the heads."""
        first = next(module for module in self.modules() if isinstance(module, nn.Conv2d))
        return first.weight.new_empty(boxes, first.in_channels, side, side)


def soft_nms(
    boxes: Tensor, scores: Tensor, labels: Tensor, overlap: float, least: float, most: int
) -> tuple[Tensor, Tensor]:
    """Select boxes in turn, the best first; each multiplies the scores of overlapping boxes of its class by 1 - IoU.

    Scores are lowered above an IoU of ``overlap``; those at or below ``least`` end the selection, as do ``most`` boxes.
    Returns the indices (m,) of the selected boxes in order, and the lowered scores (n,).

    Example:
        >>> boxes = torch.tensor([[0.0, 0, 10, 10], [0.0, 0, 10, 8], [20.0, 20, 30, 30]])
        >>> kept, scores = soft_nms(boxes, torch.tensor([0.9, 0.8, 0.7]), torch.tensor([1, 1, 1]), 0.5, 0.05, 100)
        >>> kept.tolist(), round(float(scores[1]), 2)
        ([0, 2, 1], 0.16)
    """
    kept: list[int] = []
    scores, waiting = scores.clone(), scores.clone()
    while len(kept) < most and len(waiting) and float(waiting.max()) > least:
        best = int(waiting.argmax())
        kept.append(best)
        # Selected boxes are below every threshold, and are lowered no more.
        waiting[best] = -1.0
        shared = box_iou(boxes[best : best + 1], boxes)[0] * (labels == labels[best])
        lowered = torch.where((shared > overlap) & (waiting >= 0), 1.0 - shared, 1.0)
        scores, waiting = scores * lowered, waiting * lowered
    return torch.tensor(kept, dtype=torch.long, device=boxes.device), scores


class CascadeRoIs(RoIs):
    """Three stages of box heads, each on the boxes of the stage before, trained at rising overlap (Cascade R-CNN).

    Boxes are class-agnostic. In evaluation the scores are the mean over the stages and the boxes those of the last.
    Each stage's gradient into the backbone is divided by their number. Masks train on the proposals of the first stage.
    """

    def __init__(self, *args: Any, stages: Sequence[tuple[nn.Module, nn.Module]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.box_heads = nn.ModuleList(head for head, _ in stages)
        self.box_predictors = nn.ModuleList(predictor for _, predictor in stages)
        self.coders = [BoxCoder(stage.weights) for stage in STAGES]
        self.matchers = [Matcher(stage.iou, stage.iou, allow_low_quality_matches=False) for stage in STAGES]

    def forward(
        self,
        features: Mapping[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: Found | None = None,
    ) -> tuple[Found, dict[str, Tensor]]:
        """Detections, or losses in training mode."""
        if self.training:
            return [], self.learn(features, proposals, image_shapes, targets)
        found, total = [], torch.zeros(())
        for stage in range(len(STAGES)):
            logits, deltas = self.predict(stage, features, proposals, image_shapes)
            # Every stage votes on the class, on boxes that get better.
            total = total.to(logits) + logits.softmax(-1)
            proposals = self.refined(stage, deltas, proposals, image_shapes)
        counts = [len(boxes) for boxes in proposals]
        scores = (total / len(STAGES)).split(counts)
        for boxes, score, size in zip(proposals, scores, image_shapes, strict=True):
            chosen, score, label = self.choose(boxes[:, None], score, size)
            found.append({"boxes": chosen, "scores": score, "labels": label})
        if self.has_mask():
            logits = self.mask_logits(features, [one["boxes"] for one in found], image_shapes)
            masks = maskrcnn_inference(logits, [one["labels"] for one in found])
            found = [{**one, "masks": mask} for one, mask in zip(found, masks, strict=True)]
        return self.rescored(found), {}

    def learn(
        self,
        features: Mapping[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: Found | None,
    ) -> dict[str, Tensor]:
        """Losses of all stages, added, and of the masks."""
        proposals, matched, labels, wanted = self.select_training_samples(proposals, targets)
        assert targets is not None
        first = proposals, matched, labels
        classes, boxes = [], []
        for stage in range(len(STAGES)):
            if stage:
                proposals, labels, wanted = self.matched(stage, proposals, targets)
            logits, deltas = self.predict(stage, features, proposals, image_shapes)
            every = deltas[:, None].expand(-1, logits.shape[1], -1).flatten(1)  # the same box for every class
            of_class, of_box = fastrcnn_loss(logits, every, labels, wanted)
            classes.append(of_class)
            boxes.append(of_box)
            # Boxes of the next stage are given, not learned through.
            proposals = self.refined(stage, deltas.detach(), proposals, image_shapes)
            proposals = [found[remove_small_boxes(found, min_size=1e-2)] for found in proposals]
        losses = {"loss_classifier": torch.stack(classes).sum(), "loss_box_reg": torch.stack(boxes).sum()}
        if self.has_mask():
            # the proposals of the first stage with an object
            proposals, matched, labels = first
            hits = [torch.where(found > 0)[0] for found in labels]
            held = [found[index] for found, index in zip(proposals, hits, strict=True)]
            of = [found[index] for found, index in zip(matched, hits, strict=True)]
            every_mask = [one["masks"] for one in targets], [one["labels"] for one in targets]
            logits = self.mask_logits(features, held, image_shapes)
            losses["loss_mask"] = maskrcnn_loss(logits, held, *every_mask, of)
        return losses

    def predict(
        self, stage: int, features: Mapping[str, Tensor], proposals: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """Logits (R, K + 1) and box changes (R, 4) of one stage."""
        read = self.box_roi_pool(features, proposals, image_shapes)
        share = 1.0 / len(STAGES)
        # The value stays and the gradient is divided: three stages would push the backbone three times as hard.
        read = share * read + (1.0 - share) * read.detach()
        logits, deltas = self.box_predictors[stage](self.box_heads[stage](read))
        return wide(logits), wide(deltas)

    def refined(
        self, stage: int, deltas: Tensor, proposals: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> list[Tensor]:
        """Boxes of one stage for each image, clipped to it."""
        boxes = self.coders[stage].decode(deltas, proposals)[:, 0].split([len(found) for found in proposals])
        return [clip_boxes_to_image(found, size) for found, size in zip(boxes, image_shapes, strict=True)]

    def matched(
        self, stage: int, proposals: list[Tensor], targets: Found
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The refined proposals with their target labels and box changes, by the overlap of this stage."""
        # torchvision's method reads the matcher from the module: this stage's takes its place for the call.
        self.proposal_matcher, before = self.matchers[stage], self.proposal_matcher
        objects = [target["boxes"].to(proposals[0].dtype) for target in targets]
        matched, labels = self.assign_targets_to_proposals(proposals, objects, [one["labels"] for one in targets])
        self.proposal_matcher = before
        near = [
            found[index] if len(found) else torch.zeros_like(boxes)
            for found, index, boxes in zip(objects, matched, proposals, strict=True)
        ]
        return proposals, labels, list(self.coders[stage].encode(near, proposals))

    def mask_logits(self, features: Mapping[str, Tensor], boxes: list[Tensor], image_shapes: Any) -> Tensor:
        """(R, K + 1, 28, 28) of the masks in ``boxes``."""
        found: Tensor = self.mask_predictor(self.mask_head(self.mask_roi_pool(features, boxes, image_shapes)))
        return found

    def classify(self, features: Tensor) -> None:
        for head, predictor in zip(self.box_heads, self.box_predictors, strict=True):
            predictor(head(features))


class AgnosticPredictor(nn.Module):
    """Class scores (R, K + 1), and one box change (R, 4) for all classes, of the features (R, hidden) of proposals."""

    def __init__(self, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.cls_score = nn.Linear(hidden, num_classes)
        self.bbox_pred = nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.cls_score(x), self.bbox_pred(x)


def roi_heads(
    num_classes: int,
    strides: Sequence[float],
    *,
    masks: bool,
    cascade: bool,
    channels: int,
    hidden: int,
    box_layers: int,
    samples: int,
    soft_nms: float | None,
    maskness: float | None,
) -> RoIs:
    """Create the heads of a `Detector`, with its arguments and the ``strides`` of the levels p2 to p5 in pixels."""
    labels = num_classes + 1

    def box_head() -> nn.Module:
        layers = [channels] * box_layers
        found: nn.Module = FastRCNNConvFCHead((channels, ROI, ROI), layers, [hidden], norm_layer=LayerNorm2d)
        return found

    options: dict[str, Any] = {
        "fg_iou_thresh": 0.5,
        "bg_iou_thresh": 0.5,
        "batch_size_per_image": samples,
        "positive_fraction": 0.25,
        "bbox_reg_weights": STAGES[0].weights,
        "score_thresh": 0.05,
        "nms_thresh": 0.5,
        "detections_per_img": 100,
    }
    if masks:
        options["mask_roi_pool"] = roi_reader(MASK_ROI, strides)
        options["mask_head"] = MaskRCNNHeads(channels, [channels] * 4, 1, norm_layer=LayerNorm2d)
        options["mask_predictor"] = MaskRCNNPredictor(channels, channels, labels)
    reader = roi_reader(ROI, strides)
    if cascade:
        stages = [(box_head(), AgnosticPredictor(hidden, labels)) for _ in STAGES]
        heads: RoIs = CascadeRoIs(reader, None, None, stages=stages, **options)
    else:
        heads = RoIs(reader, box_head(), FastRCNNPredictor(hidden, labels), **options)
    heads.soft_nms, heads.maskness = soft_nms, maskness
    return heads


def roi_reader(side: int, strides: Sequence[float]) -> MultiScaleRoIAlign:
    """torchvision's RoI align with ``side`` samples per side of a box, on levels of known ``strides`` in pixels.

    torchvision infers strides as powers of two, which those of patches need not be.
    """
    reader = WideReader(["p2", "p3", "p4", "p5"], side, sampling_ratio=2)
    reader.scales = [1.0 / stride for stride in strides]
    patch = strides[PATCH_LEVEL - 2]
    reader.map_levels = LevelMapper(2, 5, canonical_scale=14 * patch, canonical_level=PATCH_LEVEL)
    return reader
