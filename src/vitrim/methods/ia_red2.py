"""IA-RED2: an interpreter before each group of blocks drops uninformative patches (Pan et al., NeurIPS 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor, nn

from vitrim.core.assignment import Hard, prune
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer, Site, StepOutput, is_bare
from vitrim.core.matching import full_precision
from vitrim.core.method import Adaptive, Count, MethodConfig, Traits, Tunable
from vitrim.core.plan import Layer
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, Remove, at_blocks, check_blocks, removed_by
from vitrim.core.scoring import first_ranked, prune_flagged, real_patches, rounded_up
from vitrim.core.tokens import TokenState, decision_dtype
from vitrim.errors import VitrimError

KEPT = "kept"
LOG_PROBABILITY = "log_probability"


class IARED2(Adaptive):
    """Drop the patches whose learned informative score is below 1/2, before each of three groups of blocks.

    Training removes nothing: a patch draws to stay with probability I_j, and is masked from there on if it does not.
    Reported are ``reduction.aux("kept")``, the share of the P patches that stays, (B,) per group, in evaluation too,
    and ``reduction.aux("log_probability")`` of the draws, (B,), for REINFORCE (see `objective`).

    Formulas and deviations are in docs/methods/ia_red2.md.

    Example:
        >>> IARED2().stages(12)
        (0, 4, 8)
    """

    name = "ia_red2"
    paper = "IA-RED2: Interpretability-Aware Redundancy Reduction for Vision Transformers (NeurIPS 2021)"
    traits = Traits(training_free=False, single_images=True)
    runtime = frozenset({"threshold", "stage"})
    tunable = Tunable("threshold", 0.0, 1.0, digits=4)

    blocks: tuple[int, ...] | None = Field(None, description="first block of each group, 0-based; default three groups")
    threshold: float = Field(0.5, ge=0.0, le=1.0, description="patches with a lower score are dropped in evaluation")
    r: tuple[Count, ...] | None = Field(
        None, description="instead of the threshold: patches dropped before each group, the same number in every image"
    )
    heads: int | None = Field(None, ge=1, description="heads of the interpreter; default as many as the attention has")
    stage: int | None = Field(
        None,
        ge=0,
        description="curriculum: the group whose interpreter is trained, 0-based; earlier ones decide as in "
        "evaluation, later ones keep all patches",
    )

    def stages(self, num_layers: int) -> tuple[int, ...]:
        """Blocks before which an interpreter decides, in order."""
        if self.blocks is not None:
            return tuple(sorted(self.blocks))
        return tuple(sorted({num_layers * third // 3 for third in range(3)}))

    def obstacle(self) -> str | None:
        return "exported, its dropped patches would only be masked, which saves nothing" if self.r is None else None

    def amounts(self, num_layers: int) -> list[Amount | None]:
        stages = self.stages(num_layers)
        check_blocks(stages, num_layers)
        if self.stage is not None and self.stage >= len(stages):
            raise VitrimError(f"ia_red2: stage={self.stage} does not exist: the groups are 0 to {len(stages) - 1}")
        if self.r is None:
            return super().amounts(num_layers)
        return at_blocks(Remove, self.r, stages, num_layers, "r")

    def frozen(self, initial: int, counts: Sequence[float]) -> MethodConfig:
        removed = removed_by(initial, counts)
        return self.changed("threshold", r=tuple(removed[stage] for stage in self.stages(len(counts))))


class IARED2Reducer(Reducer[IARED2]):
    """Parameters: ``interpreter``."""

    site = "before"
    spares_block = True

    def __init__(self, config: IARED2, layer: Layer) -> None:
        super().__init__(config, layer)
        self.interpreter = Interpreter(layer.dim, config.heads or layer.num_heads)

    def follow(self, config: IARED2, layer: Layer) -> None:
        super().follow(config, layer)
        own = config.stages(layer.num_layers).index(layer.depth)
        self.acts = config.stage is None or own <= config.stage
        self.draws = config.stage is None or own == config.stage

    def reduce(self, site: Site, x: Tensor, attention: Attention | None, state: TokenState) -> StepOutput:
        if site != self.site or not self.acts:
            return x, state
        if self.training:
            state = self.mask(x, state)
        else:
            x, state = super().reduce(site, x, attention, state)
        kept = real_patches(state).sum(dim=1) / state.initial_patches
        return x, state.report(KEPT, self.layer.depth, kept)

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        if self.config.r is not None:
            with torch.no_grad():
                best = self.interpreter(x[:, state.num_prefix :]).topk(self.num_keep(state), dim=1).indices
            return prune(state, best.sort(dim=1).values)
        with torch.no_grad():
            stays = self.decide(self.interpreter(x[:, state.num_prefix :]), state)
        return prune_flagged(state, stays, state.num_patches, follows=True)

    def ranking(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor | None:
        score: Tensor = self.interpreter(x[:, state.num_prefix :])
        return score

    def mask(self, x: Tensor, state: TokenState) -> TokenState:
        """Decide in training, by masking."""
        # Detached: no gradient flows from the interpreters into the tokens.
        score = self.interpreter(x[:, state.num_prefix :].detach())
        real = real_patches(state)
        if self.draws:
            stays = (torch.rand_like(score) < score) & real
            chance = torch.where(stays, score, 1.0 - score)
            # a draw of probability 0 does not occur, but rounding does
            log_probability = chance.clamp_min(torch.finfo(chance.dtype).eps).log() * real
            state = state.report(LOG_PROBABILITY, self.layer.depth, log_probability.sum(dim=1))
        else:
            stays = self.decide(score, state)
        return replace(state, mask=state.pad_prefix(stays, True))

    def decide(self, score: Tensor, state: TokenState) -> Tensor:
        """(B, P) bool: real patches with a ``score`` (B, P) not below the threshold, and the best one."""
        real = real_patches(state)
        score = score.masked_fill(~real, -1.0)
        # The best one stays whatever the threshold: an image without patches has no mean.
        stays = ((score >= self.config.threshold) & real).scatter(1, score.argmax(dim=1, keepdim=True), 1)
        if self.config.align == 1:
            return stays
        count, total = (flags.sum(dim=1, keepdim=True) + state.num_prefix for flags in (stays, real))
        return first_ranked(score, rounded_up(count, self.config.align, total) - state.num_prefix)


@register(IARED2)
def _reducer(config: IARED2, layer: Layer) -> type[IARED2Reducer] | None:
    return IARED2Reducer if layer.depth in config.stages(layer.num_layers) else None


class Interpreter(nn.Module):
    """Informative scores (B, P) in (0, 1), at least float32, of the patches (B, P, C)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise VitrimError(f"ia_red2: heads={heads} does not divide the {dim} channels of this model")
        self.heads = heads
        self.policy = nn.Parameter(torch.empty(dim))
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.bias = nn.Parameter(torch.zeros(heads))
        nn.init.trunc_normal_(self.policy)
        for linear in (self.query, self.key):
            nn.init.xavier_uniform_(linear.weight)

    def forward(self, patches: Tensor) -> Tensor:
        wide = decision_dtype(patches.dtype)
        with full_precision(patches):
            if is_bare(self.key) and is_bare(self.query):
                # Both layers are linear, so that a head's score is one product of a patch with a vector made once.
                key = (self.key.weight.to(wide) @ self.policy.to(wide)).view(self.heads, 1, -1)
                query = self.query.weight.to(wide).view(self.heads, key.shape[2], -1)
                vectors = (key @ query).squeeze(1)  # (H, C)
                logits = patches.to(wide) @ vectors.t() * key.shape[2] ** -0.5
            else:  # wrapped layers must be called
                key = self.key(self.policy).to(wide).view(self.heads, -1)
                query = self.query(patches.to(self.policy.dtype)).to(wide).unflatten(-1, key.shape)
                logits = (query * key).sum(dim=-1) * key.shape[1] ** -0.5
        score: Tensor = (logits + self.bias.to(wide)).sigmoid().mean(dim=-1)
        return score
