"""Model and processor of a family: they cut placeholders and select embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import PromptUpdateDetails
from vllm.multimodal.processing.context import TimingContext

from vitrim.core.selection import Choice, FrameGrid, ImageSelector, Selector
from vitrim.hosts.shared.selecting import Candidates, choose
from vitrim.serving.vllm.cells import CELLS, changed
from vitrim.serving.vllm.setting import (
    FAMILIES,
    FIELD,
    NONE,
    PREFIX,
    ServerSetting,
    check_fits,
    mark,
    selector_of,
    stay,
)

CARRIED = {"image": "vitrim_image", "video": "vitrim_video"}
"""Names of the setting of an item among its tensors, by modality; one that was changed before has none."""


def encoded(setting: str) -> Tensor:
    """(n,) uint8: a setting as vLLM carries it from its processor to its model."""
    return torch.tensor([*setting.encode()], dtype=torch.uint8)


def decoded(setting: Tensor) -> str:
    """The setting, from `encoded`."""
    return bytes(setting.tolist()).decode()


class Selecting:
    """Mixin before a model class of vLLM that selects among its embeddings.

    Subclasses define how an image or video is divided where it is not one pool of tokens.
    """

    kinds: ClassVar[tuple[str, ...]] = ("image",)
    """Modalities whose tokens are selected; others are refused."""

    supports_encoder_cudagraph: ClassVar[bool] = False
    """Recorded graphs would bypass `embed_multimodal`."""
    supports_tower_connector_lora: ClassVar[bool] = False
    """vLLM counts the tower's tokens by the placeholders."""
    grid_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the processor that say what an item is; those that it has are its ``item`` below."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.vitrim_width = vllm_config.model_config.get_hidden_size()

    @staticmethod
    def tile(config: Any) -> int | None:
        """Number of tokens of a tile, which is selected separately; None: an image is one pool."""
        return None

    @staticmethod
    def grid(config: Any, item: Mapping[str, Any]) -> FrameGrid | None:
        """Frames, rows and columns of the tokens of an image or video; None: unknown."""
        return None

    @classmethod
    def units(cls, config: Any, item: Mapping[str, Any], total: int) -> list[FrameGrid]:
        """Grids of the separately selected units of an image or video of ``total`` tokens."""
        tile = cls.tile(config)
        return [(1, 1, tile)] * (total // tile) if tile else [cls.grid(config, item) or (1, 1, total)]

    def embed_multimodal(self: Any, **kwargs: Any) -> Any:
        """Embeddings (n, C) of every image, or every video, of the kept tokens."""
        carried = [kwargs.pop(name) for name in CARRIED.values() if name in kwargs]
        found = self.features(kwargs)
        if found is None or not len(found):
            return found
        found = [image.flatten(0, -2) for image in found]  # (1, n, C) of videos of several lengths in LLaVA-OneVision
        told = [name for name in self.grid_fields if name in kwargs]
        items = [{name: kwargs[name][place] for name in told} for place in range(len(found))]
        pieces: list[tuple[int, Tensor, FrameGrid]] = []
        for place, (image, item) in enumerate(zip(found, items, strict=True)):
            grids = self.units(self.config, item, len(image))
            parts = image.split([prod(grid) for grid in grids])
            pieces += [(place, part, grid) for part, grid in zip(parts, grids, strict=True)]
        # Behind the width of the language model follow features for its further layers: a choice reads the first.
        width = self.vitrim_width
        settings = [decoded(own) for own in carried[0]] if carried else [NONE] * len(found)
        left: list[list[Tensor]] = [[] for _ in found]
        for setting in dict.fromkeys(settings):
            own = [piece for piece in pieces if settings[piece[0]] == setting]
            images = [Candidates(part[:, :width], _all(part), grid=grid) for _, part, grid in own]
            for (place, part, grid), choice in zip(own, choose(selector_of(setting), images), strict=True):
                left[place].append(self.left(part, choice, grid, items[place]))
        return [torch.cat(parts) for parts in left]

    def features(self: Any, given: dict[str, Any]) -> Any:
        """All embeddings of every image, or every video."""
        return super().embed_multimodal(**given)  # type: ignore[misc]

    @classmethod
    def cut(
        cls, config: Any, item: Mapping[str, Any], tokens: Tensor, embed: Tensor, selector: Selector
    ) -> tuple[list[int], Tensor]:
        """Placeholders of what is kept of an image or video, and which of them are of features (bool).

        ``tokens`` (Q,) are those of the whole, ``embed`` (Q,) is True for features.
        """
        grids = cls.units(config, item, int(embed.sum()))
        keep = stay(embed, [prod(grid) for grid in grids], [selector.count(grid) for grid in grids])
        return tokens[keep].tolist(), embed[keep]

    def left(self: Any, part: Tensor, choice: Choice, grid: FrameGrid, item: Mapping[str, Any]) -> Tensor:
        """Kept tokens of ``part`` (n, C) on ``grid``; features for further layers, after the width, follow."""
        width = self.vitrim_width
        return torch.cat(
            [choice.of(part[:, :width]).to(part.dtype), part[:, width:].index_select(0, choice.kept)], dim=1
        )


def _all(part: Tensor) -> Tensor:
    return torch.ones(len(part), dtype=torch.bool)


class Cutting:
    """Mixin before a processor of vLLM: the prompt gets a placeholder for every kept token."""

    kind: type[Selecting]

    def _setting(self: Any, kwargs: Mapping[str, object]) -> tuple[str, dict[str, object]]:
        """The setting of a request, from its ``mm_processor_kwargs``, and the rest of these, which is vLLM's."""
        config = self.info.ctx.model_config.hf_config
        own, rest = ServerSetting.of_model(config), dict(kwargs)
        given = rest.pop(FIELD, own.select)
        # what memory is for, by the server itself, may be more than requests may ask for
        setting = given.select if isinstance(given, ServerSetting) else own.asked(given)
        check_fits(selector_of(setting), FAMILIES[config.architectures[0].removeprefix(PREFIX)])
        return setting, rest

    def get_dummy_inputs(self: Any, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> Any:
        # a server that takes embeddings asks for those of modalities whose limit is 0, too
        counts = {modality: count for modality, count in mm_counts.items() if modality in self.kind.kinds}
        made = super().get_dummy_inputs(seq_len, counts, mm_options)  # type: ignore[misc]
        settings = ServerSetting.of_model(self.info.ctx.model_config.hf_config).reserved()
        given = made.hf_processor_mm_kwargs
        tried = [replace(made, hf_processor_mm_kwargs={**given, FIELD: ServerSetting(own)}) for own in settings]
        return max(tried, key=self._length) if len(tried) > 1 else tried[0]

    def _length(self: Any, inputs: Any) -> int:
        return len(self.apply(inputs, TimingContext(enabled=False))["prompt_token_ids"])

    def _apply_hf_processor_main(self: Any, mm_items: Any, hf_kwargs: Mapping[str, object]) -> Any:
        setting, rest = self._setting(hf_kwargs)
        found = super()._apply_hf_processor_main(mm_items, rest)  # type: ignore[misc]
        selector, counts = selector_of(setting), mm_items.get_all_counts()
        for modality, name in CARRIED.items():
            if not isinstance(selector, ImageSelector):
                found[name] = [encoded(setting)] * counts.get(modality, 0)
            # All tokens of a changed image stay, so it carries no setting. And vLLM joins pixels of items with equal
            # fields alone: never bytes and numbers between them.
            elif counts.get(modality):
                found.update(changed(self.info, found, modality, selector))
        return found

    def _get_mm_fields_config(self: Any, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]) -> Any:
        _, rest = self._setting(hf_processor_mm_kwargs)
        found = super()._get_mm_fields_config(hf_inputs, rest)  # type: ignore[misc]
        carried = {
            name: MultiModalFieldConfig.batched(modality, keep_on_cpu=True) for modality, name in CARRIED.items()
        }
        if CELLS in hf_inputs:
            area = self.info.get_hf_config().vision_config.spatial_merge_size ** 2
            sizes = torch.tensor([area * int(own.sum()) for own in hf_inputs[CELLS]])
            carried[CELLS] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
            carried["pixel_values"] = MultiModalFieldConfig.flat_from_sizes("image", sizes)
        return {**found, **carried}

    def _get_mm_prompt_updates(self: Any, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> Any:
        _, rest = self._setting(hf_processor_mm_kwargs)
        found = super()._get_mm_prompt_updates(mm_items, rest, out_mm_kwargs)  # type: ignore[misc]
        return {
            modality: [
                [self._cut(update, out_mm_kwargs[modality][place]) for update in updates]
                for place, updates in enumerate(items)
            ]
            for modality, items in found.items()
        }

    def _cut(self: Any, update: Any, fields: Any) -> Any:
        config, tokens = self.info.ctx.model_config.hf_config, torch.tensor(update.content.full)
        marked = update.content.is_embed
        embed = torch.ones_like(tokens, dtype=torch.bool) if marked is None else marked(update.content.full)
        item = {name: fields[name].data for name in self.kind.grid_fields if name in fields}
        carried = fields.get(CARRIED[update.modality])
        selector = selector_of(NONE if carried is None else decoded(carried.data))
        # The number of kept tokens follows from grid and cells: the prompt is cut before the tower sees an image.
        full, embed = self.kind.cut(config, item, tokens, embed, selector)
        is_embed = None if bool(embed.all()) else partial(_same, embed)
        return update.with_content(PromptUpdateDetails(full=full, is_embed=is_embed))

    def _get_mm_hashes(self: Any, inputs: Any) -> Any:
        # vLLM caches by image: another selector must not find the embeddings of this one.
        setting, rest = self._setting(inputs.hf_processor_mm_kwargs)
        found = super()._get_mm_hashes(replace(inputs, hf_processor_mm_kwargs=rest))  # type: ignore[misc]
        return {modality: [f"{item}-{mark(setting)}" for item in items] for modality, items in found.items()}


def _same(mask: Tensor, full: list[int]) -> Tensor:
    return mask


class SelectedOnly:
    """Mixin before vLLM's processing info: what is selected is all that a prompt may have besides text."""

    kinds: ClassVar[tuple[str, ...]]

    def get_supported_mm_limits(self) -> dict[str, int | None]:
        found = super().get_supported_mm_limits()  # type: ignore[misc]
        return {modality: limit if modality in self.kinds else 0 for modality, limit in found.items()}

    def parse_mm_data(self: Any, mm_data: Any, *, validate: bool = True) -> Any:
        found = super().parse_mm_data(mm_data, validate=validate)  # type: ignore[misc]
        for modality, items in found.items():
            if validate and modality not in self.kinds:  # vLLM does not count embeddings of a modality whose limit is 0
                self.validate_num_items(modality, len(items))
        return found

    # None makes vLLM process the largest item, and so count its cut length
    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> None:
        return None


def _behind(front: type, kind: type) -> Any:
    return type(kind.__name__, (front, kind), {})


def selecting(kind: Any) -> Any:
    """Class decorator: give a subclass of `Selecting` the processor of its vLLM model, with `Cutting` before it."""
    own = kind._processor_factory

    # vLLM's factories may be functions that return objects of several classes
    def info(ctx: Any) -> Any:
        made = _behind(SelectedOnly, type(own.info(ctx)))(ctx)
        made.kinds = kind.kinds
        return made

    def processor(info: Any, dummy_inputs: Any) -> Any:
        made = _behind(Cutting, type(own.processor(info, dummy_inputs)))(info, dummy_inputs)
        made.kind = kind
        return made

    return MULTIMODAL_REGISTRY.register_processor(processor, info=info, dummy_inputs=own.dummy_inputs)(kind)
