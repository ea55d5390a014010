"""Qwen-VL and others whose positions have three axes: a token keeps its time, row and column.

Only the tower knows which tokens remain. So embeddings carry their positions in further channels, as in vLLM's
interface for pruned prompts (`recompute_mrope_positions`). The rest is known before: text continues as after the
complete image or video. So positions are right even if the beginning of a prompt, images included, is cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.models import glm4_1v, glm_ocr, paddleocr_vl, qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_vl
from vllm.model_executor.models.interfaces import supports_multimodal_pruning
from vllm.platforms import current_platform

from vitrim.core.selection import Choice, FrameGrid, Selector
from vitrim.serving.vllm.cells import CELLS, features_of
from vitrim.serving.vllm.selecting import Selecting, selecting

DIGIT = 256
"""Base of the digits that encode positions: bfloat16 and float16 represent smaller integers exactly."""
DIGITS = 3
"""Of a number: enough for the seconds of a day, at hundreds of positions each."""
CHANNELS = 4 * DIGITS
"""Number of channels that carry the positions of a token."""


def written(positions: Tensor, extent: int) -> Tensor:
    """(n, 12) ``positions`` (3, n) from where an image or video begins, and how far it extends, three digits each."""
    # They may exceed what half precision holds exactly: each goes as small digits.
    values = torch.cat([positions, torch.full_like(positions[:1], extent)])
    return torch.cat([values // DIGIT**place % DIGIT for place in range(DIGITS)]).T


def read(channels: Tensor) -> tuple[Tensor, Tensor]:
    """(3, n) positions and (n,) extent, decoded from `written`."""
    digits = channels.long().T.unflatten(0, (DIGITS, 4))
    values = sum(digit * DIGIT**place for place, digit in enumerate(digits))
    return values[:3], values[3]


def positions_follow(runner: Any) -> bool:
    """True if a runner must take positions from embeddings; vLLM's GPU runner computes this after loading."""
    config = runner.model_config.multimodal_config
    return supports_multimodal_pruning(runner.model) and config is not None and config.is_multimodal_pruning_enabled()


