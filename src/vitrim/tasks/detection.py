"""Detection and instance segmentation: the tasks, and average precision."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from math import nan
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchvision.ops import box_convert, box_iou

from vitrim.core.registry import ask
from vitrim.data.dense import DetectionDataset
from vitrim.data.objects import Boxes, import_pycocotools
from vitrim.errors import DataError, VitrimError
from vitrim.tasks.base import Task, register_task

if TYPE_CHECKING:
    from vitrim.data.objects import Objects
    from vitrim.tasks.options import Loss
    from vitrim.tasks.step import Criterion

SURE = 0.5
"""Score above which a detection of the dense model counts in the agreement."""
FAST = "faster_coco_eval"
_ENDINGS = {"": "", "50": "_50", "75": "_75", "_small": "_small", "_medium": "_medium", "_large": "_large"}
"""Suffixes of the names, ours and torchmetrics'."""
_OVERLAPS, _RECALLS = np.linspace(0.5, 0.95, 10).tolist(), np.linspace(0.0, 1.0, 101).tolist()
"""COCO's thresholds; torchmetrics' float32 ones move a recall of exactly 0.1 to the other side."""
_FIELDS = {
    "predicted": {"boxes": torch.float32, "scores": torch.float32, "labels": torch.int64},
    "true": {"boxes": torch.float32, "labels": torch.int64, "iscrowd": torch.int64, "area": torch.float32},
}
"""Fields that are kept of every image, besides masks."""


@register_task
class Detection(Task):
    """Detection: boxes around the objects of K classes.

    * Loss: `rcnn`, the losses of the model itself (`vitdet:NAME`).
    * Metrics: `box_AP`, `box_AP50`, `box_AP75` and those of small, medium and large objects, see `DetectionScores`.

    For each image a model returns a dict of `boxes` (n, 4) x1 y1 x2 y2 in pixels of its input, `labels` (n,), `scores`
    (n,) and, for the task `instances`, `masks` (n, H, W).
    """

    name = "detection"
    learned_by = "a model vitdet:NAME without masks"
    reads = "detection"
    selects_by = "box_AP"
    losses = ("rcnn",)
    agreement_means = "best IoU with the dense model's boxes"
    shown: ClassVar[tuple[str, ...] | None] = ("box_AP", "box_AP50", "box_AP75")
    cost_varies = True  # of the heads, by the number of proposals
    outlines = False

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.labels: Tensor | None = None
        """The class of the data for each of the model's, -1 for none; None: they are the same."""

    def check(self, dataset: Any) -> None:
        source = getattr(dataset, "source", type(dataset).__name__)
        if not isinstance(dataset, DetectionDataset):
            raise VitrimError(f"{source} has no boxes, which task {self.name} learns")
        if self.outlines and dataset.outlines is None:
            raise VitrimError(f"{source} has boxes without outlines, which task {self.name} learns")
        self.check_classes(source, dataset.num_classes)

    def criterion(self, loss: Loss) -> Criterion:
        self.check_loss(loss)

        def own(logits: Any, targets: Any) -> Tensor:
            raise VitrimError("this model has no losses of its own, which detection needs: train vitdet:NAME")

        return own

    def auxiliary(self, loss: Loss) -> Criterion:
        self.check_loss(loss)
        return classes_present

    def meet(self, places: list[int] | None) -> None:
        if places is not None:
            self.labels = torch.full((self.num_classes,), -1)
            self.labels[places] = torch.arange(len(places))
        super().meet(places)

    def collate(self, items: list[tuple[Tensor, Objects]]) -> tuple[Tensor, Boxes]:
        """Stack images (B, C, H, W), padded to one size by the transforms, and list their objects."""
        return torch.stack([image for image, _ in items]), Boxes(objects for _, objects in items)

    def check_targets(self, targets: Any, count: int) -> None:
        if not isinstance(targets, Boxes) or len(targets) != count:
            raise DataError(f"expected the boxes of {count} images, got {type(targets).__name__}")
        for place, objects in enumerate(targets):
            labels = objects["labels"]
            wrong = labels[(labels < 0) | (labels >= self.num_classes)]
            if len(wrong):
                raise DataError(
                    f"image {place} of a batch has a box of label {int(wrong[0])}, beyond the model's "
                    f"{self.num_classes} classes, 0 to {self.num_classes - 1}"
                )

    def predict(self, model: nn.Module, images: Tensor, targets: Any = None) -> list[Objects]:
        """Detect objects in images (B, C, H, W), one dict per image.

        ``size`` of the targets is the height and width of each image; the rest is padding.
        """
        sizes = None
        if targets is not None and all("size" in objects for objects in targets):
            sizes = [tuple(objects["size"].tolist()) for objects in targets]
        found = ask(model).detections(model, images, sizes)
        if self.labels is None:
            return found
        known = []
        for objects in found:  # those of the data's classes, with its labels
            # -1 for a class of the model that the data does not have.
            labels = self.labels.to(objects["labels"].device)[objects["labels"]]
            known.append({name: value[labels >= 0] for name, value in {**objects, "labels": labels}.items()})
        return known

    def update(self, metrics: MetricCollection, prediction: Any, targets: Any) -> None:
        pairs = zip(prediction, targets, strict=True)
        metrics.update([in_stored_pixels(found, target) for found, target in pairs], targets)

    def agreement(self, prediction: Any, dense: Any, targets: Any) -> Tensor:
        """The best IoU with a detection of the same class, for each detection of the dense model above `SURE`."""
        best = []
        for found, other in zip(prediction, dense, strict=True):
            sure = other["scores"] > SURE
            boxes, labels = other["boxes"][sure].double(), other["labels"][sure]
            if len(found["boxes"]):
                same = labels[:, None] == found["labels"][None]
                best.append((box_iou(boxes, found["boxes"].double()) * same).amax(dim=1))
            else:
                best.append(boxes.new_zeros(len(boxes)))
        return torch.cat(best)

    def metrics(self) -> MetricCollection:
        return MetricCollection({"scores": DetectionScores(masks=self.outlines)}, compute_groups=False)

    def by_class(self, metrics: MetricCollection) -> dict[str, list[float]]:
        found = cast(DetectionScores, metrics["scores"]).per_class()
        classes = range(self.num_classes)
        return {f"{kind}_AP": [values.get(label, nan) for label in classes] for kind, values in found.items()}


