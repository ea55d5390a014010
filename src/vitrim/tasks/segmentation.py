"""A class for every pixel."""

from __future__ import annotations

from functools import partial
from math import isqrt
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from vitrim.core.registry import ask
from vitrim.data.dense import IGNORED, SegmentationDataset
from vitrim.errors import DataError, VitrimError
from vitrim.tasks.base import Task, register_task
from vitrim.tasks.sliding import predict

if TYPE_CHECKING:
    from vitrim.tasks.options import Loss
    from vitrim.tasks.step import Criterion


@register_task
class Segmentation(Task):
    """Semantic segmentation: each pixel has one of K classes, or is ignored.

    * Loss: `pixel_cross_entropy`, the mean over the pixels that are not ignored, 0 if all are.
    * Metrics: `mIoU`, `mAcc` and `aAcc`, see `SegmentationScores`.

    Example:
        >>> metrics = Segmentation(2).metrics()
        >>> metrics.update(torch.tensor([[[[1.0, 1, 1]], [[0, 0, 0]]]]), torch.tensor([[[0, 1, 255]]]))
        >>> {name: value.item() for name, value in sorted(metrics.compute().items())}
        {'aAcc': 0.5, 'mAcc': 0.5, 'mIoU': 0.25}
    """

    name = "segmentation"
    learned_by = "a model segmenter:NAME"
    reads = "segmentation"
    selects_by = "mIoU"
    losses = ("pixel_cross_entropy",)
    by_windows = True
    query_per_patch = True
    agreement_means = "pixels of the same class"

    def __init__(self, num_classes: int) -> None:
        if not 2 <= num_classes <= IGNORED:
            raise VitrimError(f"segmentation needs 2 to {IGNORED} classes, the data has {num_classes}")
        super().__init__(num_classes)

    def check(self, dataset: Any) -> None:
        source = getattr(dataset, "source", type(dataset).__name__)
        if not isinstance(dataset, SegmentationDataset):
            raise VitrimError(f"{source} has no label for every pixel, which task segmentation learns")
        self.check_classes(source, dataset.num_classes)

    def criterion(self, loss: Loss) -> Criterion:
        self.check_loss(loss)
        return partial(pixel_cross_entropy, smoothing=loss.smoothing)

    def auxiliary(self, loss: Loss) -> Criterion:
        self.check_loss(loss)
        return partial(patch_cross_entropy, smoothing=loss.smoothing)

    def collate(self, items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Stack images (B, C, H, W) and masks (B, H, W) int64; `VitrimError` if they differ in size."""
        sizes = sorted({(image.shape[-1], image.shape[-2]) for image, _ in items})
        if len(sizes) > 1:
            found = ", ".join(f"{width} x {height}" for width, height in sizes[:3])
            raise VitrimError(
                f"images of {len(sizes)} sizes ({found}) are no batch: evaluate them one by one (batches of 1), "
                "or by a protocol with a size or a window"
            )
        return torch.stack([image for image, _ in items]), torch.stack([mask for _, mask in items]).long()

    def check_targets(self, targets: Any, count: int) -> None:
        if targets.ndim != 3 or len(targets) != count or targets.is_floating_point():
            raise DataError(f"expected {count} masks of integers, got {targets.dtype} of {tuple(targets.shape)}")
        self.check_labels(targets[targets != IGNORED])

    def predict(self, model: nn.Module, images: Tensor, targets: Any = None) -> Tensor:
        """Logits (B, K, H, W) of ``model`` for images (B, C, H, W), by the protocol."""
        library = ask(model)

        def forward(batch: Tensor) -> Tensor:
            scores = library.pixel_scores(model, batch)
            return scores if self.columns is None else scores[:, self.columns]

        if self.protocol.plain:
            return forward(images)
        return torch.stack([predict(forward, image, self.protocol) for image in images])

    def agreement(self, prediction: Tensor, dense: Tensor, targets: Any) -> Tensor:
        """The share of pixels with the dense model's class, for each image with a labelled pixel."""
        valid = (targets != IGNORED).flatten(1)
        same = (prediction.argmax(1) == dense.argmax(1)).flatten(1) & valid
        some = valid.any(dim=1)
        shares: Tensor = same[some].sum(dim=1).double() / valid[some].sum(dim=1)
        return shares

    def metrics(self) -> MetricCollection:
        return MetricCollection({"scores": SegmentationScores(self.num_classes)}, compute_groups=False)

    def by_class(self, metrics: MetricCollection) -> dict[str, list[float]]:
        return {"IoU": cast(SegmentationScores, metrics["scores"]).per_class().tolist()}


class SegmentationScores(Metric):
    """Scores of the confusion matrix over all pixels of a dataset, shares in [0, 1] in float64.

    * `mIoU`: the mean intersection over union of the classes that occur in truth or prediction;
    * `mAcc`: the mean share of correct pixels of the classes that occur in truth;
    * `aAcc`: the share of correct pixels. All are nan without pixels.

    Counts are integers: float32 would lose those above 2^24.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    names = ("mIoU", "mAcc", "aAcc")
    confusion: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        empty = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        self.add_state("confusion", default=empty, dist_reduce_fx="sum")

    def update(self, prediction: Tensor, targets: Tensor) -> None:
        """Add a batch: logits (B, K, H, W) or classes (B, H, W), and labels (B, H, W) in [0, K) or `IGNORED`."""
        classes = prediction.argmax(1) if prediction.ndim == 4 else prediction
        valid = targets != IGNORED
        # One number per pair (true, predicted): a count of these is the confusion matrix, row by row.
        pairs = targets[valid].long() * self.num_classes + classes[valid].long()
        counts = torch.bincount(pairs, minlength=self.num_classes**2)
        self.confusion += counts.view(self.num_classes, self.num_classes)

    def per_class(self) -> Tensor:
        """(K,) float64: intersection over union of each class; nan if it does not occur."""
        right = self.confusion.diagonal().double()
        return right / (self.confusion.sum(0) + self.confusion.sum(1) - self.confusion.diagonal())

    def compute(self) -> dict[str, Tensor]:
        right, true = self.confusion.diagonal().double(), self.confusion.sum(1)
        return {
            "mIoU": self.per_class().nanmean(),
            "mAcc": (right / true).nanmean(),
            "aAcc": right.sum() / true.sum(),
        }


def pixel_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross entropy of the pixels that are not ignored; 0 if all are ignored.

    ``logits`` are (B, K, H, W), ``labels`` (B, H, W) in [0, K) or `IGNORED`; `VitrimError` for other shapes.
    """
    if logits.ndim != 4 or logits.shape[-2:] != labels.shape[-2:]:
        given, wanted = tuple(logits.shape), tuple(labels.shape)
        raise VitrimError(f"the model gives {given} for labels {wanted}; expected logits of every pixel, (B, K, H, W)")
    # a sum over pixels in half precision would lose most digits
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(exact, labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


def patch_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross entropy of every patch, with the label of its first pixel (Cropr: nearest down-sampling).

    ``logits`` are (B, P, K), row by row; square patches fill the labels' height and width, see `patch_grid`.
    """
    grid = patch_grid(logits.shape[1], (labels.shape[-2], labels.shape[-1]))
    small = F.interpolate(labels[:, None].float(), size=grid, mode="nearest").long()
    return pixel_cross_entropy(logits.transpose(1, 2).unflatten(2, grid), small[:, 0], smoothing)


def patch_grid(patches: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of a number of square patches that fill an image; `VitrimError` if none do."""
    height, width = size
    # The side follows from the area: P squares fill it, rounded down for a first guess.
    side = isqrt(height * width // max(patches, 1))
    if not side or height % side or width % side or height * width != patches * side**2:
        raise VitrimError(
            f"{patches} query outputs are no grid of square patches on a crop of {width} x {height} pixels: "
            "num_queries must be the number of its patches"
        )
    return height // side, width // side
