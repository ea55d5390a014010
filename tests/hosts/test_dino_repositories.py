"""DINOv2 and DINOv3 of their own repositories: what of their interface is refused, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dinov2.models.vision_transformer import DinoVisionTransformer as Dinov2
from dinov3.models.vision_transformer import DinoVisionTransformer as Dinov3

import tiny
import vitrim
from tiny_hosts.common import seeded
from vitrim.core.registry import ask, host_of

MODELS = {"dinov2": Dinov2, "dinov3": Dinov3}
every_model = pytest.mark.parametrize("model", [seeded(kind)() for kind in MODELS.values()], ids=list(MODELS))


@every_model
def test_crops_of_several_sizes_are_refused(model: Any) -> None:
    crops = [tiny.images(), tiny.images(size=24)]
    dense = model.forward_features(crops, [None, None])
    vitrim.reduce_(model, "tome:r=4")
    with pytest.raises(vitrim.UnsupportedModelError, match=r"takes images of one size, not a list of 2 crops; vitrim"):
        model.forward_features(crops, [None, None])
    vitrim.restore_(model)
    again = model.forward_features(crops, [None, None])
    assert torch.equal(again[0]["x_prenorm"], dense[0]["x_prenorm"])


@pytest.mark.parametrize("kind", MODELS.values(), ids=list(MODELS))
def test_stochastic_depth_that_leaves_images_out_is_refused_in_training(kind: Any) -> None:
    model = kind(drop_path_rate=0.2)
    vitrim.reduce_(model, "tome:r=4")
    model.eval()(tiny.images())
    with pytest.raises(vitrim.UnsupportedModelError, match=r"^stochastic depth of 0.2 leaves images of a batch out"):
        model.train()(tiny.images())


@every_model
def test_other_sizes_and_the_grid_of_a_forward(model: Any) -> None:
    """GTP asks the patch embedding for rows and columns; DINOv3 takes any size."""
    reduction = vitrim.reduce_(model, "gtp:num_prop=4")
    images = tiny.images(size=24)
    with torch.no_grad():
        model(images)
        assert reduction.state.grid == (6, 6)
        if isinstance(model, Dinov3):
            model(images[:, :, :16])
            assert reduction.state.grid == (4, 6)
    vitrim.restore_(model)


@every_model
def test_a_dense_head_finds_its_tokens(model: Any) -> None:
    library = ask(model)
    with torch.no_grad():
        tokens = library.tokens(library.without_head(model), tiny.images())
    assert tokens.shape == (2, 37, 32)
    assert library.layout(model).patch_size == (4, 4)
    assert host_of(model).name.endswith("DinoVisionTransformer")
