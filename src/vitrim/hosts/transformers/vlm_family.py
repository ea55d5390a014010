"""The questions that a family of Hugging Face's vision-language models answers: tower, connector, prompts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitrim.core.attention import HIDDEN
from vitrim.core.host import VisionLanguage
from vitrim.core.plan import HostFacts
from vitrim.core.selection import FrameGrid, ImageSelector, Selector
from vitrim.errors import UnsupportedModelError, VitrimError
from vitrim.hosts.shared.compact import Survivors, prompt_rows
from vitrim.hosts.shared.selecting import ChosenTokens
from vitrim.hosts.transformers.vlm_smaller import SmallerImages


class PromptFamily(VisionLanguage):
    """The questions about a family whose connector makes features per image; `HuggingFaceVLM` installs it."""

    tower_name: ClassVar[str] = "vision_tower"
    cell_by_cell: ClassVar[bool] = False
    """See `vitrim.core.plan.HostFacts`."""
    prompts_together: ClassVar[bool] = False
    """An entry of the list of features contains all images of a prompt."""
    drops_cells: ClassVar[bool] = False
    """Cells of patches can be left out in front of the tower."""
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
    def called(cls, model: Any) -> list[nn.Module]:
        """The modules that users call with prompts: the whole model, and that without its head."""
        return [model] if model.base_model is model else [model, model.base_model]

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs of a call, with images in the form that their encoder reads."""
        return given

    @classmethod
    def handed(cls, model: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs of `ImagePrompt.compact`, with image features in the form that the model's forward takes."""
        return given

    @classmethod
    @torch.no_grad()
    def image_tokens(cls, model: Any, images: Tensor) -> int:
        given = cls.read(cls.image_inputs(model, images[:1, :1]))
        output = model.base_model.get_image_features(**given, return_dict=True)
        return len(cls.images(output, 1)[0])

    @classmethod
    def prompts(cls, model: Any, images: Tensor, text: int, places: int) -> dict[str, Any]:
        config = model.base_model.config
        placeholder = config.image_token_id
        taken = {value for name, value in config.to_dict().items() if name.endswith("token_id")}
        # Any id that means nothing special will do: only the length of a prompt is measured.
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
    def generate(cls, model: Any, given: Mapping[str, Any], *args: Any) -> Any:
        """Run the library's own ``generate`` on a prompt from `ImagePrompt.compact`."""
        generate: Any = type(model).generate
        return generate(model, None, *args, **given)

    @classmethod
    def placeholder(cls, model: Any, kind: str) -> int:
        """The id in place of an image's or video's feature in a prompt."""
        return getattr(model.base_model.config, f"{kind}_token_id")  # type: ignore[no-any-return]

    @classmethod
    def video_grid(cls, model: Any, given: Mapping[str, Any]) -> FrameGrid | None:
        """Frames, rows and columns of each video's tokens, where its pixels tell; tokens behind these always stay."""
        return None

    @classmethod
    def resizes(cls, model: nn.Module) -> bool:
        """True if the size of images of ``model`` can be changed."""
        return False

    @classmethod
    def smaller(cls, model: Any, given: Mapping[str, Any], kind: str, selector: ImageSelector) -> SmallerImages:
        """The images, or videos, of a prompt with fewer patches."""
        raise NotImplementedError

    @classmethod
    def watch(cls, model: Any, given: Mapping[str, Any], kind: str, selector: Selector) -> Any:
        """A context in which an unreduced tower records what ``selector`` needs, for its ``seen()``; or None."""
        return None

    @classmethod
    def narrowed(cls, output: Any, chosen: Sequence[ChosenTokens]) -> None:
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
        if isinstance(selector, ImageSelector):
            if facts is not None:
                raise VitrimError(f"{selector.describe()} changes what the tower reads: give no method")
            if selector.drops_cells and not cls.drops_cells:
                raise UnsupportedModelError(
                    f"the tower of {type(model).__name__} reads every patch of an image: {selector.name} leaves some "
                    "out for those of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and ColQwen2"
                )
            if not selector.drops_cells and not cls.resizes(model):
                raise UnsupportedModelError(
                    f"images of {type(model).__name__} cannot be made smaller behind its processor: give it a smaller "
                    "size there"
                )
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
                "none: take one that needs none (vitrim list selectors)"
            )
        if facts is not None and facts.own_attention:
            cls.refuse_own_attention(selector)

    @classmethod
    def refuse_own_attention(cls, selector: Selector) -> None:
        """Refuse a ``selector`` that needs attention, beside a tower whose attention a user's function computes."""
        if selector.needs().attention != "none":
            raise UnsupportedModelError(f"{selector.name} reads attention probabilities, and {HIDDEN}")

    @classmethod
    def layers(cls, model: Any, given: Mapping[str, Any]) -> list[int]:
        """The indices in ``hidden_states`` that the connector reads; empty if it reads the tower's output."""
        layer = given.get("vision_feature_layer")
        layer = getattr(model.base_model.config, "vision_feature_layer", None) if layer is None else layer
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


def embedded(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of `ImagePrompt.compact` with embeddings (B, M, D) that contain the features, in place of both."""
    left = dict(given)
    ids, pooled = left.pop("input_ids"), left.pop("mm_encoder_outputs")["image"].pooler_output
    features = pooled if isinstance(pooled, Tensor) else torch.cat(list(pooled))
    embeddings: Tensor = model.get_input_embeddings()(ids)
    places = (ids == model.base_model.config.image_token_id).unsqueeze(-1)
    # Row i of the features belongs to the i-th placeholder.
    left["inputs_embeds"] = embeddings.masked_scatter(places, features.to(embeddings.device, embeddings.dtype))
    return left
