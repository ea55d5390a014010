"""Embeddings of towers without a classifier, for retrieval and other readers of features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from vitrim.core.registry import ask
from vitrim.errors import VitrimError
from vitrim.tasks.base import Task, register_task

if TYPE_CHECKING:
    from vitrim.tasks.options import Loss
    from vitrim.tasks.step import Criterion


@register_task
class Embedding(Task):
    """One vector (B, D) per image, compared by its cosine.

    * Source: the library's embedding (`vitrim.core.library.Library.embedding`); of a classifier, the input of its last
      layer.
    * It learns nothing: train with a head, and evaluate without.
    * Agreement with the dense model: the cosine of the two embeddings, at least 0.
    * Scores need all images together, see `vitrim.measure.neighbours.Neighbours`; `metrics` has none.
    """

    name = "embedding"
    selects_by = "recall1"
    losses = ()
    agreement_means = "cosine to the dense embedding"
    shown = ("recall1", "recall1_dense", "knn", "neighbours")
    learned_by = "a model with a head"
    embeds = True

    def check(self, dataset: Any) -> None:
        raise VitrimError("embeddings are not learned by themselves: train a classifier, then score its features")

    def criterion(self, loss: Loss) -> Criterion:
        raise VitrimError("embeddings have no loss: train a classifier, then score its features")

    def metrics(self) -> MetricCollection:
        return MetricCollection({})

    def check_targets(self, targets: Any, count: int) -> None:
        self.check_count(targets, count)

    def predict(self, model: nn.Module, images: Tensor, targets: Any = None) -> Tensor:
        return ask(model).embedding(model, images)

    def agreement(self, prediction: Tensor, dense: Tensor, targets: Any) -> Tensor:
        return torch.cosine_similarity(prediction.double(), dense.double(), dim=1).clamp(min=0.0)
