"""The prompt of a vision-language model, which gets shorter with its images."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.core.reduce import HANDLE, Selection, handle_of, reduced_parts
from vitrim.core.registry import host_of
from vitrim.core.selection import Choosing, FrameGrid, ImageSelector, Selector
from vitrim.core.tokens import Asked, ImagePlaces, TokenState, Trace
from vitrim.core.versions import require
from vitrim.errors import VitrimError
from vitrim.hosts.shared.compact import Survivors, cache_of, check_prompt, kept_in_prompt, survivors, trimmed
from vitrim.hosts.shared.hooks import Hook, ThreadHooks
from vitrim.hosts.shared.selecting import (
    Candidates,
    ChosenTokens,
    attended,
    by_image,
    choose,
    grid_of,
    rows_of_images,
    runs,
    texts,
)
from vitrim.hosts.transformers.vlm_family import PromptFamily

PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
"""The input with the pixels of each kind."""

PER_TOKEN = (
    *("input_ids", "attention_mask", "position_ids", "labels"),
    *("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"),
)
"""Inputs with one entry per token of a prompt."""

COUNTING = {
    "shift_labels": "labels",
    "cache_position": "position_ids",
    "per_layer_inputs": "input_ids alone",
    **dict.fromkeys(
        ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"), "position_ids of packed prompts"
    ),
}
"""Inputs that count the tokens of the whole prompt in another way, and what to pass instead."""


class Early(ThreadHooks):
    """Context in which a connector gets only the chosen tokens of the tower; ``among`` chooses, and may use
    its output.
    """

    def __init__(
        self, tower: nn.Module, connector: nn.Module, among: Callable[[Sequence[Tensor], Any], list[ChosenTokens]]
    ) -> None:
        self.tower, self.connector, self.among = tower, connector, among
        self.chosen: list[ChosenTokens]
        self.output: Any = None

    def hooks(self) -> list[Hook]:
        return [(self.tower.register_forward_hook, self.see), (self.connector.register_forward_pre_hook, self.cut)]

    def see(self, module: nn.Module, args: Any, output: Any) -> None:
        self.output = output

    def cut(self, module: nn.Module, args: Any) -> Any:
        self.chosen = self.among(list(args[0]), self.output)
        self.output = None
        return (torch.cat([image.features for image in self.chosen])[None], *args[1:])


NEXT = "vitrim_next"
"""Attribute of the positions of shortened prompts, (B, 1): those behind the whole prompts, if any ends in an image.

