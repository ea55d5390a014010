"""DPC-KNN against its reference vectors, and where it goes its own way."""

from __future__ import annotations

import pytest
import torch

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim
from vitrim.methods.dpc_knn import density_peaks

HALF = vitrim.DPCKNN(keep_rate=0.5, blocks=(1, 3, 5), epsilon=1e-6)
CASES = [
    ("haurum/dpcknn_p64_r50", HALF),
    ("haurum/dpcknn_p64_r50_gain025", HALF),
    ("haurum/dpcknn_p64_r50_equalw", HALF.model_copy(update={"equal_weight": True})),
    ("haurum/dpcknn_p196_r70", vitrim.DPCKNN(epsilon=1e-6)),
]


@pytest.mark.parametrize(("name", "config"), CASES)
def test_reference(name: str, config: vitrim.MethodConfig) -> None:
    ref, model, reduction = learned.reduced(name, config, {})
    learned.check_outputs(ref, model, reduction)
    learned.check_kept(ref, reduction)
    learned.check_assignments(ref, reduction)
    learned.check_float32(ref, model)


def test_densities_and_weights() -> None:
    """The stored statistics of the first stage, from the tokens that enter it."""
    ref, model, _ = learned.reduced(*CASES[0], {})
    seen = []
    model.blocks[1].reducer.register_forward_hook(lambda m, args, out: seen.append(args[0][:, 1:]))
    with torch.no_grad():
        model(golden.images(ref))
        patches = seen[0]
        distance = torch.cdist(patches, patches) / patches.shape[-1] ** 0.5
        density = (-distance.topk(5, largest=False).values.square().mean(-1)).exp()
        weight = model.blocks[1].reducer.score(patches).exp().squeeze(-1)
    for found, key in ((density, "density/1"), (weight, "token_weights/1")):
        expected = golden.tensor(ref, key).double()
        torch.testing.assert_close(found, expected, atol=2e-6 * expected.abs().max().item(), rtol=0)


def test_gradients() -> None:
    ref, model, _ = learned.reduced("haurum/grads_dpcknn_p64_r50", HALF, {})
    loss = learned.cross_entropy_backward(ref, model)
    torch.testing.assert_close(loss, golden.tensor(ref, "loss"), atol=1e-9, rtol=0)
    names = {f"cluster_layers.{stage}.": f"blocks.{block}.reducer." for stage, block in enumerate((1, 3, 5))}
    learned.check_gradients(ref, model, names)


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
    assert density_peaks(torch.cdist(points, points), 2, 3).tolist() == [[1, 4]]


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
