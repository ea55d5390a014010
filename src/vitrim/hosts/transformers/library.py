"""Answers about all Hugging Face models, including the convolutional ones that vitrim does not reduce."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor

from vitrim.core.library import RELATIVE, Library, input_channels, no_embedding, no_tokens, pair
from vitrim.core.plan import Part, Preprocessing
from vitrim.core.registry import reads_prompts
from vitrim.errors import UnsupportedModelError, VitrimError, first_line
from vitrim.hosts.transformers.common import CLASSIFIERS, TransformersHost, classifiers

POOLERS = ("pooler", "head")
"""Names of the modules that compute a tower's ``pooler_output``."""


class Processed:
    """The image processor saved in a folder, or on the Hub, beside a Hugging Face model. Picklable.

    ``scale``: how many times larger the images of the model are than those of the model that was saved.
    """

    def __init__(self, source: str, scale: float = 1.0) -> None:
        try:
            self.processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise VitrimError(
                f"cannot read how images are prepared from '{source}' (preprocessor_config.json): {first_line(error)}"
            ) from error

        # A model made for larger images resizes and crops in the same proportion.
        given = {name: getattr(self.processor, name, None) for name in ("size", "crop_size")} if scale != 1.0 else {}
        self.sizes = {
            name: {side: round(number * scale) for side, number in dict(sides).items() if number is not None}
            for name, sides in given.items()
            if sides
        }

    def __call__(self, image: Any) -> Tensor:
        pixels: Tensor = self.processor(images=image, return_tensors="pt", **self.sizes)["pixel_values"][0]
        return pixels


