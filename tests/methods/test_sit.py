"""SiT's token slimming against its reference vectors."""

from __future__ import annotations

import pytest
import torch

import golden_learned as learned
import golden_models as golden
import vitrim

RENAME = {"weight.0": "norm", "weight.1": "hidden", "weight.3": "weights"}
HALF = vitrim.SiT(keep_rate=0.5, blocks=(1, 3, 5))


@pytest.mark.parametrize(("name", "config"), [("haurum/sit_p64_r50", HALF), ("haurum/sit_p196_r70", vitrim.SiT())])
def test_reference(name: str, config: vitrim.MethodConfig) -> None:
    ref, model, reduction = learned.reduced(name, config, RENAME)
    learned.check_outputs(ref, model, reduction)
    learned.check_assignments(ref, reduction)
    learned.check_soft(ref, model)
    learned.check_float32(ref, model)


def test_gradients() -> None:
    ref, model, _ = learned.reduced("haurum/grads_sit_p64_r50", HALF, RENAME)
    loss = learned.cross_entropy_backward(ref, model)
    torch.testing.assert_close(loss, golden.tensor(ref, "loss"), atol=1e-9, rtol=0)
    names = {
        f"cluster_layers.{stage}.{old}": f"blocks.{block}.reducer.{new}"
        for stage, block in enumerate((1, 3, 5))
        for old, new in {**RENAME, "scale": "scale"}.items()
    }
    learned.check_gradients(ref, model, names)


def test_untrained_it_averages_the_patches() -> None:
    reducer = vitrim.SiT().mixer(vitrim.Layer(3, 12, 32, 2, 5, 1, True, (6, 6)), 8)
    matrix = reducer.mix(torch.randn(2, 36, 32)).matrix
    torch.testing.assert_close(matrix, torch.full((2, 8, 36), 1 / 36), atol=5e-3, rtol=0)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 8))
