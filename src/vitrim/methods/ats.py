"""ATS (Fayyaz et al., Adaptive Token Sampling for Efficient Vision Transformers, ECCV 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.assignment import Hard
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer, Site, StepOutput
from vitrim.core.method import MethodConfig, Needs, Traits, Tunable
from vitrim.core.plan import Layer
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, KeepRule, keep_rate
from vitrim.core.scoring import prune_flagged, real_patches
from vitrim.core.tokens import TokenState, decision_dtype, whole

SMOOTHING = 1e-6
"""eps of the published softmax and of the study's normalisation."""


class ATS(MethodConfig):
    """Sample the cumulative distribution of the tokens' scores at fixed heights, and keep every token that is hit.

    Formulas and deviations are in docs/methods/ats.md.

    Example:
        >>> ATS().stages(12)
        (3, 4, 5, 6, 7, 8, 9, 10, 11)
    """

    name = "ats"
    paper = "Adaptive Token Sampling for Efficient Vision Transformers (ECCV 2022)"
    traits = Traits(aligns=False)
    runtime = frozenset({"keep_rate"})
    tunable = Tunable("keep_rate", 1.0, 0.05, digits=3)

    keep_rate: float = Field(1.0, gt=0.0, le=1.0, description="sample points per block, as a share of the patches")
    blocks: tuple[int, ...] | None = Field(None, description="0-based; default all from a quarter of the depth on")
    rule: KeepRule = Field("floor_initial", description="how keep_rate becomes a number of sample points")
    variant: Literal["ats", "study", "published"] = Field(
        "ats", description="'study': as in Which Tokens to Use?; 'published': the authors' code, batch dependent"
    )
    padding: Literal["auto", "bound"] = Field(
        "auto", description="'auto': to the longest image, compiled: to the number of points; 'bound': always that"
    )
    float32_heights: bool = Field(
        False, description="variant=study: heights of a float32 arange, one too many for some amounts, as published"
    )

    def faults(self) -> Iterator[str]:
        if self.float32_heights and self.variant != "study":
            yield "float32_heights goes with variant=study; the other variants have no such heights"

    def needs(self) -> Needs:
        return Needs(class_token=True)

    def is_adaptive(self) -> bool:
        return True

    def obstacle(self) -> str | None:
        if self.variant == "published" and self.padding != "bound":
            return "variant=published decides by the padding; give padding=bound, which the file pads to"
        return None

    def stages(self, num_layers: int) -> tuple[int, ...]:
        """Blocks that sample."""
        return tuple(range(num_layers // 4, num_layers)) if self.blocks is None else self.blocks

    def amounts(self, num_layers: int) -> list[Amount | None]:
        return keep_rate(self.keep_rate, self.stages(num_layers), self.rule, num_layers)


class ATSReducer(Reducer[ATS]):
    site = "query"

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        amount = self.layer.amount
        if amount is None:  # a block of the published variant that does not sample
            return None
        points = max(amount.keep(state.initial_patches, state.num_patches), 1)
        real = real_patches(state)
        with torch.no_grad():
            # Each height picks the nearest entry of the cumulative scores; a token picked twice is kept once.
            picks = self.sample(self.scores(attention, state), real, points)
            chosen = torch.zeros_like(real).scatter(1, picks, 1)
        return prune_flagged(
            state, chosen, min(whole(picks.shape[1]), state.num_patches), self.config.padding == "bound"
        )

    def ranking(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor | None:
        return self.scores(attention, state)

    def scores(self, attention: Attention, state: TokenState) -> Tensor:
        """(B, P) importance of the patches, in at least float32, not normalised."""
        return significance(attention.class_row(), attention, per_head=self.config.variant == "study")[
            :, state.num_prefix :
        ]

    def sample(self, score: Tensor, real: Tensor, points: int) -> Tensor:
        """(B, M) patch indices, with repetitions; M is ``points``, or one more with ``float32_heights``."""
        if self.config.variant == "study":
            return sample_study(score, real, points, self.config.float32_heights)
        return sample_sorted(score, real, points)


class PublishedATSReducer(ATSReducer):
    """Use the published softmax in every block, and the batch-dependent sampling in the blocks that sample."""

    def scores(self, attention: Attention, state: TokenState) -> Tensor:
        row = smoothed_probabilities(attention.rows(1))[:, :, 0]
        return significance(row, attention, per_head=False)[:, state.num_prefix :]

    def sample(self, score: Tensor, real: Tensor, points: int) -> Tensor:
        # padding has score 0 and sorts first, so that it enters the rescaling
        score = score * real
        return sample_sorted(score, torch.ones_like(real), points)

    def reduce(self, site: Site, x: Tensor, attention: Attention | None, state: TokenState) -> StepOutput:
        if site == "before" and state.mask is not None:
            return x * state.mask.unsqueeze(-1), state  # padding is a zero token
        return super().reduce(site, x, attention, state)

    def attend(self, attention: Attention, state: TokenState) -> Tensor:
        assert attention.v is not None
        real, v = _real_keys(attention), attention.v
        if self.layer.amount is None:
            probabilities = smoothed_probabilities(attention, zero_keys=False)
        else:
            probabilities = smoothed_probabilities(attention)
            v = v if real is None else v * real.transpose(-1, -2)
        return attention.dropped(probabilities).to(v.dtype) @ v


@register(ATS)
def _reducer(config: ATS, layer: Layer) -> type[ATSReducer] | None:
    if config.variant == "published":  # its softmax is that of all blocks
        return PublishedATSReducer
    return None if layer.amount is None else ATSReducer


def significance(class_row: Tensor, attention: Attention, per_head: bool) -> Tensor:
    """(B, N) attention from the class token (B, H, N) times the length of the values, per head or over all heads."""
    values = attention.values.to(class_row.dtype)
    if per_head:
        return (class_row * values.square().sum(-1).sqrt()).sum(1)
    return class_row.sum(1) * values.square().sum((1, 3)).sqrt()


def sample_sorted(score: Tensor, real: Tensor, points: int) -> Tensor:
    """Picks (B, points) among the ascending scores (B, P); ``real`` (B, P) is False for padding."""
    order = score.masked_fill(~real, -1.0).sort(dim=1, stable=True).indices  # padding first
    sorted_real = real.gather(1, order)
    cdf = (score * real).gather(1, order).cumsum(1)
    # From the first real token's height to 1, as if padding were not there.
    low = cdf.masked_fill(~sorted_real, torch.inf).amin(1, keepdim=True)
    span = cdf[:, -1:] - low
    cdf = (cdf - low) / torch.where(span > 0, span, 1.0)
    # The heights go from the lowest entry above 0 to 1.
    first = cdf.masked_fill(~sorted_real | (cdf <= 0), torch.inf).amin(1, keepdim=True).clamp(max=1.0)
    step = torch.arange(points, device=score.device, dtype=score.dtype) / max(points - 1, 1)
    cdf = cdf.masked_fill(~sorted_real, -9.0)  # farther from every height than any real token
    return order.gather(1, nearest(cdf, first + (1 - first) * step))


def sample_study(score: Tensor, real: Tensor, points: int, float32_heights: bool = False) -> Tensor:
    """Picks (B, M) of the scores (B, P) in order of position, real tokens first, as in "Which Tokens to Use?"."""
    score = score * real
    # Padding lies above every height, so no point picks it.
    cdf = (score / (score.sum(1, keepdim=True) + SMOOTHING)).cumsum(1).masked_fill(~real, 9.0)
    if float32_heights:
        height = study_arange(points, score.device).to(score.dtype)
    else:
        height = (2 * torch.arange(1, points + 1, device=score.device, dtype=score.dtype) - 1) / (2 * points + 2)
    return nearest(cdf, height.expand(score.shape[0], -1))


def study_arange(points: int, device: torch.device | None = None) -> Tensor:
    """The heights of the study's code: ``points`` float32 numbers, or one more where rounding includes the end."""
    bins = points + 1
    return torch.arange(1 / (2 * bins), (2 * bins - 1) / (2 * bins), 1 / bins, device=device, dtype=torch.float32)


def nearest(cdf: Tensor, height: Tensor) -> Tensor:
    """(B, M) index of the entry of ``cdf`` (B, P), ascending, nearest to each ``height`` (B, M); the first on ties."""
    cdf, height = cdf.contiguous(), height.contiguous()
    above = torch.searchsorted(cdf, height).clamp(max=cdf.shape[1] - 1)
    below = (above - 1).clamp_min(0)
    low, high = cdf.gather(1, below), cdf.gather(1, above)
    # equal entries: the first of them
    return torch.where((height - low).abs() <= (high - height).abs(), torch.searchsorted(cdf, low), above)


def smoothed_probabilities(attention: Attention, zero_keys: bool = True) -> Tensor:
    """(B, H, M, N) the published masked softmax, in at least float32: (e + eps/N) / (sum e + eps), e = 0 at padding."""
    real = _real_keys(attention)
    if real is not None and attention.bias is not None:
        attention = replace(attention, bias=attention.bias.masked_fill(~real, 0.0))  # without the mask
    logits = attention.logits().to(decision_dtype(attention.q.dtype))
    # The maximum that is subtracted includes padding: as zero keys in blocks that sample, else by its own keys.
    if real is not None and zero_keys:
        logits = logits.masked_fill(~real, 0.0)
    e = (logits - logits.amax(-1, keepdim=True)).exp()
    if real is not None:
        e = e * real
    return (e + SMOOTHING / e.shape[-1]) / (e.sum(-1, keepdim=True) + SMOOTHING)


def _real_keys(attention: Attention) -> Tensor | None:
    """(B, 1, 1, N) bool, False for padding. Read from the bias, because a selection has replaced the mask."""
    return None if attention.bias is None else attention.bias[:, :1, :1] > -5e3
