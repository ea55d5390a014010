"""Qwen-VL and others whose positions have three axes: a token keeps its row and column.

Only the tower knows which tokens remain. So embeddings carry their places in further channels, as in vLLM's interface
for pruned prompts (`recompute_mrope_positions`). The rest is known before: text continues as after the complete image.
So positions are right even if the beginning of a prompt, images included, is cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.models import glm4_1v, paddleocr_vl, qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_vl
from vllm.model_executor.models.interfaces import supports_multimodal_pruning
from vllm.platforms import current_platform

from vitrim.core.selection import Choice, FrameGrid
from vitrim.serving.vllm.selecting import Selecting, selecting

DIGIT = 128
"""Base of the digits that encode places: bfloat16 and float16 represent smaller integers exactly."""
CHANNELS = 6
"""Number of channels that carry a place."""


def written(kept: Tensor, rows: int, columns: int) -> Tensor:
    """(n, 6) rows and columns of the places ``kept`` (n,) of a grid, and how far the grid extends, two digits each."""
    # Rows, columns and extent may exceed what half precision holds exactly: each goes as two small digits.
    places = [kept // columns, kept % columns, torch.full_like(kept, max(rows, columns))]
    return torch.stack([digit for place in places for digit in (place // DIGIT, place % DIGIT)], dim=1)


def read(channels: Tensor) -> tuple[Tensor, Tensor]:
    """(3, n) frame, row and column, and (n,) how far the grid extends, decoded from `written`."""
    digits = channels.long().T
    rows, columns, extent = digits[::2] * DIGIT + digits[1::2]
    return torch.stack([torch.zeros_like(rows), rows, columns]), extent


def positions_follow(runner: Any) -> bool:
    """True if a runner must take positions from embeddings; vLLM's GPU runner computes this after loading."""
    config = runner.model_config.multimodal_config
    return supports_multimodal_pruning(runner.model) and config is not None and config.is_multimodal_pruning_enabled()


class Axes(Selecting):
    """A family with positions of three axes."""

    supports_multimodal_pruning: ClassVar[bool] = True
    grid_fields = ("image_grid_thw",)

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.is_multimodal_pruning_enabled = False  # of the base model, which would add its own channels
        if current_platform.is_cpu():  # vLLM's CPU runner loads models itself, and does not set it
            from vllm.v1.worker.cpu_model_runner import CPUModelRunner

            CPUModelRunner.is_multimodal_pruning_enabled = property(positions_follow, lambda runner, value: None)

    @staticmethod
    def grid(config: Any, item: Mapping[str, Any]) -> FrameGrid:
        frames, rows, columns = item["image_grid_thw"].tolist()
        merge = config.vision_config.spatial_merge_size
        return frames, rows // merge, columns // merge

    def left(self, part: Tensor, choice: Choice, grid: FrameGrid) -> Tensor:
        own = super().left(part, choice, grid)
        return torch.cat([own, written(choice.kept, *grid[1:]).to(own.dtype)], dim=1)

    def get_mrope_input_positions(
        self: Any, input_tokens: Sequence[int], mm_features: Sequence[Any]
    ) -> tuple[Tensor, int]:
        """(3, L) positions, for images the first place only, and the offset of the next token's position from L."""
        # Text counts on; all tokens of an image have its first place, and text goes on behind its longer side.
        parts, done, position = [], 0, 0
        for feature in sorted(mm_features, key=lambda feature: feature.mm_position.offset):
            start, length = feature.mm_position.offset, feature.mm_position.length
            _, rows, columns = self.grid(self.config, {name: feature.data[name].data for name in self.grid_fields})
            parts.append(torch.arange(position, position + start - done))
            position += start - done
            parts.append(torch.full((length,), position))
            position, done = position + max(rows, columns), start + length
        parts.append(torch.arange(position, position + len(input_tokens) - done))
        position += len(input_tokens) - done
        positions: Any = torch.cat(parts).expand(3, -1).clone()
        positions.offset = position - len(input_tokens)
        return positions, positions.offset

    def recompute_mrope_positions(
        self: Any,
        input_ids: Sequence[int] | Tensor,
        multimodal_embeddings: Sequence[Tensor],
        mrope_positions: Tensor,
        num_computed_tokens: int,
    ) -> tuple[list[Tensor], Tensor, int]:
        """The embeddings without their places, and with these the positions (3, L) of the tokens to come."""
        positions = mrope_positions.clone()
        ids = torch.as_tensor(input_ids, device=positions.device)
        coming = (ids == self.config.image_token_id).nonzero().squeeze(1)
        coming = coming[coming >= num_computed_tokens]
        embeddings, behind = [], positions[0, -1] + 1
        for own in multimodal_embeddings:
            here, coming = coming[: len(own)], coming[len(own) :]
            places, extent = read(own[:, -CHANNELS:].to(positions.device))
            positions[:, here] = positions[0, here] + places  # the first axis is where an image begins, also afterwards
            if len(here) and here[-1] == len(ids) - 1:
                behind = positions[0, -1] + extent[-1]
            embeddings.append(own[:, :-CHANNELS])
        # One runner of vLLM calls this in every step, also after the prompt, on the tensor that it was given at first.
        # The other calls it on copies, but only in steps with embeddings: the step of the last token counts.
        offset = getattr(mrope_positions, "offset", None)
        return embeddings, positions, int(behind) - len(ids) if offset is None else offset


@selecting
class ServedQwen2VL(Axes, qwen2_vl.Qwen2VLForConditionalGeneration):
    """Qwen2-VL."""


@selecting
class ServedQwen25VL(Axes, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL."""


@selecting
class ServedQwen3VL(Axes, qwen3_vl.Qwen3VLForConditionalGeneration):
    """Qwen3-VL: selects the features for further layers (DeepStack), too."""


@selecting
class ServedQwen35(Axes, qwen3_5.Qwen3_5ForConditionalGeneration):
    """Qwen3.5."""


@selecting
class ServedGlm4v(Axes, glm4_1v.Glm4vForConditionalGeneration):
    """GLM-4.1V, and the small model of GLM-4.6V."""


@selecting
class ServedPaddleOCRVL(Axes, paddleocr_vl.PaddleOCRVLForConditionalGeneration):
    """PaddleOCR-VL."""
