"""Where the current tokens come from. Most forwards never ask, so it is computed when somebody does.

A reduction leaves a link to what was before it; the chain is followed, once, from the first question on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Places:
    """Input tokens and current tokens, to and fro. Subclasses say how a step changes both."""

    def __init__(self, source: Tensor | None = None, position: Tensor | None = None) -> None:
        self._source = source
        self._position = position

    @property
    def source(self) -> Tensor:
        """(B, N0) int64, the current index that holds input token i, -1 where it was pruned."""
        if self._source is None:
            self._source = self._find_source()
        return self._source

    @property
    def position(self) -> Tensor:
        """(B, N) int64, the input index of each current token's anchor."""
        if self._position is None:
            self._position = self._find_position()
        return self._position

    @property
    def num_inputs(self) -> int:
        """N0, known without following the chain."""
        return self.source.shape[1]

    @property
    def num_tokens(self) -> int:
        """N, known without following the chain."""
        return self.position.shape[1]

    def _find_source(self) -> Tensor:
        raise NotImplementedError

    def _find_position(self) -> Tensor:
        raise NotImplementedError


class _Step(Places):
    """Places after a step from others."""

    def __init__(self, before: Places) -> None:
        super().__init__()
        self.before = before
        self._num_inputs = before.num_inputs  # asked for in every block: not by way of all steps before

    @property
    def num_inputs(self) -> int:
        return self._num_inputs


class Moved(_Step):
    """Places after every old token went to at most one new token (see `assignment.Hard`).

    Args:
        before: the places of the N old tokens.
        anchor: (B, M) the old index each new token grows from.
        moved: (B, R) old indices that joined another token, or None.
        into: (B, R) the new index each of them joined, M for those that did not; None without ``moved``.
        valid: (B, M) which new tokens are real, or None when all are.
        pruned: some input tokens had no current index before.
        hidden: tokens of the bank that no group stands for, though they were members of one; or None.
    """

    def __init__(
        self,
        before: Places,
        anchor: Tensor,
        moved: Tensor | None = None,
        into: Tensor | None = None,
        valid: Tensor | None = None,
        pruned: bool = False,
        hidden: Waiting | None = None,
    ) -> None:
        super().__init__(before)
        self.anchor, self.moved, self.into, self.valid = anchor, moved, into, valid
        self.pruned = pruned
        self.hidden = hidden

    @property
    def num_tokens(self) -> int:
        return self.anchor.shape[1]

    def _find_source(self) -> Tensor:
        target = new_index(self.before.num_tokens, self.anchor, self.moved, self.into, self.valid)
        source = follow(target, self.before.source) if self.pruned else target.gather(1, self.before.source)
        return source if self.hidden is None else source.masked_fill(self.hidden.member >= 0, -1)

    def _find_position(self) -> Tensor:
        return self.before.position.gather(1, self.anchor)


class Mixed(_Step):
    """Places after every new patch token became a mix of all old ones: they follow the largest weights, for plots.

    Args:
        before: the places of the old tokens.
        num_prefix: number of tokens in front, which stay.
        matrix: (B, M, P) weights of the P old patches in each of the M new ones.
    """

    def __init__(self, before: Places, num_prefix: int, matrix: Tensor) -> None:
        super().__init__(before)
        self.num_prefix, self.matrix = num_prefix, matrix

    @property
    def num_tokens(self) -> int:
        return self.num_prefix + self.matrix.shape[1]

    def _find_source(self) -> Tensor:
        return follow(self._behind_prefix(self.matrix.argmax(1)), self.before.source)

    def _find_position(self) -> Tensor:
        return self.before.position.gather(1, self._behind_prefix(self.matrix.argmax(2)))

    def _behind_prefix(self, patches: Tensor) -> Tensor:
        prefix = torch.arange(self.num_prefix, device=patches.device).expand(patches.shape[0], self.num_prefix)
        return torch.cat([prefix, patches + self.num_prefix], dim=1)


class Waiting:
    """Places of the tokens that one reduction put into the bank.

    Args:
        before: the places of the tokens that were reduced.
        dropped: (B, K) the old indices of those in the bank.
    """

    def __init__(self, before: Places, dropped: Tensor) -> None:
        self.before, self.dropped = before, dropped
        self._member: Tensor | None = None
        self._position: Tensor | None = None

    @property
    def count(self) -> int:
        """K."""
        return self.dropped.shape[1]

    @property
    def position(self) -> Tensor:
        """(B, K) the input index of each waiting token's anchor."""
        if self._position is None:
            self._position = self.before.position.gather(1, self.dropped)
        return self._position

    @property
    def member(self) -> Tensor:
        """(B, N0) which of the K waiting tokens holds each input token, -1 for none."""
        if self._member is None:
            self._member = follow(new_index(self.before.num_tokens, self.dropped), self.before.source)
        return self._member


class Refilled(_Step):
    """Places after waiting tokens were appended, in order.

    Args:
        before: the places of the tokens that they were appended to.
        waiting: the places of what was appended.
    """

    def __init__(self, before: Places, waiting: Sequence[Waiting]) -> None:
        super().__init__(before)
        self.waiting = tuple(waiting)

    @property
    def num_tokens(self) -> int:
        return self.before.num_tokens + sum(entry.count for entry in self.waiting)

    def _find_source(self) -> Tensor:
        source, end = self.before.source, self.before.num_tokens
        for entry in self.waiting:
            source = torch.where(entry.member >= 0, entry.member + end, source)
            end += entry.count
        return source

    def _find_position(self) -> Tensor:
        return torch.cat([self.before.position, *(entry.position for entry in self.waiting)], dim=1)


def follow(index: Tensor, source: Tensor) -> Tensor:
    """(B, N0) entries of ``index`` (B, N) at ``source`` (B, N0), -1 where that is -1."""
    return index.gather(1, source.clamp_min(0)).masked_fill(source < 0, -1)


def new_index(
    n: int,
    anchor: Tensor,
    moved: Tensor | None = None,
    into: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """(B, n) int64: the new index of each of ``n`` old tokens, -1 where it is gone.

    Args:
        n: number of old tokens.
        anchor: (B, M) the old index each new token grows from.
        moved: (B, R) old indices that join another token, or None.
        into: (B, R) the new index each of them joins; M means "nowhere" (only with ``valid``).
        valid: (B, M) which new tokens are real, or None when all are.

    Example:
        >>> new_index(4, torch.tensor([[0, 3]]), torch.tensor([[1]]), torch.tensor([[1]]))
        tensor([[ 0,  1, -1,  1]])
    """
    batch, m = anchor.shape
    new = torch.arange(m, device=anchor.device).expand(batch, m)
    if valid is None:
        target = anchor.new_full((batch, n), -1).scatter(1, anchor, new)
        return target if moved is None or into is None else target.scatter(1, moved, into)
    # invalid anchors and moves that do not happen write into a spare column that is cut off
    target = anchor.new_full((batch, n + 1), -1).scatter(1, torch.where(valid, anchor, n), new)
    if moved is not None and into is not None:
        target = target.scatter(1, torch.where(into < m, moved, n), into)
    return target[:, :n]
