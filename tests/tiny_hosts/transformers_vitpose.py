"""Hugging Face ViTPose, as a pose estimator and bare; its patches overlap by the padding of 2 pixels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import VitPoseBackbone, VitPoseBackboneConfig, VitPoseConfig, VitPoseForPoseEstimation

from tiny_hosts import Create
from tiny_hosts.common import seeded
from tiny_hosts.transformers_vit import GEOMETRY

FURTHER = True


def backbone() -> VitPoseBackboneConfig:
    sizes = {key: value for key, value in GEOMETRY.items() if key not in ("num_labels", "intermediate_size")}
    return VitPoseBackboneConfig(**{**sizes, "image_size": [48, 48], "patch_size": [8, 8]}, mlp_ratio=2)


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 48, 48, generator=torch.Generator().manual_seed(3))


def estimator() -> nn.Module:
    return VitPoseForPoseEstimation(VitPoseConfig(backbone_config=backbone(), num_labels=5, scale_factor=2))


HOSTS: dict[str, Create] = {
    "hf_vitpose": seeded(estimator),
    "hf_vitpose_backbone": seeded(lambda: VitPoseBackbone(backbone())),
}
INPUTS: dict[str, Callable[[int], Tensor]] = dict.fromkeys(HOSTS, images)
