"""Code shared by Hugging Face's vision-language models: prompts that get shorter with the images.

The library's models accept precomputed features of images (``mm_encoder_outputs``). So features are computed first, the
prompt is shortened to match, and the model's own forward, or ``generate``, runs on both. No library code is copied.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter
from math import prod
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from vitrim.core.host import Installed, VisionLanguage, take_off
from vitrim.core.plan import HostFacts
from vitrim.core.reduce import HANDLE, Selection, handle_of, reduced_parts
from vitrim.core.registry import host_of
from vitrim.core.selection import Choosing, Grid, Selector
from vitrim.core.tokens import Handed, TokenState, Trace
from vitrim.core.versions import require
from vitrim.errors import UnsupportedModelError, VitrimError
from vitrim.hosts.shared.compact import (
    Survivors,
    cache_of,
    check_prompt,
    holders,
    kept_in_prompt,
    prompt_rows,
    survivors,
    trimmed,
)
from vitrim.hosts.shared.selecting import Candidates, Taken, attended, by_image, choose, rows_of_images, runs, texts

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


@dataclass(eq=False, repr=False)
class PromptHook(Installed):
    """Runs before the model's forward, and passes it the features and the shortened prompt.

    A hook, and not a new forward, because export and trainers read the signature of ``model.forward``.
    """

    family: type[HuggingFaceVLM]
    model: nn.Module
    trace: Trace
    choosing: Choosing | None = None

    def __call__(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Shorten the inputs of ``called``, the whole model or the part without its head."""
        given = _named(called, args, kwargs)
        prompt = ImagePrompt(self.family, self.model, given, self.trace, self.choosing)
        if prompt.follows():
            return (), prompt.compact(called)[0]
        cache = cache_of(given)
        behind: Tensor | None = getattr(cache, BEHIND, None)
        if behind is None or given.get("position_ids") is not None:
            return None
        tokens = next(given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None)
        if len(behind) != len(tokens):
            raise VitrimError(
                f"the cache is of {len(behind)} prompts whose tokens kept their positions, and there are {len(tokens)} "
                "rows now: give position_ids, which go on from those of the prompts"
            )
        places = torch.arange(tokens.shape[1], device=tokens.device) + cache.get_seq_length()
        return (), {**given, "position_ids": places + behind.to(tokens.device)}


BEHIND = "vitrim_behind"
"""Attribute of a cache, (B, 1): by how much the next position exceeds the number of cached tokens."""


