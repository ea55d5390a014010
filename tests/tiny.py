"""Tiny hosts and the method settings that the contract tests run over.

Hosts: every form of timm's VisionTransformer. Methods: every registered one with settings that reduce a 6 x 6 grid; a
new method is tested with its defaults without being named here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import vitrim
from vitrim.registry import backbone_of, make_method, methods

GEOMETRY: dict[str, Any] = {
    "img_size": 24,
    "patch_size": 4,
    "embed_dim": 32,
    "depth": 4,
    "num_heads": 2,
    "num_classes": 5,
}


def _vit(cls: type[nn.Module] = VisionTransformer, **kwargs: Any) -> Callable[[], nn.Module]:
    def create() -> nn.Module:
        torch.manual_seed(1)
        model = cls(**{**GEOMETRY, **kwargs}).eval()
        _spread(model)
        return model

    return create


def _spread(model: nn.Module) -> None:
    """timm's initialisation gives nearly equal tokens; larger weights make every decision and every logit distinct."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


HOSTS: dict[str, Callable[[], nn.Module]] = {
    "vit": _vit(),
    "distilled": _vit(VisionTransformerDistilled),
    "registers": _vit(reg_tokens=3),
    "registers_no_embed_class": _vit(reg_tokens=2, no_embed_class=True),
    "layerscale": _vit(init_values=0.5),
    "qk_norm": _vit(qk_norm=True),
    "no_class_token_avg": _vit(class_token=False, global_pool="avg"),
    "avg_fc_norm": _vit(global_pool="avg"),
    "avg_no_fc_norm": _vit(global_pool="avg", fc_norm=False),
    "avgmax": _vit(global_pool="avgmax"),
    "map": _vit(class_token=False, global_pool="map"),
    "pre_norm": _vit(pre_norm=True),
    "scale_norms": _vit(scale_attn_norm=True, scale_mlp_norm=True),
    "dynamic_img_size": _vit(dynamic_img_size=True),
    "no_qkv_bias": _vit(qkv_bias=False),
    "headless": _vit(num_classes=0),
    "no_pool": _vit(global_pool="", num_classes=0),
}

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "a_vit": [{"gate_scale": 1.0, "gate_center": 1.0}],
    "diffrate": [{"r": 4}, {"prune_kept": [33, 30, 27, 24], "merge_kept": [31, 28, 27, 20], "discount_sizes": True}],
    "tofu": [{"keep_rate": 0.8}, {"keep_rate": 0.8, "prune_until": -1, "norm_of": "destination"}],
    "pitome": [{"keep_rate": 0.8}, {"keep_rate": 0.8, "protect": "always"}],
    "mctf": [
        {"r": 4},
        {"r": 0.2, "attention_map": "shared"},
        {"r": 4, "attention": "precise"},
        {"r": 4, "attention": "after"},
    ],
    "tome": [{"r": 4}, {"keep_rate": 0.6}],
    "atm": [
        {"alpha": 0.9, "beta": 0.2, "theta_min": 0.1},
        {"alpha": 0.9, "beta": 0.2, "theta_min": 0.1, "granularity": "image"},
    ],
    "evit": [{"keep_rate": 0.6}, {"keep_rate": 0.6, "fuse_token": False}],
}


def configs() -> list[vitrim.MethodConfig]:
    """Every registered method, with the settings above or its defaults."""
    return [make_method(name, **options) for name in methods() for options in SETTINGS.get(name, [{}])]


def static_configs() -> list[vitrim.MethodConfig]:
    """Those whose counts do not depend on the images."""
    return [config for config in configs() if not config.adaptive]


def fits(config: vitrim.MethodConfig, model: nn.Module) -> vitrim.MethodConfig:
    """``config``, with the documented substitute where it needs a class token and ``model`` has none.

    Skips the test where the method cannot serve the model: counts that differ per image by pruning, on a head that
    pools patches, are refused (`tests/test_reduce.py`).
    """
    pools_patches = backbone_of(model).facts(model).head_rows is None
    if config.kind == "prune" and config.adaptive and pools_patches:
        pytest.skip("refused: the head would average padding")
    if config.kind == "mixed" and pools_patches:
        pytest.skip("refused: the head would miss pruned tokens and count merged ones once")
    if config.requires_class_token() and not model.has_class_token:
        return config.model_copy(update={"score": "column_mean"})
    return config


def images(batch: int = 2, size: int = 24, seed: int = 3) -> Tensor:
    """(B, 3, size, size) noise on a coarse pattern, so that some patches are alike."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(batch, 3, 3, 3, generator=generator)
    fine = torch.randn(batch, 3, size, size, generator=generator)
    return nn.functional.interpolate(coarse, size=size) + 0.3 * fine
