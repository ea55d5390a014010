"""Hugging Face's vision-language models whose language model can get fewer image tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from math import ceil
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.utils.constants import OPENAI_CLIP_STD

from vitrim.core.plan import HostFacts
from vitrim.core.registry import host_of
from vitrim.core.selection import FrameGrid, ImageSelector, Selector
from vitrim.errors import UnsupportedModelError, VitrimError
from vitrim.hosts.shared.compact import Survivors
from vitrim.hosts.transformers.common import USUAL_SIDE, calls_own
from vitrim.hosts.transformers.packed import patches_in_cells
from vitrim.hosts.transformers.vlm import HuggingFaceVLM
from vitrim.hosts.transformers.vlm_cells import PackedCells
from vitrim.hosts.transformers.vlm_smaller import SmallerImages, middles, smaller_pixels

WINDOWED = (
    "Qwen2.5-VL attends within windows of 4 x 4 cells in most blocks, and those at the edges of an image have fewer: "
    "windows would keep other numbers of tokens, so its tower is not reduced"
)


class _Fixed(HuggingFaceVLM):
    """A tower of a fixed size, whose learned positions the library interpolates for others."""

    @classmethod
    def resizes(cls, model: nn.Module) -> bool:
        return "interpolate_pos_encoding" in _arguments(cls.tower(model))

    @classmethod
    def smaller(cls, model: Any, given: Mapping[str, Any], kind: str, selector: ImageSelector) -> SmallerImages:
        side, tower = model.base_model.config.vision_config.patch_size, cls.tower(model)
        pixels, grid, few = smaller_pixels(given["pixel_values"], selector, (side, side))
        further = host_of(tower).facts(tower).num_prefix - (cls.dropped(model, given) or 0)
        places = [middles(grid, few, further)] * len(pixels)
        return SmallerImages({"pixel_values": pixels}, places, {"interpolate_pos_encoding": True})


def _arguments(tower: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(tower.forward).parameters


class Llava(_Fixed):
    """A projector reads each token by itself, from one block before the last or from several.

    With Pixtral's tower, images have their own sizes, and the tokens that end rows stay.
    """

    name = "LLaVA"

    @classmethod
    def image_inputs(cls, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        given = super().image_inputs(model, images)
        if "image_sizes" in _arguments(cls.tower(model)):  # Pixtral's
            sizes = torch.tensor(images.shape[-2:], device=images.device)
            given["image_sizes"] = sizes.expand(len(given["pixel_values"]), 2)
        return given

    @classmethod
    def dropped(cls, model: Any, given: Mapping[str, Any]) -> int | None:
        strategy = given.get("vision_feature_select_strategy") or model.base_model.config.vision_feature_select_strategy
        return int(strategy == "default")

    @classmethod
    def reads_all(cls, model: nn.Module, given: Mapping[str, Any]) -> bool:
        dropped, tower = cls.dropped(model, given), cls.tower(model)
        if dropped and dropped > host_of(tower).facts(tower).num_prefix:  # the first patch, not the first token left
            return True
        # places of packed images are counted behind the projector
        return given.get("image_sizes") is not None or super().reads_all(model, given)


class VipLlava(Llava):
    """A projector reads each token by itself, with the outputs of several blocks concatenated."""

    name = "ViP-LLaVA"

    @classmethod
    def dropped(cls, model: Any, given: Mapping[str, Any]) -> int | None:
        return 1


class PaliGemma(_Fixed):
    """A linear layer reads each token by itself. PaliGemma 2 has the same class."""

    name = "PaliGemma"
    types = "token_type_ids"


class Gemma3(HuggingFaceVLM):
    """A mean over cells of patches, 4 x 4 in the published models."""

    name = "Gemma 3"
    in_cells = True
    types = "token_type_ids"

    @classmethod
    def cell(cls, model: Any) -> int:
        return model.base_model.multi_modal_projector.kernel_size  # type: ignore[no-any-return]

    @classmethod
    def check(cls, model: Any) -> None:
        projector = model.base_model.multi_modal_projector
        if projector.kernel_size < 1:
            raise UnsupportedModelError(
                f"{projector.tokens_per_side} image tokens a side are more than the {projector.patches_per_image} "
                "patches that the projector would make them of: set mm_tokens_per_image by image_size and patch_size"
            )
        if projector.patches_per_image % projector.kernel_size:
            raise UnsupportedModelError(
                f"{projector.patches_per_image} patches a side are no whole cells of {projector.kernel_size}: the "
                "projector leaves the last ones out, so what they merge with would be lost"
            )


class Idefics3(HuggingFaceVLM):
    """A pixel shuffle joins cells of patches, on images without padding."""

    name = "Idefics3, SmolVLM"
    in_cells = True
    prompts_together = True
    tower_name = "vision_model"

    @classmethod
    def cell(cls, model: Any) -> int:
        return model.base_model.config.scale_factor  # type: ignore[no-any-return]

    @classmethod
    def image_inputs(cls, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        return {"pixel_values": images}

    @classmethod
    def images(cls, output: Any, number: int) -> list[Tensor]:
        # the library concatenates those of a prompt
        together = torch.cat(list(output.pooler_output))
        return list(together.unflatten(0, (number, together.shape[0] // number)))


class InternVL(HuggingFaceVLM):
    """A pixel shuffle joins cells of 2 x 2 patches."""

    name = "InternVL"
    in_cells = True

    @classmethod
    def cell(cls, model: Any) -> int:
        return int(1 / model.base_model.config.downsample_ratio + 0.5)

    @classmethod
    def resizes(cls, model: nn.Module) -> bool:
        return True

    @classmethod
    def smaller(cls, model: Any, given: Mapping[str, Any], kind: str, selector: ImageSelector) -> SmallerImages:
        rows, columns = (cls.cell(model) * side for side in model.base_model.config.vision_config.patch_size)
        pixels, grid, few = smaller_pixels(given["pixel_values"], selector, (rows, columns))
        if few[1] != few[2]:
            raise VitrimError(
                f"the pixel shuffle of InternVL reads squares, and {few[1]} x {few[2]} tokens are none: ask for a "
                "square number of tokens"
            )
        return SmallerImages({"pixel_values": pixels}, [middles(grid, few)] * len(pixels))


class LlavaNext(HuggingFaceVLM):
    """Refused: tiles are assembled to a map, which is cut to the image's shape and gets a token after every row."""

    name = "LLaVA-NeXT"
    refused = True

    @classmethod
    def check(cls, model: nn.Module) -> None:
        raise UnsupportedModelError(
            f"{type(model).__name__} puts the tiles of an image together as a map, cuts it to the image's shape and "
            "ends its rows with a token: a place for every patch; use compact=False"
        )

    @classmethod
    def image_inputs(cls, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        raise UnsupportedModelError(f"prompts of {type(model).__name__}, with images in tiles, are not measured")


class LlavaOneVision(LlavaNext):
    """Tokens of a video's frames are joined 2 x 2; another one ends the video, and stays."""

    name = "LLaVA-OneVision"

    @classmethod
    def video_grid(cls, model: Any, given: Mapping[str, Any]) -> FrameGrid:
        vision = model.config.vision_config
        side = ceil(vision.image_size // vision.patch_size / 2)
        return given["pixel_values_videos"].shape[1], side, side


class _Qwen(PackedCells, HuggingFaceVLM):
    """Cells of 2 x 2 patches of packed images; the language model's positions have three axes.

    A remaining token keeps its anchor's time, row and column; text continues as behind the whole image.
    """

    tower_name = "visual"
    in_cells = True
    cell_by_cell = True
    types: ClassVar[str | None] = "mm_token_type_ids"

    @classmethod
    def cell(cls, model: Any) -> int:
        return model.base_model.visual.spatial_merge_size  # type: ignore[no-any-return]

    @classmethod
    def connector(cls, model: Any) -> list[nn.Module]:
        tower = model.base_model.visual
        return [tower.merger, *getattr(tower, "deepstack_merger_list", [])]

    @classmethod
    def image_inputs(cls, model: Any, images: Tensor) -> dict[str, Tensor]:
        patches, grid = patches_in_cells(model.base_model.visual.config, images.flatten(0, 1))
        return {"pixel_values": patches, "image_grid_thw": grid.to(images.device)}


class Qwen2VL(_Qwen):
    """A merger joins cells of 2 x 2 patches. Images, not videos."""

    name = "Qwen2-VL"
    pixel_std = OPENAI_CLIP_STD


class Qwen3VL(_Qwen):
    """Like Qwen2-VL, but the language model also gets the values of the anchors from earlier blocks of the tower."""

    name = "Qwen3-VL"

    @classmethod
    def taken(cls, output: Any, left: list[Survivors], full: bool) -> list[tuple[Tensor, Tensor]]:
        output.deepstack_features = [
            [own.take(image, full)[0] for own, image in zip(left, layer, strict=True)]
            for layer in output.deepstack_features
        ]
        return super().taken(output, left, full)


class Qwen25VL(_Qwen):
    """Refused: most blocks attend within windows, which have fewer patches at the edges of an image.

    Selectors use the attention of the last block that attends to all patches.
    """

    name = "Qwen2.5-VL"
    pixel_std = OPENAI_CLIP_STD
    refused = True
    shows_attention = True

    @classmethod
    def watch(cls, model: Any, given: Mapping[str, Any], kind: str, selector: Selector) -> Any:
        if selector.needs().attention == "none":
            return None
        from vitrim.hosts.transformers.windowed import LastWholeMap  # imports this family's model

        return LastWholeMap(model.base_model.visual, given[f"{kind}_grid_thw"])

    @classmethod
    def check_selector(cls, model: Any, selector: Selector, facts: HostFacts | None) -> None:
        super().check_selector(model, selector, facts)
        if selector.needs().attention != "none" and not model.base_model.visual.fullatt_block_indexes:
            raise UnsupportedModelError(f"{selector.name} needs a block without windows, and this tower has none")
        if calls_own(type(model.base_model.visual.blocks[0].attn), model.base_model.visual.config._attn_implementation):
            cls.refuse_own_attention(selector)

    @classmethod
    def check(cls, model: nn.Module) -> None:
        raise UnsupportedModelError(WINDOWED)

    @classmethod
    def usual_images(cls, model: Any) -> tuple[int, ...]:
        config = model.base_model.visual.config
        return (config.in_channels, USUAL_SIDE * config.patch_size, USUAL_SIDE * config.patch_size)
