"""Tiny vision-language models of Hugging Face, with prompts of two images, one behind the other or in two rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PixtralVisionConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMVisionConfig,
    VipLlavaConfig,
    VipLlavaForConditionalGeneration,
)
from transformers.models.idefics3 import Idefics3VisionConfig

import tiny
from tiny_hosts.common import seeded
from tiny_hosts.transformers_vit import GEOMETRY

IMAGE = 1
VISION: dict[str, Any] = {key: value for key, value in GEOMETRY.items() if key != "num_labels"}
TEXT: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 59,
    "max_position_embeddings": 256,
}
LLAMA = LlamaConfig(**TEXT)


def llava(**options: Any) -> nn.Module:
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=LLAMA, image_token_id=IMAGE, **options)
    )


def pixtral() -> nn.Module:
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=PixtralVisionConfig(**VISION),
            text_config=LLAMA,
            image_token_id=IMAGE,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        )
    )


def vipllava() -> nn.Module:
    return VipLlavaForConditionalGeneration(
        VipLlavaConfig(
            vision_config=CLIPVisionConfig(**VISION),
            text_config=LLAMA,
            image_token_id=IMAGE,
            vision_feature_layers=[-2, 1],
            vision_feature_layer=[-2, 1],
        )
    )


def paligemma() -> nn.Module:
    vision = SiglipVisionConfig(**VISION, projection_dim=16)
    return PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(vision_config=vision, text_config=GemmaConfig(**TEXT), image_token_id=IMAGE, projection_dim=16)
    )


def gemma3() -> nn.Module:
    text = Gemma3TextConfig(**TEXT, sliding_window=16, layer_types=["sliding_attention", "full_attention"])
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            vision_config=SiglipVisionConfig(**VISION), text_config=text, image_token_id=IMAGE, mm_tokens_per_image=9
        )
    )


def idefics3() -> nn.Module:
    vision = Idefics3VisionConfig(**VISION)
    return Idefics3ForConditionalGeneration(
        Idefics3Config(vision_config=vision, text_config=LLAMA, image_token_id=IMAGE, scale_factor=2, pad_token_id=0)
    )


def smolvlm() -> nn.Module:
    vision = SmolVLMVisionConfig(**VISION)
    return SmolVLMForConditionalGeneration(
        SmolVLMConfig(vision_config=vision, text_config=LLAMA, image_token_id=IMAGE, scale_factor=2, pad_token_id=0)
    )


def internvl() -> nn.Module:
    vision = InternVLVisionConfig(**{**VISION, "image_size": [24, 24], "patch_size": [4, 4]})
    return InternVLForConditionalGeneration(
        InternVLConfig(vision_config=vision, text_config=Qwen2Config(**TEXT), image_token_id=IMAGE)
    )


QWEN: dict[str, Any] = {
    "depth": 4,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
}
QWEN_MERGED = {**QWEN, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 16}
"""The same with its widths, and that of what the merger gives."""
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
IDS = {"image_token_id": IMAGE, "video_token_id": 3, "vision_start_token_id": 4, "vision_end_token_id": 5}


def qwen2_vl() -> nn.Module:
    vision = {**QWEN, "embed_dim": 32, "hidden_size": 16, "mlp_ratio": 2}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE}, **IDS)
    )


def qwen3_vl() -> nn.Module:
    vision = {
        **QWEN_MERGED,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 2],
    }
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE}, **IDS)
    )


class VLM(NamedTuple):
    """One of them.

    Attributes:
        create: makes it, with weights that are the same every time.
        tokens: image tokens of an image of 24 x 24 pixels in a prompt.
        blocks: reduced blocks that the connector sees the results of.
        images: from the numbers of images in every row to the inputs that bring them.
        types: the name of the input that says which tokens are images, if there is one.
    """

    create: Callable[[], nn.Module]
    tokens: int
    blocks: int = 4
    images: Callable[[list[int]], dict[str, Tensor]] = lambda rows: {"pixel_values": tiny.images(sum(rows))}
    types: str | None = None

    def prompt(self, rows: list[list[int]], sizes: list[int] | None = None) -> dict[str, Tensor]:
        """A prompt with a number of images in every row, each between texts, padded on the left.

        Args:
            rows: for every row the ids of texts; an image stands between any two of them.
            sizes: image tokens of every image in order; by default `tokens` each.
        """
        numbers = [len(row) - 1 for row in rows]
        own = iter(sizes or [self.tokens] * sum(numbers))
        ids = [[row[0], *(x for text in row[1:] for x in (*([IMAGE] * next(own)), text, text + 1))] for row in rows]
        longest = max(map(len, ids))
        padded = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
        given = {"input_ids": padded, "attention_mask": (padded != 0).long(), **self.images(numbers)}
        if self.types is not None:
            given[self.types] = (padded == IMAGE).long()
        return given


def nested(rows: list[int]) -> dict[str, Tensor]:
    """Idefics' form: (rows, images of a row, ...); images that a row does not have are 0."""
    images = iter(tiny.images(sum(rows)))
    blank = torch.zeros(3, 24, 24)
    filled = [torch.stack([next(images) if image < number else blank for image in range(max(rows))]) for number in rows]
    return {"pixel_values": torch.stack(filled)}


def packed(rows: list[int]) -> dict[str, Tensor]:
    """Qwen's form: 6 x 6 patches and, of every second image, 4 x 6."""
    grids = torch.tensor([[1, 6, 6] if image % 2 == 0 else [1, 4, 6] for image in range(sum(rows))])
    generator = torch.Generator().manual_seed(7)
    patches = torch.randn(int(grids.prod(-1).sum()), 3 * 2 * 4 * 4, generator=generator)
    return {"pixel_values": patches, "image_grid_thw": grids}


def sized(rows: list[int]) -> dict[str, Tensor]:
    """Pixtral's form: every second image is smaller."""
    number = sum(rows)
    sizes = torch.tensor([[24, 24] if image % 2 == 0 else [16, 24] for image in range(number)])
    return {"pixel_values": tiny.images(number), "image_sizes": sizes}


VLMS: dict[str, VLM] = {
    "llava": VLM(seeded(llava), 36, blocks=3),
    "llava_layers": VLM(seeded(lambda: llava(vision_feature_layer=[-1, 2])), 36),
    "llava_full": VLM(seeded(lambda: llava(vision_feature_select_strategy="full", vision_feature_layer=-1)), 37),
    "pixtral": VLM(seeded(pixtral), 36, images=sized),
    "vipllava": VLM(seeded(vipllava), 36, blocks=3),
    "paligemma": VLM(seeded(paligemma), 36, types="token_type_ids"),
    "gemma3": VLM(seeded(gemma3), 9, types="token_type_ids"),
    "idefics3": VLM(seeded(idefics3), 9, images=nested),
    "smolvlm": VLM(seeded(smolvlm), 9, images=nested),
    "internvl": VLM(seeded(internvl), 9),
    "qwen2_vl": VLM(seeded(qwen2_vl), 9, images=packed, types="mm_token_type_ids"),
    "qwen3_vl": VLM(seeded(qwen3_vl), 9, images=packed, types="mm_token_type_ids"),
}
SECOND = {"pixtral": 24, "qwen2_vl": 6, "qwen3_vl": 6}
"""Image tokens of every second image, where it is smaller."""
