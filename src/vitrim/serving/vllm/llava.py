"""LLaVA and others: all tokens of an image form one pool, with those of its tiles and the ends of rows."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from vllm.model_executor.models import gemma4_mm, llava, llava_next, llava_onevision

from vitrim.core.selection import FrameGrid
from vitrim.serving.vllm.selecting import Selecting, selecting


@selecting
class ServedLlava(Selecting, llava.LlavaForConditionalGeneration):
    """LLaVA-1.5."""


@selecting
class ServedLlavaNext(Selecting, llava_next.LlavaNextForConditionalGeneration):
    """LLaVA-NeXT."""


@selecting
class ServedLlavaOneVision(Selecting, llava_onevision.LlavaOnevisionForConditionalGeneration):
    """LLaVA-OneVision: of a video, the token that ends it stays."""

    kinds = ("image", "video")
    grid_fields = ("pixel_values_videos",)

    @classmethod
    def units(cls, config: Any, item: Mapping[str, Any], total: int) -> list[FrameGrid]:
        if not item:
            return super().units(config, item, total)
        side = ceil(config.vision_config.image_size // config.vision_config.patch_size / 2)
        return [((total - 1) // side**2, side, side), (1, 1, 1)]


@selecting
class ServedGemma4(Selecting, gemma4_mm.Gemma4ForConditionalGeneration):
    """Gemma 4."""
