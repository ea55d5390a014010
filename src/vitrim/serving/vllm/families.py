"""vLLM's models whose image tokens are selected, each under its own name with `plugin.PREFIX` in front."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration
from vllm.model_executor.models.idefics3 import Idefics3ForConditionalGeneration
from vllm.model_executor.models.interns1 import InternS1ForConditionalGeneration
from vllm.model_executor.models.internvl import InternVLChatModel
from vllm.model_executor.models.llava import LlavaForConditionalGeneration
from vllm.model_executor.models.llava_next import LlavaNextForConditionalGeneration
from vllm.model_executor.models.llava_onevision import LlavaOnevisionForConditionalGeneration
from vllm.model_executor.models.paligemma import PaliGemmaForConditionalGeneration
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.smolvlm import SmolVLMForConditionalGeneration

from vitrim.serving.vllm.selecting import SelectingAxes, SelectingModel


def whole(config: Any) -> None:
    """No tiles: all tokens of an image are one pool."""


def gemma(config: Any) -> int:
    """Tokens of an image, or of a crop of it."""
    return config.mm_tokens_per_image  # type: ignore[no-any-return]


def shuffled(config: Any) -> int:
    """Tokens of a tile behind a pixel shuffle of Idefics 3 or SmolVLM."""
    side = config.vision_config.image_size // config.vision_config.patch_size
    return int(side * side // config.scale_factor**2)


def intern(config: Any) -> int:
    """Tokens of a tile behind a pixel shuffle of InternVL."""
    vision = config.vision_config
    image, patch = (
        size[0] if isinstance(size, (list, tuple)) else size for size in (vision.image_size, vision.patch_size)
    )
    return int((image // patch) ** 2 * config.downsample_ratio**2)


class VitrimLlavaForConditionalGeneration(SelectingModel, LlavaForConditionalGeneration):
    """LLaVA-1.5."""

    tile = staticmethod(whole)


class VitrimLlavaNextForConditionalGeneration(SelectingModel, LlavaNextForConditionalGeneration):
    """LLaVA-NeXT: all tiles of an image are one pool, and the tokens that end rows take part, as in DivPrune."""

    tile = staticmethod(whole)


class VitrimLlavaOnevisionForConditionalGeneration(SelectingModel, LlavaOnevisionForConditionalGeneration):
    """LLaVA-OneVision, as LLaVA-NeXT."""

    tile = staticmethod(whole)


class VitrimPaliGemmaForConditionalGeneration(SelectingModel, PaliGemmaForConditionalGeneration):
    """PaliGemma."""

    tile = staticmethod(whole)


class VitrimInternVLChatModel(SelectingModel, InternVLChatModel):
    """InternVL: every tile by itself."""

    tile = staticmethod(intern)


class VitrimInternVLForConditionalGeneration(SelectingModel, InternS1ForConditionalGeneration):
    """InternVL in the form of transformers."""

    tile = staticmethod(intern)


class VitrimGemma3ForConditionalGeneration(SelectingModel, Gemma3ForConditionalGeneration):
    """Gemma 3: an image and its crops each by itself."""

    tile = staticmethod(gemma)


class VitrimIdefics3ForConditionalGeneration(SelectingModel, Idefics3ForConditionalGeneration):
    """Idefics 3: every tile by itself."""

    tile = staticmethod(shuffled)


class VitrimSmolVLMForConditionalGeneration(SelectingModel, SmolVLMForConditionalGeneration):
    """SmolVLM, as Idefics 3."""

    tile = staticmethod(shuffled)


class VitrimQwen2VLForConditionalGeneration(SelectingAxes, Qwen2VLForConditionalGeneration):
    """Qwen2-VL."""

    tile = staticmethod(whole)


class VitrimQwen2_5_VLForConditionalGeneration(SelectingAxes, Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL."""

    tile = staticmethod(whole)


class VitrimQwen3VLForConditionalGeneration(SelectingAxes, Qwen3VLForConditionalGeneration):
    """Qwen3-VL, with its further features for early layers."""

    tile = staticmethod(whole)