@register_task
class Instances(Detection):
    """Instance segmentation: detection with the outline of every object; also `mask_AP` and so on, which selects a
    model.
    """

    name = "instances"
    learned_by = "a model vitdet:NAME with model_options.masks=true"
    reads = "instances"
    selects_by = "mask_AP"
    shown = ("box_AP", "box_AP50", "mask_AP", "mask_AP50")
    outlines = True


def classes_present(logits: Tensor, targets: Boxes) -> Tensor:
    """Binary cross entropy of the classes among the boxes of an image, mean over classes and images (Cropr).

    ``logits`` are (B, K), or (B, 1, K) of one query; `VitrimError` for several.
    """
    if logits.ndim == 3 and logits.shape[1] == 1:
        logits = logits[:, 0]
    if logits.ndim != 2:
        raise VitrimError(f"expected one output (B, K) per image, got {tuple(logits.shape)}: set num_queries=1")
    kind = torch.promote_types(logits.dtype, torch.float32)
    present = torch.zeros(logits.shape, dtype=kind, device=logits.device)
    for row, objects in zip(present, targets, strict=True):
        row[objects["labels"].to(row.device)] = 1
    return F.binary_cross_entropy_with_logits(logits.to(kind), present)


def in_stored_pixels(prediction: Objects, target: Objects) -> Objects:
    """Convert a prediction from the pixels of the padded input to those of the stored image.

    The target's `size` is height and width of the image within the input, `original` those of the stored image; without
    them the prediction is unchanged. Boxes are clipped to the image, masks (n, H, W) get its size.

    Example:
        >>> prediction = {"boxes": torch.tensor([[1.0, 2, 9, 4]])}
        >>> target = {"size": torch.tensor([4, 8]), "original": torch.tensor([8, 16])}
        >>> in_stored_pixels(prediction, target)["boxes"].tolist()
        [[2.0, 4.0, 16.0, 8.0]]
    """
    if "original" not in target:
        return prediction
    (height, width), (tall, wide) = target["size"].tolist(), target["original"].tolist()
    boxes = prediction["boxes"]
    factors = boxes.new_tensor([wide / width, tall / height] * 2)
    most = boxes.new_tensor([wide, tall] * 2)
    moved = {**prediction, "boxes": torch.minimum((boxes * factors).clamp(min=0), most)}
    if "masks" in prediction:
        inside = prediction["masks"][:, None, :height, :width].float()
        # Probabilities are resized before they are cut at a half, or outlines would have steps of the input's pixels.
        resized = F.interpolate(inside, size=(tall, wide), mode="bilinear", align_corners=False)
        moved["masks"] = resized[:, 0] > 0.5
    return moved


