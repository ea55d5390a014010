"""One label per image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.utilities import dim_zero_cat

from vitrim.data.streaming import ImageStream
from vitrim.errors import VitrimError
from vitrim.tasks.base import Task, register_task
from vitrim.tasks.step import BinaryCrossEntropy

if TYPE_CHECKING:
    from vitrim.tasks.options import Loss
    from vitrim.tasks.step import Criterion


@register_task
class Classification(Task):
    """Single-label classification, of K >= 2 classes; `VitrimError` for fewer.

    * Losses: `cross_entropy`, of class indices or of mixed labels (B, K); `bce`, one binary cross entropy per class,
      averaged over the classes (or summed, if `sum_classes`) and over the images, of either.
    * Metrics: `top1`, and with more than five classes `top5`, shares in [0, 1].
    * Agreement with the dense model: equal first class.

    Example:
        >>> import torch
        >>> from vitrim.tasks.options import Loss
        >>> criterion = Classification(3).criterion(Loss(smoothing=0.1))
        >>> round(criterion(torch.zeros(2, 3), torch.tensor([0, 2])).item(), 4)
        1.0986
    """

    name = "classification"
    selects_by = "top1"
    losses: ClassVar[tuple[str, ...]] = ("cross_entropy", "bce")
    agreement_means = "same class as dense"
    other_classes = True
    mixes = True

    def __init__(self, num_classes: int) -> None:
        if num_classes < 2:
            raise VitrimError(f"classification needs at least 2 classes, got {num_classes}")
        super().__init__(num_classes)

    def check(self, dataset: Any) -> None:
        if isinstance(dataset, ImageStream):
            return  # its labels are checked on reading
        source = getattr(dataset, "source", type(dataset).__name__)
        labels = np.asarray(getattr(dataset, "labels", ()))
        if labels.ndim != 1 or labels.size == 0 or labels.dtype.kind not in "iu":
            raise VitrimError(f"{source} has no single label per image, which task classification learns")
        wrong = (labels < 0) | (labels >= self.num_classes)
        if wrong.any():
            row = int(wrong.argmax())
            raise VitrimError(
                f"image {row} of {source} has label {labels[row]}; valid: 0 to {self.num_classes - 1}, the classes of "
                "the training data"
            )

    def criterion(self, loss: Loss) -> Criterion:
        self.check_loss(loss)
        if loss.name == "bce":
            return BinaryCrossEntropy(smoothing=loss.smoothing, rest=1 / self.num_classes, sum_classes=loss.sum_classes)
        return nn.CrossEntropyLoss(label_smoothing=loss.smoothing)

    def check_targets(self, targets: Any, count: int) -> None:
        self.check_count(targets, count)
        self.check_labels(targets)

    def agreement(self, prediction: Tensor, dense: Tensor, targets: Any) -> Tensor:
        return (prediction.argmax(1) == dense.argmax(1)).double()

    def metrics(self) -> MetricCollection:
        every: dict[str, Metric | MetricCollection] = {
            f"top{most}": _Accuracy(num_classes=self.num_classes, average="micro", top_k=most)
            for most in (1, 5)
            if most < self.num_classes  # with five classes or fewer, `top5` is always 1
        }
        # torchmetrics would merge metrics whose counts agree after the first batch
        return MetricCollection(every, compute_groups=False)


class _Accuracy(MulticlassAccuracy):
    """Share of images whose label is among the k largest logits, in float64, so that sums over processes are exact."""

    def compute(self) -> Tensor:
        right, wrong = dim_zero_cat(self.tp).sum().double(), dim_zero_cat(self.fn).sum()
        return right / (right + wrong)
