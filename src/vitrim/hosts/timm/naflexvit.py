"""timm's `NaFlexVit`, on images and on padded patches, with the blocks of `VisionTransformer` or `Eva`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.naflexvit import NaFlexVit
from torch import Tensor, nn

from vitrim.core.block import Installed
from vitrim.core.host import DenseCall
from vitrim.core.plan import HostFacts
from vitrim.core.tokens import Asked, Trace
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.shared.padding import Group, groups_of, run_groups
from vitrim.hosts.timm.common import TimmHost
from vitrim.hosts.timm.eva import ReducedEvaBlock
from vitrim.hosts.timm.vit import TimmViT


@dataclass(eq=False, repr=False)
class PaddedFeatures(Installed):
    """``forward_features`` of a reduced model: padded batches run grid by grid (`hosts/shared/padding.py`).

    Output patches have their own ``patch_valid``, over which the head pools: the remaining patches, or all.
    """

    model: nn.Module
    trace: Trace

    def __call__(
        self,
        patches: Tensor,
        patch_coord: Tensor | None = None,
        patch_valid: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Any:
        features: Any = type(self.model).forward_features  # type: ignore[attr-defined]
        if patch_coord is None or patch_valid is None or attn_mask is not None:
            return features(self.model, patches, patch_coord, patch_valid, attn_mask)

        def run(group: Group) -> Any:
            found = features(self.model, group.take(patches), group.take(patch_coord))
            return {**found, "patch_valid": self.real(found["patches"])}

        found = run_groups(self.model, self.trace, split(patch_coord, patch_valid), patches.shape[1], run)
        assert self.trace.call.final is not None
        # Groups whose images kept fewer patches than the batch's longest get rows that are not real.
        valid, rows = found["patch_valid"], max(found["patches"].shape[1] - self.trace.call.final.num_prefix, 0)
        return {**found, "patch_valid": F.pad(valid, (0, rows - valid.shape[1]))}

    def real(self, x: Tensor) -> Tensor:
        """(b, m), which patch rows of the output tokens (b, prefix + m, C) are real."""
        state = self.trace.call.final
        assert state is not None
        if state.mask is not None and state.mask.shape[1] == x.shape[1]:
            return state.mask[:, state.num_prefix :]
        rows = max(x.shape[1] - state.num_prefix, 0)  # none where the last block computes the class token only
        return torch.ones(x.shape[0], rows, dtype=torch.bool, device=x.device)


class PaddedIntermediates(DenseCall):
    """``forward_intermediates`` of a reduced model: `DenseCall`, with padded batches as in `PaddedFeatures`."""

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, dict) or x.get("patch_valid") is None or x.get("attn_mask") is not None:
            return super().__call__(x, *args, **kwargs)
        model: Any = self.model
        if model.training and model.patch_drop is not None:
            raise UnsupportedModelError(
                "a reduced NaFlexVit has no forward_intermediates of padded patches in training with patch dropout"
            )
        patches, coord, valid = x["patches"], x["patch_coord"], x["patch_valid"]

        def run(group: Group) -> Any:
            own = {"patches": group.take(patches), "patch_coord": group.take(coord)}
            return type(model).forward_intermediates(model, own, *args, **kwargs)

        with self.trace.asking(Asked(full_grids=True)):
            found = run_groups(model, self.trace, split(coord, valid), patches.shape[1], run)
        return {**found, "patch_valid": valid} if isinstance(found, dict) else found


def split(patch_coord: Tensor, patch_valid: Tensor) -> list[Group]:
    """The images of a batch grouped by grid, from patch coordinates (B, P, 2) and validity (B, P)."""
    groups: list[Group] = groups_of(patch_valid, (patch_coord * patch_valid.unsqueeze(-1)).amax(dim=1) + 1)
    return groups


class TimmNaFlexViT(TimmHost):
    """Images, and [padded batches](hosts.md#padded-batches) of patches, which have no rows and columns for a method.

    Its own image size is that of the position table.
    """

    name = "timm NaFlexVit"
    reduced_blocks = (*TimmViT.reduced_blocks, ReducedEvaBlock)
    model_classes = (NaFlexVit,)
    calls = (*TimmHost.calls, "_forward_embeds", "_pool")

    @classmethod
    def check(cls, model: nn.Module) -> None:
        super().check(model)
        if model.embeds.pos_embed_grid_size is None:  # type: ignore[union-attr]
            raise UnsupportedModelError(
                f"this {type(model).__name__} has no image size of its own: create it with img_size=..."
            )

    @classmethod
    def geometry(cls, model: Any) -> tuple[tuple[int, int], tuple[int, int]]:
        rows, columns = model.embeds.pos_embed_grid_size
        height, width = model.embeds.patch_size
        return (rows, columns), (rows * height, columns * width)

    @classmethod
    def facts(cls, model: nn.Module) -> HostFacts:
        return replace(super().facts(model), any_size=True)

    @classmethod
    def patch_maker(cls, model: Any) -> nn.Module | None:
        return model.embeds  # type: ignore[no-any-return]

    @classmethod
    def grid_of(cls, maker: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
        grid = output[1]  # None for a list of patches
        return None if grid is None else (grid[0], grid[1])

    @classmethod
    def install(cls, model: Any, trace: Trace) -> None:
        model.forward_features = PaddedFeatures(model, trace)
        model.forward_intermediates = PaddedIntermediates(model, "forward_intermediates", trace)
