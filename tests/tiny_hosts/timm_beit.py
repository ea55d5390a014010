"""timm's Beit: relative position bias per block, shared, and none."""

from __future__ import annotations

from typing import Any

from timm.models.beit import Beit

from tiny_hosts import Create
from tiny_hosts.common import seeded
from tiny_hosts.timm_vit import GEOMETRY


def beit(**kwargs: Any) -> Create:
    return seeded(lambda: Beit(**{**GEOMETRY, **kwargs}))


HOSTS: dict[str, Create] = {
    "beit": beit(use_rel_pos_bias=True, use_abs_pos_emb=False, init_values=0.5, global_pool="token"),
    "beit_avg": beit(use_rel_pos_bias=True, use_shared_rel_pos_bias=True),
    "beit_shared_swiglu": beit(
        use_shared_rel_pos_bias=True, qkv_bias=False, swiglu_mlp=True, scale_mlp=True, global_pool="token"
    ),
}
