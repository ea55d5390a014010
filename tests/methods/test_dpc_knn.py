"""DPC-KNN against its reference vectors, and where it goes its own way."""

from __future__ import annotations

import torch

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim
from vitrim.core.matching import density_peaks, distances
from vitrim.methods.dpc_knn import DPCKNNReducer, log_densities

HALF = vitrim.DPCKNN(keep_rate=0.5, blocks=(1, 3, 5), epsilon=1e-6)
CASES = [
    ("haurum/dpcknn_p64_r50", HALF),
    ("haurum/dpcknn_p64_r50_gain025", HALF),
    ("haurum/dpcknn_p64_r50_equalw", HALF.model_copy(update={"equal_weight": True})),
    ("haurum/dpcknn_p196_r70", vitrim.DPCKNN(epsilon=1e-6)),
]


@golden.cases(CASES, "config")
def test_reference(ref: golden.Reference, config: vitrim.DPCKNN) -> None:
    model, reduction = learned.reduced(ref, config, {})
    distance = learned.caught(
        model, ref["config"]["args"]["blocks"], lambda m, x, *rest: distances(x[:, 1:]) / width(x)
    )
    weight = learned.caught(model, ref["config"]["args"]["blocks"], weights)
    learned.check_outputs(ref, model, reduction)
    learned.check_kept(ref, reduction)
    learned.check_assignments(ref, reduction)
    for block, key in learned.keys(ref, "density").items():
        ref.check(key, log_densities(distance[block], config.k_neighbors).exp())
    for block, key in learned.keys(ref, "token_weights").items():
        ref.check(key, weight[block])
    learned.check_float32(ref, model)


def width(x: torch.Tensor) -> float:
    return x.shape[-1] ** 0.5


def weights(reducer: DPCKNNReducer, x: torch.Tensor, *rest: object) -> torch.Tensor | None:
    """(B, P) what the learned score makes the patches weigh in the mean of their cluster."""
    return None if reducer.score is None else reducer.score(x[:, 1:]).exp().squeeze(-1)


@golden.cases(["haurum/grads_dpcknn_p64_r50"])
def test_gradients(ref: golden.Reference) -> None:
    model, _ = learned.reduced(ref, HALF, {})
    learned.cross_entropy_backward(ref, model)
    names = {f"cluster_layers.{stage}.": f"blocks.{block}.reducer." for stage, block in enumerate((1, 3, 5))}
    learned.check_gradients(ref, model, names)
    learned.check_float32(ref, model)


def test_untrained_it_takes_plain_means_and_nothing_overflows() -> None:
    outputs = []
    for options in ({}, {"equal_weight": True}):
        model = tiny.HOSTS["vit"]()
        vitrim.reduce_(model, vitrim.DPCKNN(keep_rate=0.5, **options))
        with torch.no_grad():
            outputs.append(model(tiny.images()))
    assert torch.equal(*outputs)
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, vitrim.DPCKNN(keep_rate=0.5))
    with torch.no_grad():
        model.blocks[1].reducer.score.bias.fill_(1000.0)  # exp(1000) is infinite, the mean is not
        torch.testing.assert_close(model(tiny.images()), outputs[0])


def test_densities_that_underflow_still_have_an_order() -> None:
    points = torch.tensor([[[0.0], [0.1], [0.2], [5.0], [5.1], [5.3]]]) * 1000
    distance = torch.cdist(points, points)
    assert density_peaks(distance, log_densities(distance, 3), distance.amax(), 2).tolist() == [[1, 4]]


def test_few_patches_and_many_neighbours() -> None:
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, vitrim.DPCKNN(keep_rate=0.25, blocks=(1, 2)))
    with torch.no_grad():
        model(tiny.images())
    assert reduction.state.num_patches == 2  # of 9 and then 2: the second stage would have fewer than 5 to choose from


def test_published_noise_is_random() -> None:
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, vitrim.DPCKNN(keep_rate=0.5, density_noise=1.0))
    with torch.no_grad():
        torch.manual_seed(0)
        first = model(tiny.images())
        assert not torch.equal(first, model(tiny.images()))
        torch.manual_seed(0)
        assert torch.equal(first, model(tiny.images()))
