"""Any number of labels per image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from timm.loss import AsymmetricLossMultiLabel
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.functional.classification import binary_average_precision
from torchmetrics.utilities import dim_zero_cat

from vitrim.data import DataError
from vitrim.errors import VitrimError
from vitrim.tasks.base import Task, register_task
from vitrim.tasks.step import BinaryCrossEntropy

if TYPE_CHECKING:
    from vitrim.tasks.options import Loss
    from vitrim.tasks.step import Criterion


@register_task
class MultiLabel(Task):
    """Multi-label classification of K classes.

    * Losses: `asl`, the asymmetric loss (Ridnik et al., 2021); `bce`, one binary cross entropy per class, averaged over
      the classes (or summed, if `sum_classes`) and over the images.
    * `asl` is a sum over classes and images, as in training by its authors and by Haurum et al. (2023), so its gradient
      grows with the micro-batch: a recipe's learning rate is for its batch sizes. It has no smoothing.
    * Metrics: `mAP` and `mAP_occurring`, see `MeanAveragePrecision`.
    * Agreement with the dense model: the intersection over union of the classes above probability 0.5, 1 if both models
      predict none.

    Example:
        >>> import torch
        >>> targets = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
        >>> metrics = MultiLabel(3).metrics()
        >>> metrics.update(10 * targets - 5, targets)
        >>> {name: round(value.item(), 4) for name, value in sorted(metrics.compute().items())}
        {'mAP': 0.6667, 'mAP_occurring': 1.0}
    """

    name = "multilabel"
    selects_by = "mAP"
    losses = ("asl", "bce")
    mixes = True
    several = True
    agreement_means = "overlap of the classes found with dense's"

    def check(self, dataset: Any) -> None:
        source = getattr(dataset, "source", type(dataset).__name__)
        targets = np.asarray(getattr(dataset, "targets", ()))
        if targets.ndim != 2:
            raise VitrimError(f"{source} has no table of classes per image, which task multilabel learns")
        self.check_classes(source, targets.shape[1])

    def criterion(self, loss: Loss) -> Criterion:
        self.check_loss(loss)
        if loss.name == "bce":
            return BinaryCrossEntropy(smoothing=loss.smoothing, rest=1 / 2, sum_classes=loss.sum_classes)
        if loss.smoothing:
            raise VitrimError(f"loss asl has no smoothing (got loss.smoothing={loss.smoothing:g}): set it to 0")
        criterion = AsymmetricLossMultiLabel(loss.gamma_neg, loss.gamma_pos, loss.clip)
        # The learning rates of the recipes belong to the sum.
        criterion.reduction = "sum"  # an argument since timm 1.0.31; earlier versions always sum
        return criterion

    def check_targets(self, targets: Any, count: int) -> None:
        if targets.shape != (count, self.num_classes):
            raise DataError(
                f"expected {count} rows of {self.num_classes} classes, 0 or 1 each, got {targets.dtype} of "
                f"{tuple(targets.shape)}"
            )

    def agreement(self, prediction: Tensor, dense: Tensor, targets: Any) -> Tensor:
        found, expected = prediction > 0, dense > 0
        union = (found | expected).sum(1)
        return torch.where(union > 0, (found & expected).sum(1).double() / union, 1.0)

    def metrics(self) -> MetricCollection:
        return MetricCollection({"mAP": MeanAveragePrecision()}, compute_groups=False)


class MeanAveragePrecision(Metric):
    """Mean over classes of the average precision of ranking all images by one logit, in [0, 1].

    * `mAP`: over all classes; one without positives counts 0, as in the comparative study of Haurum et al. (2023), so
      that splits have the same number of classes.
    * `mAP_occurring`: over the classes that have a positive; 0 if there is none.

    Images with equal logits share a rank; the study's code orders them by an unstable sort, which is random. Keeps all
    logits: N * K * 4 bytes.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    logits: list[Tensor]
    targets: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("logits", default=[], dist_reduce_fx="cat")
        self.add_state("targets", default=[], dist_reduce_fx="cat")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits (B, K), and targets (B, K) of 0 and 1."""
        self.logits.append(logits.detach().float())
        self.targets.append(targets > 0)

    def average_precisions(self) -> Tensor:
        """(K,) in [0, 1]; 0 for a class without positives."""
        logits = dim_zero_cat(self.logits)
        targets = dim_zero_cat(self.targets)
        present = targets.any(dim=0)
        precisions = torch.zeros(targets.shape[1], device=logits.device)
        for place in present.nonzero().flatten().tolist():
            # only the order counts, and torchmetrics' sigmoid would make ties of large logits
            ranks = torch.unique(logits[:, place], return_inverse=True)[1].float() / len(logits)
            precisions[place] = binary_average_precision(ranks, targets[:, place].int())
        return precisions

    def left_out(self, groups: int) -> Tensor:
        """`mAP` (G,) float64 without every G-th image, G at most ``groups`` and the number of images."""
        logits, targets = dim_zero_cat(self.logits), dim_zero_cat(self.targets)
        groups, found = min(groups, len(logits)), []
        for group in range(groups):
            kept, rest = torch.arange(len(logits), device=logits.device) % groups != group, MeanAveragePrecision()
            rest.update(logits[kept], targets[kept])
            found.append(rest.compute()["mAP"].cpu())
        return torch.stack(found)

    def compute(self) -> dict[str, Tensor]:
        """Both means, () float64 each."""
        precisions = self.average_precisions().double()
        occurring = dim_zero_cat(self.targets).any(dim=0).sum()
        return {"mAP": precisions.mean(), "mAP_occurring": precisions.sum() / occurring.clamp(min=1)}