class DetectionScores(Metric):
    """COCO's average precision, shares in [0, 1] in float64.

    `box_AP` is the mean over IoU thresholds 0.50 to 0.95 and over the classes that occur, `box_AP50` and `box_AP75` are
    at one threshold, `box_AP_small`, `box_AP_medium` and `box_AP_large` are of objects below 32^2, up to 96^2 and
    above, in square pixels. With ``masks`` also `mask_AP` and so on; nan without objects. Crowds are ignored, areas are
    the data's, at most 100 detections of an image count. Computed by torchmetrics with `faster_coco_eval` or
    `pycocotools`; `MissingPackageError` without both. Keeps every detection; outlines as run lengths.

    Example:
        >>> objects = {"boxes": torch.tensor([[0.0, 0, 8, 8]]), "labels": torch.tensor([1])}
        >>> scores = DetectionScores()
        >>> scores.update([{**objects, "scores": torch.tensor([0.9])}], [objects])
        >>> round(scores.compute()["box_AP"].item(), 6), scores.compute()["box_AP_large"].item()
        (1.0, nan)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    predicted_boxes: list[Tensor]

    def __init__(self, *, masks: bool = False) -> None:
        super().__init__()
        self.masks = masks
        # the scored kinds, and the prefixes of their names in torchmetrics
        self.prefixes = {"box": "bbox_", "mask": "segm_"} if masks else {"box": ""}
        self.names = tuple(f"{kind}_AP{ending}" for kind in self.prefixes for ending in _ENDINGS)
        self.backend = FAST if importlib.util.find_spec(FAST) is not None else "pycocotools"
        if masks or self.backend != FAST:
            import_pycocotools()
        for kind, fields in _FIELDS.items():
            for name in (*fields, *(("masks",) if masks else ())):
                self.add_state(f"{kind}_{name}", default=[], dist_reduce_fx=None)

    def update(self, predictions: Sequence[Objects], targets: Sequence[Objects]) -> None:
        """Add a batch; predictions and targets are in the same pixels.

        For each image boxes (n, 4) x1 y1 x2 y2, labels (n,), of predictions scores (n,), and masks (n, H, W) if scored.
        Targets may have iscrowd (n,) and area (n,); defaults: none, and the areas of masks or boxes.
        """
        for prediction, target in zip(predictions, targets, strict=True):
            boxes = target["boxes"]
            # COCO sorts objects into small, medium and large by the area of the outline.
            areas = target["masks"].flatten(1).sum(1) if self.masks else (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)
            filled = {"iscrowd": torch.zeros_like(target["labels"]), "area": areas} | target
            for kind, given in (("predicted", prediction), ("true", filled)):
                for name, dtype in _FIELDS[kind].items():
                    getattr(self, f"{kind}_{name}").append(given[name].detach().to(dtype))
                if self.masks:
                    getattr(self, f"{kind}_masks").append(_packed(given["masks"]).to(given["boxes"].device))

    def compute(self) -> dict[str, Tensor]:
        found = self._found(extended=False)
        numbers = {
            f"{kind}_AP{ending}": found[f"{prefix}map{theirs}"].double()
            for kind, prefix in self.prefixes.items()
            for ending, theirs in _ENDINGS.items()
        }
        return {name: torch.where(value < 0, torch.nan, value) for name, value in numbers.items()}

    def per_class(self) -> dict[str, dict[int, float]]:
        """AP of each class that occurs, by `box` and `mask`. Costs as much as `compute`."""
        found = self._found(extended=True)
        classes = found["classes"].reshape(-1).tolist()
        rows: dict[str, dict[int, float]] = {}
        for kind, prefix in self.prefixes.items():
            # All areas, and the largest number of detections.
            precision = found[f"{prefix}precision"][..., 0, -1].double()  # (thresholds, recalls, classes) of any size
            precision = torch.where(precision < 0, torch.nan, precision)
            means = precision.flatten(0, 1).nanmean(dim=0)
            rows[kind] = {int(label): value for label, value in zip(classes, means.tolist(), strict=True)}
        return rows

    def left_out(self, groups: int) -> Tensor:
        """AP (G,) float64 without every G-th image, at most ``groups``; that of masks, if scored; nan
        without objects.
        """
        from pycocotools.cocoeval import COCOeval

        groups = min(groups, len(self.predicted_boxes))
        found = torch.full((groups,), torch.nan, dtype=torch.float64)
        # Objects are matched once, whatever is left out; only the averages are taken again. pycocotools alone offers
        # that.
        with redirect_stdout(StringIO()):  # it prints its progress
            scores = COCOeval(self._in_coco("true"), self._in_coco("predicted"), "segm" if self.masks else "bbox")
            scores.params.areaRng, scores.params.areaRngLbl = scores.params.areaRng[:1], ["all"]
            scores.params.maxDets = scores.params.maxDets[-1:]
            scores.evaluate()
            for group in range(groups):
                kept = copy.copy(scores.params)
                # a non-existent image replaces each excluded one
                kept.imgIds = [0 if image % groups == group else image for image in scores.params.imgIds]
                scores.accumulate(kept)
                precision = scores.eval["precision"]
                if (precision >= 0).any():  # -1 for classes without objects
                    found[group] = float(precision[precision >= 0].mean())
        return found

    def _image(self, kind: str, row: int) -> Objects:
        """The kept fields of an image's predicted or true objects, without masks, on the CPU."""
        return {name: getattr(self, f"{kind}_{name}")[row].cpu() for name in _FIELDS[kind]}

    def _in_coco(self, kind: str) -> Any:
        """Predicted or true objects for pycocotools; images and objects count from 1."""
        from pycocotools.coco import COCO

        data, images, objects = COCO(), list[dict[str, Any]](), list[dict[str, Any]]()
        for row in range(len(self.predicted_boxes)):
            own = self._image(kind, row)
            boxes = box_convert(own.pop("boxes").double(), "xyxy", "xywh")
            names = {"labels": "category_id", "scores": "score"}
            own = {names.get(name, name): values for name, values in own.items()} | {"bbox": boxes}
            # Predictions have neither area nor crowd, and pycocotools asks for both.
            own.setdefault("area", boxes[:, 2:].prod(dim=1))
            own.setdefault("iscrowd", torch.zeros(len(boxes), dtype=torch.int64))
            images.append({"id": row + 1})
            outlines: list[dict[str, Any]] = [{}] * len(boxes)
            if self.masks:
                size, counts = _run_lengths(getattr(self, f"{kind}_masks")[row])
                images[-1] |= {"height": size[0], "width": size[1]}
                outlines = [{"segmentation": {"size": size, "counts": each}} for each in counts]
            for place, outline in enumerate(outlines):
                numbers = {name: values[place].tolist() for name, values in own.items()}
                objects.append({"id": len(objects) + 1, "image_id": row + 1, **numbers, **outline})
        classes = sorted({one["category_id"] for one in objects})
        categories = [{"id": label} for label in classes]
        data.dataset = {"images": images, "annotations": objects, "categories": categories}
        data.createIndex()
        return data

    def _found(self, *, extended: bool) -> dict[str, Any]:
        from torchmetrics.detection import MeanAveragePrecision

        kinds: Any = ("bbox", "segm") if self.masks else "bbox"
        metric = MeanAveragePrecision(
            iou_type=kinds,
            iou_thresholds=_OVERLAPS,
            rec_thresholds=_RECALLS,
            backend=self.backend,  # type: ignore[arg-type]
            extended_summary=extended,
        )
        # COCO counts the 100 best of an image, so more of them are no news.
        metric.warn_on_many_detections = False
        for row in range(len(self.predicted_boxes)):
            pair = []
            for kind in _FIELDS:
                image = self._image(kind, row)
                if self.masks:
                    image["masks"] = _unpacked(getattr(self, f"{kind}_masks")[row])
                pair.append([image])
            metric.update(*pair)
        return dict(metric.compute())


def _packed(masks: Tensor) -> Tensor:
    """Run lengths of masks (n, H, W), as bytes in a tensor, to gather and store like any other."""
    coding = import_pycocotools()
    filled = np.asfortranarray(masks.detach().cpu().bool().permute(1, 2, 0).numpy().astype(np.uint8))
    counts = [each["counts"].decode("ascii") for each in coding.encode(filled)] if len(masks) else []
    text = json.dumps({"size": list(masks.shape[1:]), "counts": counts})
    return torch.tensor(list(text.encode("ascii")), dtype=torch.uint8)


def _run_lengths(packed: Tensor) -> tuple[list[int], list[str]]:
    """Height and width, and the run lengths of every mask."""
    found = json.loads(bytes(packed.cpu().tolist()))
    return found["size"], found["counts"]


def _unpacked(packed: Tensor) -> Tensor:
    size, found = _run_lengths(packed)
    if not found:
        return torch.zeros(0, *size, dtype=torch.bool)
    masks = import_pycocotools().decode([{"size": size, "counts": counts} for counts in found])
    return torch.from_numpy(np.ascontiguousarray(masks)).permute(2, 0, 1).bool()
