"""Cells: squares of patches that a connector joins behind the tower, and that are therefore reduced as wholes.

The tokens of a cell are consecutive in all blocks. A method sees the mean token of each cell and the keys of its
patches side by side; its decision holds for every member: the first patch of a cell joins the first of another, the
second the second. Amounts count cells.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.core.assignment import Hard, Soft, prune
from vitrim.core.attention import Attention
from vitrim.core.block import Idle, Reducer
from vitrim.core.method import MethodConfig
from vitrim.core.plan import HostFacts, Layer
from vitrim.core.registry import make_reducer
from vitrim.core.tokens import IndexMap, TokenState, decision_dtype
from vitrim.errors import UnsupportedModelError

OWN_WAYS = ("reduce", "carry_out", "query", "attend_reduced", "attend", "remember")
"""A reducer that overrides one of these methods does more than decide."""

PATCHES_READ = (
    "this method reads the attention map or the places of single patches, and what follows the tower joins cells"
)


@dataclass(frozen=True)
class CellAttention(Attention):
    """The attention of a block as a method that decides about cells sees it: q, k, v of patches, scores of cells."""

    area: int = field(kw_only=True)
    num_prefix: int = field(kw_only=True)

    @classmethod
    def of(cls, attention: Attention, area: int, num_prefix: int) -> CellAttention:
        return cls(**attention.parts(), area=area, num_prefix=num_prefix)

    @property
    def keys(self) -> Tensor:
        """(B, H, p + Q, area * d), the keys of each cell's patches side by side."""
        return side_by_side(super().keys, self.area, self.num_prefix)

    @property
    def values(self) -> Tensor:
        """(B, H, p + Q, area * d), the values of each cell's patches side by side."""
        return side_by_side(super().values, self.area, self.num_prefix)

    def mean_keys(self) -> Tensor:
        # The property of the base class: `keys` here has the patches side by side already.
        keys = Attention.keys.fget(self).mean(dim=1, dtype=decision_dtype(self.k.dtype))  # type: ignore[attr-defined]
        return side_by_side(keys, self.area, self.num_prefix)

    def class_row(self) -> Tensor:
        return self._mean(super().class_row())

    def column_mean(self) -> Tensor:
        plain = Attention(**{name: getattr(self, name) for name in Attention.__dataclass_fields__})
        return self._mean(plain.column_mean())

    def probabilities(self) -> Tensor:
        # allowed for the class token's row (`class_row`); the whole map is one of patches
        if self.q.shape[2] > self.num_prefix:
            raise UnsupportedModelError(PATCHES_READ)
        return super().probabilities()

    def _mean(self, received: Tensor) -> Tensor:
        """Values (..., p + P) of patches averaged over cells, (..., p + Q)."""
        cells = received[..., self.num_prefix :].unflatten(-1, (-1, self.area)).mean(dim=-1)
        return torch.cat([received[..., : self.num_prefix], cells], dim=-1)


