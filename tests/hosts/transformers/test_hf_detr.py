"""LW-DETR and RF-DETR end to end, and SAM 3: detectors around backbones whose windows are batch rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LwDetrConfig,
    LwDetrForObjectDetection,
    LwDetrViTConfig,
    Sam3VisionConfig,
    Sam3VisionModel,
    Sam3ViTConfig,
)
from transformers.models.rf_detr.configuration_rf_detr import RfDetrConfig, RfDetrDinov2Config
from transformers.models.rf_detr.modeling_rf_detr import RfDetrForObjectDetection

import tiny
import vitrim
from tiny_hosts.transformers_detr import LW, RF
from tiny_hosts.transformers_sam import SAM3
from tiny_hosts.transformers_vit import GEOMETRY
from vitrim.core.assignment import prune
from vitrim.core.tokens import TokenState
from vitrim.hosts.shared.windows import Windows, WindowState

VISION: dict[str, Any] = {key: value for key, value in GEOMETRY.items() if key != "num_labels"}
DECODER: dict[str, Any] = {
    "d_model": 16,
    "decoder_ffn_dim": 16,
    "decoder_layers": 1,
    "decoder_self_attention_heads": 2,
    "decoder_cross_attention_heads": 2,
    "num_queries": 4,
    "group_detr": 1,
    "num_labels": 5,
}


def lw_detr() -> nn.Module:
    return LwDetrForObjectDetection(
        LwDetrConfig(backbone_config=LwDetrViTConfig(**{**VISION, **LW}), projector_scale_factors=[1.0], **DECODER)
    )


def rf_detr() -> nn.Module:
    return RfDetrForObjectDetection(RfDetrConfig(backbone_config=RfDetrDinov2Config(**{**VISION, **RF}), **DECODER))


def sam3() -> nn.Module:
    sizes = [[48, 48], [24, 24], [12, 12]]
    config = Sam3VisionConfig(
        backbone_config=Sam3ViTConfig(**{**VISION, **SAM3}), fpn_hidden_size=8, backbone_feature_sizes=sizes
    )
    return Sam3VisionModel(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "LW-DETR": (lw_detr, lambda output: output.pred_boxes),
    "RF-DETR": (rf_detr, lambda output: output.pred_boxes),
    "SAM 3": (sam3, lambda output: output.fpn_hidden_states[0]),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_the_backbone_in_a_whole_model_is_reduced(name: str) -> None:
    create, read = MODELS[name]
    torch.manual_seed(0)
    model, images = tiny.shaken(create()).double().eval(), tiny.images(size=24 if name == "SAM 3" else 48).double()
    dense = read(model(images))
    for method in ("none", "tome:r=0"):
        vitrim.reduce_(model, method)
        torch.testing.assert_close(read(model(images)), dense, atol=1e-6, rtol=1e-6)
        vitrim.restore_(model)
    reduction = vitrim.reduce_(model, "tome:r=1", record=True)
    merged = read(model(images))
    assert merged.shape == dense.shape
    assert not torch.equal(merged, dense)
    assert reduction.states[-1].num_tokens == reduction.states[0].num_tokens - 4 * 4  # of every window in every layer
    assert reduction.state.size.shape[0] == 2
    vitrim.restore_(model)
    assert torch.equal(read(model(images)), dense)


@pytest.mark.parametrize("name", ["LW-DETR", "RF-DETR"])
def test_images_that_are_not_square_are_refused(name: str) -> None:
    model = MODELS[name][0]().eval()
    vitrim.reduce_(model, "tome:r=1")
    with pytest.raises(vitrim.UnsupportedModelError, match="takes square images, not 24 x 48"):
        model(torch.zeros(1, 3, 24, 48))


def test_windows_that_do_not_make_up_the_image_are_refused() -> None:
    config = RfDetrDinov2Config(**{**VISION, **RF, "num_windows": 5})
    model = RfDetrForObjectDetection(RfDetrConfig(backbone_config=config, **DECODER))
    with pytest.raises(
        vitrim.UnsupportedModelError, match=r"5 x 5 windows of equal size do not make up 12 x 12 patches"
    ):
        vitrim.reduce_(model.model.backbone.backbone, "tome:r=1")


def test_states_of_windows_with_tokens_in_front_become_states_of_images() -> None:
    """Two windows of 1 x 2 patches in an image of 1 x 4, a class token in front of each: an example by hand."""
    windows = Windows(1, 2, 1, 2)
    state = TokenState.start(torch.zeros(2, 3, 1), num_prefix=1)
    of_windows = WindowState.of(state, windows)
    whole = of_windows.of_images()
    assert whole.num_prefix == 2
    assert whole.source.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert whole.position.tolist() == [[0, 1, 2, 3, 4, 5]]
    sized = replace(of_windows, size=torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert sized.of_images().size.tolist() == [[1.0, 4.0, 2.0, 3.0, 5.0, 6.0]]
    kept = prune(of_windows, torch.tensor([[1], [0]]))  # the second patch of the first window, the first of the second
    _, after = kept.apply(torch.zeros(2, 3, 1), of_windows)
    whole = after.of_images()
    assert whole.position.tolist() == [[0, 1, 3, 4]]
    assert whole.source.tolist() == [[0, 1, -1, 2, 3, -1]]
    assert whole.size.shape == (1, 4)


def test_the_class_token_of_one_window_of_several_scores_no_patches() -> None:
    """That of RF-DETR attends across windows: methods that score by it are refused, where there are several."""
    with pytest.raises(vitrim.UnsupportedModelError, match="attention of a class token"):
        vitrim.reduce_(tiny.FURTHER["hf_rf_detr"](), "evit")
    one = vitrim.reduce_(tiny.FURTHER["hf_rf_detr_one_window"](), "evit:keep_rate=0.5")
    assert one.tokens_per_block[1] < one.tokens_per_block[0]
