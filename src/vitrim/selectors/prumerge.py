"""PruMerge and PruMerge+: outliers of the attention absorb similar tokens; one token holds the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.registry import register_selector
from vitrim.core.selection import Choice, Seen, Selector, SelectorNeeds, descending, unit_rows
from vitrim.core.tokens import decision_dtype
from vitrim.errors import VitrimError

NEIGHBOURS = 32


class Merged(NamedTuple):
    """The tokens of one image: (n,) places by descending attention, then the added ones; (n, D) tokens; (1, D) of the
    rest.
    """

    kept: Tensor
    tokens: Tensor
    rest: Tensor


def one_head_attention(query: Tensor, keys: Tensor) -> Tensor:
    """(B, N) attention of the class token, all heads side by side as one, without its own share.

    ``query`` (B, C) is the class token's, without scale; ``keys`` (B, 1 + N, C) have the class token's first.
    """
    wide = decision_dtype(keys.dtype)
    logits = (keys.to(wide) @ query.to(wide)[:, :, None]).squeeze(2) * query.shape[1] ** -0.5
    attention: Tensor = logits.softmax(dim=1)
    return attention[:, 1:]


def outlier_ratio(attention: Tensor) -> float:
    """Share of the values of ``attention`` above the upper quartile by more than 1.5 interquartile ranges."""
    values = attention.flatten()
    # `quantile` accepts at most 16 million values; an image has thousands
    low, high = values.quantile(values.new_tensor([0.25, 0.75]))
    return float((values > high + 1.5 * (high - low)).sum()) / values.numel()


def merged(
    features: Tensor, attention: Tensor, keys: Tensor, ratio: float, plus: bool = False, count: int | None = None
) -> Merged:
    """Merge the tokens of one image into those with the largest attention.

    A kept token gets the sum of attention times token over the 32 others with the most similar keys: a small term as
    released, where the sum is not divided by the attention. Kept are a share ``ratio``, rounded down, or ``count``;
    with ``plus`` also a regular sample of the others: PruMerge+.
    """
    total = len(features)
    number = min(int(total * ratio) if count is None else count, total)
    kept = descending(attention[None])[0, :number]
    # The released step: a third of one over the ratio, rounded down twice.
    if plus and ratio > 0 and (step := int(int(1 / ratio) / 3)) > 0:
        sample = torch.arange(0, total - 1, step, device=kept.device)
        kept = torch.cat([kept, sample[~torch.isin(sample, kept)]])
    normed = unit_rows(keys, 1e-12)
    alike = normed[kept] @ normed.T
    alike = alike.scatter(1, kept[:, None], -torch.inf)
    near = descending(alike)[:, : min(NEIGHBOURS, total - 1)]
    weighed = features * attention[:, None].to(features.dtype)
    gone = torch.ones(total, dtype=torch.bool, device=kept.device)
    gone[kept] = False
    return Merged(kept, features[kept] + weighed[near].sum(dim=1), weighed[gone].sum(dim=0, keepdim=True))


@register_selector
class PruMerge(Selector):
    """Select the outliers of the attention, each with similar tokens merged in, and one token for the rest.

    Keeps as many tokens as the image's attention has outliers, unless ``tokens`` or ``keep`` is set; the token of the
    rest counts. ``plus`` adds a regular sample of the others. Attention is that of the tower's last block.

    Example:
        >>> import vitrim
        >>> vitrim.parse_selector("prumerge:tokens=41").count((24, 24))
        41
    """

    name = "prumerge"
    paper = "Shang et al., LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models, ICCV 2025"
    place = "before"
    merges = True
    rounding = "floor"
    published_with = "LLaVA-1.5, Video-LLaVA"
    default_keep = None

    plus: bool = Field(False, description="add a regular sample of the other tokens: PruMerge+")
    batch: bool = Field(
        False, description="count outliers over all images of a call, as released, so that all keep equally many"
    )
    order: Literal["raster", "appended"] = Field(
        "raster", description="kept tokens in raster order, or by descending attention, as published; the rest is last"
    )

    def faults(self) -> Iterator[str]:
        if self.positions == "original":
            yield "positions=original: the token of the rest has no place in the image"
        if self.plus and (self.tokens is not None or self.keep is not None):
            yield "plus=true adds a sample to the outliers: it takes neither tokens nor keep"

    def needs(self) -> SelectorNeeds:
        return SelectorNeeds(attention="last", class_token=True)

    def keeps_places(self) -> bool:
        return False

    def budget(self, tokens: int) -> int:
        if self.plus:
            raise VitrimError(f"{self.describe()} finds its number image by image")
        return super().budget(tokens)

    def select(self, seen: Seen) -> list[Choice]:
        assert seen.query is not None
        assert seen.wide_keys is not None
        attention = one_head_attention(seen.query, seen.wide_keys)
        fixed = self.tokens is not None or self.keep is not None
        together = outlier_ratio(attention) if self.batch else None
        found = []
        for features, own, keys in zip(seen.features, attention, seen.wide_keys[:, 1:], strict=True):
            if fixed and self.budget(len(own)) == len(own):
                found.append(Choice(torch.arange(len(own), device=own.device)))
                continue
            count = self.budget(len(own)) - 1 if fixed else None
            ratio = 0.0 if fixed else outlier_ratio(own) if together is None else together
            kept, tokens, rest = merged(features, own, keys, ratio, self.plus, count)
            if self.order == "raster":
                kept, order = kept.sort()
                tokens = tokens[order]
            made = torch.ones_like(kept, dtype=torch.bool)
            found.append(Choice(kept, tokens, end=rest if len(kept) < len(own) else None, merged=made))
        return found