class Axes(Selecting):
    """A family with positions of three axes."""

    supports_multimodal_pruning: ClassVar[bool] = True
    grid_fields = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", CELLS)

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.is_multimodal_pruning_enabled = False  # of the base model, which would add its own channels
        if current_platform.is_cpu():  # vLLM's CPU runner loads models itself, and does not set it
            from vllm.v1.worker.cpu_model_runner import CPUModelRunner

            CPUModelRunner.is_multimodal_pruning_enabled = property(positions_follow, lambda runner, value: None)

    @staticmethod
    def grid(config: Any, item: Mapping[str, Any]) -> FrameGrid:
        table = item["image_grid_thw"] if "image_grid_thw" in item else item["video_grid_thw"]
        frames, rows, columns = table.tolist()
        merge = config.vision_config.spatial_merge_size
        return frames, rows // merge, columns // merge

    @classmethod
    def units(cls, config: Any, item: Mapping[str, Any], total: int) -> list[FrameGrid]:
        return [(1, 1, int(item[CELLS].sum()))] if CELLS in item else super().units(config, item, total)

    def features(self: Any, given: dict[str, Any]) -> Any:
        if CELLS not in given:
            return super().features(given)
        return features_of(self.visual, given["pixel_values"], given["image_grid_thw"].tolist(), given[CELLS])

    @classmethod
    def cut(
        cls, config: Any, item: Mapping[str, Any], tokens: Tensor, embed: Tensor, selector: Selector
    ) -> tuple[list[int], Tensor]:
        if CELLS in item:
            tokens, embed = tokens[item[CELLS]], embed[item[CELLS]]
        return super().cut(config, item, tokens, embed, selector)

    def whole(self: Any, item: Mapping[str, Any]) -> Tensor:
        """(3, N) positions of all tokens of an image or video that begins at 0, as in vLLM's own model."""
        frames, rows, columns = self.grid(self.config, item)
        seconds = item.get("second_per_grid_ts")
        speed = getattr(self.config.vision_config, "tokens_per_second", 1.0)
        apart = speed if seconds is None else speed * float(seconds)
        times = (torch.arange(frames, dtype=torch.float64) * apart).long()
        return torch.stack(torch.meshgrid(times, torch.arange(rows), torch.arange(columns), indexing="ij")).flatten(1)

    def extent(self: Any, item: Mapping[str, Any]) -> int:
        """The number of positions from where an image or video begins to where text goes on."""
        return int(self.whole(item).max()) + 1

    def left(self: Any, part: Tensor, choice: Choice, grid: FrameGrid, item: Mapping[str, Any]) -> Tensor:
        own = super().left(part, choice, grid, item)
        positions = self.whole(item).to(own.device)
        extent = int(positions.max()) + 1
        if CELLS in item:
            positions = positions[:, item[CELLS].to(own.device)]
        return torch.cat([own, written(positions[:, choice.kept], extent).to(own.dtype)], dim=1)

    def get_mrope_input_positions(
        self: Any, input_tokens: Sequence[int], mm_features: Sequence[Any]
    ) -> tuple[Tensor, int]:
        """(3, L) positions, for images and videos the first only, and the offset of the next token's from L."""
        # Text counts on; all tokens of an image have its first position, and text goes on behind its largest.
        parts, done, position = [], 0, 0
        for feature in sorted(mm_features, key=lambda feature: feature.mm_position.offset):
            start, length = feature.mm_position.offset, feature.mm_position.length
            parts.append(torch.arange(position, position + start - done))
            position += start - done
            parts.append(torch.full((length,), position))
            item = {name: feature.data[name].data for name in self.grid_fields if name in feature.data}
            position, done = position + self.extent(item), start + length
        parts.append(torch.arange(position, position + len(input_tokens) - done))
        position += len(input_tokens) - done
        positions: Any = torch.cat(parts).expand(3, -1).clone()
        positions.begin, positions.offset = positions[0].clone(), position - len(input_tokens)
        return positions, positions.offset

    def recompute_mrope_positions(
        self: Any,
        input_ids: Sequence[int] | Tensor,
        multimodal_embeddings: Sequence[Tensor],
        mrope_positions: Tensor,
        num_computed_tokens: int,
    ) -> tuple[list[Tensor], Tensor, int]:
        """The embeddings without their positions, and with these the positions (3, L) of the tokens to come."""
        # One runner of vLLM calls this in every step, also after the prompt and again after a preemption, on the tensor
        # that it was given at first. The other calls it on copies, but only in steps with embeddings.
        begin = getattr(mrope_positions, "begin", mrope_positions[0])
        offset = getattr(mrope_positions, "offset", None)
        positions = mrope_positions.clone()
        ids = torch.as_tensor(input_ids, device=positions.device)
        pads = [getattr(self.config, f"{kind}_token_id") for kind in self.kinds]
        coming = torch.isin(ids, torch.tensor(pads, device=ids.device)).nonzero().squeeze(1)
        coming = coming[coming >= num_computed_tokens]
        embeddings, behind = [], positions[0, -1] + 1
        for own in multimodal_embeddings:
            here, coming = coming[: len(own)], coming[len(own) :]
            places, extent = read(own[:, -CHANNELS:].to(positions.device))
            if len(here) and here[-1] == len(ids) - 1:
                behind = begin[-1] + extent[-1]
            positions[:, here] = begin[here] + places
            embeddings.append(own[:, :-CHANNELS])
        return embeddings, positions, int(behind) - len(ids) if offset is None else offset


@selecting
class ServedQwen2VL(Axes, qwen2_vl.Qwen2VLForConditionalGeneration):
    """Qwen2-VL."""

    kinds = ("image", "video")


