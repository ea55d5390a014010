"""Builds timm models with the weights and inputs behind the reference vectors in ``tests/golden``."""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from golden_files import GOLDEN, Part, Reference, cases, load, tensor, weights
from tiny_hosts.common import copied

__all__ = [
    "GOLDEN",
    "Part",
    "Reference",
    "cases",
    "geometry",
    "images",
    "load",
    "published",
    "tensor",
    "vit",
    "weights",
]


def geometry(ref: dict[str, Any], *more: str) -> dict[str, Any]:
    """The constructor arguments that the models of all reference files take, and those called ``more``."""
    model = ref["config"]["model"]
    names = ("embed_dim", "depth", "num_heads", "mlp_ratio", "num_classes", *more)
    return {"img_size": model["image_size"], **{name: model[name] for name in names}}


def published(ref: dict[str, Any]) -> dict[str, Tensor]:
    """The authors' state dict behind a reference file."""
    return {name: torch.from_numpy(value) for name, value in weights.state(ref).items()}


LAST: OrderedDict[tuple[Any, ...], VisionTransformer] = OrderedDict()
"""The last few models that were made; most files have the weights of one model, and another method."""
FEW = 8


def vit(ref: dict[str, Any], **kwargs: Any) -> VisionTransformer:
    """The plain ViT behind a reference file, float64, eval mode."""
    about = [ref["config"].get(part) for part in ("model", "gains", "shared")]
    key = (json.dumps([*about, ref["params"]]), *sorted(kwargs.items()))
    if any(name.startswith("fixed/") for name in ref):  # weights of its own
        return _vit(ref, **kwargs)
    if key not in LAST:
        with torch.random.fork_rng([]):
            LAST[key] = _vit(ref, **kwargs)
    LAST.move_to_end(key)
    while len(LAST) > FEW:
        LAST.popitem(last=False)
    return copied(LAST[key])


def _vit(ref: dict[str, Any], **kwargs: Any) -> VisionTransformer:
    model = VisionTransformer(
        **geometry(ref, "patch_size"),
        qkv_bias=ref["config"]["model"].get("qkv_bias", True),
        norm_layer=partial(nn.LayerNorm, eps=ref["config"]["model"]["norm_eps"]),
        **kwargs,
    )
    expected = set(model.state_dict())
    model.load_state_dict({name: value for name, value in published(ref).items() if name in expected}, strict=True)
    return model.double().eval()


def images(ref: dict[str, Any]) -> Tensor:
    """The input images (B, 3, H, W) of a reference file, float64."""
    return torch.from_numpy(weights.inputs(ref)).double()
