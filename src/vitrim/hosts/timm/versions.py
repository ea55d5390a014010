"""Differences between versions of timm; see `vitrim.core.versions`."""

from __future__ import annotations

from typing import Any

from vitrim.core.library import input_channels
from vitrim.core.versions import require
from vitrim.errors import UnsupportedModelError

SINCE = dict.fromkeys(("timm.models.deepseek_vit", "timm.models.gemma4_vit", "timm.models.qwen3_vit"), "1.0.30")
"""The timm version that a family needs, by module, where above the lower bound of ``pyproject.toml``."""


def in_chans(model: Any) -> int:
    """Channels of the images; before 1.0.25 only the embedding stores them, if at all."""
    holder = model if hasattr(model, "in_chans") else getattr(model, "embeds", model)
    return int(getattr(holder, "in_chans", 0)) or input_channels(model)


def refuse_shifted_bias(block: Any) -> None:
    """Refuse parallel blocks without a bias of q, k and v before 1.0.25.

    There timm adds the MLP's bias to the wrong rows: as if the MLP's part came after q, k and v, though it comes first.
    """
    if getattr(block, "mlp_bias", None) is not None:
        require("timm", "1.0.25", f"{type(block).__name__} with qkv_bias=False", UnsupportedModelError)


def fused_projection(block: Any) -> Any | None:
    """The shared projection of both branches of a parallel block, if there is one; never before 1.0.23."""
    return getattr(block, "out_proj", None)
