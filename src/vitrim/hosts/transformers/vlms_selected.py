"""Hugging Face's vision-language models whose towers are not reduced: image tokens are selected behind them.

`AnyVLM` suffices for most. Models that pass features on in another form have small families here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, cast

import torch
import transformers
from torch import nn

from vitrim.core.plan import HostFacts
from vitrim.core.selection import Selector
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.shared.selecting import ChosenTokens
from vitrim.hosts.transformers.vlm import HuggingFaceVLM
from vitrim.hosts.transformers.vlm_cells import PackedCells
from vitrim.hosts.transformers.vlm_family import embedded
from vitrim.hosts.transformers.vlm_smaller import PackedImages

FOUR_ROWS = frozenset({
    "CohereCompassTextModel", "Cosmos3EdgeTextModel", "Ernie4_5_VLMoeTextModel", "Glm4vMoeTextModel",
    "Glm4vTextModel", "GlmImageTextModel", "GlmOcrTextModel", "HYV4VLTextModel", "PaddleOCRTextModel",
    "Qwen2VLTextModel", "Qwen2_5OmniThinkerTextModel", "Qwen2_5_VLTextModel", "Qwen3OmniMoeThinkerTextModel",
    "Qwen3VLMoeTextModel", "Qwen3VLTextModel", "Qwen3_5MoeTextModel", "Qwen3_5TextModel", "Qwen4ExpTextModel",
})  # fmt: skip
"""Language models whose positions have three axes, with the tokens' own numbers in front: (4, B, L)."""


class AnyVLM(HuggingFaceVLM):
    """Any model that accepts precomputed features of images and has a placeholder for each.

    Its tower is not reduced; image tokens are selected behind the connector.
    """

    name = "others"

    @classmethod
    def serves(cls, kind: type) -> bool:
        return _takes_features(kind)

    @classmethod
    def check_selector(cls, model: Any, selector: Selector, facts: HostFacts | None) -> None:
        named = isinstance(getattr(model.base_model.config, "image_token_id", None), int)
        if not named or not hasattr(model.base_model, "get_image_features"):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no placeholder of images (config.image_token_id) or no call that makes "
                "features of them (get_image_features), so prompts cannot follow a selection"
            )
        if cls.has_axes(model) and not any(base.__name__ in FOUR_ROWS for base in type(model.get_decoder()).__mro__):
            raise UnsupportedModelError(
                f"positions of {type(model).__name__} have axes of a form that is not known, so tokens could not keep "
                "theirs"
            )
        super().check_selector(model, selector, facts)

    @classmethod
    def check(cls, model: nn.Module) -> None:
        raise UnsupportedModelError(
            f"the tower of {type(model).__name__} cannot be reduced: only image tokens behind its connector can be "
            "selected, by a selector that needs no attention (vitrim list selectors), without a method"
        )

    @classmethod
    def tower(cls, model: nn.Module) -> nn.Module:
        cls.check(model)
        raise AssertionError


@cache
def _takes_features(kind: type) -> bool:
    """True if models of a class accept features in place of images, and also compute or mention them."""
    forward = getattr(kind, "forward", None)
    if forward is None or not (hasattr(kind, "get_image_features") or hasattr(kind, "generate")):
        return False
    return "mm_encoder_outputs" in inspect.signature(cast(Any, forward)).parameters


class AnyQwen(PackedCells, AnyVLM):
    """Later models with the patches of Qwen2-VL."""


class _Refused(AnyVLM):
    """Models whose image tokens cannot be selected."""

    reason: ClassVar[str]

    @classmethod
    def serves(cls, kind: type) -> bool:
        return True

    @classmethod
    def check_selector(cls, model: Any, selector: Selector, facts: HostFacts | None) -> None:
        cls.check(model)

    @classmethod
    def check(cls, model: nn.Module) -> None:
        raise UnsupportedModelError(f"{type(model).__name__} {cls.reason}")


class Mllama(_Refused):
    """Layers of the language model attend to images, whose tokens are not in the prompt."""

    reason = (
        "attends to images from layers of its own instead of having their tokens in the prompt, so none can be left "
        "out of it: take a model with image tokens in the prompt, such as LLaVA, Qwen2.5-VL or InternVL"
    )


class Florence2(_Refused):
    """An encoder reads image and text together, and the forward takes no image features."""

    reason = (
        "takes no features in place of images (mm_encoder_outputs) in its forward: select by Selector.mask among "
        "model.get_image_features(...), and give the shorter prompt as inputs_embeds"
    )


class Idefics2(AnyVLM):
    """The features of all images of a prompt come together."""

    prompts_together = True


class Llama4(AnyVLM):
    """The language model's side projects the tower's output itself."""

    @classmethod
    def check_selector(cls, model: Any, selector: Selector, facts: HostFacts | None) -> None:
        if transformers.__version__.startswith("5.24."):
            raise UnsupportedModelError(
                f"the forward of Llama 4 fails by itself in transformers {transformers.__version__} (image_outputs), "
                "with images and without: take another version"
            )
        super().check_selector(model, selector, facts)

    @classmethod
    def pooled(cls, model: Any, output: Any) -> Any:
        return model.multi_modal_projector(output.last_hidden_state)

    @classmethod
    def narrowed(cls, output: Any, chosen: Sequence[ChosenTokens]) -> None:
        images = zip(output.last_hidden_state, chosen, strict=True)
        output.last_hidden_state = torch.cat([image.index_select(0, own.rows) for image, own in images]).unsqueeze(0)


class Molmo2(AnyVLM):
    """The model makes a mask, None without padding, from which its language model makes another."""

    @classmethod
    def check_selector(cls, model: Any, selector: Selector, facts: HostFacts | None) -> None:
        if selector.positions == "original":
            raise UnsupportedModelError(
                f"{type(model).__name__} takes gaps in positions for the starts of packed prompts, with a mask, too: "
                "leave positions=original out"
            )
        super().check_selector(model, selector, facts)


class Glm4V(PackedImages, AnyVLM):
    """Frames of videos use the image placeholder."""

    @classmethod
    def placeholder(cls, model: Any, kind: str) -> int:
        return model.base_model.config.image_token_id  # type: ignore[no-any-return]


class Blip2(AnyVLM):
    """Queries read the image, and their outputs are its tokens. Generation is the language model's own."""

    @classmethod
    def generate(cls, model: Any, given: Mapping[str, Any], *args: Any) -> Any:
        left = {name: value for name, value in given.items() if value is not None}
        shorter = embedded(model, left)
        if not model.language_model.config.is_encoder_decoder:
            shorter["input_ids"] = left["input_ids"]
        return model.language_model.generate(*args, **shorter)
