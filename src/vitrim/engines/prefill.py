"""Prefill of a vision-language model: one forward of prompts of images and text, as a model of images.

Everything that counts or times a model thus works for tower, connector and language model together. A compact model
shortens the prompts to the remaining image tokens. It can also decode an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from vitrim.checked import Natural, checked
from vitrim.core.reduce import handle_of, reduce_, reduced_parts, restore_
from vitrim.core.registry import find_host, find_vision_language, host_of, parse_selector, vision_language
from vitrim.core.selection import Selector
from vitrim.errors import VitrimError

TEXT = 32
"""Default number of text tokens in a prompt: a short question."""


class Prefill(nn.Module):
    """A vision-language model on prompts with one text and some images each.

    Args:
        model: not reduced, with a supported tower, or `UnsupportedModelError`; reduce it with ``compact=True``.
        text: text tokens of a prompt, at least one per image, as each image follows some text.
        images: images of a prompt.
        select: selector of image tokens (or its text) for reduced copies, see `vitrim.reduce_`.
        new_tokens: tokens of a greedy answer, of which the prefill computes the first; 0 for prefill only.

    Attributes:
        shape: n images of a prompt, channels, height, width.
        places: tokens of each image in a prompt of the unreduced model.
        cache_bytes: bytes of the cache after the last forward, per prompt; None before, or without a cache.

    Example:
        >>> from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
        >>> size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        >>> vision = CLIPVisionConfig(**size, image_size=32, patch_size=8)
        >>> config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**size, vocab_size=50), image_token_id=1)
        >>> prefill = Prefill(LlavaForConditionalGeneration(config).eval(), text=8, images=2)
        >>> prefill.shape, prefill.places
        ((2, 3, 32, 32), 16)
        >>> prefill(torch.zeros(5, 2, 3, 32, 32)).logits.shape  # only of the last token, as in generation
        torch.Size([5, 1, 50])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        text: int = TEXT,
        images: int = 1,
        select: Selector | str | None = None,
        new_tokens: int = 0,
    ) -> None:
        super().__init__()
        self.model: nn.Module
        self.model, self.family = vision_language(model)
        self.select = None if select is None else parse_selector(select)
        if self.select is None:
            self.family.check(self.model)
        if not 1 <= images <= text:
            raise VitrimError(
                f"expected at least one image and a token of text before each, got {images} images and {text} tokens"
            )
        if new_tokens and not hasattr(self.model, "generate"):
            raise VitrimError(f"{type(self.model).__name__} has no head for an answer: leave new_tokens out")
        tower = self.family.tower(self.model)
        self.text, self.new_tokens = text, new_tokens
        self.cache_bytes: float | None = None
        self._dense_tokens: tuple[float, ...] | None = None
        own = self.family.usual_images(self.model)
        self.shape: tuple[int, ...] = (images, *(own or host_of(tower).facts(tower).input_size))
        self.places = self.family.image_tokens(self.model, self._blank())

    def forward(self, images: Tensor) -> Any:
        """The output for prompts around ``images`` (B, n, C, H, W): logits, or the result of ``generate``."""
        given = self.family.prompts(self.model, images, self.text, self.places)
        if self.new_tokens:
            # Exactly as many tokens in every run, whatever the untrained or reduced model would say.
            # Both bounds: an end token must not shorten the answer that is counted.
            number = {"max_new_tokens": self.new_tokens, "min_new_tokens": self.new_tokens}
            generate: Any = self.model.generate
            output = generate(**given, **number, do_sample=False, num_beams=1, return_dict_in_generate=True)
        else:
            output = self.model(**given)
        self.cache_bytes = cache_bytes(getattr(output, "past_key_values", None), len(images))
        return output

    def image_tokens(self, images: Tensor) -> float:
        """Image tokens per prompt in the last forward, which was of ``images``; mean over prompts."""
        parts = reduced_parts(self.model)
        if not parts:
            return self.places * self.shape[0]
        return sum(handle_of(parts[0][1]).image_tokens) / len(images)

    def dense_tokens(self) -> tuple[float, ...]:
        """Tokens after every block of the unreduced tower for one image, prefix included; empty if it is unknown."""
        if self._dense_tokens is None:
            self._dense_tokens = self._counted_tokens()
        return self._dense_tokens

    def _counted_tokens(self) -> tuple[float, ...]:
        if find_host(self.family.tower(self.model)) is None:
            return ()
        reduction = reduce_(self.model, "none", record=True)
        try:
            self.family.image_tokens(self.model, self._blank())
            return tuple(reduction.mean_tokens_per_block)
        finally:
            restore_(self.model)

    def _blank(self) -> Tensor:
        """Images of one prompt; not zeros, which some models treat as padding."""
        weight = next(self.model.parameters())
        return torch.ones(1, *self.shape, dtype=weight.dtype, device=weight.device)

    def shares(self) -> Mapping[str, tuple[list[nn.Module], list[nn.Module]]]:
        """Modules of tower and language model, each with the modules inside that belong to the connector."""
        tower = self.family.tower(self.model)
        return {
            "tower": ([tower], self.family.connector(self.model)),
            "language model": (self.family.language(self.model), []),
        }


def cache_bytes(cache: Any, prompts: int) -> float | None:
    """Bytes per prompt of all tensors in a language model's cache, including padding; None without a cache."""
    layers = getattr(cache, "layers", None)
    if not layers:
        return None
    # By identity: layers may share a tensor, which is held once.
    held = {id(value): value for value in tree_leaves([vars(layer) for layer in layers]) if isinstance(value, Tensor)}
    return sum(value.nbytes for value in held.values()) / prompts


@checked
class Prompt:
    """The prompt for counting and timing a vision-language model; other models have none.

    Attributes:
        text: text tokens; None for 32.
        images: images; None for 1.
        select: selector of image tokens, applied after every method, or alone without a method.
        new_tokens: tokens of an answer to decode, which then counts; None for prefill only.
    """

    text: int | None = None
    images: int | None = None
    select: Selector | str | None = None
    new_tokens: Natural | None = None

    def __post_init__(self) -> None:
        if isinstance(self.select, str):
            object.__setattr__(self, "select", parse_selector(self.select))


def as_measured(model: nn.Module, prompt: Prompt | None = None) -> nn.Module:
    """``model``, or the `Prefill` of a vision-language model; `VitrimError` for a prompt of another kind of model."""
    prompt = prompt or Prompt()
    if find_vision_language(model) is not None:
        text, images = TEXT if prompt.text is None else prompt.text, 1 if prompt.images is None else prompt.images
        return Prefill(model, text=text, images=images, select=prompt.select, new_tokens=prompt.new_tokens or 0)
    if prompt.select is not None:
        raise VitrimError(f"select chooses image tokens of a vision-language model, and {type(model).__name__} is none")
    if prompt.text is not None or prompt.images is not None or prompt.new_tokens:
        raise VitrimError(f"a prompt is described, and {type(model).__name__} reads none")
    return model
