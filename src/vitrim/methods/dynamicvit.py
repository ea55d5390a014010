"""DynamicViT: a small network predicts which patches to drop (Rao et al., NeurIPS 2021)."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from operator import mul

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vitrim.core.attention import Attention
from vitrim.core.block import Idle, Reducer, Site, StepOutput, draw_linear_, is_bare
from vitrim.core.matching import full_precision
from vitrim.core.method import StagedConfig, Traits
from vitrim.core.plan import Layer
from vitrim.core.registry import register
from vitrim.core.scoring import ScorerReducer, masked_softmax
from vitrim.core.tokens import TokenState, decision_dtype

POLICY = "dynamicvit_policy"
DECISION = "decision"


class DynamicViT(StagedConfig):
    """Keep the patches to which a learned predictor gives the highest probability of being kept.

    Training reports the decisions as ``reduction.aux("decision")``, (B, P) per stage.

    Formulas and deviations are in docs/methods/dynamicvit.md.

    Example:
        >>> DynamicViT(keep_rate=0.7).counts(196, 12)[-1]
        67
    """

    name = "dynamicvit"
    paper = "DynamicViT: Efficient Vision Transformers with Dynamic Token Sparsification (NeurIPS 2021)"
    traits = Traits(training_free=False)

    tau: float = Field(1.0, gt=0.0, description="temperature of the Gumbel softmax in training")
    epsilon_from_start: bool = Field(
        False, description="training: smoothed softmax also before the first stage, as published (full attention map)"
    )
    global_epsilon: float = Field(0.0, ge=0.0, description="added to the mean over kept patches; 1e-6 in the study")

    def targets(self, num_stages: int) -> list[float]:
        """Share of all patches that each stage should keep in training: r, r^2, r^3; always r by "floor_initial"."""
        if isinstance(self.keep_rate, tuple):
            return list(self.keep_rate if self.rule == "floor_initial" else accumulate(self.keep_rate, mul))
        powers = [1] * num_stages if self.rule == "floor_initial" else range(1, num_stages + 1)
        # Stage s keeps r of what stage s - 1 left: r^s of all.
        return [self.keep_rate**power for power in powers]


class MaskedReducer(Reducer[DynamicViT]):
    """Attend in training without the dropped tokens."""

    site = "before"

    @property
    def spares_block(self) -> bool:
        return not self.training

    def attend(self, attention: Attention, state: TokenState) -> Tensor:
        policy = state.carry.get(POLICY)
        if not self.training or (policy is None and not self.config.epsilon_from_start):
            return attention.output()
        if policy is None:
            policy = torch.ones_like(state.size)
        return attention.weigh(masked_softmax(attention.logits(), policy))


class IdleReducer(MaskedReducer, Idle[DynamicViT]): ...


class PredictingReducer(MaskedReducer, ScorerReducer[DynamicViT]):
    """Parameters: ``predictor``."""

    stable = True

    def __init__(self, config: DynamicViT, layer: Layer) -> None:
        super().__init__(config, layer)
        self.predictor = Predictor(layer.dim, config.global_epsilon)

    def reduce(self, site: Site, x: Tensor, attention: Attention | None, state: TokenState) -> StepOutput:
        if site == "before" and self.training:
            return x, self.decide(x, state)
        return super().reduce(site, x, attention, state)

    def score(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor:
        kept = torch.ones_like(state.size[:, state.num_prefix :])
        score: Tensor = self.predictor(x[:, state.num_prefix :], kept)[..., 0]
        return score

    def decide(self, x: Tensor, state: TokenState) -> TokenState:
        """Draw in training which patches are kept, and note it in the state; nothing is removed."""
        p = state.num_prefix
        policy = state.carry.get(POLICY)
        kept = torch.ones_like(state.size[:, p:]) if policy is None else policy[:, p:]
        log_probabilities = self.predictor(x[:, p:], kept)
        logits = log_probabilities + self.noise(log_probabilities)
        # The Gumbel softmax: with this noise the larger logit is a draw from the probabilities.
        soft = (logits / self.config.tau).softmax(dim=-1)[..., 0]
        hard = (logits[..., 0] >= logits[..., 1]).to(soft.dtype)
        kept = kept * (hard + (soft - soft.detach()))  # exactly 0 or 1, with the gradient of the softmax
        policy = state.pad_prefix(kept)
        state = replace(state, carry={**state.carry, POLICY: policy})
        return state.report(DECISION, self.layer.depth, kept)

    def noise(self, like: Tensor) -> Tensor:
        """Standard Gumbel noise of the shape of ``like``."""
        # Neither logarithm may see 0: uniform numbers include it.
        tiny = torch.finfo(like.dtype).tiny
        exponential = -torch.rand_like(like).clamp_min(tiny).log()
        return -exponential.clamp_min(tiny).log()


@register(DynamicViT)
def _reducer(config: DynamicViT, layer: Layer) -> type[MaskedReducer]:
    return IdleReducer if layer.amount is None else PredictingReducer


class Predictor(nn.Module):
    """Log probabilities (B, P, 2) of keeping and dropping the patches (B, P, C), from those kept so far (B, P)."""

    def __init__(self, dim: int, global_epsilon: float = 0.0) -> None:
        super().__init__()
        self.global_epsilon = global_epsilon
        self.in_conv = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU())
        self.out_conv = nn.Sequential(
            nn.Linear(dim, dim // 2), nn.GELU(), nn.Linear(dim // 2, dim // 4), nn.GELU(), nn.Linear(dim // 4, 2)
        )
        draw_linear_(self)

    def forward(self, patches: Tensor, kept: Tensor) -> Tensor:
        patches = patches.to(next(self.parameters()).dtype)
        with full_precision(patches):
            local, rest = self.in_conv(patches).chunk(2, dim=-1)
            weight = kept.unsqueeze(-1).to(rest.dtype)
            # decisions are 0 or 1: the clamp changes nothing unless an image has lost all patches
            mean = (rest * weight).sum(dim=1, keepdim=True) / weight.sum(dim=1, keepdim=True).clamp_min(1.0)
            mean, (first, *rest_of_network) = mean + self.global_epsilon, self.out_conv
            if is_bare(first):
                # the mean is the same for all patches: the first layer is applied to it once
                half = local.shape[-1]
                of_mean = F.linear(mean, first.weight[:, half:], first.bias)
                logits = F.linear(local, first.weight[:, :half]) + of_mean
                for layer in rest_of_network:
                    logits = layer(logits)
            else:
                logits = self.out_conv(torch.cat([local, mean.expand_as(local)], dim=-1))
        log_probabilities: Tensor = logits.to(decision_dtype(patches.dtype)).log_softmax(dim=-1)
        return log_probabilities
