"""SiT's token slimming against its reference vectors."""

from __future__ import annotations

import torch

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim

RENAME = {"weight.0": "norm", "weight.1": "hidden", "weight.3": "weights"}
HALF = vitrim.SiT(keep_rate=0.5, blocks=(1, 3, 5))


@golden.cases([("haurum/sit_p64_r50", HALF), ("haurum/sit_p196_r70", vitrim.SiT())], "config")
def test_reference(ref: golden.Reference, config: vitrim.MethodConfig) -> None:
    model, reduction = learned.reduced(ref, config, RENAME)
    learned.check_outputs(ref, model, reduction)
    learned.check_soft(ref, model, reduction)
    learned.check_float32(ref, model)


@golden.cases(["haurum/grads_sit_p64_r50"])
def test_gradients(ref: golden.Reference) -> None:
    model, _ = learned.reduced(ref, HALF, RENAME)
    learned.cross_entropy_backward(ref, model)
    names = {
        f"cluster_layers.{stage}.{old}": f"blocks.{block}.reducer.{new}"
        for stage, block in enumerate((1, 3, 5))
        for old, new in {**RENAME, "scale": "scale"}.items()
    }
    learned.check_gradients(ref, model, names)
    learned.check_float32(ref, model)


def test_untrained_it_averages_the_patches() -> None:
    config = vitrim.SiT(keep_rate=8 / 36, blocks=(3,))
    reducer = tiny.reducer(config, vitrim.Layer(3, 12, 32, 2, 5, 1, True, (6, 6)))
    matrix = reducer.mix(torch.randn(2, 36, 32)).matrix
    torch.testing.assert_close(matrix, torch.full((2, 8, 36), 1 / 36), atol=5e-3, rtol=0)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 8))
