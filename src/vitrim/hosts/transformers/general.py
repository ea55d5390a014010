"""Answers that hold for all Hugging Face models, including the convolutional ones that vitrim does not reduce."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import transformers
from torch import Tensor, nn
from transformers import AutoImageProcessor

from vitrim.core.host import Host
from vitrim.core.modules import input_channels, pair
from vitrim.core.plan import Part, Preprocessing
from vitrim.core.registry import reads_prompts, register_library
from vitrim.errors import VitrimError, first_line

CLASSIFIERS = ("classifier", "cls_classifier", "distillation_classifier")
"""Names of the last layers of the library's image classifiers."""


class Processed:
    """The image processor saved in a folder, or on the Hub, next to a Hugging Face model. It can be pickled.

    Raises:
        VitrimError: there is none, or it cannot be read.
    """

    def __init__(self, source: str) -> None:
        try:
            self.processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise VitrimError(
                f"cannot read how images are prepared from '{source}' (preprocessor_config.json): {first_line(error)}"
            ) from error

    def __call__(self, image: Any) -> Tensor:
        pixels: Tensor = self.processor(images=image, return_tensors="pt")["pixel_values"][0]
        return pixels


@register_library("transformers")
class TransformersModel(Host):
    """Any model of Hugging Face transformers."""

    name = "transformers"
    parts: ClassVar[Mapping[Part, tuple[str, ...]]] = {
        "tokens": ("*_token",),
        "head": ("head", *CLASSIFIERS),
        "positions": ("position_embedding", "position_embeddings"),
        "stem": ("embeddings", "patch_embed"),
    }

    @classmethod
    def find_classifiers(cls, model: nn.Module) -> list[nn.Module]:
        return [getattr(model, name) for name in CLASSIFIERS if hasattr(model, name)]

    @classmethod
    def undecayed(cls, model: nn.Module) -> Collection[str]:
        return cls.parts["tokens"]  # the library itself does not say

    @classmethod
    def num_classes(cls, model: Any) -> int | None:
        if not cls.find_classifiers(model):
            return None
        return model.config.num_labels  # type: ignore[no-any-return]

    @classmethod
    def class_names(cls, model: Any) -> Sequence[str] | None:
        own = super().class_names(model)
        if own is not None:  # of a run, which may have trained the head for other classes
            return own
        names = [str(model.config.id2label.get(label)) for label in range(model.config.num_labels)]
        unnamed = all(name == f"LABEL_{label}" for label, name in enumerate(names))  # as the library fills them in
        return None if unnamed else names

    @classmethod
    def reset_head(cls, model: Any, num_classes: int) -> None:
        names = cls.classifier_names(model)
        if not names or len(names) != len(cls.find_classifiers(model)):
            super().reset_head(model, num_classes)
        for name in names:
            old = model.get_submodule(name)
            place = {"device": old.weight.device, "dtype": old.weight.dtype}
            new = nn.Linear(old.in_features, num_classes, bias=old.bias is not None, **place)
            model._init_weights(new)
            model.set_submodule(name, new)
        model.config.num_labels = model.num_labels = num_classes

    @classmethod
    def logits(cls, output: Any) -> Tensor:
        return output[0] if isinstance(output, tuple) else super().logits(output)  # return_dict=False

    @classmethod
    def preprocessing(cls, model: Any) -> Preprocessing:
        own = super().preprocessing(model)
        size = own.size or cls.configured_size(model.config)
        if own.transform is not None:
            return Preprocessing(own.channels, size, own.mean, own.std, transform=own.transform)
        source = model.config._name_or_path
        if not isinstance(source, str) or not source:  # made from a config
            return Preprocessing(input_channels(model), size)
        processed = Processed(source)
        mean, std = tuple(processed.processor.image_mean), tuple(processed.processor.image_std)
        return Preprocessing(own.channels, size, mean, std, transform=processed)

    @classmethod
    def configured_size(cls, config: Any) -> tuple[int, int] | None:
        """Height and width of the images according to a model's config, or to its vision part."""
        return pair(getattr(getattr(config, "vision_config", config), "image_size", None))

    @classmethod
    def checkpoint_gradients(cls, model: Any, on: bool = True) -> None:
        if not getattr(model, "supports_gradient_checkpointing", False):
            super().checkpoint_gradients(model, on)
        if on:
            model.gradient_checkpointing_enable()
        else:
            model.gradient_checkpointing_disable()

    @classmethod
    def has_idle_parameters(cls, model: nn.Module) -> bool:
        return True  # some classifiers have poolers and second towers that classification does not reach


def class_for(config: Any) -> Any:
    """The class a model was saved as if images, or prompts with images, can be given to it, else one of its kind."""
    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if kind is not None and (kind.main_input_name == "pixel_values" or reads_prompts(kind)):
            return kind
    prompted: Any = transformers.AutoModelForImageTextToText._model_mapping
    if type(config) in prompted and reads_prompts(prompted[type(config)]):
        return prompted[type(config)]
    classifier = transformers.AutoModelForImageClassification
    return classifier if type(config) in classifier._model_mapping else transformers.AutoModel
