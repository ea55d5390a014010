"""Code shared by Hugging Face's vision-language models: prompts that get shorter with the images.

Features are computed first, the prompt is shortened to match, and the model's own forward, or ``generate``, runs on
both (``mm_encoder_outputs``). No library code is copied.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitrim.core.block import Installed
from vitrim.core.host import take_off
from vitrim.core.reduce import handle_of
from vitrim.core.selection import Choosing
from vitrim.core.tokens import Trace
from vitrim.errors import VitrimError
from vitrim.hosts.shared.compact import cache_of, holders
from vitrim.hosts.shared.hooks import Hook, ThreadHooks
from vitrim.hosts.transformers.vlm_family import PromptFamily
from vitrim.hosts.transformers.vlm_prompt import NEXT, ImagePrompt, selects_behind


@dataclass(eq=False, repr=False)
class PromptHook(Installed):
    """Runs before the model's forward, and passes it the features and the shortened prompt.

    A hook, and not a new forward, because export and trainers read the signature of ``model.forward``.
    """

    family: type[PromptFamily]
    model: nn.Module
    trace: Trace
    choosing: Choosing | None = None

    def __call__(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Shorten the inputs of ``called``, the whole model or the part without its head."""
        names = tuple(inspect.signature(type(called).forward).parameters)[1:]
        given = self.family.read({**dict(zip(names, args, strict=False)), **kwargs})
        prompt = ImagePrompt(self.family, self.model, given, self.trace, self.choosing)
        if prompt.follows():
            return (), self.family.handed(self.model, prompt.compact(called)[0])
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
        # The next token stands behind the whole prompt, not behind the tokens that the cache still has.
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
            behind = getattr(positions, NEXT, None)
            behind = positions.amax(dim=1, keepdim=True) + 1 if behind is None else behind
            setattr(cache, BEHIND, behind - cache.get_seq_length())


