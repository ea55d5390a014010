"""Modules through which one stream of tokens reads another; only models with two streams have them."""

from __future__ import annotations

from torch import nn


class Exchange(nn.Module):
    """Base class of modules that carry information between two streams of tokens.

    ViTTM's read and write heads and LookupViT's two-way attention are such modules. The class does nothing itself: it
    tells the MAC counter (`vitrim.measure.macs`) which products are exchange, because published figures count them
    even where they leave the self-attention of the blocks out. Only products inside ``forward`` are recognised.

    Example:
        >>> class Mean(Exchange):
        ...     def forward(self, source, target):
        ...         return target + source.mean(1, keepdim=True)
    """
