"""Models that hold a supported host: refused with a line that names it; reduced inside, they go on working."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import timm
import torch
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    DepthAnythingConfig,
    DepthAnythingForDepthEstimation,
    Dinov2Config,
    DPTConfig,
    DPTForDepthEstimation,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

import tiny
import vitrim
from tiny_hosts.transformers_vit import GEOMETRY
from vitrim.core.registry import access

VISION: dict[str, Any] = {key: value for key, value in GEOMETRY.items() if key != "num_labels"}


class Container(NamedTuple):
    """How to make it, where the supported host is in it, and its output (a tensor) on ``tiny.images()``."""

    create: Callable[[], nn.Module]
    part: str
    run: Callable[[Any], Tensor]


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


def dinov2_backbone() -> Dinov2Config:
    return Dinov2Config(
        **VISION, mlp_ratio=2, out_features=["stage2", "stage4"], reshape_hidden_states=False, apply_layernorm=True
    )


def depth_anything() -> nn.Module:
    return DepthAnythingForDepthEstimation(
        DepthAnythingConfig(
            backbone_config=dinov2_backbone(),
            patch_size=4,
            reassemble_hidden_size=32,
            neck_hidden_sizes=[8, 8],
            fusion_hidden_size=8,
            reassemble_factors=[1, 1],
        )
    )


def dpt() -> nn.Module:
    return DPTForDepthEstimation(
        DPTConfig(
            backbone_config=dinov2_backbone(),
            is_hybrid=False,
            patch_size=4,
            hidden_size=32,
            neck_hidden_sizes=[8, 8],
            fusion_hidden_size=8,
            reassemble_factors=[1, 1],
            readout_type="ignore",
            neck_ignore_stages=[],
        )
    )


def llava() -> nn.Module:
    text = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=text, image_token_id=1, pad_token_id=0)
    )


def llava_run(model: Any) -> Tensor:
    ids = torch.cat([torch.full((2, 36), 1), torch.full((2, 3), 5)], dim=1)
    return model(input_ids=ids, pixel_values=tiny.images()).logits


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
    "DepthAnythingForDepthEstimation": Container(depth_anything, "model.backbone", depth),
    "DPTForDepthEstimation": Container(dpt, "model.backbone", depth),
    "TimmWrapperForImageClassification": Container(
        timm_wrapper, "model.timm_model", lambda model: model(tiny.images()).logits
    ),
    "LlavaForConditionalGeneration": Container(llava, "model.model.vision_tower", llava_run),
    "VisionEncoderDecoderModel": Container(
        encoder_decoder,
        "model.encoder",
        lambda model: model(pixel_values=tiny.images(), decoder_input_ids=torch.zeros(2, 3, dtype=torch.int64)).logits,
    ),
}
HANDING_ON = ("OptimizedModule", "Adapted")
"""Wrappers with the attributes of what they hold."""


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_is_refused_in_a_line_that_names_what_to_reduce(name: str) -> None:
    create, part, run = CONTAINERS[name]
    torch.manual_seed(0)
    model = create().eval()
    with torch.no_grad():
        dense = run(model)
        with pytest.raises(vitrim.UnsupportedModelError) as caught:
            vitrim.reduce_(model, "tome:r=4")
        message = str(caught.value)
        assert message.startswith(f"{name} is not a supported host itself: reduce {part} (")
        assert "\n" not in message
        assert len(message) < 160

        host = eval(part, {"model": model})
        reduction = vitrim.reduce_(host, "tome:r=4")
        reduced = run(model)
        assert reduced.shape == dense.shape
        assert torch.isfinite(reduced).all()
        assert not torch.equal(reduced, dense)
        assert reduction.state.num_tokens == 37 - 4 * 4
        if name in HANDING_ON:
            assert vitrim.get_reduction(model) is reduction
            vitrim.restore_(model)
        else:
            for call in (vitrim.restore_, vitrim.get_reduction):
                with pytest.raises(vitrim.VitrimError, match=r"is not reduced: model.* in it is: give that$") as caught:
                    call(model)
                assert part in str(caught.value)
            vitrim.restore_(host)
        assert torch.equal(run(model), dense)


def test_of_many_supported_parts_the_first_two_are_named() -> None:
    model = nn.ModuleDict({"a b": tiny.HOSTS["vit"](), "c": nn.ModuleList([tiny.HOSTS["vit"](), tiny.HOSTS["vit"]()])})
    with pytest.raises(vitrim.UnsupportedModelError) as caught:
        vitrim.reduce_(model, "tome:r=4")
    assert "reduce model['a b'] (VisionTransformer) or model.c[0] (VisionTransformer) or 1 others instead" in str(
        caught.value
    )


def test_a_part_that_would_be_refused_is_not_named() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny.HOSTS["vit"]()
            self.inner.blocks[0].attn.forward = lambda x: x

    with pytest.raises(vitrim.UnsupportedModelError, match=r"`vitrim list hosts` prints those that are$"):
        vitrim.reduce_(Gated(), "tome:r=4")


def test_a_model_whose_part_is_reduced_says_which() -> None:
    model: Any = tiny.HOSTS["hf_vit"]()
    vitrim.reduce_(model.vit, "tome:r=4")
    with pytest.raises(vitrim.VitrimError, match=r"reduced already: call vitrim.restore_\(model.vit\) first$"):
        vitrim.reduce_(model, "tome:r=4")


@pytest.mark.parametrize(
    ("name", "path"), [("a.b", "model.a.b"), ("0", "model[0]"), ("a.1.x y", "model.a[1]['x y']"), ("", "model")]
)
def test_how_a_submodule_is_reached(name: str, path: str) -> None:
    assert access(name) == path
