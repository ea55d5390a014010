"""Mixing of the images of a batch and of their labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from timm.data import Mixup

if TYPE_CHECKING:
    from vitrim.tasks.options import Mix


def make_mixup(mix: Mix, num_classes: int, *, multi_label: bool = False) -> Mixup | None:
    """timm's mixup and cutmix as a recipe says, or None if it mixes none.

    It takes images (B, C, H, W), which it overwrites, with B even, and (B,) class indices, or (B, K) where images have
    several labels, and gives the mixed images and (B, K) targets. It draws from numpy's global stream.

    Labels are not smoothed here but by the criterion: both are linear, so mixing smoothed labels and smoothing mixed
    ones is the same.

    Args:
        mix: of the recipe.
        num_classes: K.
        multi_label: whether targets are (B, K).

    Example:
        >>> import torch
        >>> from vitrim.tasks.options import Mix
        >>> mixup = make_mixup(Mix(mixup=0.8), num_classes=3)
        >>> images, targets = mixup(torch.rand(2, 3, 8, 8), torch.tensor([0, 2]))
        >>> images.shape, targets.sum(dim=1).allclose(torch.ones(2))
        (torch.Size([2, 3, 8, 8]), True)
    """
    if not mix.on:
        return None
    return Mixup(
        mixup_alpha=mix.mixup,
        cutmix_alpha=mix.cutmix,
        prob=mix.probability,
        switch_prob=mix.switch,
        label_smoothing=0.0,
        num_classes=num_classes,
        multi_label=multi_label,
    )
