"""Sinkhorn clustering against its reference vectors."""

from __future__ import annotations

import torch

import golden_learned as learned
import golden_models as golden
import vitrim
from vitrim.methods.sinkhorn import transport

CASES = [
    ("haurum/sinkhorn_p64_r50", vitrim.Sinkhorn(keep_rate=0.5, blocks=(1, 3, 5), eps=1.0)),
    ("haurum/sinkhorn_p64_r50_eps005", vitrim.Sinkhorn(keep_rate=0.5, blocks=(1, 3, 5))),
    ("haurum/sinkhorn_p196_r70", vitrim.Sinkhorn(keep_rate=0.7, eps=1.0)),
]


@golden.cases(CASES, "config")
def test_reference(ref: golden.Reference, config: vitrim.MethodConfig) -> None:
    model, reduction = learned.reduced(ref, config, {})
    learned.check_outputs(ref, model, reduction)
    learned.check_soft(ref, model, reduction)
    learned.check_float32(ref, model)


@golden.cases(["haurum/grads_sinkhorn_p64_r50"])
def test_published_gradients_are_those_of_the_unit_centres(ref: golden.Reference) -> None:
    config = CASES[0][1].model_copy(update={"in_place": True})
    model, _ = learned.reduced(ref, config, {})
    learned.cross_entropy_backward(ref, model)
    names = {f"cluster_layers.{stage}.": f"blocks.{block}.reducer." for stage, block in enumerate((1, 3, 5))}
    learned.check_gradients(ref, model, names)
    for block in (1, 3, 5):
        norm = model.blocks[block].reducer.v.norm(dim=1)
        torch.testing.assert_close(norm, torch.ones_like(norm))
    learned.check_float32(ref, model)


def test_by_default_the_centres_stay_and_the_output_is_the_same() -> None:
    ref = golden.load(CASES[1][0])
    model, _ = learned.reduced(ref, CASES[1][1], {})
    before = model.blocks[1].reducer.v.clone()
    with torch.no_grad():
        model(golden.images(ref))
    assert torch.equal(model.blocks[1].reducer.v, before)


def test_transport_is_balanced() -> None:
    scores = torch.randn(2, 4, 12, dtype=torch.float64)
    plan = transport(scores, iterations=200)
    torch.testing.assert_close(plan.sum(1), torch.ones(2, 12, dtype=torch.float64))
    torch.testing.assert_close(plan.sum(2), torch.full((2, 4), 3.0, dtype=torch.float64))


def test_iterations_matter() -> None:
    scores = torch.randn(1, 4, 12, dtype=torch.float64) / 0.05
    assert (transport(scores, 1) - transport(scores, 3)).abs().max() > 1e-3
