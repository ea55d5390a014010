"""Answers about all open_clip models, with one or two towers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from open_clip import SimpleTokenizer, get_tokenizer
from open_clip.model import resize_pos_embed
from open_clip.transform import PreprocessCfg, image_transform_v2
from open_clip.transformer import VisionTransformer
from torch import Tensor, nn

from vitrim.core.library import Library, no_embedding, no_tokens, pair
from vitrim.core.plan import Part, Preprocessing
from vitrim.errors import UnsupportedModelError, VitrimError

CROPS = {"shortest": "center", "squash": "squash"}
"""open_clip's names of resize modes, and those of `Preprocessing`."""
TOWER = "visual."
"""Prefix of the tower of images."""


class OpenClipLibrary(Library):
    """Any model of open_clip; only the image tower has a host."""

    name = "open_clip"
    parts: ClassVar[Mapping[Part, tuple[str, ...]]] = {
        "tokens": ("class_embedding",),
        "head": ("attn_pool", "attn_pool_contrastive", "proj"),
        "positions": ("positional_embedding",),
        "stem": ("conv1",),
    }

    def num_classes(self, model: nn.Module) -> int:
        return 0

    def resampled(self, model: nn.Module, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if hasattr(model, "visual"):
            found = dict(weights)
            resize_pos_embed(found, model)
            return found
        whole = {f"{TOWER}{name}": value for name, value in weights.items()}  # the library reads this name only
        resize_pos_embed(whole, SimpleNamespace(visual=model))
        return {name.removeprefix(TOWER): value for name, value in whole.items()}

    def set_size(self, model: Any, size: int) -> None:
        tower = getattr(model, "visual", model)
        if not isinstance(tower, VisionTransformer):
            raise UnsupportedModelError(f"its tower of images is a {type(tower).__name__}, not open_clip's own")
        tower.image_size, tower.grid_size = (size, size), (size // tower.patch_size[0], size // tower.patch_size[1])
        self.take_resampled(model)
        if getattr(tower, "preprocess_cfg", None):
            tower.preprocess_cfg = {**tower.preprocess_cfg, "size": (size, size)}

    def embedding(self, model: Any, images: Tensor) -> Tensor:
        if not hasattr(model, "encode_image"):  # two towers, whose forward runs both
            return super().embedding(model, images)
        vectors = self.vector(model, model.encode_image(images))
        if vectors is None:
            raise no_embedding(model)
        return vectors

    def vector(self, model: nn.Module, output: Any) -> Tensor | None:
        """The projection if there is one; CoCa's tower returns tokens beside it."""
        return super().vector(model, output[0] if isinstance(output, tuple) else output)

    def embedding_name(self, model: nn.Module) -> str:
        return "the output of the image tower"

    def text_embeddings(self, model: Any, texts: Sequence[str]) -> tuple[Tensor, float, float]:
        """See `Library.text_embeddings`. Uses the model's ``tokenizer``, else its name's, else the default."""
        if not hasattr(model, "encode_text"):
            raise VitrimError(
                f"this {type(model).__name__} is the image tower alone: give the whole model, which reads text, too"
            )
        tokenizer, words = getattr(model, "tokenizer", None), getattr(model, "text", model).vocab_size
        if tokenizer is None and hasattr(model, "tokenizer_name"):
            tokenizer = get_tokenizer(model.tokenizer_name)
        if tokenizer is None:
            tokenizer = SimpleTokenizer(context_length=model.context_length)
            # A wrong tokenizer would give numbers that mean other words, and no error.
            if tokenizer.vocab_size != words:
                raise VitrimError(
                    f"this {type(model).__name__} reads text by {words} words, and not open_clip's own "
                    f"{tokenizer.vocab_size}: set model.tokenizer = open_clip.get_tokenizer(NAME)"
                )
        with torch.no_grad():
            vectors = model.encode_text(tokenizer(list(texts)).to(model.logit_scale.device))
        bias = getattr(model, "logit_bias", None)
        return vectors, model.logit_scale.exp().item(), 0.0 if bias is None else bias.item()

    def undecayed(self, model: Any) -> Collection[str]:
        return model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()

    def preprocessing(self, model: nn.Module) -> Preprocessing:
        """The tower's ``preprocess_cfg``, by the library's own transform."""
        config: Any = getattr(getattr(model, "visual", model), "preprocess_cfg", None)
        if not config:
            return super().preprocessing(model)
        mode = config.get("resize_mode", "shortest")
        return Preprocessing(
            channels=len(config["mean"]),
            size=pair(config["size"]),
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
            interpolation=config.get("interpolation"),
            transform=image_transform_v2(PreprocessCfg(**config), is_train=False),
            crop_share=1.0 if mode in CROPS else None,
            crop_mode=CROPS.get(mode, "center"),
        )

    def patch_dropout(self, model: Any) -> Any | None:
        found = None if self.host is None else model.patch_dropout
        return found if hasattr(found, "prob") else None

    def checkpoint_gradients(self, model: Any, on: bool = True) -> None:
        if self.host is None:
            super().checkpoint_gradients(model, on)
        model.set_grad_checkpointing(on)

    def without_head(self, model: Any) -> nn.Module:
        if self.host is None or model.attn_pool is not None:
            raise no_tokens(model)
        model.proj = None
        return model  # type: ignore[no-any-return]

    def tokens(self, model: Any, images: Tensor) -> Tensor:
        if self.host is None:
            raise no_tokens(model)
        size = (images.shape[2], images.shape[3])
        if size != tuple(model.image_size):
            raise VitrimError(
                f"images of {size[0]} x {size[1]} px: this VisionTransformer of open_clip takes "
                f"{model.image_size[0]} x {model.image_size[1]} only; create it with force_image_size"
            )
        return model.ln_post(model.transformer(model._embeds(images)))  # type: ignore[no-any-return]
