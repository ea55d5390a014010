"""Differences between versions of timm: each names the version that ends it (see `vitrim.core.versions`)."""

from __future__ import annotations

from typing import Any

from vitrim.core.library import input_channels

SINCE = dict.fromkeys(("timm.models.deepseek_vit", "timm.models.gemma4_vit", "timm.models.qwen3_vit"), "1.0.30")
"""The version with which families work, by their module, where it is above the lower bound of ``pyproject.toml``."""


def in_chans(model: Any) -> int:
    """Channels of the images; before 1.0.25 a model does not keep them."""
    return getattr(model, "in_chans", None) or input_channels(model)


def fused_projection(block: Any) -> Any | None:
    """The projection of both branches of a parallel block, if they share one; before 1.0.24 none do."""
    return getattr(block, "out_proj", None)
