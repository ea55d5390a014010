"""Answers about all timm models, including the convolutional ones that vitrim does not reduce."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import Any, ClassVar, cast

import numpy as np
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from torch import Tensor, nn

from vitrim.core.library import RELATIVE, Library, input_channels, no_tokens, pair
from vitrim.core.plan import Part, Preprocessing, Starting
from vitrim.errors import UnsupportedModelError, VitrimError
from vitrim.hosts.timm.common import TimmHost

INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "lanczos", "box", "hamming", "random")

POOLED = {"token": "class token", "avg": "mean of patches", "map": "attention pooling"}
"""timm's names of poolings, and ours."""


class TimmLibrary(Library):
    """A model with timm's conventions, all optional: ``pretrained_cfg``, ``reset_classifier``, ``group_matcher``."""

    name = "timm"
    parts: ClassVar[Mapping[Part, tuple[str, ...]]] = {
        "tokens": ("*_token", "*_tokens"),
        "head": ("head", "head_dist", "heads", "fc", "classifier", "aux_head", "auxiliary_head"),
        "positions": ("pos_embed", "pos_embed_x", "pos_embed_y"),
        "stem": ("patch_embed", "embed", "embeds"),
    }

    def family(self) -> type[TimmHost] | None:
        """The family of the model, if it is laid out as timm's are."""
        return self.host if self.host is not None and issubclass(self.host, TimmHost) else None

    def classifiers(self, model: Any) -> list[nn.Module]:
        if not hasattr(model, "get_classifier"):
            return []
        found = model.get_classifier()
        several = isinstance(found, tuple | list | nn.ModuleList)  # CrossViT has one per branch
        return [layer for layer in (found if several else (found,)) if layer is not None]

    def class_layers(self, model: nn.Module) -> dict[str, int]:
        names = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
        return dict.fromkeys((names,) if isinstance(names, str) else names, 0)

    def class_names(self, model: nn.Module) -> Sequence[str] | None:
        own = super().class_names(model)
        named: Sequence[str] | None = (getattr(model, "pretrained_cfg", None) or {}).get("label_names")
        return named if own is None else own

    def reset_head(self, model: Any, num_classes: int) -> None:
        if not hasattr(model, "reset_classifier"):
            super().reset_head(model, num_classes)
        model.reset_classifier(num_classes)

    def embedding_name(self, model: Any) -> str:
        return POOLED.get(getattr(model, "global_pool", None) or "", super().embedding_name(model))

    def features_and_logits(self, model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        if not hasattr(model, "forward_features") or not hasattr(model, "forward_head"):
            return super().features_and_logits(model, images)
        tokens: Tensor = model.forward_features(images)
        return tokens, model.forward_head(tokens)

    def without_head(self, model: Any) -> nn.Module:
        if self.family() is None:
            raise no_tokens(model)
        model.reset_classifier(0, "")  # removes attention pooling; a norm behind the mean stays
        return model  # type: ignore[no-any-return]

    def tokens(self, model: Any, images: Tensor) -> Tensor:
        if self.family() is None:
            raise no_tokens(model)
        embed: Any = getattr(model, "patch_embed", None)
        size = images.shape[2], images.shape[3]
        if getattr(embed, "strict_img_size", False) and size != tuple(embed.img_size):
            raise VitrimError(
                f"images of {size[0]} x {size[1]} px: this {type(model).__name__} takes {embed.img_size[0]} x "
                f"{embed.img_size[1]} only; create it with img_size={list(size)}, or dynamic_img_size=true if it has "
                "that"
            )
        found = model.forward_features(images)
        tokens: Tensor = found["patches"] if isinstance(found, dict) else found  # a dict of NaFlexVit
        norm = getattr(model, "fc_norm", None)
        return tokens if norm is None else norm(tokens)

    def layers(self, model: Any, parts: Mapping[str, Part]) -> Mapping[str, int] | None:
        if not hasattr(model, "group_matcher"):
            return super().layers(model, parts)
        from timm.models import group_parameters

        found = cast("dict[str, int]", group_parameters(model, model.group_matcher(coarse=False), reverse=True))
        return {name: found[name] for name in parts}

    def undecayed(self, model: Any) -> Collection[str]:
        # defaults for a model that names none: tokens, and tables of relative positions, which timm lists for BEiT only
        own = model.no_weight_decay() if hasattr(model, "no_weight_decay") else self.parts["tokens"]
        return (*own, *RELATIVE)

    def starting(self, model: Any) -> Starting | None:
        family, positions = self.family(), getattr(model, "pos_embed", None)
        # A mimetic start sets q, k and v of one width each, and positions behind those of the prefix.
        if family is None or positions is None:
            return None
        attentions: list[Any] = [getattr(block, "attn", None) for block in family.blocks(model)]
        joint = [getattr(attn, "qkv", None) for attn in attentions]
        if not all(isinstance(qkv, nn.Linear) and qkv.out_features == 3 * qkv.in_features for qkv in joint):
            return None
        rows, columns = family.facts(model).grid_size
        return Starting(
            tuple((*attn.qkv.weight.detach().chunk(3), attn.proj.weight.detach()) for attn in attentions),
            positions.detach()[0, -rows * columns :],
        )

    def resampled(self, model: Any, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        found = dict(weights)
        # A subclass of a user's has the conversion of the family that it comes from.
        modules = [sys.modules[kind.__module__] for kind in type(model).__mro__ if kind.__module__.startswith("timm.")]
        convert = next((one.checkpoint_filter_fn for one in modules if hasattr(one, "checkpoint_filter_fn")), None)
        if convert is not None:  # the family's own, with which timm loads weights
            return cast("dict[str, Tensor]", convert(found, model))
        kernel, own = found.get("patch_embed.proj.weight"), getattr(getattr(model, "patch_embed", None), "proj", None)
        if kernel is not None and own is not None and kernel.shape[2:] != own.weight.shape[2:]:
            found["patch_embed.proj.weight"] = resample_patch_embed(kernel, list(own.weight.shape[2:]))
        table, positions = found.get("pos_embed"), getattr(model, "pos_embed", None)
        if table is not None and positions is not None and table.shape[1] != positions.shape[1]:
            prefix = 0 if getattr(model, "no_embed_class", False) else model.num_prefix_tokens
            grid = list(model.patch_embed.grid_size)
            found["pos_embed"] = resample_abs_pos_embed(table, grid, num_prefix_tokens=prefix)
        return found

    def preprocessing(self, model: nn.Module) -> Preprocessing:
        from timm.data.config import resolve_data_config

        # create_model sets pretrained_cfg, also on our own models; classes called directly do not have it
        inherited = any(kind.__module__.startswith("timm.") for kind in type(model).__mro__)
        if not inherited and not hasattr(model, "pretrained_cfg"):
            return super().preprocessing(model)
        config: dict[str, Any] = resolve_data_config({}, model=model)
        channels = input_channels(model)
        # possibly the user's own (pretrained_cfg_overlay)
        counts = {3, channels}  # pretrained_cfg has three, averaged for grey images
        for name, lowest in (("mean", -inf), ("std", 0.0)):
            value = config[name]
            numbers = isinstance(value, tuple | list) and len(value) in counts
            if not numbers or not all(isinstance(one, int | float) and lowest < one < inf for one in value):
                above = "" if name == "mean" else " above 0"
                wanted = f"{' or '.join(map(str, sorted(counts)))} numbers{above}, one per channel"
                raise VitrimError(f"pretrained_cfg: {name} is {wanted}, not {value!r:.80}")
        if config["interpolation"] not in INTERPOLATIONS:
            valid = ", ".join(INTERPOLATIONS)
            raise VitrimError(f"pretrained_cfg: unknown interpolation {config['interpolation']!r:.80}; valid: {valid}")
        mean, std = tuple(config["mean"]), tuple(config["std"])
        if channels == 1:  # three means would silently broadcast one channel to three
            mean, std = (float(np.mean(mean)),), (float(np.mean(std)),)
        # pretrained_cfg keeps the size of training whatever img_size was; models of two streams have an attribute
        sizes = (getattr(part, "img_size", None) for part in (getattr(model, "patch_embed", None), model))
        size = next((size for size in sizes if size is not None), None)
        return Preprocessing(
            channels=channels,
            size=pair(config["input_size"][-2:] if size is None else size),
            mean=mean,
            std=std,
            interpolation=config["interpolation"],
            crop_share=config["crop_pct"],
            crop_mode=config["crop_mode"],
            transform=getattr(model, "eval_transform", None),
        )

    def set_size(self, model: Any, size: int) -> None:
        """See `Library.set_size`. Without ``set_input_size``, a model takes any size unless timm calls it fixed."""
        config = getattr(model, "pretrained_cfg", None)
        if hasattr(model, "set_input_size"):
            model.set_input_size((size, size))
        elif self.host is not None or not config or config.get("fixed_input_size"):
            raise UnsupportedModelError("it has no set_input_size")
        if config:
            model.pretrained_cfg = {**config, "input_size": (config["input_size"][0], size, size)}

    def checkpoint_gradients(self, model: Any, on: bool = True) -> None:
        if not hasattr(model, "set_grad_checkpointing"):
            super().checkpoint_gradients(model, on)
        model.set_grad_checkpointing(on)

    def patch_dropout(self, model: nn.Module) -> Any | None:
        found = getattr(model, "patch_drop", None)
        return found if hasattr(found, "prob") else None

    def set_fused(self, model: nn.Module, fused: bool) -> bool:
        if self.family() is None:
            return False
        module: Any
        for module in model.modules():  # attention pooling has the switch, too
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        return True

    def masked_autoencoder(self, model: nn.Module) -> bool:
        config = getattr(model, "pretrained_cfg", None)
        return isinstance(config, dict) and str(config.get("tag")).partition("_")[0] == "mae"

    def architecture(self, model: nn.Module) -> str:
        config = getattr(model, "pretrained_cfg", None)
        named = config.get("architecture") if isinstance(config, dict) else None
        return named or super().architecture(model)


class TimmMapLibrary(TimmLibrary):
    """A model that returns a map, or something made from one, and no tokens."""

    def starting(self, model: nn.Module) -> Starting | None:
        return None

    def without_head(self, model: nn.Module) -> nn.Module:
        raise no_tokens(model)

    def tokens(self, model: nn.Module, images: Tensor) -> Tensor:
        raise no_tokens(model)
