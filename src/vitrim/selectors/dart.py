"""DART: a few pivots, and the tokens that resemble them least. On the embeddings, or within a language model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.registry import register_selector
from vitrim.core.selection import Choice, Seen, Selector, SelectorNeeds, descending, unit_rows
from vitrim.core.tokens import decision_dtype

LEAST = 1e-8
"""The least product of two lengths."""


def strongest(embeddings: Tensor, count: int) -> Tensor:
    """(n,) the rows of ``embeddings`` (M, D) with the largest sums of absolute values, descending; all, of fewer."""
    sums = embeddings.to(decision_dtype(embeddings.dtype)).abs().sum(dim=-1)
    return descending(sums[None])[0, :count]


def least_like_pivots(features: Tensor, text: Tensor | None, count: int, pivots: int) -> Tensor:
    """(T,) the tokens of one image that are kept, in raster order.

    First the strongest tokens of the image; then for each of these and of the text pivots, in this order, its share of
    what is still wanted: the tokens not yet kept whose cosine with it is smallest.

    Args:
        features: (N, D).
        text: (n, D) text pivots, or None.
        count: T, at most N.
        pivots: of the image.
    """
    x = features.to(decision_dtype(features.dtype))
    own = strongest(x, min(pivots, count))
    acting = x[own] if text is None else torch.cat([x[own], text.to(x)])
    lengths = x.norm(dim=-1)
    cosine = (acting @ x.T) / (acting.norm(dim=-1)[:, None] * lengths).clamp_min(LEAST)
    taken = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    taken[own] = True
    left = count - len(own)
    for number, row in enumerate(cosine):
        share = -(-left // (len(cosine) - number))
        if share <= 0:
            break
        taken[descending((-row).masked_fill(taken, -torch.inf)[None])[0, :share]] = True
        left -= share
    return taken.nonzero().squeeze(1)


def quota(tokens: int, reduction: float) -> int:
    """Tokens that TensorRT Edge-LLM keeps of so many, with a share of ``reduction`` in single precision taken away.

    Example:
        >>> quota(40, 0.5)
        20
    """
    share = float(torch.tensor(1.0) - torch.tensor(reduction, dtype=torch.float32))
    return min(max(int(torch.tensor(tokens * share, dtype=torch.float64).ceil()), 1), tokens)


def shortened_prompt(
    embeddings: Tensor, spans: Sequence[tuple[int, int]], reduction: float, pivot_image: int = 4, pivot_text: int = 4
) -> Tensor:
    """Positions of a prompt that stay, ascending, text included, as TensorRT Edge-LLM cuts it before the first layer.

    Nothing is cut where there are fewer than 16 image tokens in all.

    Args:
        embeddings: (S, D) input embeddings of the prompt.
        spans: of image tokens, half open.
        reduction: share that goes of every span.
        pivot_image: pivots of every span.
        pivot_text: pivots among all text, the same for all spans.
    """
    is_text = torch.ones(len(embeddings), dtype=torch.bool, device=embeddings.device)
    for start, stop in spans:
        is_text[start:stop] = False
    counts = [stop - start for start, stop in spans]
    quotas = [quota(count, reduction) for count in counts]
    stays = torch.ones_like(is_text)
    if sum(counts) >= FEWEST and sum(quotas) < sum(counts):
        text = embeddings[is_text]
        text = text[strongest(text, pivot_text)]
        for (start, stop), count in zip(spans, quotas, strict=True):
            stays[start:stop] = False
            stays[start + least_like_pivots(embeddings[start:stop], text, count, pivot_image)] = True
    return stays.nonzero().squeeze(1)


FEWEST = 16
"""Image tokens below which a prompt stays whole."""


def in_language_model(
    states: Tensor,
    keys: Tensor,
    image: tuple[int, int],
    per_pivot: int,
    pivot_image: int = 4,
    pivot_text: int = 4,
    order: Sequence[int] | None = None,
) -> tuple[Tensor, list[int]]:
    """(n,) the image tokens that stay, counted from the first and ascending, and the pivots' positions as they act.

    DART as it is published: before a layer of the language model, by what the layer before it made.

    Args:
        states: (S, D) outputs of the layer before, behind the final norm of the model.
        keys: (H, S, d) keys of that layer, rotated.
        image: first position of the image, and the one behind its last.
        per_pivot: tokens that each pivot keeps besides.
        pivot_image: pivots of the image.
        pivot_text: pivots of the text behind it.
        order: in which the pivots act; by default image, then text, each by descending strength. The release takes the
            order of a Python ``set`` of their positions, and the result depends on it.
    """
    start, stop = image
    sums = keys.to(decision_dtype(keys.dtype)).abs().sum(dim=(0, 2))
    own = (start + descending(sums[None, start:stop])[0, :pivot_image]).tolist()
    words = (stop + descending(sums[None, stop:])[0, :pivot_text]).tolist()
    acting = [*own, *words] if order is None else list(order)
    x = unit_rows(states)
    taken = torch.zeros(stop - start, dtype=torch.bool, device=x.device)
    taken[[position - start for position in own]] = True
    for row in x[acting] @ x[start:stop].T:
        free = min(per_pivot, int((~taken).sum()))
        taken[descending((-row).masked_fill(taken, -torch.inf)[None])[0, :free]] = True
    return taken.nonzero().squeeze(1), acting


@register_selector
class Dart(Selector):
    """A few pivots of image and text, and the tokens that resemble them least, on the language model's embeddings.

    As TensorRT Edge-LLM ships it. DART as published acts within the language model, which a model here does not let it.

    Example:
        >>> import vitrim
        >>> vitrim.parse_selector("dart:keep=0.75,pivots=4").count(1995)
        1497
    """

    name = "dart"
    paper = "Wen et al., Stop Looking for Important Tokens in Multimodal Language Models, EMNLP 2025"
    rounding = "ceil"
    published_with = "Qwen3-VL (on embeddings); LLaVA-1.5, LLaVA-NeXT, Qwen2.5-VL (within the language model)"

    pivots: int = Field(4, ge=0, description="pivots of every image: the tokens with the largest L1 norms")
    text_pivots: int = Field(4, ge=0, description="pivots of the text of the prompt, shared by its images")

    def needs(self) -> SelectorNeeds:
        return SelectorNeeds(text=self.text_pivots > 0)

    def select(self, seen: Seen) -> list[Choice]:
        budget = self.budget(seen.features.shape[1])
        found = []
        for place, features in enumerate(seen.features):
            text = None
            if seen.text is not None and self.text_pivots:
                text = seen.text[place]
                text = text[strongest(text, self.text_pivots)]
            pivots = max(self.pivots, 1) if text is None or not len(text) else self.pivots
            found.append(Choice(least_like_pivots(features, text, budget, pivots)))
        return found
