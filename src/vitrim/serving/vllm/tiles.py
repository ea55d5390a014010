"""Families with separately selected tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models import gemma3_mm, idefics3, interns1, minicpmv4_6, smolvlm

from vitrim.core.selection import FrameGrid
from vitrim.serving.vllm.selecting import Selecting, selecting


@selecting
class ServedGemma3(Selecting, gemma3_mm.Gemma3ForConditionalGeneration):
    """Gemma 3: an image and its crops."""

    @staticmethod
    def tile(config: Any) -> int:
        return config.mm_tokens_per_image  # type: ignore[no-any-return]


@selecting
class ServedInternVL(Selecting, interns1.InternS1ForConditionalGeneration):
    """InternVL: tiles follow one another."""

    @staticmethod
    def tile(config: Any) -> int:
        return config.image_seq_length  # type: ignore[no-any-return]


class _Shuffled(Selecting):
    @staticmethod
    def tile(config: Any) -> int:
        side = config.vision_config.image_size // config.vision_config.patch_size // config.scale_factor
        return side * side  # type: ignore[no-any-return]


@selecting
class ServedIdefics3(_Shuffled, idefics3.Idefics3ForConditionalGeneration):
    """Idefics 3."""


@selecting
class ServedSmolVLM(_Shuffled, smolvlm.SmolVLMForConditionalGeneration):
    """SmolVLM."""


@selecting
class ServedMiniCPMV(Selecting, minicpmv4_6.MiniCPMV4_6ForConditionalGeneration):
    """MiniCPM-V 4.6: an image and its slices, of sizes that depend on the image."""

    grid_fields = ("tgt_sizes", "use_vit_merger")

    @classmethod
    def units(cls, config: Any, item: Mapping[str, Any], total: int) -> list[FrameGrid]:
        side = 4 if bool(item["use_vit_merger"]) else 2  # of patches in a token
        return [(1, rows // side, columns // side) for rows, columns in item["tgt_sizes"].tolist()]
