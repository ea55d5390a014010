"""Builds timm models with the weights and inputs behind the reference vectors in ``tests/golden``."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

GOLDEN = Path(__file__).parent / "golden"

_spec = importlib.util.spec_from_file_location("golden_weights", GOLDEN / "weights.py")
assert _spec is not None
assert _spec.loader is not None
weights = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(weights)


def load(name: str) -> dict[str, Any]:
    """The reference file ``name``, e.g. ``merging/tome_r8_prop``."""
    return weights.load(GOLDEN / f"{name}.npz")


def geometry(ref: dict[str, Any], *more: str) -> dict[str, Any]:
    """The constructor arguments that the models of all reference files take, and those called ``more``."""
    model = ref["config"]["model"]
    names = ("embed_dim", "depth", "num_heads", "mlp_ratio", "num_classes", *more)
    return {"img_size": model["image_size"], **{name: model[name] for name in names}}


def published(ref: dict[str, Any]) -> dict[str, Tensor]:
    """The authors' state dict behind a reference file."""
    return {name: torch.from_numpy(value) for name, value in weights.state(ref).items()}


def vit(ref: dict[str, Any], **kwargs: Any) -> VisionTransformer:
    """The plain ViT behind a reference file, float64, eval mode."""
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


def tensor(ref: dict[str, Any], key: str) -> Tensor:
    """One stored array."""
    return torch.from_numpy(ref[key])
