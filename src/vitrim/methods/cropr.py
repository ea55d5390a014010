"""Cropr: routers taught by auxiliary heads prune after every block (Bergner et al., Token Cropr, CVPR 2025)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vitrim.core.assignment import Hard, prune
from vitrim.core.attention import Attention, merge_heads, split_heads
from vitrim.core.block import Reducer, Site, StepOutput, draw_linear_, is_bare
from vitrim.core.matching import full_precision
from vitrim.core.method import Count, MethodConfig, Restore, Traits, Tunable
from vitrim.core.plan import Layer
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, BringBack, Remove, one_each
from vitrim.core.scoring import ScorerReducer
from vitrim.core.tokens import TokenState, decision_dtype
from vitrim.errors import VitrimError

AUXILIARY = "auxiliary_logits"


class Cropr(MethodConfig):
    """Prune the same number of patches after every block, by routers that auxiliary heads teach.

    Training reports ``reduction.aux("auxiliary_logits")``: per router logits, or without a class head (B, N, C) or (B,
    C).

    Formulas and deviations are in docs/methods/cropr.md.

    Example:
        >>> Cropr(r=8).counts(196, 12)
        [196, 187, 179, 171, 163, 155, 147, 139, 131, 123, 115, 196]
    """

    name = "cropr"
    paper = "Token Cropr: Faster ViTs for Quite a Few Tasks (CVPR 2025)"
    traits = Traits(training_free=False)
    runtime = frozenset({"r"})
    tunable = Tunable("r", 0, None, per_layer="r", others={"per": None})

    r: Count | tuple[Count, ...] = Field(
        8, description="patches that each router removes, or a list with one amount per router"
    )
    per: int | None = Field(
        None,
        ge=1,
        description="r is for images of this many patches, and scales with their number; default: it does not scale",
    )
    first_extra: int = Field(1, ge=0, description="further patches that the first router removes; 1 for a class token")
    fusion: Literal["last_layer", "concat", "none"] = Field(
        "last_layer", description="pruned tokens rejoin before the last block, after it, or never"
    )
    num_queries: int = Field(1, ge=1, le=4096, description="learned queries per router; 1 for classification")
    num_heads: int = Field(1, ge=1, description="heads of the cross-attention")
    pre_attn_norm: bool = Field(False, description="layer norm before the router")
    q_proj: bool = Field(False, description="project the queries")
    k_proj: bool = Field(False, description="project the keys")
    v_proj: bool = Field(False, description="project the values")
    mlp: bool = Field(True, description="MLP in the cross-attention")
    mlp_ratio: float = Field(4.0, gt=0.0, le=64.0, description="width of the MLP in channels of the model")

    def faults(self) -> Iterator[str]:
        if self.restore is not None:
            yield f"restore={self.restore} does not go with cropr: give fusion"

    def restoring(self) -> Restore:
        return "zeros" if self.fusion == "none" else "end"

    def rejoining(self) -> Mapping[str, MethodConfig]:
        """Variants whose pruned tokens come back before the last block, and after it; for `tsne`."""
        return {fusion: self.changed(fusion=fusion, last_block="full") for fusion in ("last_layer", "concat")}

    def stages(self, num_layers: int) -> tuple[int, ...]:
        """The blocks before which a router acts."""
        return tuple(range(1, num_layers if self.fusion == "none" else num_layers - 1))

    def amounts(self, num_layers: int) -> list[Amount | None]:
        routers = self.stages(num_layers)
        if not routers:
            raise VitrimError(f"cropr with fusion={self.fusion} needs more than {num_layers} blocks")
        schedule: list[Amount | None] = [None] * num_layers
        for depth, count in zip(routers, one_each(self.r, len(routers), "cropr: r"), strict=True):
            schedule[depth] = Remove(count + (self.first_extra if depth == 1 else 0), self.per)
        if self.fusion != "none":
            schedule[-1] = BringBack()
        return schedule


class RoutingReducer(ScorerReducer[Cropr]):
    """Parameters: ``cross_attn``, of which only queries and projections matter at inference, and ``head``."""

    site = "before"
    stable = True
    spares_block = True

    def __init__(self, config: Cropr, layer: Layer) -> None:
        super().__init__(config, layer)
        self.cross_attn = CrossAttention(config, layer.dim)
        self.head = nn.Sequential()
        if layer.num_classes:
            self.head.add_module("norm", nn.LayerNorm(layer.dim))
            self.head.add_module("head", nn.Linear(layer.dim, layer.num_classes))
        draw_linear_(self)

    def reduce(self, site: Site, x: Tensor, attention: Attention | None, state: TokenState) -> StepOutput:
        if site == "before" and self.training:
            # Detached: the auxiliary heads teach the routers, not the model.
            aggregated = self.cross_attn(x.detach())
            if aggregated.shape[1] == 1:
                aggregated = aggregated[:, 0]
            state = state.report(AUXILIARY, self.layer.depth, self.head(aggregated))
        return super().reduce(site, x, attention, state)

    def score(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor:
        return self.cross_attn.scores(x[:, state.num_prefix :])

    def keep_best(self, order: Tensor, state: TokenState) -> Hard:
        keep = self.num_keep(state)
        return prune(state, order[:, :keep], dropped=None if self.config.fusion == "none" else order[:, keep:])


class FusingReducer(Reducer[Cropr]):
    """Last layer fusion: all pruned tokens rejoin before the block."""

    site: ClassVar[Site] = "before"

    def reduce(self, site: Site, x: Tensor, attention: Attention | None, state: TokenState) -> StepOutput:
        return state.refill(x) if site == self.site else (x, state)


class ConcatReducer(FusingReducer):
    """Token Concat: all pruned tokens rejoin after the block."""

    site = "after"

    def remember(self, attention: Attention, state: TokenState) -> None:
        """Keep nothing: q, k and v need not live through the MLP."""


@register(Cropr)
def _reducer(config: Cropr, layer: Layer) -> type[Reducer[Cropr]] | None:
    if layer.is_last and config.fusion != "none":
        return FusingReducer if config.fusion == "last_layer" else ConcatReducer
    return None if layer.amount is None else RoutingReducer


class CrossAttention(nn.Module):
    """Score tokens of C = ``dim`` channels by learned queries, and in training aggregate them by the same queries."""

    def __init__(self, config: Cropr, dim: int) -> None:
        super().__init__()
        if dim % config.num_heads:
            raise VitrimError(f"cropr: num_heads={config.num_heads} does not divide the {dim} channels of this model")
        self.num_heads = config.num_heads
        self.queries = nn.Parameter(torch.empty(1, config.num_queries, dim))
        nn.init.trunc_normal_(self.queries)  # truncated at two standard deviations, then scaled
        self.queries.data.mul_(dim**-0.5)
        self.attn_norm = nn.LayerNorm(dim, eps=1e-6) if config.pre_attn_norm else nn.Identity()
        self.q = nn.Linear(dim, dim, bias=False) if config.q_proj else None
        self.k = nn.Linear(dim, dim, bias=False) if config.k_proj else None
        self.v = nn.Linear(dim, dim, bias=False) if config.v_proj else None
        self.proj = nn.Linear(dim, dim) if config.num_heads > 1 else nn.Identity()
        self.mlp: nn.Sequential | None = None
        if config.mlp:
            hidden = int(dim * config.mlp_ratio)
            self.mlp = nn.Sequential()
            self.mlp.add_module("norm", nn.LayerNorm(dim, eps=1e-6))
            self.mlp.add_module("fc1", nn.Linear(dim, hidden))
            self.mlp.add_module("act", nn.GELU())
            self.mlp.add_module("fc2", nn.Linear(hidden, dim))

    def query(self) -> Tensor:
        """(C,) the sum of the projected queries."""
        # Logits are linear in the query, so their sum over queries and heads is one product with the sum of the
        # queries.
        queries: Tensor = self.queries if self.q is None else self.q(self.queries)
        return queries.sum(dim=(0, 1))

    def scores(self, x: Tensor) -> Tensor:
        """(B, M) score of each token of ``x`` (B, M, C): unscaled logits, summed over queries and heads."""
        wide = decision_dtype(x.dtype)
        with full_precision(x):
            normed: Tensor = self.attn_norm(x.to(self.queries.dtype))
            if self.k is None:
                return normed.to(wide) @ self.query().to(wide)
            if is_bare(self.k):  # the query times the projection: one vector for all tokens
                return normed.to(wide) @ (self.query() @ self.k.weight).to(wide)
            keys: Tensor = self.k(normed)
            return keys.to(wide) @ self.query().to(wide)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) what the queries gather from the tokens ``x`` (B, M, C)."""
        x = self.attn_norm(x)
        q = (self.queries if self.q is None else self.q(self.queries)).expand(x.shape[0], -1, -1)
        k = x if self.k is None else self.k(x)
        v = x if self.v is None else self.v(x)
        q, k, v = (split_heads(t, self.num_heads) for t in (q, k, v))
        z: Tensor = self.proj(merge_heads(F.scaled_dot_product_attention(q.to(v.dtype), k, v)))
        return z if self.mlp is None else z + self.mlp(z)
