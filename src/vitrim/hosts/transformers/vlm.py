"""Code shared by Hugging Face's vision-language models: prompts that follow the images of a reduced tower.

The library's models take features of images that were computed before (``mm_encoder_outputs``). So the features are
computed first, the prompt is trimmed to what is left of them, and the model's own forward, or ``generate``, runs on
that. Nothing of the library is copied.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from vitrim.core.host import VisionLanguage
from vitrim.core.reduce import get_reduction, reduced_parts
from vitrim.core.tokens import Trace
from vitrim.errors import VitrimError
from vitrim.hosts.shared.compact import Survivors, check_prompt, kept_in_prompt, prompt_rows, survivors, trimmed

PER_TOKEN = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "labels")
"""Inputs that have one entry for every token of a prompt."""


class PromptHook:
    """Runs before the forward of the model and gives it features and prompt of what is left of the images.

    A hook and not a forward of its own, because export and trainers read the signature of ``model.forward``. An object
    and not a function, so that the model can still be copied and pickled.
    """

    def __init__(self, family: type[HuggingFaceVLM], trace: Trace) -> None:
        self.family = family
        self.trace = trace

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positional = tuple(inspect.signature(type(model).forward).parameters)[1:]
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        if not self.family.follows(model, given):
            return None
        return (), self.family.compact(model, given, self.trace)[0]


class CompactGenerate:
    """The ``generate`` of a compact model. Sequences come out behind the prompt as it was given."""

    def __init__(self, family: type[HuggingFaceVLM], model: nn.Module, trace: Trace) -> None:
        self.family = family
        self.model = model
        self.trace = trace

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(getattr(type(self.model), "generate"))  # noqa: B009 - not known of a plain module

    @torch.no_grad()
    def __call__(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        generate: Any = type(self.model).generate  # type: ignore[attr-defined]
        given = kwargs if inputs is None or "input_ids" in kwargs else {**kwargs, "input_ids": inputs}
        if not self.family.follows(self.model, given):
            return generate(self.model, inputs, *args, **kwargs)
        cache = given.get("past_key_values")
        if cache is not None and cache.get_seq_length() > 0:
            raise VitrimError(
                "a compact model generates from whole conversations: the cache holds fewer tokens than the prompt, so "
                "call generate without past_key_values"
            )
        prompt: Tensor = given["input_ids"]
        given, ragged = self.family.compact(self.model, given, self.trace)
        config = given.get("generation_config") or self.model.generation_config
        copies = [given.get(name, getattr(config, name, None)) for name in ("num_beams", "num_return_sequences")]
        if ragged and max(number or 1 for number in copies) > 1:
            raise VitrimError(
                "beams and several sequences per prompt need images that keep equal numbers of tokens in this "
                f"{type(self.model).__name__}: use a method whose counts do not depend on the image, or one prompt"
            )
        shorter = prompt.shape[1] - given["input_ids"].shape[1]
        for name in ("max", "min"):  # both lengths count the prompt, which is handed back whole; new tokens count alone
            whole = self._asked(f"{name}_length", given)
            if whole is not None and self._asked(f"{name}_new_tokens", given) is None:
                given[f"{name}_length"] = whole - shorter
        out = generate(self.model, None, *args, **given)
        sequences: Tensor = out if isinstance(out, Tensor) else out.sequences
        if shorter > 0:  # put the prompt as it was given in front
            new = sequences[:, prompt.shape[1] - shorter :]
            copied = prompt.repeat_interleave(len(new) // len(prompt), dim=0).to(new.device)
            sequences = torch.cat([copied, new], dim=1)
        if isinstance(out, Tensor):
            return sequences
        out.sequences = sequences
        return out

    def _asked(self, option: str, given: Mapping[str, Any]) -> int | None:
        """The value of an ``option`` of generation in a call, or in the configuration; None where nobody set it."""
        if given.get(option) is not None:
            return cast(int, given[option])
        own: Any = self.model.generation_config
        unset = getattr(type(own)(), option)  # transformers 4 has defaults here, which count new tokens
        configs = [config for config in (given.get("generation_config"), own) if config is not None]
        values = [getattr(config, option) for config in configs]
        return next((value for value in values if value not in (None, unset)), None)


class HuggingFaceVLM(VisionLanguage):
    """A family of Hugging Face's vision-language models whose connector gives features of images one by one."""

    tower_name: ClassVar[str] = "vision_tower"
    cell_by_cell: ClassVar[bool] = False
    """See `vitrim.core.plan.HostFacts`."""
    stacks: ClassVar[bool] = False
    """The model takes the features as one tensor and not as a list."""
    types: ClassVar[str | None] = None
    """The name of the input that says which tokens of a prompt are images'; None: the model takes none."""

    @classmethod
    def tower(cls, model: Any) -> nn.Module:
        return getattr(model.base_model, cls.tower_name)  # type: ignore[no-any-return]

    @classmethod
    def language(cls, model: Any) -> list[nn.Module]:
        head = model.get_output_embeddings()
        return [model.get_decoder(), *([] if head is None else [head])]

    @classmethod
    def image_inputs(cls, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        """The inputs that bring ``images`` (B, n, C, H, W), in the form that the library's processor gives them."""
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
    def install(cls, model: nn.Module, trace: Trace) -> None:
        cls.uninstall(model)
        hook = PromptHook(cls, trace)
        holder: Any = model
        holder.vitrim_compact = model.register_forward_pre_hook(hook, with_kwargs=True)
        if hasattr(model, "generate"):
            holder.generate = CompactGenerate(cls, model, trace)

    @classmethod
    def uninstall(cls, model: nn.Module) -> None:
        if "vitrim_compact" in vars(model):
            holder: Any = model
            holder.vitrim_compact.remove()
            del holder.vitrim_compact
            if "generate" in vars(model):
                del holder.generate

    @classmethod
    def follows(cls, model: nn.Module, given: Mapping[str, Any]) -> bool:
        """True if a call with these inputs brings images whose tokens are fewer now.

        Raises:
            VitrimError: the prompt is not given as ids.
        """
        if given.get("pixel_values") is None:
            return False
        parts = reduced_parts(cls.tower(model))
        if not parts or not get_reduction(parts[0][1]).compact:  # it was restored by itself
            return False
        if not isinstance(given.get("input_ids"), Tensor):
            raise VitrimError(
                "a compact model needs input_ids beside pixel_values, to know which tokens of the prompt stand for "
                "images; inputs_embeds do not say"
            )
        check_prompt(given, PER_TOKEN)
        if not len(given["pixel_values"]):
            raise VitrimError("pixel_values holds no image: leave it out where a prompt has none")
        return True

    @classmethod
    def compact(cls, model: Any, given: Mapping[str, Any], trace: Trace) -> tuple[dict[str, Any], bool]:
        """The inputs with features in place of images, and without the tokens that went; and whether images differ."""
        ids, cache, mask = given["input_ids"], given.get("past_key_values"), given.get("attention_mask")
        held = 0 if cache is None else cache.get_seq_length()
        if held and isinstance(mask, Tensor) and mask.shape[1] != held + ids.shape[1]:
            raise VitrimError(
                f"expected an attention_mask for the {held} tokens in the cache, which are fewer than the prompts had, "
                f"and {ids.shape[1]} new ones, got {mask.shape[1]}"
            )
        base, placeholder = model.base_model, model.config.image_token_id
        names = [name for name in inspect.signature(base.get_image_features).parameters if name in given]
        full = cls.cell(model) > 1 or cls.reads_all(model, given)
        with trace.handing_out(dense=full, fewer=True):
            output = base.get_image_features(**{name: given[name] for name in names}, return_dict=True)
        number = len(trace.call.states)
        state = trace.call.states[max((layer % number for layer in cls.layers(model, given)), default=-1)]
        left = survivors(state, cls.cell(model), not cls.cell_by_cell, cls.dropped(model, given))
        features, flags = cls.taken(output, left, full)
        trace.call.handed = [len(image) for image in features]
        kept = kept_in_prompt(ids, placeholder, flags)
        filler = 1 if placeholder == 0 else 0
        given = cls.positioned(model, given, kept)
        out = trimmed({name: value for name, value in given.items() if name not in names}, PER_TOKEN, kept, filler)
        out["mm_encoder_outputs"] = {"image": output}
        return out, cls.stacks and len({len(image) for image in features}) > 1

    @classmethod
    def layers(cls, model: Any, given: Mapping[str, Any]) -> list[int]:
        """The places in ``hidden_states`` that the connector reads; empty where it reads what the tower hands out."""
        layer = given.get("vision_feature_layer")
        layer = getattr(model.config, "vision_feature_layer", None) if layer is None else layer
        return [layer] if isinstance(layer, int) else list(layer or [])

    @classmethod
    def dropped(cls, model: nn.Module, given: Mapping[str, Any]) -> int | None:
        """The leading tokens that the connector leaves out, whatever they are; None: all of the prefix, or none."""
        return None

    @classmethod
    def reads_all(cls, model: nn.Module, given: Mapping[str, Any]) -> bool:
        """True if the connector needs every place of an image, as for several blocks side by side."""
        return len(cls.layers(model, given)) > 1

    @classmethod
    def taken(cls, output: Any, left: list[Survivors], full: bool) -> tuple[list[Tensor], list[Tensor]]:
        """The features of every image that stay, put into ``output``; and flags for `kept_in_prompt`."""
        images = cls.images(output, len(left))
        if len(images) != len(left):
            raise VitrimError(f"expected features of {len(left)} images, got {len(images)}: give image_sizes, too")
        pairs = [own.take(image, full) for own, image in zip(left, images, strict=True)]
        features, flags = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if not cls.stacks:
            output.pooler_output = features
        elif len({len(image) for image in features}) == 1:
            output.pooler_output = torch.stack(features)  # (images, n, D)
        else:
            output.pooler_output = torch.cat(features).unsqueeze(0)  # (1, total, D)
        return features, flags

    @classmethod
    def images(cls, output: Any, number: int) -> list[Tensor]:
        """The features (n, D) of every image in the connector's output."""
        return list(output.pooler_output)

    @classmethod
    def positioned(cls, model: nn.Module, given: Mapping[str, Any], kept: Tensor) -> Mapping[str, Any]:
        """The inputs with positions of all tokens, where the language model does not count its tokens itself."""
        return given
