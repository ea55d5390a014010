from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import linkage as tree_of
from torch import Tensor

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim
from vitrim.core import compiled
from vitrim.core.attention import Attention
from vitrim.core.plan import Layer
from vitrim.methods.atc import LINKAGES, agglomerate


@golden.cases(
    [
        ("new/atc_average_r70", vitrim.ATC(keep_rate=0.7, blocks=(1, 3, 4))),
        (
            "new/atc_p49_single_r50_noprop",
            vitrim.ATC(keep_rate=0.5, blocks=(1, 3), linkage="single", proportional=False),
        ),
        ("new/atc_every_r8", vitrim.ATC(r=8, prefix_counts=True)),
    ],
    "config",
)
def test_vectors(ref: golden.Reference, config: vitrim.ATC) -> None:
    learned.check_dense(ref)
    model = golden.vit(ref)
    reduction = vitrim.reduce_(model, config, record=True)
    learned.check_outputs(ref, model, reduction)
    for block, key in learned.keys(ref, "source").items():
        ref.check(key, reduction.states[block + 1].source)
    learned.check_float32(ref, model)


def by_scipy(distance: Tensor, linkage: str, merges: int) -> list[list[int]]:
    """The first patch of the cluster of each patch, image by image."""
    found = []
    for one in distance.numpy():
        count = len(one)
        groups = np.arange(count)
        tree = tree_of(one[np.triu_indices(count, 1)], linkage)
        for step, (a, b) in enumerate(tree[:merges, :2].astype(int)):
            groups[(groups == a) | (groups == b)] = count + step
        found.append([int(np.flatnonzero(groups == group)[0]) for group in groups])
    return found


@pytest.fixture(params=[True, False], ids=["loops", "operators"])
def _loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param and not compiled.INSTALLED:
        pytest.skip("Numba is not installed")
    monkeypatch.setattr(compiled, "INSTALLED", request.param)


@pytest.mark.usefixtures("_loops")
@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("count", [2, 3, 7, 40])
def test_clusters_are_those_of_scipy(linkage: str, count: int) -> None:
    points = torch.randn(5, count, 4, dtype=torch.float64)
    points[-1] = points[-1].cumsum(0).exp()  # a chain of ever longer steps: the rounds take one pair at a time
    distance = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    for merges in sorted({1, count // 3, count // 2, count - 1} - {0}):
        found = agglomerate(distance.clone(), linkage, merges)
        assert found.tolist() == by_scipy(distance, linkage, merges), merges


@pytest.mark.usefixtures("_loops")
@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("values", [1, 3])
def test_equal_distances_leave_as_many_clusters_as_asked(linkage: str, values: int) -> None:
    """A constant image, and few different distances: each cluster has a first patch that stands for itself."""
    distance = torch.randint(values, (4, 12, 12)).float()
    distance = torch.maximum(distance, distance.mT)
    for merges in (1, 5, 11):
        found = agglomerate(distance.clone(), linkage, merges)
        assert [len(set(row)) for row in found.tolist()] == [12 - merges] * 4
        assert torch.equal(found.gather(1, found), found)
        assert (found <= torch.arange(12)).all()


@pytest.mark.usefixtures("_loops")
@pytest.mark.parametrize("linkage", LINKAGES)
def test_a_product_that_rounds_a_pair_differently_from_its_two_ends_leaves_as_many_clusters(linkage: str) -> None:
    """Each of three points has the next one as the closest, so that no two are each other's."""
    nearer, farther = 0.5, 0.5 + 2**-20
    circle = torch.tensor([[2.0, nearer, farther], [farther, 2.0, nearer], [nearer, farther, 2.0]])
    distance = torch.full((1, 6, 6), 1.0)
    distance[0, :3, :3] = distance[0, 3:, 3:] = circle
    for merges, expected in ((2, 4), (4, 2), (5, 1)):
        found = agglomerate(distance.clone(), linkage, merges)
        assert len(set(found[0].tolist())) == expected, merges


@pytest.mark.parametrize(
    ("linkage", "merges", "expected"),
    [
        ("single", 3, [0, 0, 0, 3, 4, 4]),
        ("single", 4, [0, 0, 0, 0, 4, 4]),
        ("complete", 3, [0, 0, 2, 2, 4, 4]),
        ("average", 3, [0, 0, 0, 3, 4, 4]),
        ("average", 4, [0, 0, 0, 3, 3, 3]),
    ],
)
def test_linkages_differ_where_a_chain_lies_between(linkage: str, merges: int, expected: list[int]) -> None:
    line = torch.tensor([[[0.0], [1.0], [2.05], [3.9], [6.0], [6.1]]])
    assert agglomerate(torch.cdist(line, line), linkage, merges)[0].tolist() == expected


def test_sizes_weigh_in_the_mean_and_not_in_the_distance() -> None:
    keys = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [1.0, 0.3]])[None, None]
    keys = torch.cat([torch.ones(1, 1, 1, 2), keys], dim=2)
    x = torch.tensor([[[9.0], [1.0], [4.0], [7.0], [8.0]]])
    state = vitrim.TokenState.start(x, num_prefix=1)
    state = replace(state, size=torch.tensor([[1.0, 3.0, 1.0, 1.0, 1.0]]), uniform=False)
    for proportional, mean in ((True, (3 * 1 + 4) / 4), (False, (1 + 4) / 2)):
        config = vitrim.ATC(r=[1, 0], proportional=proportional)
        reducer = tiny.reducer(config, Layer(0, 2, 1, 1, 0, 1, True, (2, 2)))
        tokens, after = reducer(x, Attention(keys, keys, keys, 1.0), state).apply(x, state)
        assert tokens.flatten().tolist() == pytest.approx([9.0, mean, 7.0, 8.0])
        assert after.size.tolist() == [[1.0, 4.0, 1.0, 1.0]]


def test_the_prefix_counts_as_released() -> None:
    model = tiny.HOSTS["vit"]()
    for prefix_counts, expected in ((True, [36, 36, 36, 36]), (False, [35, 34, 33, 32])):
        reduction = vitrim.reduce_(model, vitrim.ATC(r=1, prefix_counts=prefix_counts), record=True)
        model(tiny.images())
        assert reduction.tokens_per_block == [1 + count for count in expected]
        vitrim.restore_(model)
    assert vitrim.ATC(r=[8, 3], prefix_counts=True).counts(64, 4, num_prefix=5) == [61, 61, 61, 61]
    assert vitrim.ATC(r=[8, 3], prefix_counts=True).counts(64, 4, num_prefix=0) == [56, 53, 53, 53]


def test_only_single_linkage_has_a_fixed_graph() -> None:
    assert vitrim.ATC(linkage="single").obstacle() is None
    for linkage in ("average", "complete"):
        problem = vitrim.ATC(linkage=linkage).obstacle()
        assert problem is not None
        assert problem.endswith("use linkage=single")


def test_an_image_that_is_not_finite_ends() -> None:
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, "atc:keep_rate=0.5")
    with patch.object(compiled, "INSTALLED", False), torch.no_grad():
        assert not model(tiny.images() * torch.nan).isfinite().any()
