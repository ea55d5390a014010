"""timm's VOLO: outlookers on 12 x 12 places, transformer blocks on 6 x 6, and a class token that joins behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timm.models.volo import VOLO
from torch import Tensor

from tiny_hosts import Create
from tiny_hosts.common import seeded

FURTHER = True


def volo(**kwargs: Any) -> Create:
    stages: dict[str, Any] = {"layers": [1, 4], "embed_dims": [16, 32], "num_heads": [2, 2]}
    sizes: dict[str, Any] = {"img_size": 48, "patch_size": 4, "stem_hidden_dim": 8, "num_classes": 5}
    return seeded(lambda: VOLO(**{**stages, **sizes, **kwargs}))


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 48, 48, generator=torch.Generator().manual_seed(3))


HOSTS: dict[str, Create] = {
    "volo": volo(),
    "volo_stages": volo(layers=[1, 2, 2], embed_dims=[16, 32, 32], num_heads=[2, 2, 2]),
    "volo_avg": volo(global_pool="avg", post_layers=None, use_aux_head=False),
}
INPUTS: dict[str, Callable[[int], Tensor]] = dict.fromkeys(HOSTS, images)
