"""torch.jit.trace and torch.fx on reduced models: right, or refused in one line."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models.feature_extraction import create_feature_extractor

import tiny
import vitrim
from vitrim.core.block import ReducedBlock

REFUSED = ("algm", "atm", "saint")
"""How many tokens these merge is a number that Python reads from the images."""


def jit_trace(model: torch.nn.Module, images: Tensor) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # of lengths that become constants
        return torch.jit.trace(model, images, check_trace=False, strict=False)


def values(output: Any) -> Tensor:
    """The first tensor of what a model, or its trace, gives: a trace turns the outputs of transformers into dicts."""
    if isinstance(output, dict):
        output = output.get("logits", next(iter(output.values())))
    output = tiny.logits(output)
    return output if isinstance(output, Tensor) else output[0]


# on hosts of a library the same lines are traced; `test_contract.py` runs every one of them
@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
@pytest.mark.parametrize(
    ("host", "config"),
    tiny.matrix(tiny.configs(), [*tiny.LIBRARIES, "eva"], [], others=["tome"], once=["vit"], full=tiny.PLAIN),
)
def test_a_traced_model_equals_the_eager_one_on_other_images(host: str, config: vitrim.MethodConfig) -> None:
    model = tiny.traceable(host, config).double()
    vitrim.reduce_(model, tiny.fits(config, model))
    if (config.name in REFUSED and config.is_adaptive()) or (config.name == "atc" and config.obstacle() is not None):
        with pytest.raises(vitrim.VitrimError, match=f"^torch.jit.trace cannot trace {config.name}: how many"):
            jit_trace(model, tiny.images().double())
        return
    traced = jit_trace(model, tiny.images().double())
    for images in (tiny.images(seed=8).double(), tiny.images(batch=3, seed=11).double()):
        with torch.no_grad(), torch.jit.optimized_execution(False):  # which would take longer than the trace
            torch.manual_seed(5)
            torch.testing.assert_close(values(traced(images)), values(tiny.run(model, images)), atol=1e-12, rtol=1e-12)


FX = {"vit": "blocks.3", "torchvision_vit": "encoder.layers.encoder_layer_3"}


@pytest.mark.parametrize("host", FX)
def test_fx_says_that_blocks_are_leaves(host: str) -> None:
    model = tiny.HOSTS[host]()
    vitrim.reduce_(model, "tome:r=4")
    with pytest.raises(vitrim.UnsupportedModelError, match=r"^torch.fx cannot trace through a reduced block"):
        create_feature_extractor(model, [FX[host]])


@pytest.mark.parametrize("host", FX)
def test_fx_with_blocks_as_leaves_works(host: str) -> None:
    model, images = tiny.HOSTS[host](), tiny.images()
    vitrim.reduce_(model, "tome:r=4")
    seen: list[Tensor] = []
    tiny.blocks(model)[3].register_forward_hook(lambda m, i, o: seen.append(o))
    with torch.no_grad():
        logits = tiny.run(model, images)
        features = create_feature_extractor(model, [FX[host]], tracer_kwargs={"leaf_modules": [ReducedBlock]})
        torch.testing.assert_close(features(images)[FX[host]], seen[0], atol=0, rtol=0)
        assert seen[0].shape == (2, 37 - 16, 32)
        torch.testing.assert_close(tiny.run(model, images), logits, atol=0, rtol=0)