class TransformersLibrary(Library):
    """Any model of Hugging Face transformers."""

    name = "transformers"
    parts: ClassVar[Mapping[Part, tuple[str, ...]]] = {
        "head": ("head", *CLASSIFIERS),
        "tokens": ("*_token", "*_tokens", "*class_embedding"),
        "positions": ("position_embedding", "position_embeddings"),
        "stem": ("embeddings", "patch_embed"),
    }

    def family(self) -> type[TransformersHost] | None:
        return self.host if self.host is not None and issubclass(self.host, TransformersHost) else None

    def classifiers(self, model: nn.Module) -> list[nn.Module]:
        return classifiers(model)

    def num_classes(self, model: Any) -> int | None:
        if not self.classifiers(model):
            return 0
        return model.config.num_labels  # type: ignore[no-any-return]

    def class_names(self, model: Any) -> Sequence[str] | None:
        own = super().class_names(model)
        if own is not None:  # set by a run, which may have trained the head for other classes
            return own
        names = [str(model.config.id2label.get(label)) for label in range(model.config.num_labels)]
        unnamed = all(name == f"LABEL_{label}" for label, name in enumerate(names))  # the library's placeholders
        return None if unnamed else names

    def reset_head(self, model: Any, num_classes: int) -> None:
        names = self.class_layers(model)
        if not names or len(names) != len(self.classifiers(model)):
            super().reset_head(model, num_classes)
        for name in names:
            old = model.get_submodule(name)
            place = {"device": old.weight.device, "dtype": old.weight.dtype}
            new = nn.Linear(old.in_features, num_classes, bias=old.bias is not None, **place)
            model._init_weights(new)
            model.set_submodule(name, new)
        model.config.num_labels = model.num_labels = num_classes

    def logits(self, output: Any) -> Tensor:
        return output[0] if isinstance(output, tuple) else super().logits(output)  # return_dict=False

    def embedding(self, model: Any, images: Tensor) -> Tensor:
        if not hasattr(model, "get_image_features"):  # two towers, whose forward needs text, too
            return super().embedding(model, images)
        vectors = self.vector(model, model.get_image_features(images))
        if vectors is None:
            raise no_embedding(model)
        return vectors

    def vector(self, model: Any, output: Any) -> Tensor | None:
        """The projection if there is one, else the pooler's output, else the class token of a bare tower."""
        for name in ("image_embeds", "pooler_output"):
            if (vectors := super().vector(model, getattr(output, name, None))) is not None:
                return vectors
        tokens, family = getattr(output, "last_hidden_state", None), self.family()
        if tokens is None or tokens is not output[0] or family is None or not family.facts(model).has_class_token:
            return super().vector(model, output)
        return tokens[:, 0]  # type: ignore[no-any-return]

    def text_embeddings(self, model: Any, texts: Sequence[str]) -> tuple[Tensor, float, float]:
        both, source = model, model.config._name_or_path
        if not hasattr(model, "get_text_features"):  # only the image tower; its folder may contain both
            both = transformers.AutoModel.from_pretrained(source, trust_remote_code=False).eval() if source else None
        if not hasattr(both, "get_text_features") or not source:
            return super().text_embeddings(model, texts)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        most = both.config.text_config.max_position_embeddings
        given = tokenizer(list(texts), padding="max_length", max_length=most, truncation=True, return_tensors="pt")
        with torch.no_grad():
            found = both.get_text_features(**given.to(both.device))
        # SigLIP has a bias, CLIP none.
        vectors, bias = self.vector(both, found), getattr(both, "logit_bias", None)
        assert vectors is not None
        return vectors, both.logit_scale.exp().item(), 0.0 if bias is None else bias.item()

    def embedding_name(self, model: Any) -> str:
        if self.classifiers(model):
            return super().embedding_name(model)
        if hasattr(model, "get_image_features") or hasattr(model, "visual_projection"):
            return "projection"
        return "pooler" if any(name.split(".")[-1] in POOLERS for name, _ in model.named_modules()) else "class token"

    def features_and_logits(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        family = self.family()
        if family is None:
            return super().features_and_logits(model, images)
        self.readers(model)  # refuses a model without
        seen: list[Tensor] = []
        # a classifier returns no last hidden state, and `output_hidden_states` returns full grids
        with family.trunk(model).register_forward_hook(lambda trunk, args, output: seen.append(output[0])):
            logits = self.logits(model(images))
        return seen[0], logits

    def without_head(self, model: nn.Module) -> nn.Module:
        family = self.family()
        if family is None or not family.tokens_of_images:
            raise no_tokens(model)
        trunk: nn.Module = family.trunk(model)
        if hasattr(trunk, "forward_with_filtered_kwargs"):  # an AutoBackbone returns maps of some layers
            raise no_tokens(trunk)
        return trunk

    def tokens(self, model: Any, images: Tensor) -> Tensor:
        family = self.family()
        if family is None or not family.tokens_of_images:
            raise no_tokens(model)
        size = images.shape[2], images.shape[3]
        resized = size != family.image_size(model.config) and "interpolate_pos_encoding" in _arguments(model.__class__)
        options = {"interpolate_pos_encoding": True} if resized else {}
        try:
            return model(images, **options).last_hidden_state  # type: ignore[no-any-return]
        except ValueError as error:
            raise VitrimError(f"{type(model).__name__} does not take these images: {first_line(error)}") from error

    def undecayed(self, model: nn.Module) -> Collection[str]:
        # tokens and tables of relative positions; the library does not list any
        return (*self.parts["tokens"], *RELATIVE)

    def resampled(self, model: nn.Module, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        found, expected = dict(weights), model.state_dict()
        for name, embeddings in model.named_modules():
            if not hasattr(embeddings, "interpolate_pos_encoding"):
                continue
            for place in ("position_embeddings", "position_embedding", "position_embedding.weight"):
                key = f"{name}.{place}" if name else place
                if key in found and key in expected and found[key].shape != expected[key].shape:
                    found[key] = interpolated(embeddings, place, found[key], expected[key], image_size(model))
        return found

    def set_size(self, model: Any, size: int) -> None:
        """See `Library.set_size`. What depends on the size is what differs between two models made of a config."""
        family = self.family()
        if family is not None and not family.tokens_of_images:
            raise UnsupportedModelError("its tokens are not those of one image")
        if not hasattr(getattr(model.config, "vision_config", model.config), "image_size"):
            raise UnsupportedModelError("its config has no image_size")
        own = type(model)
        with torch.device("meta"):  # without memory
            before, after = own(copy.deepcopy(model.config)), own(_resized(copy.deepcopy(model.config), size))
        old, new = before.state_dict(), after.state_dict()
        moved = [name for name, value in new.items() if value.shape != old[name].shape]
        found = self.resampled(after, model.state_dict())
        fixed = next((name for name in moved if found[name].shape != new[name].shape), None)
        if fixed is not None:
            raise UnsupportedModelError(f"transformers does not resample {fixed}")
        self.take_resampled(model, after)
        _resized(model.config, size)
        modules = dict(model.named_modules())
        for (name, one), other in zip(before.named_modules(), after.modules(), strict=True):
            for key, value in vars(other).items():
                if isinstance(value, int | tuple | list) and value != getattr(one, key):
                    setattr(modules[name], key, value)
            for key, buffer in other.named_buffers(recurse=False):
                if buffer.shape != one.get_buffer(key).shape:
                    if key != "position_ids":
                        raise UnsupportedModelError(f"{key} depends on the size, in a way that is not known")
                    ids = torch.arange(buffer.shape[-1], device=getattr(modules[name], key).device)
                    setattr(modules[name], key, ids.expand(buffer.shape))

    def has_idle_parameters(self, model: nn.Module) -> bool:
        return True  # some classifiers have poolers and second towers that classification does not reach

    def preprocessing(self, model: Any) -> Preprocessing:
        own = super().preprocessing(model)
        config = getattr(model.config, "vision_config", model.config)
        size = own.size or pair(getattr(config, "image_size", None))
        if own.transform is not None:
            return Preprocessing(own.channels, size, own.mean, own.std, transform=own.transform)
        source = model.config._name_or_path
        if not isinstance(source, str) or not source:  # made from a config
            return Preprocessing(input_channels(model), size)
        processed = Processed(source, scale_of(config, source))
        mean, std = tuple(processed.processor.image_mean), tuple(processed.processor.image_std)
        return Preprocessing(own.channels, size, mean, std, **resizing(processed.processor), transform=processed)

    def masked_autoencoder(self, model: Any) -> bool:
        return model.config.model_type in ("vit_mae", "videomae")

    def checkpoint_gradients(self, model: Any, on: bool = True) -> None:
        if not getattr(model, "supports_gradient_checkpointing", False):
            super().checkpoint_gradients(model, on)
        if on:
            model.gradient_checkpointing_enable()
        else:
            model.gradient_checkpointing_disable()

    def set_fused(self, model: nn.Module, fused: bool) -> bool:
        family = self.family()
        if family is None or not family.chooses_kernel:
            return False
        family.trunk(model).config._attn_implementation = "sdpa" if fused else "eager"
        return True


def _resized(config: Any, size: int) -> Any:
    """``config``, changed to images of ``size`` pixels."""
    inner = getattr(config, "vision_config", config)
    inner.image_size = size if isinstance(inner.image_size, int) else [size, size]
    return config


def image_size(model: Any) -> tuple[int, int]:
    """Height and width of the images in the config of ``model``."""
    size = pair(getattr(model.config, "vision_config", model.config).image_size)
    assert size is not None
    return size


def interpolated(embeddings: Any, place: str, table: Tensor, own: Tensor, image: tuple[int, int]) -> Tensor:
    """The position ``table`` at the size of the model's ``own``, by its module's ``interpolate_pos_encoding``.

    ``place`` is the table's name in the module ``embeddings``, which stays as it is; ``image`` is the image's size.
    """
    # The library resamples its own table: one of the given size takes its place in a copy.
    source, table = copy.deepcopy(embeddings), table.to(own.dtype)
    number = max(table.shape[:-1])
    if place.endswith(".weight"):
        source.position_embedding = nn.Embedding.from_pretrained(table)
        source.position_ids = torch.arange(number).expand(1, -1)
    else:
        setattr(source, place, nn.Parameter(table))
    tokens = torch.zeros(1, max(own.shape[:-1]), own.shape[-1], dtype=own.dtype)
    with torch.no_grad():
        return source.interpolate_pos_encoding(tokens, *image).reshape(own.shape)  # type: ignore[no-any-return]


def scale_of(config: Any, source: str) -> float:
    """The image size of a model of ``config`` over that of the model saved in ``source``: 1 unless it was changed."""
    saved = AutoConfig.from_pretrained(source, trust_remote_code=False)
    old, new = (pair(getattr(one, "image_size", None)) for one in (getattr(saved, "vision_config", saved), config))
    return 1.0 if old is None or new is None else new[0] / old[0]


def resizing(processor: Any) -> dict[str, Any]:
    """The resizing of an image processor, in the terms of `Preprocessing`; empty if these cannot express it.

    Both crop the centre; where that is not a whole number of pixels, they may differ by a pixel.
    """
    resample, size = getattr(processor, "resample", None), getattr(processor, "size", None) or {}
    if resample is None or not getattr(processor, "do_resize", True):
        return {}
    crop = processor.crop_size["height"] if getattr(processor, "do_center_crop", None) else None
    resize = {"interpolation": Image.Resampling(int(resample)).name.lower()}
    if size.get("shortest_edge") and crop is not None:
        return {**resize, "crop_share": crop / size["shortest_edge"], "crop_mode": "center"}
    if size.get("height") and size.get("width") and crop is None:
        return {**resize, "crop_share": 1.0, "crop_mode": "squash"}
    return {}


@cache
def _arguments(kind: Any) -> frozenset[str]:
    """Names of the arguments of a class's forward."""
    return frozenset(inspect.signature(kind.forward).parameters)


def class_for(config: Any) -> Any:
    """The class a model was saved as if it takes images, or prompts with images; else one of its kind.

    For an image and a text tower (CLIP), the image tower, with its projection if there is such a class.
    """
    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if hasattr(kind, "get_image_features") and hasattr(kind, "get_text_features"):
            ends = ("VisionModelWithProjection", "VisionModel")
            towers = (getattr(transformers, name.removesuffix("Model") + end, None) for end in ends)
            kind = next((tower for tower in towers if tower is not None), kind)
        if kind is not None and (kind.main_input_name == "pixel_values" or reads_prompts(kind)):
            return kind
    prompted: Any = transformers.AutoModelForImageTextToText._model_mapping
    if type(config) in prompted and reads_prompts(prompted[type(config)]):
        return prompted[type(config)]
    classifier = transformers.AutoModelForImageClassification
    return classifier if type(config) in classifier._model_mapping else transformers.AutoModel


def config_for(kind: Any, config: Any) -> Any:
    """The part of a config that ``kind`` (see `class_for`) is made from: of two towers, the image tower's."""
    own = getattr(config, "vision_config", None)
    if own is None or getattr(kind, "config_class", None) is not type(own):
        return config
    own._name_or_path, own.projection_dim = config._name_or_path, getattr(config, "projection_dim", None)
    return own
