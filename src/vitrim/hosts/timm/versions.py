"""Differences between versions of timm: each names the version that ends it (see `vitrim.core.versions`)."""

from __future__ import annotations

from typing import Any

from vitrim.core.library import input_channels
from vitrim.core.versions import require
from vitrim.errors import UnsupportedModelError

SINCE = dict.fromkeys(("timm.models.deepseek_vit", "timm.models.gemma4_vit", "timm.models.qwen3_vit"), "1.0.30")
"""The version with which families work, by their module, where it is above the lower bound of ``pyproject.toml``."""


def in_chans(model: Any) -> int:
    """Channels of the images; before 1.0.25 a model does not keep them, at most its embedding."""
    holder = model if hasattr(model, "in_chans") else getattr(model, "embeds", model)
    return int(getattr(holder, "in_chans", 0)) or input_channels(model)


def refuse_shifted_bias(block: Any) -> None:
    """Refuse parallel blocks without a bias of q, k and v before 1.0.25.

    There timm adds the MLP's bias as if it stood behind q, k and v, which it stands in front of: its first rows reach
    the end of the MLP, the others q, k and v.
    """
    if getattr(block, "mlp_bias", None) is not None:
        require("timm", "1.0.25", f"{type(block).__name__} with qkv_bias=False", UnsupportedModelError)


def fused_projection(block: Any) -> Any | None:
    """The projection of both branches of a parallel block, if they share one; before 1.0.23 none do."""
    return getattr(block, "out_proj", None)
