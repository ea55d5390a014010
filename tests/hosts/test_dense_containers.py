"""Dense models of other libraries around a backbone: full maps whatever is reduced inside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DepthAnythingConfig,
    DepthAnythingForDepthEstimation,
    Dinov2Config,
    DPTConfig,
    DPTForDepthEstimation,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)

import tiny
import vitrim
from tiny_hosts.transformers_vit import GEOMETRY


class Around(NamedTuple):
    """How to make it, where its backbone is, and its output, a map."""

    create: Callable[[], nn.Module]
    part: str
    run: Callable[[Any], Tensor]


def backbone(reshape: bool = True) -> Dinov2Config:
    options = {key: value for key, value in GEOMETRY.items() if key not in ("num_labels", "intermediate_size")}
    return Dinov2Config(**options, mlp_ratio=2, out_indices=[1, 2, 3, 4], reshape_hidden_states=reshape)


def upernet() -> nn.Module:
    config = UperNetConfig(
        backbone_config=backbone(), hidden_size=16, num_labels=5, use_auxiliary_head=False, pool_scales=[1, 2]
    )
    return UperNetForSemanticSegmentation(config)


def mask2former() -> nn.Module:
    config = Mask2FormerConfig(
        backbone_config=backbone(),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=16,
        num_queries=4,
        num_labels=5,
    )
    return Mask2FormerForUniversalSegmentation(config)


def dpt() -> nn.Module:
    config = DPTConfig(
        backbone_config=backbone(reshape=False),
        is_hybrid=False,
        patch_size=4,
        hidden_size=32,
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        reassemble_factors=[4, 2, 1, 1],
    )
    model = DPTForDepthEstimation(config)
    [*model.head.modules()][-2].bias.data.fill_(1.0)  # no depth is negative: random weights would give zeros
    return model


def depth_anything() -> nn.Module:
    config = DepthAnythingConfig(
        backbone_config=backbone(reshape=False),
        patch_size=4,
        reassemble_hidden_size=32,
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        head_hidden_size=8,
        reassemble_factors=[4, 2, 1, 0.5],
    )
    model = DepthAnythingForDepthEstimation(config)
    model.head.conv3.bias.data.fill_(1.0)  # as above
    return model


def smp_dpt() -> nn.Module:
    models = pytest.importorskip("segmentation_models_pytorch")
    model: nn.Module = models.DPT("tu-test_vit", encoder_weights=None, classes=5)
    return model


MODELS = {
    "UperNetForSemanticSegmentation": Around(upernet, "model.backbone", lambda model: model(tiny.images()).logits),
    "Mask2FormerForUniversalSegmentation": Around(
        mask2former,
        "model.model.pixel_level_module.encoder",
        lambda model: model(tiny.images()).masks_queries_logits,
    ),
    "DPTForDepthEstimation": Around(dpt, "model.backbone", lambda model: model(tiny.images()).predicted_depth),
    "DepthAnythingForDepthEstimation": Around(
        depth_anything, "model.backbone", lambda model: model(tiny.images()).predicted_depth
    ),
    "DPT": Around(smp_dpt, "model.encoder.model", lambda model: model(tiny.images(size=160))),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_its_backbone_is_reduced(name: str) -> None:
    create, where, run = MODELS[name]
    torch.manual_seed(0)
    model = create().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    dense = run(model)
    part = eval(where, {"model": model})
    assert vitrim.reduce_(model, "tome:r=0").model is part
    torch.testing.assert_close(run(model), dense, atol=1e-6, rtol=1e-6)
    vitrim.restore_(part)
    found = {}
    for method in ("tome:r=4", "topk", "topk:restore=end"):
        reduction = vitrim.reduce_(part, method, record=True)
        found[method] = run(model)
        assert found[method].shape == dense.shape
        assert found[method].isfinite().all()
        assert not torch.equal(found[method], dense)
        assert min(state.num_tokens for state in reduction.states) < reduction.states[0].num_tokens
        vitrim.restore_(part)
    # what a pruned patch is in the maps is `restore`'s to say here, too
    assert not torch.equal(found["topk"], found["topk:restore=end"])
    assert torch.equal(run(model), dense)


@torch.no_grad()
def test_every_feature_map_of_a_reduced_backbone_is_full() -> None:
    model = upernet().eval().backbone
    whole = model(tiny.images()).feature_maps
    vitrim.reduce_(model, "topk:restore=end")
    maps = model(tiny.images()).feature_maps
    assert [entry.shape for entry in maps] == [entry.shape for entry in whole] == [(2, 32, 6, 6)] * 4
    assert all((entry.abs().sum(dim=1) > 0).all() for entry in maps)
