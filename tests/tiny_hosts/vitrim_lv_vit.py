"""LV-ViT: with its auxiliary head, without it, with narrow heads."""

from __future__ import annotations

from typing import Any

from tiny_hosts import Create
from tiny_hosts.common import seeded
from tiny_hosts.timm_vit import GEOMETRY
from vitrim.models.lv_vit import LVViT


def lv_vit(**kwargs: Any) -> Create:
    return seeded(lambda: LVViT(**{**GEOMETRY, "skip_lambda": 2.0, "stem_width": 8, **kwargs}))


HOSTS: dict[str, Create] = {
    "lv_vit": lv_vit(),
    "lv_vit_no_aux": lv_vit(dense_head=False, skip_lambda=1.0),
    "lv_vit_narrow_heads": lv_vit(head_dim=8),
}