@dataclass(eq=False, repr=False)
class CacheHook(Installed):
    """Records the next position on a cache, for users who decode step by step without positions."""

    choosing: Choosing

    def __call__(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.choosing.selector.positions != "original":
            return
        cache, positions = cache_of(vars(output) if hasattr(output, "__dict__") else {}), kwargs.get("position_ids")
        if cache is not None and isinstance(positions, Tensor) and positions.dim() == 2:
            setattr(cache, BEHIND, positions.amax(dim=1, keepdim=True) + 1 - cache.get_seq_length())


def _named(called: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a call by name."""
    return {**dict(zip(tuple(inspect.signature(type(called).forward).parameters)[1:], args, strict=False)), **kwargs}


Hook = tuple[Callable[..., Any], Callable[..., Any]]
"""The function that registers a hook, and the hook."""


class ThreadHooks:
    """Context with hooks that only see calls of this thread; other threads may run the same model."""

    def hooks(self) -> list[Hook]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        thread = threading.get_ident()

        def own(hook: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given: hook(*given) if threading.get_ident() == thread else None

        self.handles = [register(own(hook)) for register, hook in self.hooks()]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()


class OnePromptARow(ThreadHooks):
    """Context in which forwards without mask and cache get a mask: gaps in positions then start no new prompt.

    ``generate`` drops a mask of ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def hooks(self) -> list[Hook]:
        return [(partial(self.model.register_forward_pre_hook, with_kwargs=True), self.mask)]

    def mask(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        told = kwargs.get("attention_mask") is not None or cache_of(kwargs) is not None
        if told or kwargs.get("input_ids") is None:
            return None
        return args, {**kwargs, "attention_mask": torch.ones_like(kwargs["input_ids"])}


@dataclass(eq=False, repr=False)
class CompactGenerate(Installed):
    """The ``generate`` of a compact model. Returned sequences start with the original prompt."""

    family: type[HuggingFaceVLM]
    model: nn.Module
    trace: Trace
    choosing: Choosing | None = None

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(getattr(type(self.model), "generate"))  # noqa: B009 - not known of a plain module

    @torch.no_grad()
    def __call__(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        generate: Any = type(self.model).generate  # type: ignore[attr-defined]
        given = kwargs if inputs is None or "input_ids" in kwargs else {**kwargs, "input_ids": inputs}
        prompt = ImagePrompt(self.family, self.model, given, self.trace, self.choosing)
        if not prompt.follows():
            return generate(self.model, inputs, *args, **kwargs)
        cache = cache_of(given)
        if cache is not None and cache.get_seq_length() > 0:
            raise VitrimError(
                "a compact model generates from whole conversations: the cache holds fewer tokens than the prompt, so "
                "call generate without past_key_values"
            )
        ids: Tensor = given["input_ids"]
        given, ragged = prompt.compact(self.model)
        config = given.get("generation_config") or self.model.generation_config
        copies = [given.get(name, getattr(config, name, None)) for name in ("num_beams", "num_return_sequences")]
        if ragged and max(number or 1 for number in copies) > 1:
            raise VitrimError(
                "beams and several sequences per prompt need images that keep equal numbers of tokens in this "
                f"{type(self.model).__name__}: use a method whose counts do not depend on the image, or one prompt"
            )
        shorter = ids.shape[1] - given["input_ids"].shape[1]
        for name in ("max", "min"):  # lengths count the original prompt, counts of new tokens do not
            whole = self._asked(f"{name}_length", given)
            if whole is not None and self._asked(f"{name}_new_tokens", given) is None:
                given[f"{name}_length"] = whole - shorter
        kept = self.choosing is not None and self.choosing.selector.positions == "original"
        with OnePromptARow(self.model) if kept else nullcontext():
            out = self.family.generate(self.model, given, *args)
        sequences: Tensor = out if isinstance(out, Tensor) else out.sequences
        if shorter > 0:  # put the original prompt in front
            new = sequences[:, ids.shape[1] - shorter :]
            copied = ids.repeat_interleave(len(new) // len(ids), dim=0).to(new.device)
            sequences = torch.cat([copied, new], dim=1)
        if isinstance(out, Tensor):
            return sequences
        out.sequences = sequences
        return out

    def _asked(self, option: str, given: Mapping[str, Any]) -> int | None:
        """The value of a generation ``option`` in a call, or in the configuration; None if unset."""
        if given.get(option) is not None:
            return cast(int, given[option])
        own: Any = self.model.generation_config
        unset = getattr(type(own)(), option)  # transformers 4 has defaults here, for new tokens
        configs = [config for config in (given.get("generation_config"), own) if config is not None]
        values = [getattr(config, option) for config in configs]
        return next((value for value in values if value not in (None, unset)), None)


class Early(ThreadHooks):
    """Context in which a connector gets only the chosen tokens of the tower, images concatenated.

    Args:
        tower: whose output the choice may use.
        connector: reads tokens (B, n, C), each by itself.
        among: chooses among tokens (n, C) of every image.
    """

    def __init__(
        self, tower: nn.Module, connector: nn.Module, among: Callable[[Sequence[Tensor], Any], list[Taken]]
    ) -> None:
        self.tower, self.connector, self.among = tower, connector, among
        self.chosen: list[Taken]
        self.output: Any = None

    def hooks(self) -> list[Hook]:
        return [(self.tower.register_forward_hook, self.see), (self.connector.register_forward_pre_hook, self.cut)]

    def see(self, module: nn.Module, args: Any, output: Any) -> None:
        self.output = output

    def cut(self, module: nn.Module, args: Any) -> Any:
        self.chosen = self.among(list(args[0]), self.output)
        self.output = None
        return (torch.cat([image.features for image in self.chosen])[None], *args[1:])


class HuggingFaceVLM(VisionLanguage):
    """A family of Hugging Face's vision-language models whose connector makes features per image."""

    tower_name: ClassVar[str] = "vision_tower"
    cell_by_cell: ClassVar[bool] = False
    """See `vitrim.core.plan.HostFacts`."""
    prompts_together: ClassVar[bool] = False
    """An entry of the list of features contains all images of a prompt."""
    types: ClassVar[str | None] = None
    """The name of the input that marks image tokens of a prompt; None if the model has none."""

    @classmethod
    def tower(cls, model: Any) -> nn.Module:
        return getattr(model.base_model, cls.tower_name)  # type: ignore[no-any-return]

    @classmethod
    def language(cls, model: Any) -> list[nn.Module]:
        head = model.get_output_embeddings()
        return [model.get_decoder(), *([] if head is None else [head])]

    @classmethod
    def image_inputs(cls, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        """The inputs for ``images`` (B, n, C, H, W), as the library's processor makes them."""
        return {"pixel_values": images.flatten(0, 1)}

    @classmethod
    @torch.no_grad()
    def image_tokens(cls, model: Any, images: Tensor) -> int:
        output = model.base_model.get_image_features(**cls.image_inputs(model, images[:1, :1]), return_dict=True)
        return len(cls.images(output, 1)[0])

    @classmethod
    def prompts(cls, model: Any, images: Tensor, text: int, places: int) -> dict[str, Any]:
        placeholder = model.config.image_token_id
        taken = {value for name, value in model.config.to_dict().items() if name.endswith("token_id")}
        word = next(number for number in range(len(taken) + 1) if number not in taken)
        ids = prompt_rows(images, text, places, word, placeholder)
        given: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            **cls.image_inputs(model, images),
        }
        if cls.types is not None:
            given[cls.types] = (ids == placeholder).long()
        if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
            given["logits_to_keep"] = 1  # as in the first step of `generate`
        return given

    @classmethod
    def install(cls, model: nn.Module, trace: Trace, choosing: Choosing | None = None) -> None:
        cls.uninstall(model)
        holder: Any = model
        if choosing is not None:
            holder.vitrim_choosing = choosing
        for called in {id(part): part for part in (model, holder.base_model)}.values():
            called.register_forward_pre_hook(PromptHook(cls, model, trace, choosing), with_kwargs=True)
        if choosing is not None and not cls.has_axes(model):  # those record it themselves
            holder.base_model.register_forward_hook(CacheHook(choosing), with_kwargs=True)
        if hasattr(model, "generate"):
            holder.generate = CompactGenerate(cls, model, trace, choosing)

    @classmethod
    def uninstall(cls, model: nn.Module) -> None:
        for part in (model, cast(Any, model).base_model):
            take_off(part)
        if hasattr(model, "vitrim_choosing"):
            del model.vitrim_choosing

    @classmethod
    def generate(cls, model: Any, given: Mapping[str, Any], *args: Any) -> Any:
        """Run the library's own ``generate`` on a prompt from `ImagePrompt.compact`."""
        generate: Any = type(model).generate
        return generate(model, None, *args, **given)

    @classmethod
    def placeholder(cls, model: Any, kind: str) -> int:
        """The id in place of an image's or video's feature in a prompt."""
        return getattr(model.config, f"{kind}_token_id")  # type: ignore[no-any-return]

    @classmethod
    def watch(cls, model: Any, given: Mapping[str, Any], kind: str, selector: Selector) -> Any:
        """A context in which an unreduced tower records what ``selector`` needs, for its ``seen()``; or None."""
        return None

    @classmethod
    def held(cls, model: nn.Module) -> list[Tensor]:
        whole = isinstance(vars(model).get(HANDLE), Selection)
        reduction = handle_of(model if whole else cls.tower(model))
        handed = reduction.image_places
        every = [torch.arange(len(image.kept)) for image in handed]
        if not whole:
            last, cell, raster = ImagePrompt(cls, model, {}, reduction._trace), cls.cell(model), not cls.cell_by_cell
            state, left = last.read_state(), last.survivors()
            every = [
                holders(state, number, own, cell, raster, len(image.kept))
                for number, (own, image) in enumerate(zip(left, handed, strict=True))
            ]
        return [torch.where((own >= 0) & image.kept[own], own, -1) for own, image in zip(every, handed, strict=True)]

    @classmethod
    def narrowed(cls, output: Any, chosen: Sequence[Taken]) -> None:
        """Put the ``chosen`` features into the encoder's ``output``, and those of the same places for other layers."""
        cls.put(output, [image.features for image in chosen])
        if getattr(output, "deepstack_features", None) is not None:
            if any(len(layer) != len(chosen) for layer in output.deepstack_features):
                raise UnsupportedModelError("features for several layers come in a form that is not known")
            output.deepstack_features = [
                [image.index_select(0, own.rows) for image, own in zip(layer, chosen, strict=True)]
                for layer in output.deepstack_features
            ]

    @classmethod
    def put(cls, output: Any, features: Sequence[Tensor]) -> None:
        """Put ``features`` (n, D) of every image into the encoder's ``output``, in its own format."""
        if not isinstance(output.pooler_output, Tensor):
            output.pooler_output = list(features)
        elif output.pooler_output.dim() == 2:
            output.pooler_output = torch.cat(list(features))
        elif len({len(image) for image in features}) == 1:
            output.pooler_output = torch.stack(list(features))  # (images, n, D)
        else:
            output.pooler_output = torch.cat(list(features)).unsqueeze(0)  # (1, total, D)

    @classmethod
    def pooled(cls, model: Any, output: Any) -> Any:
        """The features in the encoder's ``output``, as the language model gets them."""
        return output.pooler_output

    @classmethod
    def has_axes(cls, model: Any) -> bool:
        """True if the language model's positions have three axes."""
        return hasattr(model.base_model, "get_rope_index")

    @classmethod
    def check_selector(cls, model: Any, selector: Selector, facts: HostFacts | None) -> None:
        axes = cls.has_axes(model)
        if axes and selector.positions == "closed":
            raise VitrimError(
                f"{selector.describe()}: positions of {type(model).__name__} have three axes, so tokens keep theirs: "
                "leave positions out"
            )
        if (axes or selector.positions == "original") and not selector.keeps_places():
            raise VitrimError(
                f"{selector.describe()}: what goes on has no original positions, and {type(model).__name__} is to keep "
                "those: take another selector"
            )
        if selector.needs().class_token and facts is not None and not facts.has_class_token:
            raise UnsupportedModelError(
                f"{selector.name} needs the attention of a class token, and the tower of {type(model).__name__} has "
                "none: take divprune, dart or cdpruner, or visionzip, which takes means there"
            )

    @classmethod
    def layers(cls, model: Any, given: Mapping[str, Any]) -> list[int]:
        """The indices in ``hidden_states`` that the connector reads; empty if it reads the tower's output."""
        layer = given.get("vision_feature_layer")
        layer = getattr(model.config, "vision_feature_layer", None) if layer is None else layer
        return [layer] if isinstance(layer, int) else list(layer or [])

    @classmethod
    def dropped(cls, model: nn.Module, given: Mapping[str, Any]) -> int | None:
        """The leading tokens that the connector drops, of any kind; None: the whole prefix, or nothing."""
        return None

    @classmethod
    def reads_all(cls, model: nn.Module, given: Mapping[str, Any]) -> bool:
        """True if the connector needs every place of an image, as for several concatenated blocks."""
        return len(cls.layers(model, given)) > 1

    @classmethod
    def taken(cls, output: Any, left: list[Survivors], full: bool) -> list[tuple[Tensor, Tensor]]:
        """The remaining features of every image, also put into ``output``, with flags for `kept_in_prompt`."""
        images = cls.images(output, len(left))
        if len(images) != len(left):
            raise VitrimError(f"expected features of {len(left)} images, got {len(images)}: give image_sizes, too")
        pairs = [own.take(image, full) for own, image in zip(left, images, strict=True)]
        cls.put(output, [features for features, _ in pairs])
        return pairs

    @classmethod
    def images(cls, output: Any, number: int) -> list[Tensor]:
        """The features (n, D) of every image in the connector's output."""
        return list(output.pooler_output)


@dataclass(frozen=True)
class ImagePrompt:
    """The inputs of a model call, to be shortened with its images.

    Attributes:
        family: of the model.
        model: the whole model.
        given: the inputs, by name.
        trace: of the tower.
        choosing: chooses among image tokens; None: all that a reduced tower returns are kept.
    """

    family: type[HuggingFaceVLM]
    model: Any
    given: Mapping[str, Any]
    trace: Trace
    choosing: Choosing | None = None

    def tower_is_reduced(self) -> bool:
        """True if the tower returns fewer tokens; otherwise a selector behind it may."""
        if isinstance(vars(self.model).get(HANDLE), Selection):
            return False
        parts = reduced_parts(self.family.tower(self.model))
        return bool(parts) and handle_of(parts[0][1]).compact

    def follows(self) -> bool:
        """True if the call has images that now have fewer tokens."""
        given, model = self.given, self.model
        selecting = isinstance(vars(model).get(HANDLE), Selection)
        brought = [name for name in PIXELS.values() if given.get(name) is not None]
        if not brought or not (selecting or self.tower_is_reduced()):  # the tower was restored separately
            return False
        if not (selecting or "pixel_values" in brought):
            if not hasattr(model, "vitrim_choosing"):
                return False
            raise VitrimError(
                "tokens of videos are selected behind a tower as it is: give no method, and a selector that needs no "
                "attention (divprune, dart, cdpruner, evs)"
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
        family, model, given = self.family, self.model, self.given
        ids, cache, mask = given["input_ids"], cache_of(given), given.get("attention_mask")
        if getattr(given.get("logits_to_keep", 0), "ndim", 0) == 2:
            require("transformers", "5.21", "logits_to_keep with a row for each prompt")
        held = 0 if cache is None else cache.get_seq_length()
        if held and isinstance(mask, Tensor) and mask.shape[1] != held + ids.shape[1]:
            raise VitrimError(
                f"expected an attention_mask for the {held} tokens in the cache, which are fewer than the prompts had, "
                f"and {ids.shape[1]} new ones, got {mask.shape[1]}"
            )
        reduced = self.tower_is_reduced()
        outputs: dict[str, Any] = {}
        handed: list[Handed] = []
        encoded: set[str] = set()
        kept, ragged = torch.ones_like(ids, dtype=torch.bool), False
        for kind, pixels in PIXELS.items():
            if given.get(pixels) is None:
                continue
            if kind == "video" and reduced:
                raise VitrimError("a compact model takes images; videos need one that is reduced with compact=False")
            encoder = self.encoder(kind)
            names = [name for name in inspect.signature(encoder).parameters if name in given]
            own = {name: given[name] for name in names}
            if pixels not in own:  # one encoder for both kinds, by the name of images
                own["pixel_values"] = given[pixels]
            output, taken = self.of_reduced(own) if reduced else self.of_whole(own, kind)
            outputs[kind] = output
            handed += [image.handed for image in taken]
            encoded |= {*names, pixels}
            kept &= kept_in_prompt(ids, family.placeholder(model, kind), [image.flags for image in taken])
            ragged |= isinstance(output.pooler_output, Tensor) and len({len(image.features) for image in taken}) > 1
        self.trace.call.handed = handed
        filler = next(number for number in range(3) if number not in self.placeholders())
        original = self.choosing is not None and self.choosing.selector.positions == "original"
        left = {name: value for name, value in self.positioned(kept, original).items() if name not in encoded}
        out = trimmed(left, PER_TOKEN, kept, filler, close=not original)
        arguments = inspect.signature(type(called).forward).parameters
        # some arguments are required even if they are not needed
        out |= dict.fromkeys(
            name for name in encoded if name in arguments and arguments[name].default is Parameter.empty
        )
        out["mm_encoder_outputs"] = outputs
        return out, ragged

    def of_whole(self, own: Mapping[str, Any], kind: str) -> tuple[Any, list[Taken]]:
        """Select among all tokens of the connector's output behind an unreduced tower, and keep only those in it.

        ``own`` are the encoder's inputs; ``kind`` is one of `PIXELS`.
        """
        assert self.choosing is not None
        family, model, given, selector = self.family, self.model, self.given, self.choosing.selector
        watch = family.watch(model, given, kind, selector)
        with watch or nullcontext():
            output = self.encoder(kind)(**own, return_dict=True)
        images = by_image(
            family.pooled(model, output),
            runs(given["input_ids"], family.placeholder(model, kind)),
            family.prompts_together,
        )
        grids = self.grids(kind, images)

        def look() -> list[Taken]:
            more = [None] * len(images) if watch is None else watch.seen()
            candidates = [
                Candidates(image, torch.ones(len(image), dtype=torch.bool), grid=grid, more=own)
                for image, grid, own in zip(images, grids, more, strict=True)
            ]
            return self.chosen(selector, kind, candidates)

        chosen = self.choosing(look)
        family.narrowed(output, chosen)
        return output, chosen

    def of_reduced(self, own: Mapping[str, Any]) -> tuple[Any, list[Taken]]:
        """Keep the tokens that a reduced tower returns, or a selector's choice among them, in the output.

        A selector acts before the connector if it is made for that and the connector reads tokens one by one. ``own``
        are the encoder's inputs.
        """
        family, model, given, choosing = self.family, self.model, self.given, self.choosing
        base, cell = model.base_model, family.cell(model)
        selector = None if choosing is None else choosing.selector
        full = cell > 1 or family.reads_all(model, given)
        watched = [] if selector is None else self.watched(selector)
        early = selector is not None and selector.place == "before" and cell == 1 and given.get("image_sizes") is None
        with self.trace.handing_out(dense=full, fewer=True), self.trace.watching(watched) as notes:

            def among(images: Sequence[Tensor], tower: Any) -> list[Taken]:
                assert choosing is not None
                left = self.survivors()
                pairs = [own.take(image, full) for own, image in zip(left, images, strict=True)]
                look = partial(self.chosen_of_left, choosing.selector, left, pairs, notes, tower)
                return choosing(look)  # type: ignore[no-any-return]

            if early:
                with Early(family.tower(model), model.base_model.multi_modal_projector, among) as chooser:
                    output = base.get_image_features(**own, return_dict=True)
                lengths = [len(image.features) for image in chooser.chosen]
                family.put(output, torch.cat(by_image(output.pooler_output, [], False)).split(lengths))
                return output, chooser.chosen
            output = base.get_image_features(**own, return_dict=True)
        left = self.survivors()
        pairs = family.taken(output, left, full)
        if choosing is None:
            return output, [
                Taken(own, kept, torch.arange(len(own)), Handed(kept, torch.zeros_like(kept))) for own, kept in pairs
            ]
        chosen = choosing(partial(self.chosen_of_left, choosing.selector, left, pairs, notes, None))
        family.narrowed(output, chosen)
        return output, chosen

    def survivors(self) -> list[Survivors]:
        """The remaining tokens of every image behind the block that the connector reads."""
        family, dropped = self.family, self.family.dropped(self.model, self.given)
        return survivors(self.read_state(), family.cell(self.model), not family.cell_by_cell, dropped)

    def read_state(self) -> TokenState:
        """The state behind the block that the connector reads."""
        states, layers = self.trace.call.states, self.family.layers(self.model, self.given)
        return states[max((layer % len(states) for layer in layers), default=-1)]

    def watched(self, selector: Selector) -> list[int]:
        """The blocks whose attention the selector needs."""
        tower = self.family.tower(self.model)
        last = len(host_of(tower).blocks(tower)) - 1
        layers = self.family.layers(self.model, self.given)
        read = max((layer % (last + 2) for layer in layers), default=last + 1) - 1
        return {"none": [], "read": [max(read, 0)], "last": [last]}[selector.needs().attention]

    def chosen_of_left(
        self,
        selector: Selector,
        left: Sequence[Survivors],
        pairs: Sequence[tuple[Tensor, Tensor]],
        notes: Sequence[Any],
        tower: Any,
    ) -> list[Taken]:
        """Choose among the tokens that a reduced tower returns.

        Args:
            selector: makes the choice.
            left: of every image.
            pairs: features and flags of every image, from `Survivors.take`.
            notes: attention of the watched block.
            tower: the tower's output, if it contains a class token that the connector drops; else None.
        """
        family, model = self.family, self.model
        own = family.tower(model)
        facts, wide = host_of(own).facts(own), selector.needs().attention == "last"
        attention = attended(notes, facts.has_class_token, wide, family.cell(model), not family.cell_by_cell)
        layers = family.layers(model, self.given)
        candidates = []
        for place, (survivor, (features, flags)) in enumerate(zip(left, pairs, strict=True)):
            front = len(features) - len(survivor.places)
            more = attention[place].at(survivor.places) if attention else {}
            more = {name: value.to(features.device) for name, value in more.items()}
            if tower is not None and facts.has_class_token and front == 0 and layers:
                tokens = [tower.hidden_states[layer][place, 0] for layer in layers]
                more["class_token"] = torch.cat(tokens, dim=-1).to(features.device)
            candidates.append(Candidates(features, flags, front, (1, 1, len(survivor.places)), more))
        return self.chosen(selector, "image", candidates)

    def chosen(self, selector: Selector, kind: str, images: Sequence[Candidates]) -> list[Taken]:
        """Choose among the tokens of all images, or videos, of a prompt."""
        if selector.needs().text:
            ids, embed = self.given["input_ids"], self.model.get_input_embeddings()
            words = texts(ids, self.given.get("attention_mask"), self.placeholders(), embed)
            placeholder = self.family.placeholder(self.model, kind)
            rows = rows_of_images(ids, placeholder, [len(image.flags) for image in images])
            images = [
                replace(image, more={**(image.more or {}), "text": words[row]})
                for image, row in zip(images, rows, strict=True)
            ]
        choices = choose(selector, images)
        return [image.chosen(choice) for image, choice in zip(images, choices, strict=True)]

    def placeholders(self) -> list[int]:
        """The placeholder of every kind that the model has."""
        found = [getattr(self.model.config, f"{kind}_token_id", None) for kind in PIXELS]
        return [number for number in found if number is not None]

    def encoder(self, kind: str) -> Any:
        """The library's function that makes features of images, or videos."""
        base = self.model.base_model
        return getattr(base, f"get_{kind}_features", None) or base.get_image_features

    def grids(self, kind: str, images: Sequence[Tensor]) -> list[Grid | None]:
        """Frames, rows and columns of the tokens of every image or video; None if the inputs do not tell."""
        unknown: list[Grid | None] = [(1, 1, len(image)) if kind == "image" else None for image in images]
        table = self.given.get(f"{kind}_grid_thw")
        if table is None:
            return unknown
        merge = getattr(getattr(self.model.config, "vision_config", None), "spatial_merge_size", 1)
        found = [(frames, rows // merge, columns // merge) for frames, rows, columns in table.tolist()]
        return [*found] if [prod(grid) for grid in found] == [len(image) for image in images] else unknown

    def positioned(self, kept: Tensor, original: bool) -> Mapping[str, Any]:
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
            places, deltas = base.get_rope_index(ids, attention_mask=mask, **own)
            base.rope_deltas = deltas + (~kept).sum(dim=1, keepdim=True)
            order = real.long().cumsum(dim=1) - 1
            return {**given, "position_ids": torch.cat([order.clamp_min(0).unsqueeze(0), places])}
        if not original:
            return given
        cache = cache_of(given)
        if cache is not None and cache.get_seq_length() > 0:
            raise VitrimError("positions=original on a cache: give position_ids, which go on from those of the prompt")
        return {**given, "position_ids": (real.long().cumsum(dim=1) - 1).clamp_min(0)}