@selecting
class ServedQwen25VL(Axes, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL."""

    kinds = ("image", "video")


@selecting
class ServedQwen3VL(Axes, qwen3_vl.Qwen3VLForConditionalGeneration):
    """Qwen3-VL: selects the features for further layers (DeepStack), too.

    The time stands before every frame of a video, as text. Only the tower knows how many tokens a frame keeps, and so
    where that text stands: it comes with the embeddings, and the prompt has a placeholder for each of its tokens, too.
    """

    kinds = ("image", "video")
    grid_fields = ("image_grid_thw", "video_grid_thw", "timestamps", CELLS)

    @classmethod
    def cut(
        cls, config: Any, item: Mapping[str, Any], tokens: Tensor, embed: Tensor, selector: Selector
    ) -> tuple[list[int], Tensor]:
        if "timestamps" not in item:
            return super().cut(config, item, tokens, embed, selector)
        length = int((~embed).sum()) + selector.count(cls.grid(config, item))
        return [config.video_token_id] * length, torch.ones(length, dtype=torch.bool)

    def tokens(self: Any, item: Mapping[str, Any], counts: Sequence[int]) -> Tensor:
        """(N,) tokens of a video whose frames keep so many features: placeholders for these, and text."""
        names = ("vision_start_token_id", "vision_end_token_id", "video_token_id")
        found = qwen3_vl.Qwen3VLMultiModalProcessor.get_video_repl(
            tokens_per_frame=[*counts],
            timestamps=item["timestamps"],
            tokenizer=self._tokenizer,
            **{name: getattr(self.config, name) for name in names},
        )
        return torch.tensor(found.full)

    def whole(self: Any, item: Mapping[str, Any]) -> Tensor:
        """(3, N) positions as in other models, of a video also those of the text in it."""
        if "timestamps" not in item:
            return super().whole(item)
        frames, rows, columns = self.grid(self.config, item)
        tokens = self.tokens(item, [rows * columns] * frames)
        text, ends = tokens != self.config.video_token_id, tokens == self.config.vision_end_token_id
        # text counts on, by one for each of its tokens and by the longer side of a frame
        positions: Tensor = (text.cumsum(0) - text.long() + max(rows, columns) * ends.cumsum(0)).repeat(3, 1)
        positions[1, ~text] += torch.arange(rows).repeat_interleave(columns).repeat(frames)
        positions[2, ~text] += torch.arange(columns).repeat(frames * rows)
        return positions

    def left(self: Any, part: Tensor, choice: Choice, grid: FrameGrid, item: Mapping[str, Any]) -> Tensor:
        if "timestamps" not in item:
            return super().left(part, choice, grid, item)
        features = Selecting.left(self, part, choice, grid, item)
        frames, size = grid[0], grid[1] * grid[2]
        pad, device = self.config.video_token_id, features.device
        whole, dense = self.whole(item).to(device), self.tokens(item, [size] * frames).to(device)
        tokens = self.tokens(item, (choice.kept // size).bincount(minlength=frames).tolist()).to(device)
        text = tokens != pad
        own, positions = features.new_zeros(len(tokens), features.shape[1]), whole.new_zeros(3, len(tokens))
        own[~text], own[text, : self.vitrim_width] = features, self.get_language_model().embed_input_ids(tokens[text])
        positions[:, ~text], positions[:, text] = whole[:, dense == pad][:, choice.kept], whole[:, dense != pad]
        return torch.cat([own, written(positions, int(positions.max()) + 1).to(own.dtype)], dim=1)


@selecting
class ServedQwen35(Axes, qwen3_5.Qwen3_5ForConditionalGeneration):
    """Qwen3.5."""


@selecting
class ServedGlm4v(Axes, glm4_1v.Glm4vForConditionalGeneration):
    """GLM-4.1V, and the small model of GLM-4.6V."""


@selecting
class ServedGlm4vMoe(Axes, glm4_1v.Glm4vMoeForConditionalGeneration):
    """GLM-4.5V and GLM-4.6V."""


@selecting
class ServedGlmOcr(Axes, glm_ocr.GlmOcrForConditionalGeneration):
    """GLM-OCR."""


@selecting
class ServedPaddleOCRVL(Axes, paddleocr_vl.PaddleOCRVLForConditionalGeneration):
    """PaddleOCR-VL."""
