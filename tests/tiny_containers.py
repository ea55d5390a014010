"""Models that hold a supported host, and what to run of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import timm
import torch
from torch import Tensor, nn
from transformers import (
    BeitConfig,
    BeitForSemanticSegmentation,
    DepthAnythingConfig,
    DepthAnythingForDepthEstimation,
    Dinov2Config,
    DPTConfig,
    DPTForDepthEstimation,
    GPT2Config,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    SamConfig,
    SamMaskDecoderConfig,
    SamModel,
    SamPromptEncoderConfig,
    SamVisionConfig,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    UperNetConfig,
    UperNetForSemanticSegmentation,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

import tiny
from tiny_hosts.common import seeded
from tiny_hosts.transformers_vit import GEOMETRY
from tiny_vlms import SECOND, VISION, VLMS


class Container(NamedTuple):
    """Description of one: a function that makes it, the host in it, and its output (a tensor) on ``tiny.images()``."""

    create: Callable[[], nn.Module]
    part: str
    run: Callable[[Any], Tensor]
    tokens: int = 37 - 4 * 4
    """After the last block under ``tome:r=4``."""


def plain(model: Any) -> Tensor:
    return model(tiny.images())


def depth(model: Any) -> Tensor:
    return model(tiny.images()).predicted_depth


class Adapted(nn.Module):
    """Holds its base as peft's models do, and hands attributes on."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = base

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model").model, name)

    def forward(self, images: Tensor) -> Tensor:
        return tiny.logits(self.base_model.model(images))  # type: ignore[operator, return-value]


