"""Assignments of N old tokens to M new ones, made by `prune`, `merge` or a `Soft` matrix.

An assignment determines the pooled tokens, their expansion back, sizes, sources and positions. Apart from
`TokenState.refill`, nothing else moves tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitrim.core import compiled
from vitrim.core.tokens import (
    Banked,
    BankedIndices,
    Mixed,
    Moved,
    TokenState,
    changed,
    decision_dtype,
    flat_index,
    new_index,
    take,
    take_flat,
)
from vitrim.errors import VitrimError


@dataclass(frozen=True)
class Hard:
    """Every old token goes to at most one new token. Made by `prune` or `merge`, never by hand.

    Attributes:
        anchor: (B, M) int64, the old index each new token grows from, in output order.
        moved: (B, R) int64, old indices that join another token; None for a pure selection.
        into: (B, R) int64, the new index each moved token joins; M means none (with ``valid`` or ``ragged``).
        weight: (B, N) pooling weights; None pools by size.
        normalise: divide by the sum of a group's weights; False gives a plain weighted sum (EViT's fused token).
        maximum: pool by elementwise maximum and ignore the weights.
        valid: (B, M) bool, False for padding; None if all new tokens are real.
        ragged: all new tokens are real, and some moved tokens of some images join none: these are lost.
        dropped: (B, K) int64, old indices that go to the bank instead of being lost; None for none.
    """

    anchor: Tensor
    moved: Tensor | None = None
    into: Tensor | None = None
    weight: Tensor | None = None
    normalise: bool = True
    maximum: bool = False
    valid: Tensor | None = None
    ragged: bool = False
    dropped: Tensor | None = None

    @property
    def is_selection(self) -> bool:
        """True if no token joins another: query rows can then be selected before attention."""
        return self.moved is None

    def pool(self, x: Tensor, size: Tensor, new_size: Tensor | None = None, gained: Tensor | None = None) -> Tensor:
        """Pool old tokens ``x`` (B, N, C) with sizes (B, N) into new tokens (B, M, C), in the dtype of x.

        ``new_size`` (B, M) and ``gained`` (B, R) are the sizes of new and moved tokens, where already known.
        """
        if self._suits_loop(x, size):
            return self._pool_by_loop(x, size)[0]
        weight = size if self.weight is None else self.weight
        pooled = take(x, self.anchor)
        if self.maximum:
            return self._maximum(x, pooled)
        if not self.normalise:
            pooled = pooled * weight.gather(1, self.anchor).unsqueeze(-1).to(x.dtype)
        if self.moved is None or not self._merges():
            return pooled
        into, joins = self._targets()
        share = weight.gather(1, self.moved) if gained is None or self.weight is not None else gained
        if joins is not None:
            share = share * joins
        # A mean is t + sum_s share_s (x_s - t), where t is the anchor: only the R moved rows are touched, not all M.
        # Shares are at least float32, since half precision loses what many small ones add.
        wide, flat, rows = decision_dtype(x.dtype), pooled.flatten(0, 1), flat_index(into, self.anchor.shape[1])
        update = take_flat(x, self.moved)
        if self.normalise:
            total = new_size if self.weight is None else None
            if total is None:
                total = weight.gather(1, self.anchor).scatter_add(1, into, share)
            share = share / total.gather(1, into)
            update = update.to(wide) - flat.index_select(0, rows)
        flat.index_add_(0, rows, (update * share.view(-1, 1)).to(x.dtype))  # in place: a view of pooled, which is new
        return pooled

    def _maximum(self, x: Tensor, pooled: Tensor) -> Tensor:
        if self.moved is None or self.moved.shape[1] == 0:
            return pooled
        into, joins = self._targets()
        update = take_flat(x, self.moved)
        if joins is not None:
            update = update.masked_fill(~joins.view(-1, 1), -torch.inf)
        rows = flat_index(into, self.anchor.shape[1]).unsqueeze(-1).expand(-1, x.shape[2])
        # The anchor is in `pooled` already, so amax covers the whole group.
        flat = pooled.flatten(0, 1).scatter_reduce(0, rows, update, "amax")
        return flat.view_as(pooled)

    def target(self, n: int) -> Tensor:
        """(B, n) int64: the new index of each of the n old tokens, -1 where it is gone."""
        return new_index(n, self.anchor, self.moved, self.into, self._real())

    def expand(self, y: Tensor, n: int) -> Tensor:
        """Copy new tokens (B, M, C) to the n old places, (B, n, C); dropped tokens become zeros."""
        if self._real() is None and compiled.suit(y):
            # Empty, because the loop writes every place: zeros where a token is gone.
            places = y.new_empty(y.shape[0], n, y.shape[2])
            moved, into = (self.anchor[:, :0], self.anchor[:, :0]) if self.moved is None else (self.moved, self.into)
            compiled.EXPAND(y, self.anchor, moved, into, places)
            return places
        target = self.target(n)
        if not self._loses(n) and self.dropped is None:
            return take(y, target)
        # -1 would index the last token: read token 0 there, and make it zero.
        return take(y, target.clamp_min(0)) * (target >= 0).unsqueeze(-1).to(y.dtype)

    def apply(self, x: Tensor, state: TokenState) -> tuple[Tensor, TokenState]:
        """Reduce tokens (B, N, C) and their state to tokens (B, M, C) and the new `TokenState`."""
        if self._suits_loop(x, state.size):
            pooled, size = self._pool_by_loop(x, state.size)
            return pooled, self.advance(x, state, size)
        gained = None if self.moved is None else state.size.gather(1, self.moved)
        size = self._sizes(state, gained)
        return self.pool(x, state.size, size, gained), self.advance(x, state, size)

    def _suits_loop(self, x: Tensor, size: Tensor) -> bool:
        if not self._merges() or self._real() is not None or self.maximum:
            return False
        weight = size if self.weight is None else self.weight
        return compiled.suit(weight) and compiled.suit(x, dtypes=(*compiled.DTYPES, *compiled.HALF))

    def _pool_by_loop(self, x: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """`pool` and the new sizes (B, M) in one loop; half precision is summed in float32."""
        wide = x.float() if x.dtype in compiled.HALF else x
        pooled = wide.new_empty(x.shape[0], self.anchor.shape[1], x.shape[2])
        new_size = size.new_empty(self.anchor.shape)
        weight = size if self.weight is None else self.weight
        compiled.POOL(wide, size, weight, self.normalise, self.anchor, self.moved, self.into, pooled, new_size)
        return pooled.to(x.dtype), new_size

    def advance(self, x: Tensor, state: TokenState, size: Tensor | None = None) -> TokenState:
        """The state after the reduction. ``x`` (B, N, C) fills the bank; ``size`` (B, M) if already known."""
        bank, banked = state.bank, None
        if self.dropped is not None:
            banked = BankedIndices(state.index_map, self.dropped)
            bank = (*bank, self._banked(x, state, self.dropped, banked))
        # a banked member of a group returns with its own value, so its place must not point to the group
        hidden = banked if state.banking and self.moved is not None else None
        carry = {name: _take_any(value, self.anchor) for name, value in state.carry.items()} if state.carry else {}
        return changed(
            state,
            size=self._sizes(state) if size is None else size,
            index_map=Moved(state.index_map, self.anchor, self.moved, self.into, self._real(), state.pruned, hidden),
            mask=self._mask(state),
            uniform=state.uniform and not self._merges(),
            reduced=True,
            lost=state.lost or self._loses(state.num_tokens),
            bank=bank,
            carry=carry,
        )

    @staticmethod
    def _banked(x: Tensor, state: TokenState, dropped: Tensor, indices: BankedIndices) -> Banked:
        carry = {name: _take_any(value, dropped) for name, value in state.carry.items()}
        size = state.size[:, : dropped.shape[1]] if state.uniform else state.size.gather(1, dropped)
        return Banked(take(x, dropped), size, indices, carry)

    def _targets(self) -> tuple[Tensor, Tensor | None]:
        """(B, R) new indices of moved tokens, in [0, M), and a mask of the moves that happen (None: all do)."""
        assert self.into is not None
        if self.valid is None and not self.ragged:  # every move happens
            return self.into, None
        joins = self.into < self.anchor.shape[1]
        # Moves to none go to token 0 with a share of zero: a scatter has no place for "nowhere".
        return torch.where(joins, self.into, 0), joins

    def _merges(self) -> bool:
        if self.moved is None or not torch.compiler.is_exporting():
            return self.moved is not None and self.moved.shape[1] > 0
        from torch.fx.experimental.symbolic_shapes import guard_or_true  # takes a second to load

        return bool(guard_or_true(self.moved.shape[1] > 0))  # a data-dependent count: assume that some merge

    def _real(self) -> Tensor | None:
        """``valid``, written out where some moves go nowhere although all new tokens are real."""
        return torch.ones_like(self.anchor, dtype=torch.bool) if self.ragged else self.valid

    def _sizes(self, state: TokenState, gained: Tensor | None = None) -> Tensor:
        if state.uniform and not self._merges():
            if torch.compiler.is_exporting():  # a data-dependent count cannot bound a slice
                return state.size.new_ones(self.anchor.shape)
            return state.size[:, : self.anchor.shape[1]]  # all are 1
        pooled = state.size.gather(1, self.anchor)
        if self.valid is not None:
            pooled = torch.where(self.valid, pooled, torch.ones_like(pooled))  # padding: log(1) = 0
        if self.moved is None or not self._merges():
            return pooled
        into, joins = self._targets()
        gained = state.size.gather(1, self.moved) if gained is None else gained
        return pooled.scatter_add(1, into, gained if joins is None else gained * joins)

    def _mask(self, state: TokenState) -> Tensor | None:
        if self.valid is not None:
            return self.valid
        return None if state.mask is None else state.mask.gather(1, self.anchor)

    def _loses(self, n: int) -> bool:
        """True if some old token is neither kept, moved nor banked."""
        # With a count per image, a merge lists every token that may move, so it loses none; a selection loses what it
        # leaves out.
        if self.ragged:
            return self.dropped is None
        if self.valid is not None:
            return self.moved is None
        left = self.anchor.shape[1]
        for others in (self.moved, self.dropped):
            left += 0 if others is None else others.shape[1]
        # An exported count is a symbol: answer what holds for the usual image instead of guarding the graph by it.
        if torch.compiler.is_exporting():
            from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

            return bool((guard_or_true if self.moved is None else guard_or_false)(left < n))
        return left < n


@dataclass(frozen=True)
class Soft:
    """Every new patch token is a weighted mix of all old ones (PatchMerger, SiT, Sinkhorn). The prefix is kept.

    For plots, `position` and `source` follow the largest weights.

    Attributes:
        matrix: (B, M, P) weights of the P old patch tokens in each of the M new ones.
        values: (B, P, C) vectors to mix; None for the patch tokens themselves.
    """

    matrix: Tensor
    values: Tensor | None = None

    def apply(self, x: Tensor, state: TokenState) -> tuple[Tensor, TokenState]:
        """Do what `Hard.apply` does, to tokens (B, prefix + M, C)."""
        if state.carry or state.bank or state.mask is not None:
            raise NotImplementedError("a soft assignment cannot move a mask, a bank or per-token carry")
        p = state.num_prefix
        values = x[:, p:] if self.values is None else self.values
        mixed = self.matrix.to(values.dtype) @ values
        return torch.cat([x[:, :p], mixed.to(x.dtype)], dim=1), self._advance(state)

    def _advance(self, state: TokenState) -> TokenState:
        p, matrix = state.num_prefix, self.matrix.detach().to(state.size.dtype)
        # Old sizes are divided in proportion to the weights, which keeps their sum.
        share = matrix / matrix.sum(1, keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)
        size = (share @ state.size[:, p:, None]).squeeze(-1)
        return replace(
            state,
            size=torch.cat([state.size[:, :p], size], dim=1),
            index_map=Mixed(state.index_map, p, matrix),
            uniform=False,
            reduced=True,
            mixed=True,
        )


def prune(state: TokenState, keep: Tensor, *, valid: Tensor | None = None, dropped: Tensor | None = None) -> Hard:
    """Keep the prefix and the patch tokens ``keep``, in that order.

    Args:
        keep: (B, K) patch indices in [0, P), not counting the prefix.
        valid: (B, K) bool, False for padding where images keep different numbers of tokens.
        dropped: (B, R) patch indices that go to the bank; by default all others if the state is ``banking``, else none.

    Example:
        >>> state = TokenState.start(torch.zeros(1, 5, 8), num_prefix=1)
        >>> prune(state, torch.tensor([[2, 0]])).anchor
        tensor([[0, 3, 1]])
    """
    p = state.num_prefix
    if dropped is None and valid is None:
        dropped = _left_out(state, keep)
    return Hard(
        anchor=_with_prefix(keep, p),
        valid=None if valid is None else _prefix_true(valid, p),
        dropped=None if dropped is None else dropped + p,
    )


def merge(
    state: TokenState,
    keep: Tensor,
    moved: Tensor,
    into: Tensor,
    *,
    weight: Tensor | None = None,
    valid: Tensor | None = None,
    normalise: bool = True,
    maximum: bool = False,
    ragged: bool = False,
    dropped: Tensor | None = None,
) -> Hard:
    """Keep the prefix and the patch tokens ``keep``, in that order, and pool the patch tokens ``moved`` into them.

    Args:
        keep: (B, K) patch indices in [0, P).
        moved: (B, R) patch indices that join another token.
        into: (B, R) the entry of ``keep`` that each joins, in [0, K); K means none (with ``valid`` or ``ragged``).
        weight: (B, N) pooling weights, prefix included, else `VitrimError`; None pools by size.
        valid, normalise, maximum, ragged: as in `Hard`.
        dropped: (B, D) patch indices that go to the bank with their own values, members of groups too. By default, if
            the state is ``banking``: all that are neither kept nor moved, or all ``moved`` if ``ragged``.

    Example:
        >>> state = TokenState.start(torch.zeros(1, 4, 8), num_prefix=1)
        >>> hard = merge(state, torch.tensor([[0, 2]]), torch.tensor([[1]]), torch.tensor([[0]]))
        >>> hard.target(4)
        tensor([[0, 1, 1, 2]])
    """
    p = state.num_prefix
    if weight is not None and weight.shape != state.size.shape:  # the gather would silently read other tokens' weights
        raise VitrimError(
            f"expected a pooling weight for each of {state.num_tokens} tokens, those in front of the patches counted, "
            f"{tuple(state.size.shape)}, got {tuple(weight.shape)}"
        )
    if dropped is None and ragged:
        # Those that join none cannot be told from the others by a fixed shape, so all go to the bank; `advance` hides
        # the places of the members.
        dropped = moved if state.banking else None
    elif dropped is None and valid is None:
        dropped = _left_out(state, torch.cat([keep, moved], dim=1) if state.banking else keep)
    return Hard(
        anchor=_with_prefix(keep, p),
        moved=moved + p,
        into=into + p,
        weight=weight,
        normalise=normalise,
        maximum=maximum,
        valid=None if valid is None else _prefix_true(valid, p),
        ragged=ragged,
        dropped=None if dropped is None else dropped + p,
    )


def merge_of(index: Tensor, r: int) -> Hard:
    """The merge that a loop wrote into ``index`` (B, N + r): anchors, the r moved tokens, and what they join."""
    # N + r = kept + 2 r, because every moved token stands twice: as itself and by what it joins.
    kept = index.shape[1] - 2 * r
    return Hard(index[:, :kept], moved=index[:, kept : kept + r], into=index[:, kept + r :])


def _left_out(state: TokenState, staying: Tensor) -> Tensor | None:
    """(B, P - K) patches not among ``staying`` (B, K), in order; None unless the state is banking."""
    count = state.num_patches - staying.shape[1]
    if not state.banking or count == 0:
        return None
    # A stable sort of the flags lists the tokens left out first, in order, without a data-dependent shape.
    stays = torch.zeros(staying.shape[0], state.num_patches, dtype=torch.int8, device=staying.device)
    return stays.scatter(1, staying, 1).sort(dim=1, stable=True).indices[:, :count]


def _with_prefix(keep: Tensor, num_prefix: int) -> Tensor:
    if num_prefix <= 1:  # the usual class token: padding with its index 0 is one operation instead of three
        return torch.constant_pad_nd(keep + num_prefix, (num_prefix, 0))
    prefix = torch.arange(num_prefix, device=keep.device).expand(keep.shape[0], num_prefix)
    return torch.cat([prefix, keep + num_prefix], dim=1)


def _prefix_true(valid: Tensor, num_prefix: int) -> Tensor:
    return torch.cat([valid.new_ones(valid.shape[0], num_prefix), valid], dim=1)


def _take_any(value: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` (B, M) of a per-token tensor (B, N) or (B, N, ...)."""
    if value.dim() == 2:
        return value.gather(1, index)
    return take(value.flatten(2), index).view(*index.shape, *value.shape[2:])
