"""Answers about models of the original repositories of DINOv2 and DINOv3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitrim.core.plan import Layout
from vitrim.hosts.vitrim.library import OwnLibrary


class DinoLibrary(OwnLibrary):
    """A `DinoVisionTransformer`, which returns its class token, registers and patches separately."""

    name = "dinov2"

    def num_classes(self, model: nn.Module) -> int | None:
        return None

    def layout(self, model: Any) -> Layout:
        return super().layout(model)._replace(patch_size=model.patch_embed.patch_size)

    def set_size(self, model: Any, size: int) -> None:
        embed = model.patch_embed  # the model's forward resamples positions
        grid = (size // embed.patch_size[0], size // embed.patch_size[1])
        embed.img_size, embed.patches_resolution, embed.num_patches = (size, size), grid, grid[0] * grid[1]

    def without_head(self, model: Any) -> nn.Module:
        model.head = nn.Identity()
        return model  # type: ignore[no-any-return]

    def tokens(self, model: Any, images: Tensor) -> Tensor:
        found = model.forward_features(images)
        middle = next(found[key] for key in ("x_norm_regtokens", "x_storage_tokens") if key in found)
        return torch.cat([found["x_norm_clstoken"].unsqueeze(1), middle, found["x_norm_patchtokens"]], dim=1)
