"""Parts of vLLM's models that select image tokens: the processor cuts placeholders, the model cuts features.

Both cut an item's tokens into the same pools, each of which a selector gets by itself: the whole item, or its tiles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitrim.core.registry import parse_selector
from vitrim.core.selection import Choice, Grid, Seen, Selector
from vitrim.errors import VitrimError
from vitrim.serving.vllm.plugin import ATTRIBUTE


def selector_of(hf_config: Any) -> Selector:
    """The selector that was written into a model's configuration."""
    return parse_selector(getattr(hf_config, ATTRIBUTE))


def pools(tokens: int, tile: int | None) -> list[int]:
    """Sizes of the pools of an item of so many tokens.

    Args:
        tokens: of the item.
        tile: tokens of a tile; None: the item is one pool.

    Raises:
        VitrimError: the tokens are no whole tiles.

    Example:
        >>> pools(48, 16), pools(48, None)
        ([16, 16, 16], [48])
    """
    size = tile or tokens
    if tokens % size:
        raise VitrimError(f"expected whole tiles of {size} image tokens, got {tokens}")
    return [size] * (tokens // size)


def kept_places(selector: Selector, tokens: int, tile: int | None, grid: Grid | None) -> list[int]:
    """The placeholders of an item that stay: of every pool the first ones, as many as its count.

    Example:
        >>> kept_places(parse_selector("divprune:tokens=2"), 6, 3, None)
        [0, 1, 3, 4]
    """
    sizes = pools(tokens, tile)
    count = selector.count(grid if grid is not None and prod(grid) == sizes[0] else sizes[0])
    return [number * size + place for number, size in enumerate(sizes) for place in range(count)]


def choices(selector: Selector, features: Tensor, tile: int | None, grid: Grid | None) -> tuple[list[Choice], Tensor]:
    """The choice in every pool, and the pools (P, n, D), of an item's ``features`` (N, D)."""
    sizes = pools(len(features), tile)
    parts = features.view(len(sizes), sizes[0], -1)
    with torch.no_grad():
        return selector.select(Seen(parts, grid if grid is not None and prod(grid) == sizes[0] else None)), parts


def fixed_mask(mask: list[bool], full: list[int]) -> Tensor:
    """The same ``mask`` for any sequence. A function of a module, so that caches of other processes can read it."""
    return torch.tensor(mask)


def grid_of(table: Any, merge: int) -> list[Grid]:
    """Frames, rows and columns of the tokens of every item, of what Qwen's processors say of its patches."""
    return [(frames, rows // merge, columns // merge) for frames, rows, columns in table.reshape(-1, 3).tolist()]


class SelectingProcessor:
    """The part of a processor that leaves out the placeholders of what will not go on."""

    tile: Any
    """A function of the model's configuration: tokens of a tile, or None."""
    info: Any

    def _get_mm_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Any:
        updates = super()._get_mm_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)  # type: ignore[misc]
        return {
            modality: [
                [self._shorter(update, out_mm_kwargs[modality][number]) for update in item]
                for number, item in enumerate(items)
            ]
            for modality, items in updates.items()
        }

    def _shorter(self, update: Any, item: Mapping[str, Any]) -> Any:
        config = self.info.ctx.model_config.hf_config
        content = update.content
        mask = torch.ones(len(content.full), dtype=torch.bool)
        if content.is_embed is not None:
            mask = content.is_embed(content.full)
        places = mask.nonzero().squeeze(1)
        key = f"{update.modality}_grid_thw"
        grid = None
        if key in item:
            (grid,) = grid_of(item[key].data, config.vision_config.spatial_merge_size)
            if update.modality == "video":
                raise ValueError("vitrim selects among image tokens of this model: videos need a server without it")
        stay = ~mask
        stay[places[kept_places(selector_of(config), len(places), self.tile(config), grid)]] = True
        full = [token for token, stays in zip(content.full, stay.tolist(), strict=True) if stays]
        whole = content.is_embed is None
        return update.with_content(
            replace(content, full=full, is_embed=None if whole else partial(fixed_mask, mask[stay].tolist()))
        )

    def _get_mm_hashes(self, inputs: Any) -> Any:
        told = selector_of(self.info.ctx.model_config.hf_config).describe()
        own = super()._get_mm_hashes(inputs)  # type: ignore[misc]
        return {
            modality: [None if one is None else hashlib.sha256(f"{one} {told}".encode()).hexdigest() for one in hashes]
            for modality, hashes in own.items()
        }


class SelectingInfo:
    """The part of a processor's facts that says how many tokens an item has at most."""

    tile: Any
    ctx: Any

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Any:
        own = super().get_mm_max_tokens_per_item(seq_len, mm_counts)  # type: ignore[misc]
        if own is None:
            return None
        config = self.ctx.model_config.hf_config
        selector = selector_of(config)
        return {
            modality: sum(selector.budget(size) for size in pools(tokens, self.tile(config)))
            if modality == "image"
            else tokens
            for modality, tokens in own.items()
        }


@cache
def joined(part: type, own: type, tile: Any) -> type:
    """The class of an object of vLLM's, with a part in front."""
    return type(f"{part.__name__}{own.__name__}", (part, own), {"tile": staticmethod(tile)})


def factories(own: Any, tile: Any) -> Any:
    """What makes vLLM's processors of a model, so that they leave out placeholders."""

    def info(ctx: Any) -> Any:
        made = own.info(ctx)
        made.__class__ = joined(SelectingInfo, type(made), tile)
        return made

    def processor(info: Any, dummy_inputs: Any) -> Any:
        made = own.processor(info, dummy_inputs)
        made.__class__ = joined(SelectingProcessor, type(made), tile)
        return made

    return replace(own, info=info, processor=processor)


class SelectingModel:
    """The part of a model that leaves out the features that were not chosen."""

    tile: ClassVar[Any]
    _processor_factory: ClassVar[Any]

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        config = vllm_config.model_config.hf_config
        self.vitrim_selector = selector_of(config)
        self.vitrim_tile = type(self).tile(config)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = next(
            (vars(base)["_processor_factory"] for base in cls.__mro__ if "_processor_factory" in vars(base)), None
        )
        if own is not None:
            cls._processor_factory = factories(own, cls.tile)

    def embed_multimodal(self, **kwargs: Any) -> Any:
        whole = super().embed_multimodal(**kwargs)  # type: ignore[misc]
        if whole is None or not len(whole):
            return whole
        table = kwargs.get("image_grid_thw")
        grids: Sequence[Grid | None] = [None] * len(whole)
        if table is not None:
            grids = grid_of(table, self.config.vision_config.spatial_merge_size)  # type: ignore[attr-defined]
        return tuple(self.narrowed(item, grid) for item, grid in zip(whole, grids, strict=True))

    def narrowed(self, item: Tensor, grid: Grid | None) -> Tensor:
        """What goes on of an item's tokens (N, D)."""
        chosen, parts = choices(self.vitrim_selector, item.reshape(-1, item.shape[-1]), self.vitrim_tile, grid)
        return torch.cat([choice.of(part).to(item.dtype) for choice, part in zip(chosen, parts, strict=True)])


BASE = 128
"""Positions travel beside features in digits of this base, which bfloat16 holds."""
CHANNELS = 8
"""Two digits of time, row, column and extent."""


class SelectingAxes(SelectingModel):
    """The same where positions have three axes: tokens keep theirs, and text goes on as behind the whole image.

    Positions of text follow from counts. Those of image tokens are known once they are chosen: they travel in further
    channels beside the features, and vLLM asks `recompute_mrope_positions` for them, its interface for pruned prompts.
    """

    supports_multimodal_pruning: ClassVar[bool] = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # the runner asks this after loading; vLLM's own pruning was asked before, and stays off
        object.__setattr__(
            vllm_config.model_config.multimodal_config, "is_multimodal_pruning_enabled", partial(bool, True)
        )

    def narrowed(self, item: Tensor, grid: Grid | None) -> Tensor:
        if grid is None:
            raise VitrimError("expected image_grid_thw beside the images")
        width = self.config.get_text_config().hidden_size  # type: ignore[attr-defined]
        (choice,), (features,) = choices(self.vitrim_selector, item[:, :width], None, grid)
        kept = choice.kept
        # what goes to further layers is that of the places that stay
        parts = [choice.of(features).to(item.dtype), item[kept, width:]]
        _, rows, columns = grid
        axes = [kept // (rows * columns), kept // columns % rows, kept % columns]
        axes.append(torch.full_like(kept, max(grid)))
        digits = [digit for axis in axes for digit in (axis // BASE, axis % BASE)]
        return torch.cat([*parts, torch.stack(digits, dim=1).to(item.dtype)], dim=1)

    def get_mrope_input_positions(self, input_tokens: Sequence[int], mm_features: Sequence[Any]) -> tuple[Tensor, int]:
        merge = self.config.vision_config.spatial_merge_size  # type: ignore[attr-defined]
        parts: list[Tensor] = []
        done = start = 0
        for feature in sorted(mm_features, key=lambda own: own.mm_position.offset):
            offset, length = feature.mm_position.offset, feature.mm_position.length
            if offset == done and done:
                raise ValueError("expected a token, such as the one that starts an image, between two images")
            (grid,) = grid_of(feature.data["image_grid_thw"].data, merge)
            parts.append(torch.arange(start, start + offset - done))
            start += offset - done
            parts.append(torch.full((length,), start))  # until the tokens are chosen
            start, done = start + max(grid), offset + length
        parts.append(torch.arange(start, start + len(input_tokens) - done))
        start += len(input_tokens) - done
        return torch.cat(parts).expand(3, -1).contiguous(), start - len(input_tokens)

    def recompute_mrope_positions(
        self,
        input_ids: Any,
        multimodal_embeddings: Sequence[Tensor],
        mrope_positions: Tensor,
        num_computed_tokens: int,
    ) -> tuple[Sequence[Tensor], Tensor, int]:
        ids = torch.as_tensor(input_ids, device=mrope_positions.device)
        image = ids == self.config.image_token_id  # type: ignore[attr-defined]
        positions = mrope_positions.clone()
        number = torch.arange(len(ids), device=ids.device)
        # the last token of text in front of each image; its position is never changed
        before = torch.where(image, -1, number).cummax(dim=0).values
        base = torch.where(before >= 0, positions[0, before.clamp_min(0)] + 1, 0)
        end = int(positions[0, -1]) + 1
        if multimodal_embeddings:
            digits = torch.cat([own[:, -CHANNELS:] for own in multimodal_embeddings]).to(positions.device).long()
            axes = digits[:, ::2] * BASE + digits[:, 1::2]
            places = number[num_computed_tokens:][image[num_computed_tokens:]][: len(axes)]
            positions[:, places] = base[places] + axes[:, :3].T
            if len(places) and int(places[-1]) == len(ids) - 1:
                end = int(base[-1] + axes[-1, 3])
        return [own[:, :-CHANNELS] for own in multimodal_embeddings], positions, end - len(ids)
