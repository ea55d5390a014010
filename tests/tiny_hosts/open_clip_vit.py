"""open_clip's image tower: class token, mean of patches, attention pools, tokens beside them, custom blocks."""

from __future__ import annotations

import importlib.util
from typing import Any

from tiny_hosts import Create
from tiny_hosts.common import seeded

FURTHER = True
GEOMETRY: dict[str, Any] = {
    "image_size": 24,
    "patch_size": 4,
    "width": 32,
    "layers": 4,
    "heads": 2,
    "mlp_ratio": 2.0,
    "output_dim": 6,
}
POOL: dict[str, Any] = {"attentional_pool": True, "attn_pooler_queries": 3, "attn_pooler_heads": 2}


def tower(**kwargs: Any) -> Create:
    from open_clip.transformer import VisionTransformer

    return seeded(lambda: VisionTransformer(**{**GEOMETRY, **kwargs}))


HOSTS: dict[str, Create] = {}
if importlib.util.find_spec("open_clip") is not None:
    HOSTS = {
        "open_clip": tower(),
        "open_clip_avg": tower(pool_type="avg", final_ln_after_pool=True, ls_init_value=0.5),
        "open_clip_coca": tower(**POOL, output_tokens=True),
        "open_clip_custom": tower(
            qk_norm=True, scale_heads=True, scale_attn_inner=True, scale_attn=True, scale_fc=True
        ),
    }
