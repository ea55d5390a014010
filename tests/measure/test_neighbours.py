"""Neighbours of embeddings beside scikit-learn's, on the same embeddings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import pairwise_distances
from sklearn.neighbors import KNeighborsClassifier

from vitrim.errors import VitrimError
from vitrim.measure.contestants import ModelOutput
from vitrim.measure.neighbours import NEAREST, VOTERS, NeighbourLoss, Neighbours, nearest, voted
from vitrim.measure.records import Batch

Made = tuple[torch.Tensor, ...]


@pytest.fixture(scope="module")
def made() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings of 150 images of 4 classes, dense and changed a little, and their classes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (150,), generator=generator)
    centres = torch.randn(4, 12, generator=generator)
    dense = centres[labels] + 1.5 * torch.randn(150, 12, generator=generator)
    return dense, dense + 0.7 * torch.randn(150, 12, generator=generator), labels


def order(queries: torch.Tensor, database: torch.Tensor) -> np.ndarray:
    distances = pairwise_distances(queries.double(), database.double(), metric="cosine")
    np.fill_diagonal(distances, np.inf)
    return distances.argsort(1)


def gauge(
    dense: torch.Tensor,
    own: torch.Tensor,
    labels: torch.Tensor,
    sizes: tuple[int, ...],
    found: Neighbours | None = None,
) -> Neighbours:
    found = found or Neighbours()
    start = 0
    for index, size in enumerate(sizes):
        part = slice(start, start + size)
        batch = Batch(torch.zeros(size, 3, 1, 1), labels[part], torch.arange(start, start + size), index)
        found.see(batch, ModelOutput(own[part]), ModelOutput(dense[part]))
        start += size
    return found


@pytest.mark.parametrize("rows", [1024, 7])
def test_the_nearest_are_scikit_learns(made: Made, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr("vitrim.measure.neighbours.ROWS", rows)
    dense, own, _ = made
    assert nearest(own, dense, 9)[0].tolist() == order(own, dense)[:, :9].tolist()


def test_votes_are_those_of_scikit_learn_with_each_image_left_out(made: Made) -> None:
    dense, own, labels = made
    every = np.arange(len(labels))
    for queries, database in ((own, own), (own, dense)):
        wanted = []
        for image in every:
            others = every != image
            knn = KNeighborsClassifier(VOTERS, metric="cosine", weights=lambda far: np.exp((1 - far) / 0.07))
            knn.fit(database[others].double().numpy(), labels[others].numpy())
            wanted.append(int(knn.predict(queries[image : image + 1].double().numpy())[0]))
        assert voted(*nearest(queries, database, VOTERS), labels).tolist() == wanted


def test_the_numbers_of_a_comparison(made: Made) -> None:
    dense, own, labels = made
    result = gauge(dense, own, labels, (64, 64, 22)).result()
    found, among, like = order(own, own), order(own, dense), order(dense, dense)
    for end, places in (("", found), ("_dense", among)):
        same = labels.numpy()[places] == labels.numpy()[:, None]
        assert result[f"recall1{end}"] == pytest.approx(same[:, 0].mean())
        assert result[f"recall5{end}"] == pytest.approx(same[:, :5].any(1).mean())
        kept = [len(set(a[:NEAREST]) & set(b[:NEAREST])) / NEAREST for a, b in zip(places, like, strict=True)]
        assert result[f"neighbours{end}"] == pytest.approx(np.mean(kept))
    assert result["knn"] == pytest.approx((voted(*nearest(own, own, VOTERS), labels) == labels).double().mean().item())
    lost = (labels.numpy()[like[:, 0]] == labels.numpy()) * 1.0 - (labels.numpy()[found[:, 0]] == labels.numpy())
    assert result["loss"] == pytest.approx(lost.mean())
    assert result["loss_error"] == pytest.approx(lost.std() / np.sqrt(150))
    cosines = (dense.double() * own.double()).sum(1) / dense.double().norm(dim=1) / own.double().norm(dim=1)
    assert result["cosine"] == pytest.approx(cosines.mean().item())


def test_the_dense_model_loses_nothing_and_is_its_own_neighbourhood(made: Made) -> None:
    dense, _, labels = made
    result = gauge(dense, dense, labels, (150,)).result()
    assert (result["loss"], result["loss_error"]) == (0.0, 1 / 150)
    assert result["neighbours"] == result["neighbours_dense"] == 1.0
    assert result["knn"] == result["knn_dense"]


def test_without_labels_neighbours_that_are_others_are_what_is_lost(made: Made) -> None:
    dense, own, labels = made
    result = gauge(dense, own, labels, (150,), NeighbourLoss(labelled=False)).result()
    places = zip(order(own, own), order(dense, dense), strict=True)
    lost = np.array([1 - len(set(a[:NEAREST]) & set(b[:NEAREST])) / NEAREST for a, b in places])
    assert (result["loss"], result["loss_error"]) == (
        pytest.approx(lost.mean()),
        pytest.approx(lost.std() / np.sqrt(150)),
    )
    cosines = (dense.double() * own.double()).sum(1) / dense.double().norm(dim=1) / own.double().norm(dim=1)
    assert result["kl"] == pytest.approx(1 - cosines.mean().item())


def test_batches_do_not_matter(made: Made) -> None:
    assert gauge(*made, (150,)).result() == gauge(*made, (1, 100, 49)).result()


def test_of_equal_rows_the_first_is_nearest() -> None:
    same = torch.ones(5, 3)
    assert nearest(same, same, 3)[0].tolist() == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2], [0, 1, 2]]


def test_a_tie_of_votes_goes_to_the_lower_class() -> None:
    near = torch.full((1, 4), 0.5, dtype=torch.float64)
    assert voted(torch.tensor([[0, 1, 2, 3]]), near, torch.tensor([7, 2, 2, 7])).tolist() == [2]
    near[0, 3] = 0.501  # and a nearer one weighs more
    assert voted(torch.tensor([[0, 1, 2, 3]]), near, torch.tensor([7, 2, 2, 7])).tolist() == [7]


def test_fewer_images_than_neighbours() -> None:
    dense, labels = torch.eye(3), torch.tensor([0, 0, 1])
    result = gauge(dense, dense + 0.1, labels, (3,)).result()
    assert result["neighbours"] == 1.0  # both others
    assert result["recall5"] == pytest.approx(2 / 3)
    with pytest.raises(VitrimError, match="one image has no neighbours"):
        gauge(dense[:1], dense[:1], labels[:1], (1,)).result()
