"""Prefill of a vision-language model: one forward of prompts of images and text, as a model that takes images.

    profile(Prefill(model, text=32), "tome:r=8", images)

So everything that counts or times a model does the same with tower, connector and language model together. Prompts are
made in the forward, for the images at hand; a compact model (`compact=True`) shortens them to what is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.core.reduce import get_reduction, reduce_, reduced_parts, restore_
from vitrim.core.registry import find_host, find_vision_language, host_of, parse_selector, vision_language
from vitrim.core.selection import Selector
from vitrim.errors import VitrimError

TEXT = 32
"""Tokens of text in a prompt, unless it is said: a short question."""


class Prefill(nn.Module):
    """A vision-language model on prompts of one text and some images each.

    It holds ``model`` itself, which `vitrim.reduce_` finds in it; reduced, it is reduced with ``compact=True``.

    Args:
        model: not reduced, with a tower that can be.
        text: tokens of text in a prompt.
        images: images in a prompt.
        select: a selector of image tokens, for reduced forms of it, see `vitrim.reduce_`; also as text.

    Attributes:
        shape: n images of a prompt, channels, height, width.
        places: tokens that each image has in a prompt of the unreduced model.

    Raises:
        UnsupportedModelError: the model is of no family that takes ``compact=True``, or its form is refused.
        VitrimError: less text than images: some of it stands before each.

    Example:
        >>> from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
        >>> size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        >>> vision = CLIPVisionConfig(**size, image_size=32, patch_size=8)
        >>> config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**size, vocab_size=50), image_token_id=1)
        >>> prefill = Prefill(LlavaForConditionalGeneration(config).eval(), text=8, images=2)
        >>> prefill.shape, prefill.places
        ((2, 3, 32, 32), 16)
        >>> prefill(torch.zeros(5, 2, 3, 32, 32)).logits.shape  # of the last token only, as in the first step
        torch.Size([5, 1, 50])
    """

    def __init__(
        self, model: nn.Module, *, text: int = TEXT, images: int = 1, select: Selector | str | None = None
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
        tower = self.family.tower(self.model)
        self.text = text
        own = self.family.usual_images(self.model)
        self.shape: tuple[int, ...] = (images, *(own or host_of(tower).facts(tower).input_size))
        self.places = self.family.image_tokens(self.model, self._blank())

    def forward(self, images: Tensor) -> Any:
        """The model's output for prompts around ``images`` (B, n, C, H, W)."""
        return self.model(**self.family.prompts(self.model, images, self.text, self.places))

    def image_tokens(self, images: Tensor) -> float:
        """Tokens of images in a prompt, the mean over the prompts of the last forward, which was of ``images``."""
        parts = reduced_parts(self.model)
        if not parts:
            return self.places * self.shape[0]
        return sum(get_reduction(parts[0][1]).image_tokens) / len(images)

    def dense_tokens(self) -> tuple[float, ...]:
        """Tokens after every block of the unreduced tower, for one image, prefix included; none of an unknown one."""
        if find_host(self.family.tower(self.model)) is None:
            return ()
        blank = self._blank()
        reduction = reduce_(self.model, "none", record=True)
        try:
            self.family.image_tokens(self.model, blank)
            return tuple(reduction.mean_tokens_per_block)
        finally:
            restore_(self.model)

    def _blank(self) -> Tensor:
        """One prompt's images; not of zeros, which some models take for padding."""
        weight = next(self.model.parameters())
        return torch.ones(1, *self.shape, dtype=weight.dtype, device=weight.device)

    def shares(self) -> Mapping[str, tuple[list[nn.Module], list[nn.Module]]]:
        """Tower and language model by name, each as modules, and those in them that are the connector's."""
        tower = self.family.tower(self.model)
        return {
            "tower": ([tower], self.family.connector(self.model)),
            "language model": (self.family.language(self.model), []),
        }


def as_measured(
    model: nn.Module,
    *,
    text: int | None = None,
    images: int | None = None,
    select: Selector | str | None = None,
) -> nn.Module:
    """``model`` itself, or where it is a vision-language model its `Prefill` of so much text and so many images.

    Args:
        model: any.
        text: tokens; default 32.
        images: default 1.
        select: as of `Prefill`.

    Raises:
        VitrimError: any of these is given, and the model reads no prompts; and as `Prefill`.

    Example:
        >>> as_measured(nn.Linear(2, 2))
        Linear(in_features=2, out_features=2, bias=True)
    """
    if find_vision_language(model) is not None:
        text, images = TEXT if text is None else text, 1 if images is None else images
        return Prefill(model, text=text, images=images, select=select)
    if select is not None:
        raise VitrimError(f"select chooses image tokens of a vision-language model, and {type(model).__name__} is none")
    if text is not None or images is not None:
        raise VitrimError(f"a prompt is described, and {type(model).__name__} reads none")
    return model
