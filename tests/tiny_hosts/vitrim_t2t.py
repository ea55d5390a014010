"""T2T-ViT with either token module, on patches of 4 pixels."""

from __future__ import annotations

from typing import Any

from tiny_hosts import Create
from tiny_hosts.common import seeded
from tiny_hosts.timm_vit import GEOMETRY
from vitrim.models.t2t_vit import T2TViT

SPLITS = ((3, 2, 1), (3, 2, 1), (3, 1, 1))


def t2t_vit(**kwargs: Any) -> Create:
    return seeded(lambda: T2TViT(**{**GEOMETRY, "splits": SPLITS, "token_dim": 8, **kwargs}))


HOSTS: dict[str, Create] = {
    "t2t_vit": t2t_vit(),
    "t2t_vit_performer_avg": t2t_vit(token_module="performer", global_pool="avg"),
}
