"""Models for dense tasks, `vitrim.models.segmenter` and `vitrim.models.vitdet`: a head that reads every patch.

What concerns blocks and tokens is asked of the host of ``model.backbone``; the whole model is what is reduced, saved
and measured.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from vitrim.core.block import ReducedBlock
from vitrim.core.host import METHOD, Host
from vitrim.core.plan import Head, HostFacts, Layout, Part, Preprocessing, Role
from vitrim.core.registry import register_host
from vitrim.core.trace import Trace
from vitrim.errors import UnsupportedModelError

BACKBONE = "backbone."
SCORES = ("roi_heads.box_predictor.cls_score.weight", "roi_heads.box_predictors.0.cls_score.weight")
"""The layer of a `Detector` that scores classes, and the first of a cascade's."""


@register_host("vitrim.models.segmenter.Segmenter", "vitrim.models.vitdet.Detector")
class DenseHost(Host):
    """`segmenter:` and `vitdet:` models around any supported backbone: [dense tasks](dense.md)."""

    name = "vitrim dense models"
    purpose = "segmentation, detection, poses, depth"
    heads: ClassVar[tuple[Head, ...]] = ("grid",)

    @classmethod
    def trunk_host(cls, model: Any) -> type[Host]:
        return _inner(model)

    @classmethod
    def check(cls, model: Any) -> None:
        _inner(model).check(model.backbone)

    @classmethod
    def blocks(cls, model: Any) -> list[nn.Module]:
        return _inner(model).blocks(model.backbone)

    @classmethod
    def reduced_class(cls, block: nn.Module) -> type[ReducedBlock]:
        raise NotImplementedError("the host of the backbone knows it: see trunk_host")

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        own = _inner(model).facts(model.backbone)
        return replace(own, dense=True, head_rows=None, takes_maximum=False, num_classes=model.num_classes)

    @classmethod
    def layout(cls, model: Any) -> Layout:
        """The layout of the backbone, which may have none of the `facts` of a host of blocks: ViTTM."""
        return _inner(model).layout(model.backbone)

    @classmethod
    def form(cls, model: Any) -> Hashable:
        return _inner(model).form(model.backbone)

    @classmethod
    def classifiers(cls, model: nn.Module) -> list[nn.Module]:
        raise UnsupportedModelError(f"{type(model).__name__} has no classifier: its head reads every patch")

    @classmethod
    def dense_feature(cls, model: Any) -> nn.Module:
        """The module whose input (the tokens of all patches, or their map) stands for what the backbone hands out."""
        return model.decoder if hasattr(model, "decoder") else model.pyramid  # type: ignore[no-any-return]

    @classmethod
    def compared(cls, model: Any) -> list[nn.Module]:
        return [cls.dense_feature(model)]

    @classmethod
    def front_name(cls, model: Any) -> str:
        return model.front_name  # type: ignore[no-any-return]

    @classmethod
    def front(cls, model: Any, images: Tensor) -> Any:
        return model.front(images)

    @classmethod
    def task(cls, model: Any) -> str:
        return model.task  # type: ignore[no-any-return]

    @classmethod
    def num_classes(cls, model: Any) -> int:
        return model.num_classes  # type: ignore[no-any-return]

    @classmethod
    def classifier_names(cls, model: Any) -> tuple[str, ...]:
        # layers with one row per class; those of a Detector have one more, for the background
        names = ("decoder.head", "decoder.mask_norm")
        return tuple(name for name, _ in model.named_modules() if name in names)

    @classmethod
    def classes_in(cls, model: Any, weights: Mapping[str, Tensor]) -> int | None:
        rows = [len(weights[name]) for name in SCORES if name in weights]
        return rows[0] - 1 if rows else super().classes_in(model, weights)  # one row is the background's

    @classmethod
    def reset_head(cls, model: Any, num_classes: int) -> None:
        model.reset_classifier(num_classes)

    @classmethod
    def roles(cls, model: Any) -> dict[str, Role]:
        inner = _inner(model).roles(model.backbone)
        deepest = max((role.layer for role in inner.values() if role.layer is not None), default=None)
        blocks = cls.blocks(model)
        head = len(blocks) + 1 if blocks else None if deepest is None else deepest + 1
        undecayed = cls.undecayed(model)
        found: dict[str, Role] = {}
        for name, _ in model.named_parameters():
            if name.startswith(BACKBONE):
                found[name] = inner[name.removeprefix(BACKBONE)]
            else:
                part: Part = "method" if METHOD in name.split(".") else "head"
                found[name] = Role(part, head, name not in undecayed)
        return found

    @classmethod
    def undecayed(cls, model: Any) -> Collection[str]:
        decoder: Any = getattr(model, "decoder", None)
        names = decoder.no_weight_decay() if hasattr(decoder, "no_weight_decay") else ()
        return {f"decoder.{name}" for name in names}

    @classmethod
    def preprocessing(cls, model: Any) -> Preprocessing:
        return _inner(model).preprocessing(model.backbone)

    @classmethod
    def input_size(cls, model: Any) -> tuple[int, int, int] | None:
        return _inner(model).input_size(model.backbone)

    @classmethod
    def checkpoint_gradients(cls, model: Any, on: bool = True) -> None:
        _inner(model).checkpoint_gradients(model.backbone, on)

    @classmethod
    def has_idle_parameters(cls, model: Any) -> bool:
        return _inner(model).has_idle_parameters(model.backbone)

    @classmethod
    def patch_dropout(cls, model: Any) -> Any | None:
        return _inner(model).patch_dropout(model.backbone)

    @classmethod
    def architecture(cls, model: Any) -> str:
        kind = "segmenter" if hasattr(model, "decoder") else "vitdet"
        return f"{kind}:{_inner(model).architecture(model.backbone)}"

    @classmethod
    def set_fused(cls, model: Any, fused: bool) -> bool:
        return _inner(model).set_fused(model.backbone, fused)

    @classmethod
    def patch_maker(cls, model: Any) -> nn.Module | None:
        return _inner(model).patch_maker(model.backbone)

    @classmethod
    def tokens(cls, model: Any, images: Tensor) -> Tensor:
        """Tokens (B, P, C) of all patches, without prefix, as the head reads them."""
        tokens, _ = model.tokens(images)
        return tokens  # type: ignore[no-any-return]

    @classmethod
    def install(cls, model: Any, trace: Trace) -> None:
        _inner(model).install(model.backbone, trace)
        if getattr(model, "decoder_tokens", "all") == "merged":
            model.trace = trace
            cls.blocks(model)[-1].unmerge_at_end = False  # type: ignore[assignment]

    @classmethod
    def uninstall(cls, model: Any) -> None:
        _inner(model).uninstall(model.backbone)
        if hasattr(model, "trace"):
            model.trace = None


def _inner(model: Any) -> type[Host]:
    """The host of the backbone, which the model looked up when it was made: `form` is asked in every forward."""
    return model.host  # type: ignore[no-any-return]
