"""Nearest neighbours among embeddings, by cosine: the effect of a reduction on retrieval and on classification.

Every image is a query, and the others are its database, either with embeddings of the same model, or of the dense
model, as if the database was computed before the model was reduced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitrim.errors import VitrimError
from vitrim.measure.contestants import ModelOutput
from vitrim.measure.probes import Gauge, Lists, mean_loss
from vitrim.measure.records import Batch

VOTERS, TEMPERATURE = 20, 0.07
"""Neighbours that vote on the class of an image, and the temperature of their weights, as in DINO and DINOv2."""

NEAREST = 10
"""Neighbours that are compared with those of the dense model."""

RECALLED = (1, 5)
"""Numbers of neighbours for recall."""

ROWS = 1024
"""Queries compared with the database at once, which bounds the memory."""


def nearest(queries: Tensor, database: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The rows of ``database`` nearest to each query (N, D), nearest first, (N, k) int64, and their cosines (N, k).

    Row i of both is the same image, which is not its own neighbour. k is ``count``, at most N - 1; N >= 2.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
        >>> nearest(embeddings, embeddings, 2)[0].tolist()
        [[1, 2], [0, 2], [1, 0]]
    """
    # In float64: near ties of float32 would be decided by the order of a sum. Equal cosines go by row order.
    queries, database = (torch.nn.functional.normalize(each.double(), dim=1) for each in (queries, database))
    places, nearness = [], []
    for start in range(0, len(queries), ROWS):
        cosines = queries[start : start + ROWS] @ database.T
        rows = torch.arange(len(cosines))
        # An image is not its own neighbour.
        cosines[rows, rows + start] = -torch.inf
        found = cosines.sort(dim=1, descending=True, stable=True)
        most = min(count, len(database) - 1)
        places.append(found.indices[:, :most])
        nearness.append(found.values[:, :most])
    return torch.cat(places), torch.cat(nearness)


def voted(neighbours: Tensor, cosines: Tensor, labels: Tensor) -> Tensor:
    """(N,) int64: the class that the ``neighbours`` (N, k) of each query vote for, with weights exp(cosine / 0.07).

    ``labels`` (N,) are classes of the rows; ties are resolved by the lowest class.
    """
    # Only classes that occur, so the votes need no column for each of thousands.
    classes, places = labels.unique(return_inverse=True)
    votes = torch.zeros(len(neighbours), len(classes), dtype=cosines.dtype)
    votes.scatter_add_(1, places[neighbours], (cosines / TEMPERATURE).exp())
    first: Tensor = votes.argmax(1)  # the first maximum
    return torch.take(classes, first)


def shared(neighbours: Tensor, others: Tensor) -> Tensor:
    """(N,) float64: the share of each query's neighbours (N, k) that are among ``others`` (N, k), in any order."""
    return (neighbours[:, :, None] == others[:, None, :]).any(2).double().mean(1)


class Neighbours(Gauge):
    """A gauge of embeddings, and of metrics of their nearest neighbours (leave-one-out).

    * ``knn``: accuracy of the vote of the `VOTERS` nearest neighbours (`voted`).
    * ``recall1``, ``recall5``: share of images with their own class among the nearest one, or five.
    * ``neighbours``: share of the `NEAREST` nearest neighbours that are the dense model's.
    * ``cosine``: mean cosine to the dense embedding.
    * ``knn_dense``, ``recall1_dense``, ``recall5_dense``, ``neighbours_dense``: the same with a database of the dense
      model's embeddings; only the queries are this model's.
    * ``loss``, ``loss_error``: mean loss of ``recall1`` (without labels, of ``neighbours``) against the dense model and
      its standard error, at least one image's share; slightly too small, as images share neighbours.

    Without class labels, only neighbours, cosine and loss. Memory: the embeddings of both models, and `ROWS` rows of
    cosines.
    """

    against_dense = (
        "neighbours", "cosine", "knn_dense", "recall1_dense", "recall5_dense", "neighbours_dense", "loss", "loss_error",
    )  # fmt: skip

    def __init__(self, *, labelled: bool = True) -> None:
        self.labelled = labelled
        self.found = Lists("own", "dense", "labels")
        super().__init__({"found": self.found})

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        self.found.update(own=output.prediction.float(), dense=dense.prediction.float())
        if self.labelled:
            self.found.update(labels=batch.targets)

    def result(self) -> Mapping[str, Any]:
        each = self.found.each()
        own, dense, labels = each["own"], each["dense"], each.get("labels")
        cosine = torch.cosine_similarity(own.double(), dense.double(), dim=1).mean().item()
        if len(own) < 2:
            raise VitrimError("one image has no neighbours: give more")
        # One search serves all metrics: each reads the first columns.
        count = max(VOTERS, NEAREST, *RECALLED)
        like, found, among = nearest(dense, dense, count), nearest(own, own, count), nearest(own, dense, count)
        numbers: dict[str, Any] = {}
        if labels is not None:
            for end, rows in (("", found), ("_dense", among)):
                right = _right(*rows, labels)
                numbers |= {f"{name}{end}": values.mean().item() for name, values in right.items()}
        for end, (places, _) in (("", found), ("_dense", among)):
            numbers[f"neighbours{end}"] = shared(places[:, :NEAREST], like[0][:, :NEAREST]).mean().item()
        numbers["cosine"] = cosine
        if labels is not None:
            # Image by image, so that the standard error is that of paired differences.
            lost = _right(*like, labels)["recall1"] - _right(*found, labels)["recall1"]
        else:
            lost = 1.0 - shared(found[0][:, :NEAREST], like[0][:, :NEAREST])
        return {**numbers, **mean_loss(lost)}


class NeighbourLoss(Neighbours):
    """The loss of `Neighbours`, its standard error, and, as ``kl``, the mean distance 1 - cosine to the dense
    embedding, which correlates with the loss and is measured far more precisely.
    """

    @property
    def labels(self) -> bool:
        """True if the loss is of recall; False for neighbours of the dense model."""
        return self.labelled

    def result(self) -> Mapping[str, Any]:
        found = super().result()
        return {"loss": found["loss"], "loss_error": found["loss_error"], "kl": max(1.0 - found["cosine"], 0.0)}


def _right(neighbours: Tensor, cosines: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """(N,) float64 each: 1 where the vote is right, and where the nearest neighbours include the query's class."""
    same = labels[neighbours] == labels[:, None]
    recalled = {f"recall{count}": same[:, :count].any(1).double() for count in RECALLED}
    vote = voted(neighbours[:, :VOTERS], cosines[:, :VOTERS], labels)
    return {"knn": (vote == labels).double(), **recalled}
