"""Models for dense tasks, `vitrim.models.segmenter` and `vitrim.models.vitdet`: a head that reads every patch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from vitrim.core.host import Host
from vitrim.core.library import METHOD, Library
from vitrim.core.plan import Head, HostFacts, Part, Role
from vitrim.core.tokens import Trace

BACKBONE = "backbone."
SCORES = ("roi_heads.box_predictor.cls_score", "roi_heads.box_predictors.0.cls_score")
"""The layers of a `Detector` that score classes, plain or the first of a cascade."""


def _inner(model: Any) -> type[Host]:
    """The host of the backbone, found when the model was made, because every forward reads `form`."""
    return model.library.host or Host


def _asks_host(name: str) -> Any:
    """A class method that passes its question to the backbone's host."""

    def answer(cls: type[Host], model: Any) -> Any:
        return getattr(_inner(model), name)(model.backbone)

    return classmethod(answer)


def _asks_library(name: str) -> Any:
    """A method that passes its question to the backbone's library."""

    def answer(self: Library, model: Any, *args: Any) -> Any:
        return getattr(model.library, name)(model.backbone, *args)

    return answer


class DenseHost(Host):
    """`segmenter:` and `vitdet:` models around any supported backbone: [dense tasks](dense.md)."""

    name = "vitrim dense models"
    purpose = "segmentation, detection, poses, depth"
    heads: ClassVar[tuple[Head, ...]] = ("grid",)

    check = _asks_host("check")
    blocks = _asks_host("blocks")
    form = _asks_host("form")
    patch_maker = _asks_host("patch_maker")

    @classmethod
    def trunk_host(cls, model: Any) -> type[Host]:
        return _inner(model)

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        own = _inner(model).facts(model.backbone)
        return replace(own, dense=True, head_rows=None, takes_maximum=False, num_classes=model.num_classes)

    @classmethod
    def install(cls, model: Any, trace: Trace) -> None:
        _inner(model).install(model.backbone, trace)
        if getattr(model, "decoder_tokens", "all") == "merged":
            model.trace = trace
            cls.blocks(model)[-1].unmerge_at_end = False

    @classmethod
    def uninstall(cls, model: Any) -> None:
        _inner(model).uninstall(model.backbone)
        if hasattr(model, "trace"):
            model.trace = None


class DenseLibrary(Library):
    """Passes questions about the backbone to the backbone's own library."""

    name = "vitrim"

    layout = _asks_library("layout")
    has_idle_parameters = _asks_library("has_idle_parameters")
    preprocessing = _asks_library("preprocessing")
    input_size = _asks_library("input_size")
    set_size = _asks_library("set_size")
    checkpoint_gradients = _asks_library("checkpoint_gradients")
    patch_dropout = _asks_library("patch_dropout")
    set_fused = _asks_library("set_fused")

    def tasks(self, model: Any) -> tuple[str, ...]:
        return (model.task,)

    def front(self, model: Any) -> tuple[str, Callable[[Tensor], Any]]:
        return model.front_name, model.front

    def readers(self, model: Any) -> list[nn.Module]:
        """The module that reads the tokens of all patches, or their map."""
        return [model.decoder if hasattr(model, "decoder") else model.pyramid]

    def class_layers(self, model: Any) -> dict[str, int]:
        decoder = {name: 0 for name, _ in model.named_modules() if name in ("decoder.head", "decoder.mask_norm")}
        return decoder or dict.fromkeys(SCORES, 1)  # the background has a row, too

    def num_classes(self, model: Any) -> int:
        return model.num_classes  # type: ignore[no-any-return]

    def reset_head(self, model: Any, num_classes: int) -> None:
        model.reset_classifier(num_classes)

    def tokens(self, model: Any, images: Tensor) -> Tensor:
        """Tokens (B, P, C) of all patches, without prefix, as the head reads them."""
        tokens, _ = model.tokens(images)
        return tokens  # type: ignore[no-any-return]

    def roles(self, model: Any) -> dict[str, Role]:
        inner: dict[str, Role] = model.library.roles(model.backbone)
        deepest = max((role.layer for role in inner.values() if role.layer is not None), default=None)
        blocks = self.trunk_layers(model)
        # The head is one layer above the trunk, for rates that fall from layer to layer.
        head = len(blocks) + 1 if blocks else None if deepest is None else deepest + 1
        decoder: Any = getattr(model, "decoder", None)
        named = decoder.no_weight_decay() if hasattr(decoder, "no_weight_decay") else ()
        undecayed = {f"decoder.{name}" for name in named}
        found: dict[str, Role] = {}
        for name, _ in model.named_parameters():
            if name.startswith(BACKBONE):
                found[name] = inner[name.removeprefix(BACKBONE)]
            else:
                part: Part = "method" if METHOD in name.split(".") else "head"
                found[name] = Role(part, head, name not in undecayed)
        return found

    def architecture(self, model: Any) -> str:
        kind = "segmenter" if hasattr(model, "decoder") else "vitdet"
        return f"{kind}:{model.library.architecture(model.backbone)}"