class CellIndexMap(IndexMap):
    """The index map of cells, indexed by their first patches."""

    def __init__(self, before: IndexMap, area: int, num_prefix: int) -> None:
        inputs, tokens = ((count - num_prefix) // area for count in (before.num_inputs, before.num_tokens))
        super().__init__(num_inputs=num_prefix + inputs, num_tokens=num_prefix + tokens)

    def _find_source(self) -> Tensor:
        raise UnsupportedModelError(PATCHES_READ)

    def _find_position(self) -> Tensor:
        raise UnsupportedModelError(PATCHES_READ)


def side_by_side(x: Tensor, area: int, num_prefix: int) -> Tensor:
    """Tokens (..., p + Q * area, d), cell by cell, as (..., p + Q, area * d). Prefix tokens are repeated.

    Example:
        >>> side_by_side(torch.tensor([[[1.0], [2.0], [3.0]]]), 2, 1)
        tensor([[[1., 1.],
                 [2., 3.]]])
    """
    # A prefix token has no members: its own value in all parts gives the width that cells have.
    front = x[..., :num_prefix, :].repeat(*([1] * (x.dim() - 1)), area)
    cells = x[..., num_prefix:, :].unflatten(-2, (-1, area)).flatten(-2)
    return torch.cat([front, cells], dim=-2)


class CellReducer(Reducer[Any]):
    """Reduces whole cells as an inner reducer decides.

    ``gathers``: patches come in raster order of a square image, so the first block makes a cell's members consecutive.
    """

    def __init__(self, inner: Reducer[Any], area: int, num_prefix: int, gathers: bool) -> None:
        nn.Module.__init__(self)
        self.inner = inner
        self.area = area
        self.num_prefix = num_prefix
        self.gathers = gathers
        self.site, self.everywhere = inner.site, inner.everywhere  # type: ignore[misc]  # instance attributes
        super().follow(inner.config, inner.layer)

    def follow(self, config: Any, layer: Layer) -> None:
        self.inner.follow(config, layer)
        super().follow(config, layer)

    def _apply(self, fn: Any, recurse: bool = True) -> CellReducer:
        nn.Module._apply(self, fn, recurse)  # the inner reducer initialises its own tensors
        return self

    def reduce(self, site: Any, x: Tensor, attention: Attention | None, state: TokenState) -> tuple[Tensor, TokenState]:
        if site == "before" and self.gathers and not state.reduced:
            x, state = gathered(state, self.area).apply(x, state)
        return (x, state) if isinstance(self.inner, Idle) else super().reduce(site, x, attention, state)

    def forward(self, x: Tensor, attention: Attention | None, state: TokenState) -> Hard | Soft | None:
        p = self.num_prefix
        tokens = torch.cat([x[:, :p], x[:, p:].unflatten(1, (-1, self.area)).mean(dim=2)], dim=1)
        seen = None if attention is None else CellAttention.of(attention, self.area, p)
        decided = self.inner(tokens, seen, self.cells(state))
        assert not isinstance(decided, Soft)
        return None if decided is None else self.spread(decided)

    def cells(self, state: TokenState) -> TokenState:
        """The state of the cells; all members of a cell have the same size."""
        p = self.num_prefix

        # Members agree in size and mask, so the first patch of a cell speaks for it.
        def first(values: Tensor) -> Tensor:
            return torch.cat([values[:, :p], values[:, p :: self.area]], dim=1)

        return replace(
            state,
            size=first(state.size),
            index_map=CellIndexMap(state.index_map, self.area, p),
            mask=None if state.mask is None else first(state.mask),
            grid=None,
        )

    def spread(self, decided: Hard) -> Hard:
        """The assignment of all tokens that follows from an assignment of cells."""
        return replace(
            decided,
            anchor=self.members(decided.anchor, self.num_prefix),
            moved=None if decided.moved is None else self.members(decided.moved, 0),
            into=None if decided.into is None else self.members(decided.into, 0),
            weight=None if decided.weight is None else self.repeat(decided.weight),
            valid=None if decided.valid is None else self.repeat(decided.valid),
            dropped=None if decided.dropped is None else self.members(decided.dropped, 0),
        )

    def members(self, cells: Tensor, front: int) -> Tensor:
        """The tokens of ``cells`` (B, n), indices among all cells, of which the first ``front`` are prefix tokens."""
        p = self.num_prefix
        inside = torch.arange(self.area, device=cells.device)
        # Cell c holds the patches c * area ... c * area + area - 1 behind the prefix, as `gathered` ordered them.
        patches = p + (cells[:, front:, None] - p) * self.area + inside
        return torch.cat([cells[:, :front], patches.flatten(1)], dim=1)

    def repeat(self, values: Tensor) -> Tensor:
        """Values (B, p + n) of cells repeated for their members."""
        p = self.num_prefix
        return torch.cat([values[:, :p], values[:, p:].repeat_interleave(self.area, dim=1)], dim=1)


def gathered(state: TokenState, area: int) -> Hard:
    """The reordering that makes the members of each cell consecutive, for a square image in raster order.

    Example:
        >>> gathered(TokenState.start(torch.zeros(1, 16, 8), num_prefix=0), 4).anchor[0, :8]
        tensor([0, 1, 4, 5, 2, 3, 6, 7])
    """
    side, cell = isqrt(state.num_patches), isqrt(area)
    if side * side != state.num_patches or side % cell:
        raise UnsupportedModelError(
            f"expected patches of a square image in whole cells of {cell} x {cell}, got {state.num_patches} patches"
        )
    # (row of cells, row in a cell, column of cells, column in a cell); the transposition puts a cell's members last.
    order = torch.arange(side * side, device=state.size.device).view(side // cell, cell, side // cell, cell)
    return prune(state, order.transpose(1, 2).reshape(1, -1).expand(state.size.shape[0], -1))


def build_reducer(config: MethodConfig, layer: Layer, block: nn.Module, facts: HostFacts) -> Reducer[Any]:
    """Make the reducer of one layer, with the device, dtype and mode of its block."""
    reducer = make_reducer(config, layer)
    if facts.cell > 1:
        kind, needs = type(reducer), config.needs()
        own = [name for name in OWN_WAYS if getattr(kind, name) not in (getattr(Reducer, name), getattr(Idle, name))]
        if own or config.kind == "soft" or needs.grid or needs.attention_map:
            raise UnsupportedModelError(
                f"{config.name} does more than to choose tokens that stay or join, or reads places of single patches; "
                "what follows this tower joins cells of patches, which are reduced as wholes: use a method such as "
                "tome or topk"
            )
        gathers = layer.depth == 0 and not facts.cell_by_cell
        reducer = CellReducer(reducer, facts.cell**2, facts.num_prefix, gathers)
    if next(chain(reducer.parameters(), reducer.buffers()), None) is not None:
        parameter = next((p for p in block.parameters() if p.is_floating_point()), None)
        if parameter is not None:
            reducer = reducer.to(device=parameter.device, dtype=parameter.dtype)
    return reducer.train(block.training)