class OnePromptARow(ThreadHooks):
    """Context in which forwards without mask and cache get a mask: gaps in positions then start no new prompt.

    ``generate`` drops a mask of ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def hooks(self) -> list[Hook]:
        return [(partial(self.model.register_forward_pre_hook, with_kwargs=True), self.mask)]

    def mask(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        positioned = kwargs.get("attention_mask") is not None or cache_of(kwargs) is not None
        if positioned or kwargs.get("input_ids") is None:
            return None
        return args, {**kwargs, "attention_mask": torch.ones_like(kwargs["input_ids"])}


class Behind(ThreadHooks):
    """Context in which tokens behind a shortened prompt, at ``positions``, continue those of the whole.

    ``generate`` continues those of the last token that stays.
    """

    gap: Tensor
    """(B, 1), or for every row of positions: from behind the last token that stays to behind the whole prompt."""

    def __init__(self, model: nn.Module, positions: Any) -> None:
        self.model = model
        self.behind: Tensor | None = getattr(positions, NEXT, None)
        if self.behind is not None:
            self.length, self.gap = positions.shape[-1], self.behind - 1 - positions[..., -1:]
            if positions.dim() == 3 and len(positions) == 4:
                self.gap[0] = 0  # numbers the tokens

    def hooks(self) -> list[Hook]:
        called = partial(self.model.register_forward_pre_hook, with_kwargs=True)
        return [] if self.behind is None else [(called, self.shift)]

    def shift(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        positions, cache = kwargs.get("position_ids"), cache_of(kwargs)
        if positions is None or self.behind is None:
            return None
        # Only tokens behind the prompt move on: those of the prompt have their own positions already.
        first = 0 if cache is None else cache.get_seq_length()
        numbers = torch.arange(first, first + positions.shape[-1], device=positions.device)
        copies = positions.shape[-2] // len(self.behind)  # of every prompt, such as beams
        gap, behind = (own.to(positions.device).repeat_interleave(copies, dim=-2) for own in (self.gap, self.behind))
        shifted = positions + gap * (numbers >= self.length)
        if first + len(numbers) == self.length:
            setattr(shifted, NEXT, behind)  # for `CacheHook`
        return args, {**kwargs, "position_ids": shifted}


@dataclass(eq=False, repr=False)
class CompactGenerate(Installed):
    """The ``generate`` of a compact model. Returned sequences start with the original prompt."""

    family: type[PromptFamily]
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
        shorter, ragged = prompt.compact(self.model)
        if ragged:
            self.refuse_copies(shorter)
        ids: Tensor = given["input_ids"]
        gone = ids.shape[1] - shorter["input_ids"].shape[1]
        shorter |= self.lengths(shorter, gone)
        behind = Behind(self.model, shorter.get("position_ids"))
        with behind, OnePromptARow(self.model) if prompt.keeps_positions else nullcontext():
            out = self.family.generate(self.model, shorter, *args)
        return out if gone <= 0 else with_whole_prompt(out, ids, gone)

    def refuse_copies(self, given: Mapping[str, Any]) -> None:
        """Refuse copies of prompts whose images keep different numbers of tokens."""
        config = given.get("generation_config") or self.model.generation_config
        copies = [given.get(name, getattr(config, name, None)) for name in ("num_beams", "num_return_sequences")]
        if max(number or 1 for number in copies) > 1:
            raise VitrimError(
                "beams and several sequences per prompt need images that keep equal numbers of tokens in this "
                f"{type(self.model).__name__}: use a method whose counts do not depend on the image, or one prompt"
            )

    def lengths(self, given: Mapping[str, Any], gone: int) -> dict[str, int]:
        """The lengths asked for, which count the original prompt, less ``gone``; counts of new tokens do not."""
        # Whole lengths count the prompt as the user sees it; the model sees one that is shorter by `gone`.
        whole = {name: self._asked(f"{name}_length", given) for name in ("max", "min")}
        return {
            f"{name}_length": length - gone
            for name, length in whole.items()
            if length is not None and self._asked(f"{name}_new_tokens", given) is None
        }

    def _asked(self, option: str, given: Mapping[str, Any]) -> int | None:
        """The value of a generation ``option`` in a call, or in the configuration; None if unset."""
        configs = given.get("generation_config"), self.model.generation_config
        values = [given.get(option), *(getattr(config, option, None) for config in configs)]
        return next((value for value in values if value is not None), None)


def with_whole_prompt(out: Any, ids: Tensor, gone: int) -> Any:
    """The output of ``generate`` with prompts ``ids`` (B, L) in front, in place of those without ``gone`` tokens."""
    sequences: Tensor = out if isinstance(out, Tensor) else out.sequences
    # Behind the shortened prompt come the new tokens.
    new = sequences[:, ids.shape[1] - gone :]
    sequences = torch.cat([ids.repeat_interleave(len(new) // len(ids), dim=0).to(new.device), new], dim=1)
    if isinstance(out, Tensor):
        return sequences
    out.sequences = sequences
    return out


class HuggingFaceVLM(PromptFamily):
    """A family of Hugging Face's vision-language models whose connector makes features per image."""

    @classmethod
    def install(cls, model: nn.Module, trace: Trace, choosing: Choosing | None = None) -> None:
        cls.uninstall(model)
        holder: Any = model
        if choosing is not None:
            holder.vitrim_choosing = choosing
        for called in cls.called(model):
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
    def held(cls, model: nn.Module) -> list[Tensor]:
        whole = selects_behind(model)
        reduction = handle_of(model if whole else cls.tower(model))
        places = reduction.image_places
        every = [torch.arange(len(image.kept)) for image in places]
        if not whole:
            last, cell, raster = ImagePrompt(cls, model, {}, reduction._trace), cls.cell(model), not cls.cell_by_cell
            state, left = last.read_state(), last.survivors()
            every = [
                holders(state, number, own, cell, raster, len(image.kept))
                for number, (own, image) in enumerate(zip(left, places, strict=True))
            ]
        return [torch.where((own >= 0) & image.kept[own], own, -1) for own, image in zip(every, places, strict=True)]
