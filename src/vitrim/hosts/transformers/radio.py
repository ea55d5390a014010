"""Hugging Face C-RADIO, whose layers are DINOv2's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.models.radio import modeling_radio as radio

from vitrim.errors import UnsupportedModelError
from vitrim.hosts.transformers.common import TransformersHost
from vitrim.hosts.transformers.versions import OLDER_DINO, DinoForm, attention


class ReducedRadioLayer(DinoForm, radio.RadioLayer):
    attention_classes = (attention(radio, "Radio", OLDER_DINO),)


class HFRadio(TransformersHost):
    """Several class tokens, registers. The summary reads class tokens, the features are patches.

    This is the library's model; NVIDIA's remote code, which wraps a timm model, is refused.
    """

    name = "transformers C-RADIO"
    heads = ("patches",)
    reduced_blocks = (ReducedRadioLayer,)
    trunk_classes = (radio.RadioModel,)
    maker_name = "embeddings"

    @classmethod
    def prefix_of(cls, trunk: Any) -> int:
        return int(trunk.config.num_cls_tokens + trunk.config.num_registers)

    @classmethod
    def grid_of(cls, maker: Any, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
        height, width = args[0].shape[-2:]
        return height // maker.patch_size, width // maker.patch_size

    @classmethod
    def check_inputs(cls, trunk: Any, given: Mapping[str, Any]) -> None:
        if given.get("image_grid_hw") is not None:
            raise UnsupportedModelError(
                "a reduced RadioModel takes no image_grid_hw (packed images of several sizes): give images of one size "
                "as pixel_values (B, C, H, W)"
            )
