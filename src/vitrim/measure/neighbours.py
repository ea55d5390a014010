"""Nearest neighbours among embeddings: what a reduction does to retrieval and to classification by neighbours.

Embeddings are compared by their cosine. Every image is a query, and the others are its database: either their
embeddings by the same model, or those of the dense model, as where a database was made before the model was reduced.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from vitrim.measure.contestants import Output
from vitrim.measure.probes import Gauge, Lists
from vitrim.measure.records import Batch

VOTERS = 20
"""Neighbours that vote on the class of an image, as in the evaluations of DINO and DINOv2."""

NEAREST = 10
"""Neighbours that are compared with the dense model's."""

RECALLED = (1, 5)
"""Numbers of neighbours among which one of the image's own class is looked for."""

ROWS = 1024
"""Queries that are compared with the database at once, which bounds the memory."""


def nearest(queries: Tensor, database: Tensor, count: int) -> Tensor:
    """(N, k) int64: the rows of ``database`` nearest to each of ``queries`` by cosine, the nearest first.

    Row i of both is the same image, which is not its own neighbour. k is ``count``, or N - 1 where there are fewer. Of
    equally near rows the first one comes first.

    Args:
        queries, database: (N, D) embeddings, N >= 2; compared in float64.
        count: neighbours per query, at least 1.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
        >>> nearest(embeddings, embeddings, 2).tolist()
        [[1, 2], [0, 2], [1, 0]]
    """
    queries, database = (torch.nn.functional.normalize(each.double(), dim=1) for each in (queries, database))
    found = []
    for start in range(0, len(queries), ROWS):
        cosines = queries[start : start + ROWS] @ database.T
        rows = torch.arange(len(cosines))
        cosines[rows, rows + start] = -torch.inf
        found.append(cosines.sort(dim=1, descending=True, stable=True).indices[:, : min(count, len(database) - 1)])
    return torch.cat(found)


def voted(neighbours: Tensor, labels: Tensor) -> Tensor:
    """(N,) int64: the class that most of the neighbours of each query have; of several, the one with the lowest number.

    Args:
        neighbours: (N, k) rows of the database.
        labels: (N,) int64, the classes of its rows.

    Example:
        >>> voted(torch.tensor([[1, 2], [0, 2]]), torch.tensor([5, 5, 3])).tolist()
        [3, 3]
    """
    classes, places = labels.unique(return_inverse=True)
    votes = torch.zeros(len(neighbours), len(classes), dtype=torch.int64)
    votes.scatter_add_(1, places[neighbours], torch.ones_like(neighbours))
    return classes[votes.argmax(1)]  # the first maximum


def shared(neighbours: Tensor, others: Tensor) -> Tensor:
    """(N,) float64: the share of each query's neighbours (N, k) that are among ``others`` (N, k), in any order.

    Example:
        >>> shared(torch.tensor([[1, 2], [0, 2]]), torch.tensor([[2, 1], [3, 0]])).tolist()
        [1.0, 0.5]
    """
    return (neighbours[:, :, None] == others[:, None, :]).any(2).double().mean(1)


class Neighbours(Gauge):
    """Embeddings of the images, and the numbers that follow from their nearest neighbours, each image left out itself.

    * ``knn``: the share of images whose class is that of most of their `VOTERS` nearest neighbours.
    * ``recall1``, ``recall5``: the share with an image of their class among the nearest one, or five.
    * ``neighbours``: the share of the `NEAREST` nearest neighbours that are the dense model's.
    * ``cosine``: mean cosine to the dense embedding.
    * ``knn_dense``, ``recall1_dense``, ``recall5_dense``, ``neighbours_dense``: the same where the database holds the
      dense model's embeddings, and only the queries are this model's.
    * ``loss``, ``loss_error``: what ``knn`` loses against the dense model, image by image, and its standard error, at
      least one image's share. Votes of neighbours that images have in common make it a little too small.

    Without labels that are classes, only neighbours and cosine. Memory: the embeddings of both models, and `ROWS` times
    the number of images.

    Args:
        labelled: whether targets are classes (B,).
    """

    def __init__(self, *, labelled: bool = True) -> None:
        self.labelled = labelled
        self.found = Lists("own", "dense", "labels")
        super().__init__({"found": self.found})

    def see(self, batch: Batch, output: Output, dense: Output) -> None:
        self.found.update(own=output.prediction.float(), dense=dense.prediction.float())
        if self.labelled:
            self.found.update(labels=batch.targets)

    def result(self) -> Mapping[str, Any]:
        each = self.found.each()
        own, dense, labels = each["own"], each["dense"], each.get("labels")
        cosine = torch.cosine_similarity(own.double(), dense.double(), dim=1).mean().item()
        if len(own) < 2:
            return {"neighbours": 1.0, "cosine": cosine}
        count = max(VOTERS, NEAREST, *RECALLED)
        like, found, among = nearest(dense, dense, count), nearest(own, own, count), nearest(own, dense, count)
        numbers: dict[str, Any] = {}
        if labels is not None:
            for end, rows in (("", found), ("_dense", among)):
                right = _right(rows, labels)
                numbers |= {f"{name}{end}": values.mean().item() for name, values in right.items()}
        numbers["neighbours"] = shared(found[:, :NEAREST], like[:, :NEAREST]).mean().item()
        numbers["neighbours_dense"] = shared(among[:, :NEAREST], like[:, :NEAREST]).mean().item()
        numbers["cosine"] = cosine
        if labels is not None:
            lost = _right(like, labels)["knn"] - _right(found, labels)["knn"]
            error = lost.std(unbiased=False).item() / sqrt(len(lost))
            numbers |= {"loss": lost.mean().item(), "loss_error": max(error, 1.0 / len(lost))}
        return numbers


def _right(neighbours: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """(N,) float64 each: whether the vote is right, and whether the nearest ones have the class of the query."""
    same = labels[neighbours] == labels[:, None]
    recalled = {f"recall{count}": same[:, :count].any(1).double() for count in RECALLED}
    return {"knn": (voted(neighbours[:, :VOTERS], labels) == labels).double(), **recalled}
