"""CDPruner: a determinantal point process over tokens that are relevant to the text and dissimilar."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.registry import register_selector
from vitrim.core.selection import Choice, Seen, Selector, SelectorNeeds, descending, first_largest, unit_rows
from vitrim.core.tokens import decision_dtype

LEAST = 1e-6
"""Relevance of the least relevant token."""


def relevance(images: Tensor, text: Tensor, opposed: bool = False) -> Tensor:
    """(B, N) mean cosine of every token of ``images`` (B, N, C) with all rows of ``text`` (M, C).

    ``opposed`` negates it, as released: CLIP's patches are opposite to their texts.
    """
    mean = (unit_rows(images, LEAST**2) @ unit_rows(text, LEAST**2).to(images.device).T).mean(dim=2)
    return -mean if opposed else mean


def scaled(values: Tensor, batch: bool = False) -> Tensor:
    """Scale ``values`` (B, N) to between nearly 0 and 1, per image, or as released over the ``batch``."""
    low, high = (
        (values.amin(), values.amax()) if batch else (values.amin(1, keepdim=True), values.amax(1, keepdim=True))
    )
    span = high - low
    return torch.where(span > 0, (values - low + LEAST) / span.where(span > 0, 1), 1.0)


@torch.no_grad()
def greedy_determinant(kernel: Tensor, gain: Tensor, least: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(B, T) rows of ``kernel`` in the order of selection, each for the largest determinant, and (B, T) if it adds any.

    A pick costs T N, by a growing Cholesky factor.

    Args:
        kernel: (B, N, N), symmetric, without negative eigenvalues.
        gain: (B, N) its diagonal, overwritten.
        least: (B, N) a gain up to this is a rounding error.
        count: T, at most N.
    """
    batch, total = gain.shape
    factor = kernel.new_zeros(batch, count, total)
    tiny = torch.finfo(gain.dtype).tiny
    images = torch.arange(batch, device=kernel.device)
    picked, useful = [], []
    for number in range(count):
        gain.masked_fill_(gain <= least, -torch.inf)
        pick = first_largest(gain)
        best = gain.gather(1, pick)
        place, before = pick[:, 0], factor[:, :number]
        # A row of the Cholesky factor: the kernel's row of the pick, less what earlier picks explain.
        row = torch.baddbmm(kernel[images, place][:, None], before[images, :, place][:, None], before, alpha=-1)
        torch.div(row[:, 0], best.clamp(min=tiny).sqrt(), out=factor[:, number])
        # The gain of a token is its squared distance to the span of the picks; a picked one gains nothing.
        gain.addcmul_(factor[:, number], factor[:, number], value=-1).scatter_(1, pick, -torch.inf)
        picked.append(pick)
        useful.append(best > 0)
    return torch.cat(picked, dim=1), torch.cat(useful, dim=1)


@torch.no_grad()
def determinantal(features: Tensor, weights: Tensor, count: int) -> Tensor:
    """(B, T) tokens of ``features`` (B, N, D) in the order of selection: each maximises the determinant of the kernel
    diag(w) cos(x, x) diag(w), with ``weights`` w (B, N).

    Where no token adds anything (duplicates, zeros, more than D), the most relevant of the rest follow; the release
    repeats one.
    """
    normed = unit_rows(features)
    weights = weights.to(normed)
    cosine = normed @ normed.transpose(1, 2)
    kernel = cosine * weights[:, :, None] * weights[:, None]
    # the diagonal, with cos(x, x) exactly 1, or 0 for zeros, so that equal weights tie
    gain = weights.square() * cosine.diagonal(dim1=1, dim2=2).round()
    least = gain * (features.shape[1] * torch.finfo(gain.dtype).eps)
    order, valid = greedy_determinant(kernel, gain, least, count)
    if bool(valid.all()):
        return order
    # Images differ in the number of useful picks: each is filled up by its most relevant others.
    rank = weights.clone()
    for image, own in enumerate(valid):
        rank[image, order[image, own]] = -torch.inf
    fill = descending(rank)
    rows = [torch.cat([order[image, own], fill[image, : count - int(own.sum())]]) for image, own in enumerate(valid)]
    return torch.stack(rows)


@register_selector
class CDPruner(Selector):
    """Select tokens that are relevant to the prompt's text and dissimilar, by a determinantal point process.

    Relevance is the mean cosine of a token with the text's embeddings in the language model, as in OpenVINO GenAI,
    without a second tower. The release uses CLIP's text tower, and negates it, see ``opposed``; `relevance`, `scaled`
    and `determinantal` accept any embeddings.

    Example:
        >>> import vitrim
        >>> vitrim.parse_selector("cdpruner:tokens=64,text=none").count((24, 24))
        64
    """

    name = "cdpruner"
    paper = (
        "Zhang et al., Beyond Attention or Similarity: Maximizing Conditional Diversity for Token Pruning, NeurIPS 2025"
    )
    published_with = "LLaVA-1.5, LLaVA-NeXT; Qwen2-VL, Qwen2.5-VL and Qwen3-VL in OpenVINO GenAI"

    text: Literal["prompt", "none"] = Field(
        "prompt", description="what relevance is to: the text of the prompt, or none, so that only diversity counts"
    )
    weights: Literal["relevance", "exponential"] = Field(
        "relevance",
        description="of a token: relevance, or exp(alpha relevance), alpha = theta / (2 (1 - theta))",
    )
    theta: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.5, description="see weights=exponential")
    opposed: bool = Field(False, description="relevance with a minus, as released for CLIP's embeddings")
    batch: bool = Field(False, description="scale relevance over all images of a call, as released, not image by image")

    def needs(self) -> SelectorNeeds:
        return SelectorNeeds(text=self.text == "prompt")

    def select(self, seen: Seen) -> list[Choice]:
        features = seen.features
        dtype = decision_dtype(features.dtype)
        weights = features.new_ones(features.shape[:2], dtype=dtype)
        if self.text == "prompt" and seen.text is not None and all(len(words) for words in seen.text):
            rows = [relevance(own[None], words, self.opposed) for own, words in zip(features, seen.text, strict=True)]
            # Prompts without text have no relevance: then every token weighs the same.
            weights = scaled(torch.cat(rows), self.batch)
            if self.weights == "exponential":
                weights = (weights * (self.theta / (2 * (1 - self.theta)))).exp()
        picked = determinantal(features, weights, self.budget(features.shape[1]))
        return [Choice(kept) for kept in picked.sort(dim=1).values]
