"""GTP: graph-based token propagation (Xu et al., GTP-ViT, WACV 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vitrim.core.assignment import Hard, Soft
from vitrim.core.attention import Attention, KnownMap, map_is_faster
from vitrim.core.block import Site, StepOutput
from vitrim.core.matching import full_precision
from vitrim.core.method import Count, MethodConfig, Needs, Tunable
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, per_layer
from vitrim.core.scoring import ScorerReducer
from vitrim.core.tokens import TokenState, changed, decision_dtype, no_gradient, take

GraphKind = Literal["mixed", "spatial", "semantic"]


class GTP(MethodConfig):
    """Remove the tokens that regenerate least and are broadcast least, and give their content to their neighbours.

    Formulas and deviations are in docs/methods/gtp.md.

    Example:
        >>> GTP(num_prop=8).counts(196, 12)[-1]
        100
    """

    name = "gtp"
    paper = "GTP-ViT: Efficient Vision Transformers via Graph-based Token Propagation (WACV 2024)"
    runtime = frozenset({"num_prop"})
    tunable = Tunable("num_prop", 0, None, per_layer="num_prop", others={"per": None})

    num_prop: Count | tuple[Count, ...] = Field(
        8, description="patches removed per block, or a list with one per block"
    )
    per: int | None = Field(
        None,
        ge=1,
        description="num_prop is for images of this many patches, and scales with their number; default: it does not",
    )
    propagation: Literal["graph", "none"] = Field("graph", description="'none': discard removed tokens")
    graph: GraphKind = Field("mixed", description="neighbours of a patch: on the grid, by content, or both")
    num_neighbours: int = Field(8, ge=1, description="semantic neighbours of a patch")
    alpha: float = Field(0.1, ge=0.0, description="how much of a removed token its neighbours gain")
    token_scale: bool = Field(True, description="let tokens that gained content attract more attention")
    sparsity: float = Field(1.0, gt=0.0, le=1.0, description="share of the attention map that is kept; 1: all")
    selection: Literal["mixed", "diagonal", "received", "class_token"] = Field(
        "mixed", description="score: the product above, one of its factors, or attention from the class token"
    )

    def faults(self) -> Iterator[str]:
        if self.sparsity < 1.0 and self.last_block != "full":
            yield "sparsity is defined by the whole attention map, so it needs last_block=full"

    def needs(self) -> Needs:
        spatial = self.propagation == "graph" and self.graph != "semantic"
        return Needs(class_token=self.selection == "class_token", attention_map=True, grid=spatial)

    def amounts(self, num_layers: int) -> list[Amount | None]:
        return per_layer(self.num_prop, num_layers, self.per)


@register(GTP)
class GTPReducer(ScorerReducer[GTP]):
    site = "between"
    stable = True
    everywhere = True

    def reduce(self, site: Site, x: Tensor, attention: Attention | None, state: TokenState) -> StepOutput:
        if site == "before" and self.layer.depth == 0 and self.config.propagation == "graph":
            return x, self.start(x, state)
        return super().reduce(site, x, attention, state)

    def carry_out(self, assignment: Hard | Soft, x: Tensor, state: TokenState) -> StepOutput:
        reduced, after = assignment.apply(x, state)
        if "joined" in state.carry and isinstance(assignment, Hard):
            reduced, after = self.propagate(x, state, reduced, after, assignment)
        return reduced, after

    def prepare(self, attention: Attention, state: TokenState) -> Attention:
        decides = self.config.selection != "class_token" and self.num_removed(state) > 0
        if self.config.sparsity == 1.0 and not (decides and map_is_faster(attention)):
            return attention
        known = self.probabilities(attention, state)
        return KnownMap(**attention.parts(), known=known)

    def attend(self, attention: Attention, state: TokenState) -> Tensor:
        return self.scaled(attention, state).output()

    def start(self, x: Tensor, state: TokenState) -> TokenState:
        """Add the graph of tokens (B, N, C), without the prefix (see `patch_graph`), and scales of 1 to the state."""
        p = state.num_prefix
        grid = (1, state.num_patches) if self.config.graph == "semantic" else state.known_grid(GTP.name)
        with no_gradient():
            joined, root = patch_graph(
                x[:, p:].to(decision_dtype(x.dtype)), grid, self.config.graph, self.config.num_neighbours
            )
            carry = {"joined": F.pad(joined, (p, 0, p, 0)), "root": F.pad(root, (p, 0)), "place": state.position}
        if self.config.token_scale:
            carry["scale"] = torch.ones_like(state.size)
        return changed(state, carry=carry)

    def propagate(
        self, x: Tensor, state: TokenState, reduced: Tensor, after: TokenState, assignment: Hard
    ) -> StepOutput:
        """Give the removed tokens of ``x`` (B, N, C) to their neighbours among the ``reduced`` (B, M, C)."""
        n, m, carry = state.num_tokens, after.num_tokens, dict(after.carry)
        # Rows of the graph have moved along with their tokens; columns are still those of the input tokens, so a
        # removed token is found there by the place where it entered.
        stays = torch.zeros(x.shape[0], n, dtype=torch.int8, device=x.device).scatter_(1, assignment.anchor, 1)
        removed = stays.sort(dim=1, stable=True).indices[:, : n - m]
        places = state.carry["place"].gather(1, removed)
        lost = carry["joined"].gather(2, places.unsqueeze(1).expand(-1, m, -1))
        weight = self.config.alpha * normalised(lost, carry["root"], state.carry["root"].gather(1, removed))
        with full_precision(weight):  # scales decide, so in wide precision; tokens in that of the loop
            if self.config.token_scale:
                gained = weight @ state.carry["scale"].gather(1, removed).unsqueeze(-1)
                carry["scale"] = carry["scale"] + gained.squeeze(-1)
            update = weight.to(x.dtype) @ take(x, removed)
        return reduced + update, changed(after, carry=carry)

    def score(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor:
        return self.importance(attention, state)[:, state.num_prefix :]

    def importance(self, attention: Attention, state: TokenState) -> Tensor:
        """(B, N) of all tokens, in at least float32; the lowest patches go."""
        if self.config.selection == "class_token":
            return self.scaled(attention, state).class_row().mean(1)
        probabilities = self.probabilities(attention, state)
        # The product of two factors over the heads' maxima, as the paper's score: how much a token keeps of itself, and
        # how much it gives to others.
        itself = probabilities.diagonal(dim1=2, dim2=3).amax(1)
        if self.config.selection == "diagonal":
            return itself
        received = probabilities.sum(2).amax(1)
        return received if self.config.selection == "received" else itself * received

    def scaled(self, attention: Attention, state: TokenState) -> Attention:
        """Add log(t) to the logits of the keys, from the first propagation on."""
        if isinstance(attention, KnownMap) or "scale" not in state.carry or not state.reduced:
            return attention
        bias = state.carry["scale"].log().to(attention.q.dtype)[:, None, None, :]
        return changed(attention, bias=bias if attention.bias is None else attention.bias + bias)

    def probabilities(self, attention: Attention, state: TokenState) -> Tensor:
        """(B, H, N, N) attention map in at least float32, sparsified if asked."""
        probabilities = self.scaled(attention, state).probabilities()
        if isinstance(attention, KnownMap):
            return probabilities
        n = probabilities.shape[-1]
        zeroed = int(n * n * (1 - self.config.sparsity))
        if zeroed == 0:
            return probabilities
        flat = probabilities.detach().flatten(2)
        if torch.compiler.is_exporting():  # kthvalue is faster than sorting, but ONNX lacks it
            kth = flat.sort(dim=2).values[..., zeroed - 1]
        else:
            kth = flat.kthvalue(zeroed, dim=2).values
        threshold = kth[..., None, None]
        return probabilities * (probabilities >= threshold)


def patch_graph(patches: Tensor, grid: tuple[int, int], kind: GraphKind, num_neighbours: int) -> tuple[Tensor, Tensor]:
    """Neighbours (B, P, P), bool, of ``patches`` (B, P, C) on a ``grid``, and D^-1/2 (B, P), for `normalised`."""
    # Bool, because the graph lives as long as the tokens do and should need little memory beside them.
    joined = torch.zeros(patches.shape[0], patches.shape[1], patches.shape[1], dtype=torch.bool, device=patches.device)
    if kind != "semantic":
        joined = joined | spatial_neighbours(grid, patches.device)
    if kind != "spatial":
        joined = joined | semantic_neighbours(patches, num_neighbours)
    degree = joined.sum(2, dtype=patches.dtype)
    return joined, torch.where(degree > 0, degree, 1.0).rsqrt()


def normalised(joined: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """(B, M, N) entries of D^-1/2 G D^-1/2, from ``joined`` (B, M, N) of G, and ``rows`` and ``columns`` of D^-1/2."""
    return joined * rows[:, :, None] * columns[:, None, :]


def spatial_neighbours(grid: tuple[int, int], device: torch.device) -> Tensor:
    """(P, P) bool: the up to 8 patches around each patch."""
    index = torch.arange(grid[0] * grid[1], device=device)
    row, column = index // grid[1], index % grid[1]
    # The larger of the distances in rows and columns is 1 for the 8 patches around.
    near = (row[:, None] - row).abs().maximum((column[:, None] - column).abs())
    return near == 1


def semantic_neighbours(patches: Tensor, num_neighbours: int) -> Tensor:
    """(B, P, P) bool: for each patch, the others of highest cosine; ties can make more than ``num_neighbours``."""
    unit = F.normalize(patches, dim=-1)
    with full_precision(patches):
        similarity = unit @ unit.transpose(-1, -2)
    # A patch is no neighbour of itself, and would be its own most similar one.
    itself = torch.eye(patches.shape[1], dtype=torch.bool, device=patches.device)
    similarity = similarity.masked_fill(itself, -torch.inf)
    count = min(num_neighbours, patches.shape[1] - 1)
    if count == 0:
        return torch.zeros_like(similarity, dtype=torch.bool)
    return similarity >= similarity.topk(count, dim=2).values[..., -1:]
