"""Average precision of boxes and of outlines."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from vitrim.data.outlines import import_pycocotools

if TYPE_CHECKING:
    from vitrim.data.boxes import Objects

FAST = "faster_coco_eval"
_ENDINGS = {"": "", "50": "_50", "75": "_75", "_small": "_small", "_medium": "_medium", "_large": "_large"}
"""Endings of the names, ours and torchmetrics'."""
_PREDICTED = {"boxes": torch.float32, "scores": torch.float32, "labels": torch.int64}
_TRUE = {"boxes": torch.float32, "labels": torch.int64, "iscrowd": torch.int64, "area": torch.float32}


class DetectionScores(Metric):
    """COCO's average precision, shares in [0, 1] in float64.

    `box_AP` is the mean over IoU thresholds 0.50 to 0.95 and over the classes that occur, `box_AP50` and `box_AP75` are
    at one threshold, `box_AP_small`, `box_AP_medium` and `box_AP_large` of objects below 32^2, up to 96^2 and above
    square pixels. With outlines also `mask_AP` and so on. Absent ones are nan. Crowds count as ignored, areas are those
    of the data, at most 100 detections of an image count. Computed by torchmetrics with `faster_coco_eval` if it is
    installed, else `pycocotools`.

    Keeps every detection; outlines as run lengths.

    Args:
        masks: score outlines too.

    Raises:
        MissingPackageError: neither package is installed.

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
        self.backend = FAST if importlib.util.find_spec(FAST) is not None else "pycocotools"
        if masks or self.backend != FAST:
            import_pycocotools()
        for kind, fields in (("predicted", _PREDICTED), ("true", _TRUE)):
            for name in (*fields, *(("masks",) if masks else ())):
                self.add_state(f"{kind}_{name}", default=[], dist_reduce_fx=None)

    @property
    def names(self) -> tuple[str, ...]:
        """The scores."""
        return tuple(f"{kind}_AP{ending}" for kind in self._prefixes for ending in _ENDINGS)

    @property
    def _prefixes(self) -> dict[str, str]:
        """The kinds that are scored, and the beginnings of their names in torchmetrics."""
        return {"box": "bbox_", "mask": "segm_"} if self.masks else {"box": ""}

    def update(self, predictions: Sequence[Objects], targets: Sequence[Objects]) -> None:
        """A batch, in the same pixels.

        Args:
            predictions: for each image boxes (n, 4) x1 y1 x2 y2, scores (n,), labels (n,), and masks (n, H, W) if these
                are scored.
            targets: for each image boxes, labels and masks, and optionally iscrowd (n,) and area (n,), by default none
                and those of the masks or boxes.
        """
        for prediction, target in zip(predictions, targets, strict=True):
            filled = {"iscrowd": torch.zeros_like(target["labels"]), "area": _areas(target, self.masks)} | target
            for kind, fields, given in (("predicted", _PREDICTED, prediction), ("true", _TRUE, filled)):
                for name, dtype in fields.items():
                    getattr(self, f"{kind}_{name}").append(given[name].detach().to(dtype))
                if self.masks:
                    getattr(self, f"{kind}_masks").append(_packed(given["masks"]).to(given["boxes"].device))

    def compute(self) -> dict[str, Tensor]:
        """The scores by name."""
        found = self._found(extended=False)
        numbers = {
            f"{kind}_AP{ending}": found[f"{prefix}map{theirs}"].double()
            for kind, prefix in self._prefixes.items()
            for ending, theirs in _ENDINGS.items()
        }
        return {name: torch.where(value < 0, torch.nan, value) for name, value in numbers.items()}

    def per_class(self) -> dict[str, dict[int, float]]:
        """AP of each class that occurs, by `box` and `mask`. Costs as much as `compute`."""
        found = self._found(extended=True)
        classes = found["classes"].reshape(-1).tolist()
        rows: dict[str, dict[int, float]] = {}
        for kind, prefix in self._prefixes.items():
            precision = found[f"{prefix}precision"][..., 0, -1].double()  # (thresholds, recalls, classes) of any size
            precision = torch.where(precision < 0, torch.nan, precision)
            means = precision.flatten(0, 1).nanmean(dim=0)
            rows[kind] = {int(label): value for label, value in zip(classes, means.tolist(), strict=True)}
        return rows

    def _found(self, *, extended: bool) -> dict[str, Any]:
        from torchmetrics.detection import MeanAveragePrecision

        kinds: Any = ("bbox", "segm") if self.masks else "bbox"
        metric = MeanAveragePrecision(iou_type=kinds, backend=self.backend, extended_summary=extended)  # type: ignore[arg-type]
        metric.warn_on_many_detections = False
        for row in range(len(self.predicted_boxes)):
            metric.update([self._image(row, "predicted", _PREDICTED)], [self._image(row, "true", _TRUE)])
        return dict(metric.compute())

    def _image(self, row: int, kind: str, fields: dict[str, Any]) -> Objects:
        image = {name: getattr(self, f"{kind}_{name}")[row].cpu() for name in fields}
        return {**image, "masks": _unpacked(getattr(self, f"{kind}_masks")[row])} if self.masks else image


def _areas(target: Objects, masks: bool) -> Tensor:
    boxes = target["boxes"]
    return target["masks"].flatten(1).sum(1) if masks else (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)


def _packed(masks: Tensor) -> Tensor:
    """Run lengths of masks (n, H, W), as bytes in a tensor: gathered and written like any other."""
    coding = import_pycocotools()
    filled = np.asfortranarray(masks.detach().cpu().bool().permute(1, 2, 0).numpy().astype(np.uint8))
    counts = [each["counts"].decode("ascii") for each in coding.encode(filled)] if len(masks) else []
    text = json.dumps({"size": list(masks.shape[1:]), "counts": counts})
    return torch.tensor(list(text.encode("ascii")), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Tensor:
    coding = import_pycocotools()
    found = json.loads(bytes(packed.cpu().tolist()))
    height, width = found["size"]
    if not found["counts"]:
        return torch.zeros(0, height, width, dtype=torch.bool)
    masks = coding.decode([{"size": [height, width], "counts": counts} for counts in found["counts"]])
    return torch.from_numpy(np.ascontiguousarray(masks)).permute(2, 0, 1).bool()