class OpenClip(nn.Module):
    """Laid out as open_clip's models with a timm tower."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Module()
        self.visual.trunk = tiny.HOSTS["vit"]()
        self.visual.head = nn.Linear(5, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.visual.head(self.visual.trunk(images))  # type: ignore[operator]


def backbone(reshape: bool = False) -> Dinov2Config:
    return Dinov2Config(
        **VISION, mlp_ratio=2, out_indices=[1, 2, 3, 4], reshape_hidden_states=reshape, apply_layernorm=True
    )


def depth_anything() -> nn.Module:
    config = DepthAnythingConfig(
        backbone_config=backbone(), patch_size=4, neck_hidden_sizes=[8] * 4, head_hidden_size=8,
        reassemble_hidden_size=32, reassemble_factors=[4, 2, 1, 0.5], fusion_hidden_size=8,
    )  # fmt: skip
    model = DepthAnythingForDepthEstimation(config)
    model.head.conv3.bias.data.fill_(1.0)  # no depth is negative: random weights would give zeros
    return model


def dpt() -> nn.Module:
    config = DPTConfig(
        backbone_config=backbone(), patch_size=4, is_hybrid=False, hidden_size=32, neck_hidden_sizes=[8] * 4,
        reassemble_factors=[4, 2, 1, 1], fusion_hidden_size=8,
    )  # fmt: skip
    model = DPTForDepthEstimation(config)
    [*model.head.modules()][-2].bias.data.fill_(1.0)  # as above
    return model


def upernet() -> nn.Module:
    config = UperNetConfig(
        backbone_config=backbone(reshape=True), hidden_size=16, num_labels=5, use_auxiliary_head=False,
        pool_scales=[1, 2],
    )  # fmt: skip
    return UperNetForSemanticSegmentation(config)


def mask2former() -> nn.Module:
    widths = dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim"), 32)
    config = Mask2FormerConfig(
        **widths, backbone_config=backbone(reshape=True), encoder_feedforward_dim=16, encoder_layers=1,
        decoder_layers=2, num_attention_heads=2, dim_feedforward=16, num_queries=4, num_labels=5,
    )  # fmt: skip
    return Mask2FormerForUniversalSegmentation(config)


def beit() -> nn.Module:
    config = BeitConfig(**GEOMETRY, use_relative_position_bias=True, out_indices=[1, 2, 3, 4], pool_scales=[1, 2])
    return seeded(lambda: BeitForSemanticSegmentation(config))()


def smp_dpt() -> nn.Module:
    models = pytest.importorskip("segmentation_models_pytorch")
    model: nn.Module = models.DPT("tu-test_vit", encoder_weights=None, classes=5)
    return model


def sam() -> nn.Module:
    vision = {
        **VISION,
        "patch_size": 2,
        "window_size": 6,
        "global_attn_indexes": [3],
        "output_channels": 16,
        "num_pos_feats": 8,
    }
    decoder = SamMaskDecoderConfig(
        hidden_size=16, num_attention_heads=2, mlp_dim=16, num_hidden_layers=1, iou_head_hidden_dim=16
    )
    prompts = SamPromptEncoderConfig(hidden_size=16, image_size=24, patch_size=2, mask_input_channels=4)
    return SamModel(
        SamConfig(vision_config=SamVisionConfig(**vision), mask_decoder_config=decoder, prompt_encoder_config=prompts)
    )


def sam_run(model: Any) -> Tensor:
    return model(tiny.images(), input_points=torch.tensor([[[[5.0, 7.0]]], [[[9.0, 3.0]]]])).pred_masks


def of_language(name: str, part: str, tokens: int = 37 - 4 * 4) -> Container:
    """A vision-language model, of a prompt with an image in each of two rows."""
    given = VLMS[name].prompt([[7, 11], [13, 17]], [VLMS[name].tokens, SECOND.get(name, VLMS[name].tokens)])
    return Container(VLMS[name].create, part, lambda model: model(**given).logits, tokens)


def encoder_decoder() -> nn.Module:
    decoder = GPT2Config(
        vocab_size=50, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, add_cross_attention=True
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**VISION), decoder)
    return VisionEncoderDecoderModel(config)


def timm_wrapper() -> nn.Module:
    args = {"img_size": 24, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 2}
    return TimmWrapperForImageClassification(
        TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=args, num_labels=5)
    )


CONTAINERS: dict[str, Container] = {
    "DataParallel": Container(lambda: nn.DataParallel(tiny.HOSTS["vit"]()), "model.module", plain),
    "OptimizedModule": Container(
        lambda: torch.compile(tiny.HOSTS["vit"](), backend="eager"),  # type: ignore[return-value]
        "model._orig_mod",
        plain,
    ),
    "FeatureGetterNet": Container(
        lambda: timm.create_model("vit_tiny_patch16_224", features_only=True, img_size=24, patch_size=4, depth=4),
        "model.model",
        lambda model: model(tiny.images())[-1],
    ),
    "Adapted": Container(lambda: Adapted(tiny.HOSTS["hf_vit"]()), "model.base_model.model", plain),
    "OpenClip": Container(OpenClip, "model.visual.trunk", plain),
    "Sequential": Container(lambda: nn.Sequential(tiny.HOSTS["vit"](), nn.Linear(5, 2)), "model[0]", plain),
    "TimmWrapperForImageClassification": Container(
        timm_wrapper, "model.timm_model", lambda model: model(tiny.images()).logits
    ),
    "LLaVA": of_language("llava", "model.model.vision_tower"),
    "Pixtral": of_language("pixtral", "model.model.vision_tower", 36 - 4 * 4),
    "InternVL": of_language("internvl", "model.model.vision_tower"),
    "SmolVLM": of_language("smolvlm", "model.model.vision_model", 36 - 4 * 4),
    "SamModel": Container(seeded(sam), "model.vision_encoder", sam_run, 4 * (36 - 4 * 4)),
    "VisionEncoderDecoderModel": Container(
        encoder_decoder,
        "model.encoder",
        lambda model: model(pixel_values=tiny.images(), decoder_input_ids=torch.zeros(2, 3, dtype=torch.int64)).logits,
    ),
}


DENSE = {
    "BEiT": Container(beit, "model", lambda model: model(tiny.images()).logits),
    "UperNet": Container(upernet, "model.backbone", lambda model: model(tiny.images()).logits),
    "Mask2Former": Container(
        mask2former,
        "model.model.pixel_level_module.encoder",
        lambda model: model(tiny.images()).masks_queries_logits,
    ),
    "DPT": Container(dpt, "model.backbone", depth),
    "DepthAnything": Container(depth_anything, "model.backbone", depth),
    "segmentation_models_pytorch": Container(
        smp_dpt, "model.encoder.model", lambda model: model(tiny.images(size=160)), 101 - 6 * 4
    ),
}
"""Those that make a map of the patches."""