Behind the last token that stays, there may be others that went.
"""


@dataclass(frozen=True)
class Encoded:
    """The images of a prompt, or its videos, behind their encoder.

    Attributes:
        read: names of the inputs that the encoder read.
        output: of the encoder, with the features that stay.
        kept: (B, L) bool, the tokens of the prompt that stay.
    """

    read: set[str]
    output: Any
    taken: Sequence[ChosenTokens]
    kept: Tensor

    @property
    def ragged(self) -> bool:
        """True if images of a batch keep different numbers of features."""
        return isinstance(self.output.pooler_output, Tensor) and len({len(own.features) for own in self.taken}) > 1


def selects_behind(model: nn.Module) -> bool:
    """True if a selector chooses among the image tokens of ``model`` behind a tower as it is."""
    return isinstance(vars(model).get(HANDLE), Selection)


@dataclass(frozen=True)
class ImagePrompt:
    """The inputs of a model call, to be shortened with its images.

    ``trace`` is of the tower; ``choosing`` chooses among image tokens, None: all that a reduced tower returns are kept.
    ``options`` are those of the encoder, besides the inputs that it reads.
    """

    family: type[PromptFamily]
    model: Any
    given: Mapping[str, Any]
    trace: Trace
    choosing: Choosing | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def selector(self) -> Selector:
        """The selector, where there is one."""
        assert self.choosing is not None
        return self.choosing.selector

    @property
    def keeps_positions(self) -> bool:
        """True if tokens keep the positions that they have in the whole prompt."""
        return self.choosing is not None and self.selector.positions == "original"

    def tower_is_reduced(self) -> bool:
        """True if the tower returns fewer tokens; otherwise a selector behind it may."""
        if selects_behind(self.model):
            return False
        parts = reduced_parts(self.family.tower(self.model))
        return bool(parts) and handle_of(parts[0][1]).compact

    def follows(self) -> bool:
        """True if the call has images that now have fewer tokens."""
        given, model = self.given, self.model
        selecting = selects_behind(model)
        brought = [name for name in PIXELS.values() if given.get(name) is not None]
        if not brought or not (selecting or self.tower_is_reduced()):  # the tower was restored separately
            return False
        if not (selecting or "pixel_values" in brought):
            if not hasattr(model, "vitrim_choosing"):
                return False
            raise VitrimError(
                "tokens of videos are selected behind a tower as it is: give no method, and a selector that needs no "
                "attention (vitrim list selectors)"
            )
        if not isinstance(given.get("input_ids"), Tensor):
            raise VitrimError(
                "a compact model needs input_ids beside pixel_values, to know which tokens of the prompt stand for "
                "images; inputs_embeds do not say"
            )
        check_prompt(given, PER_TOKEN)
        for name, instead in COUNTING.items():
            if given.get(name) is not None:
                raise VitrimError(f"{name} counts the tokens of the whole prompt, which gets shorter: give {instead}")
        if any(not len(given[name]) for name in brought):
            raise VitrimError("pixel_values holds no image: leave it out where a prompt has none")
        return True

    def compact(self, called: nn.Module) -> tuple[dict[str, Any], bool]:
        """The shortened inputs, with features in place of images; and True if images keep different numbers.

        ``called`` is the whole model, or the part without its head.
        """
        if self.choosing is not None and isinstance(self.selector, ImageSelector):
            prompt, places = self.choosing(partial(self.smaller, self.selector))
            shorter = prompt.encode(called)
            self.trace.call.image_places = places
            return shorter  # type: ignore[no-any-return]
        return self.encode(called)

    def encode(self, called: nn.Module) -> tuple[dict[str, Any], bool]:
        """The result of `compact`, from images as they are."""
        self.check_continued()
        encoded = {kind: self.encoded(kind) for kind, name in PIXELS.items() if self.given.get(name) is not None}
        parts = encoded.values()
        self.trace.call.image_places = [image.places for part in parts for image in part.taken]
        out = self.shortened(
            kept=torch.stack([part.kept for part in parts]).all(dim=0),
            read={name for part in parts for name in part.read},
            arguments=inspect.signature(type(called).forward).parameters,
        )
        out["mm_encoder_outputs"] = {kind: part.output for kind, part in encoded.items()}
        return out, any(part.ragged for part in parts)

    def smaller(self, selector: ImageSelector) -> tuple[ImagePrompt, list[ImagePlaces]]:
        """The prompt with smaller images, as many placeholders as these have tokens, and those that stay of each.

        Positions are those of the smaller images; where cells are left out, the others keep theirs in the whole prompt.
        """
        given, ids = self.given, self.given["input_ids"]
        if given.get("position_ids") is not None and not selector.drops_cells:
            raise VitrimError(f"{selector.name}: position_ids are those of the whole images: leave them out")
        kept, options = torch.ones_like(ids, dtype=torch.bool), dict(self.options)
        inputs: dict[str, Tensor] = {}
        places: list[ImagePlaces] = []
        for kind, name in PIXELS.items():
            if given.get(name) is not None:
                found = self.family.smaller(self.model, given, kind, selector)
                inputs |= found.inputs
                options |= found.options
                flags = [image.kept for image in found.places]
                kept &= kept_in_prompt(ids, self.family.placeholder(self.model, kind), flags)
                places += found.places
        left = self.positioned(kept) if selector.drops_cells else given
        return replace(self, given=self.without({**left, **inputs}, kept), options=options), places

    def check_continued(self) -> None:
        """Refuse a mask that does not fit the tokens in the cache, and logits that the library cannot keep."""
        given, cache, mask = self.given, cache_of(self.given), self.given.get("attention_mask")
        if getattr(given.get("logits_to_keep", 0), "ndim", 0) == 2:
            require("transformers", "5.21", "logits_to_keep with a row for each prompt")
        held, length = 0 if cache is None else cache.get_seq_length(), given["input_ids"].shape[1]
        if held and isinstance(mask, Tensor) and mask.shape[1] != held + length:
            raise VitrimError(
                f"expected an attention_mask for the {held} tokens in the cache, which are fewer than the prompts had, "
                f"and {length} new ones, got {mask.shape[1]}"
            )

    def encoded(self, kind: str) -> Encoded:
        """The images, or videos, behind their encoder; ``kind`` is one of `PIXELS`."""
        given, pixels, reduced = self.given, PIXELS[kind], self.tower_is_reduced()
        if kind == "video" and reduced:
            raise VitrimError("a compact model takes images; videos need one that is reduced with compact=False")
        read = [name for name in inspect.signature(self.encoder(kind)).parameters if name in given]
        own = {name: given[name] for name in read}
        if pixels not in own:  # one encoder for both kinds, by the name of images
            own["pixel_values"] = given[pixels]
        output, taken = self.of_reduced(own) if reduced else self.of_whole(own, kind)
        placeholder = self.family.placeholder(self.model, kind)
        kept = kept_in_prompt(given["input_ids"], placeholder, [image.flags for image in taken])
        return Encoded({*read, pixels}, output, taken, kept)

    def shortened(self, kept: Tensor, read: set[str], arguments: Mapping[str, Parameter]) -> dict[str, Any]:
        """The inputs for the tokens that stay, without those that an encoder ``read``; required
        ``arguments`` are None.
        """
        left = {name: value for name, value in self.positioned(kept).items() if name not in read}
        needed = {name for name in read & arguments.keys() if arguments[name].default is Parameter.empty}
        return self.without(left, kept) | dict.fromkeys(needed)

    def without(self, left: Mapping[str, Any], kept: Tensor) -> dict[str, Any]:
        """The inputs ``left`` for the tokens that stay; positions know those behind the whole prompt (`NEXT`)."""
        # A token that is no placeholder: the library would count it as an image's.
        filler = next(number for number in range(3) if number not in self.placeholders())
        out = trimmed(left, PER_TOKEN, kept, filler, close=not self.keeps_positions)
        # Behind an image at the end of a prompt, the next position is that behind the whole, which went with its
        # tokens.
        ends = torch.isin(self.given["input_ids"][:, -1:], torch.tensor(self.placeholders(), device=kept.device))
        whole = left.get("position_ids")
        axes = whole is not None and whole.dim() == 3
        if whole is not None and not hasattr(whole, NEXT) and (axes or self.keeps_positions) and bool(ends.any()):
            shorter = out["position_ids"].clone()  # the caller's own get no attribute
            most, last = _largest(whole).amax(dim=1, keepdim=True), _largest(shorter[..., -1:])
            setattr(shorter, NEXT, torch.where(ends, most, last) + 1)
            out["position_ids"] = shorter
        return out

    def of_whole(self, own: Mapping[str, Any], kind: str) -> tuple[Any, list[ChosenTokens]]:
        """Select among all tokens of the connector's output behind an unreduced tower; ``own`` are the encoder's
        inputs.
        """
        assert self.choosing is not None
        family, model, given = self.family, self.model, self.given
        watch = family.watch(model, given, kind, self.selector)
        with watch or nullcontext():
            output = self.encoder(kind)(**own, **self.options, return_dict=True)
        images = by_image(
            family.pooled(model, output),
            runs(given["input_ids"], family.placeholder(model, kind)),
            family.prompts_together,
        )
        grids = self.grids(kind, images)

        def look() -> list[ChosenTokens]:
            more = [None] * len(images) if watch is None else watch.seen()
            candidates = [
                Candidates(image, torch.ones(len(image), dtype=torch.bool), grid=grid, more=own)
                for image, grid, own in zip(images, grids, more, strict=True)
            ]
            return self.chosen(kind, candidates)

        chosen = self.choosing(look)
        family.narrowed(output, chosen)
        return output, chosen

    def of_reduced(self, own: Mapping[str, Any]) -> tuple[Any, list[ChosenTokens]]:
        """Keep the tokens that a reduced tower returns, or a selector's choice among them, in the output.

        A selector acts before the connector if it is made for that and the connector reads tokens one by one. ``own``
        are the encoder's inputs.
        """
        family, model, given, choosing = self.family, self.model, self.given, self.choosing
        in_cells = family.cell(model) > 1
        # A connector that joins neighbours, or reads the grid, needs a token at every place.
        full = in_cells or family.reads_all(model, given)
        watched = frozenset(() if choosing is None else self.watched())
        one_by_one = not in_cells and given.get("image_sizes") is None
        with self.trace.asking(Asked(full_grids=full, compact=True, watched=watched)) as notes:
            if choosing is not None and self.selector.place == "before" and one_by_one:
                return self.before_connector(own, full, notes)
            output = model.base_model.get_image_features(**own, return_dict=True)
        left = self.survivors()
        pairs = family.taken(output, left, full)
        if choosing is None:
            # Without a selector, every token that the tower left goes on to its place in the prompt.
            return output, [
                ChosenTokens(own, kept, torch.arange(len(own)), ImagePlaces(kept, torch.zeros_like(kept)))
                for own, kept in pairs
            ]
        chosen = choosing(partial(self.chosen_of_left, left, pairs, notes))
        family.narrowed(output, chosen)
        return output, chosen

    def before_connector(
        self, own: Mapping[str, Any], full: bool, notes: Sequence[Any]
    ) -> tuple[Any, list[ChosenTokens]]:
        """The counterpart of `of_reduced` for a selector before the connector, which gets only the chosen tokens."""

        def among(images: Sequence[Tensor], tower: Any) -> list[ChosenTokens]:
            assert self.choosing is not None
            left = self.survivors()
            pairs = [own.take(image, full) for own, image in zip(left, images, strict=True)]
            return self.choosing(partial(self.chosen_of_left, left, pairs, notes, tower))  # type: ignore[no-any-return]

        base = self.model.base_model
        with Early(self.family.tower(self.model), base.multi_modal_projector, among) as chooser:
            output = base.get_image_features(**own, return_dict=True)
        lengths = [len(image.features) for image in chooser.chosen]
        self.family.put(output, torch.cat(by_image(output.pooler_output, [], False)).split(lengths))
        return output, chooser.chosen

    def survivors(self) -> list[Survivors]:
        """The remaining tokens of every image behind the block that the connector reads."""
        family, dropped = self.family, self.family.dropped(self.model, self.given)
        return survivors(self.read_state(), family.cell(self.model), not family.cell_by_cell, dropped)

    def read_state(self) -> TokenState:
        """The state behind the block that the connector reads."""
        states, layers = self.trace.call.states, self.family.layers(self.model, self.given)
        # The deepest block that the connector reads: what left before it is gone for all.
        return states[max((layer % len(states) for layer in layers), default=-1)]

    def watched(self) -> list[int]:
        """The blocks whose attention the selector needs."""
        tower = self.family.tower(self.model)
        last = len(host_of(tower).blocks(tower)) - 1
        layers = self.family.layers(self.model, self.given)
        # Hidden states begin with the embeddings, so state i is behind block i - 1.
        read = max((layer % (last + 2) for layer in layers), default=last + 1) - 1
        return {"none": [], "read": [max(read, 0)], "last": [last]}[self.selector.needs().attention]

    def chosen_of_left(
        self, left: Sequence[Survivors], pairs: Sequence[tuple[Tensor, Tensor]], notes: Sequence[Any], tower: Any = None
    ) -> list[ChosenTokens]:
        """Choose among the tokens that a reduced tower returns: ``pairs`` are their features and flags.

        ``notes`` are the attention of the watched block, ``tower`` the tower's output if the connector has not read it.
        """
        family, model = self.family, self.model
        own = family.tower(model)
        facts, wide = host_of(own).facts(own), self.selector.needs().attention == "last"
        attention = attended(notes, facts.has_class_token, wide, family.cell(model), not family.cell_by_cell)
        layers = family.layers(model, self.given)
        candidates = []
        for place, (survivor, (features, flags)) in enumerate(zip(left, pairs, strict=True)):
            front = len(features) - len(survivor.places)
            more = attention[place].at(survivor.places) if attention else {}
            more = {name: value.to(features.device) for name, value in more.items()}
            # A connector that leaves out the class token still lets a selector see it, in the layers that it
            # concatenates.
            if tower is not None and facts.has_class_token and front == 0 and layers:
                tokens = [tower.hidden_states[layer][place, 0] for layer in layers]
                more["class_token"] = torch.cat(tokens, dim=-1).to(features.device)
            candidates.append(Candidates(features, flags, front, (1, 1, len(survivor.places)), more))
        return self.chosen("image", candidates)

    def chosen(self, kind: str, images: Sequence[Candidates]) -> list[ChosenTokens]:
        """Choose among the tokens of all images, or videos, of a prompt."""
        if self.selector.needs().text:
            ids, embed = self.given["input_ids"], self.model.get_input_embeddings()
            words = texts(ids, self.given.get("attention_mask"), self.placeholders(), embed)
            placeholder = self.family.placeholder(self.model, kind)
            rows = rows_of_images(ids, placeholder, [len(image.flags) for image in images])
            images = [
                replace(image, more={**(image.more or {}), "text": words[row]})
                for image, row in zip(images, rows, strict=True)
            ]
        choices = choose(self.selector, images)
        return [image.chosen(choice) for image, choice in zip(images, choices, strict=True)]

    def placeholders(self) -> list[int]:
        """The placeholder of every kind that the model has."""
        found = [getattr(self.model.base_model.config, f"{kind}_token_id", None) for kind in PIXELS]
        return [number for number in found if number is not None]

    def encoder(self, kind: str) -> Any:
        """The library's function that makes features of images, or videos."""
        base = self.model.base_model
        return getattr(base, f"get_{kind}_features", None) or base.get_image_features

    def grids(self, kind: str, images: Sequence[Tensor]) -> list[FrameGrid | None]:
        """Frames, rows and columns of the tokens of every image or video; None if the inputs do not tell."""
        whole = self.family.video_grid(self.model, self.given) if kind == "video" else None
        if whole is not None:
            return [whole] * len(images)
        unknown: list[FrameGrid | None] = [(1, 1, len(image)) if kind == "image" else None for image in images]
        patches = self.patches(kind)
        if len(patches) != len(images):
            return unknown
        found = [grid_of(len(image), *grid) for image, grid in zip(images, patches, strict=True)]
        return [own or other for own, other in zip(found, unknown, strict=True)]

    def patches(self, kind: str) -> list[FrameGrid]:
        """Frames, rows and columns of the patches of every image or video, from the inputs; empty if they do not say.

        Models have them under different names; tokens are in raster order in all of them.
        """
        given = self.given
        if given.get(f"{kind}_grid_thw") is not None:
            return [(frames, rows, columns) for frames, rows, columns in given[f"{kind}_grid_thw"].tolist()]
        if kind == "video":
            return []
        for name in ("spatial_shapes", "target_sizes", "image_grid_hw"):
            if given.get(name) is not None:
                return [(1, rows, columns) for rows, columns in torch.as_tensor(given[name]).tolist()]
        if given.get("image_position_ids") is not None:  # column and row of every patch, -1 for padding
            return [(1, rows, columns) for columns, rows in (given["image_position_ids"].amax(dim=1) + 1).tolist()]
        side = getattr(getattr(self.model.base_model.config, "vision_config", None), "patch_size", None)
        # with tokens that end rows, sizes are of whole images, and features of their tiles
        tiled = hasattr(self.model.base_model, "image_newline")
        if given.get("image_sizes") is None or not isinstance(side, int) or tiled:
            return []
        sizes = torch.as_tensor(given["image_sizes"]) // side
        return [(1, rows, columns) for rows, columns in sizes.tolist()]

    def positioned(self, kept: Tensor) -> Mapping[str, Any]:
        """The inputs with the positions of all tokens, if the language model must not count its tokens itself.

        If positions have three axes, a token keeps time, row and column of its anchor, and text continues as behind the
        whole image.
        """
        given = self.given
        if given.get("position_ids") is not None:
            return given
        ids, mask = given["input_ids"], given.get("attention_mask")
        real = torch.ones_like(kept) if mask is None else mask[:, -ids.shape[1] :].bool()
        if self.family.has_axes(self.model):
            base = self.model.base_model
            arguments = {*inspect.signature(base.get_rope_index).parameters} - {"input_ids", "attention_mask"}
            if "mm_token_type_ids" in arguments and given.get("mm_token_type_ids") is None:
                raise VitrimError(
                    "positions of images need mm_token_type_ids, which the processor gives beside input_ids"
                )
            own = {name: given[name] for name in arguments if given.get(name) is not None}
            self.check_apart(own)
            # Positions of the whole prompt, of which the tokens that stay keep theirs.
            places, deltas = base.get_rope_index(ids, attention_mask=mask, **own)
            # The library adds its deltas to the number of tokens in its cache, from which the removed ones are missing.
            base.rope_deltas = deltas + (~kept).sum(dim=1, keepdim=True)
            # The row in front of the three axes numbers the tokens themselves.
            order = real.long().cumsum(dim=1) - 1
            return {**given, "position_ids": torch.cat([order.clamp_min(0).unsqueeze(0), places])}
        if not self.keeps_positions:
            return given
        cache = cache_of(given)
        if cache is not None and cache.get_seq_length() > 0:
            raise VitrimError("positions=original on a cache: give position_ids, which go on from those of the prompt")
        return {**given, "position_ids": (real.long().cumsum(dim=1) - 1).clamp_min(0)}

    def check_apart(self, own: Mapping[str, Any]) -> None:
        """Refuse images, or videos, that touch: the library, given ``own``, takes them for one, and fails."""
        types = own.get("mm_token_type_ids")
        for number, kind in enumerate(PIXELS, 1):
            grids = own.get(f"{kind}_grid_thw")
            if types is not None and grids is not None and len(runs(types, number)) < len(grids):
                raise VitrimError(
                    f"{kind}s touch in the prompt, and transformers takes them for one: put a token between them, as "
                    "chat templates do"
                )


def _largest(positions: Tensor) -> Tensor:
    """(B, L): the largest of three axes, behind a row that numbers the tokens if there are four; (B, L) as they are."""
    return positions[-3:].amax(dim=0) if positions.dim() == 3 else positions
