"""`TokenState` follows the tokens through a forward; `Trace` passes it from block to block, per thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrim.errors import VitrimError


class IndexMap:
    """Indices of input tokens among the current tokens, and back. Subclasses define how a step changes both.

    Most forwards never read them, so a chain of steps is kept, and evaluated on first use. Where ``source`` or
    ``position`` is not known, ``num_inputs`` or ``num_tokens`` gives N0 or N.
    """

    def __init__(
        self, source: Tensor | None = None, position: Tensor | None = None, num_inputs: int = 0, num_tokens: int = 0
    ) -> None:
        self.num_inputs = num_inputs if source is None else source.shape[1]
        self.num_tokens = num_tokens if position is None else position.shape[1]
        self._source, self._position = source, position

    @property
    def source(self) -> Tensor:
        """(B, N0) int64, the current index that holds each input token, -1 where it was pruned."""
        if self._source is None:
            self._source = self._find_source()
        return self._source

    @property
    def position(self) -> Tensor:
        """(B, N) int64, the input index of each current token's anchor."""
        if self._position is None:
            self._position = self._find_position()
        return self._position

    def _find_source(self) -> Tensor:
        raise NotImplementedError

    def _find_position(self) -> Tensor:
        raise NotImplementedError


class Moved(IndexMap):
    """The map after every old token went to at most one new token; arguments as of `assignment.Hard`.

    ``pruned``: some input tokens had no current index before. ``hidden``: banked tokens that were members of a group
    but keep their own value.
    """

    def __init__(
        self,
        before: IndexMap,
        anchor: Tensor,
        moved: Tensor | None = None,
        into: Tensor | None = None,
        valid: Tensor | None = None,
        pruned: bool = False,
        hidden: BankedIndices | None = None,
    ) -> None:
        super().__init__(num_inputs=before.num_inputs, num_tokens=anchor.shape[1])
        self.before = before
        self.anchor, self.moved, self.into, self.valid = anchor, moved, into, valid
        self.pruned = pruned
        self.hidden = hidden

    def _find_source(self) -> Tensor:
        target = new_index(self.before.num_tokens, self.anchor, self.moved, self.into, self.valid)
        # -1 for what was pruned before is no index, and costs two more operations only where there is some.
        source = follow(target, self.before.source) if self.pruned else target.gather(1, self.before.source)
        return source if self.hidden is None else source.masked_fill(self.hidden.member >= 0, -1)

    def _find_position(self) -> Tensor:
        return self.before.position.gather(1, self.anchor)


class Mixed(IndexMap):
    """The map after all patches were mixed by ``matrix`` (B, M, P): follows the largest weights, for plots."""

    def __init__(self, before: IndexMap, num_prefix: int, matrix: Tensor) -> None:
        super().__init__(num_inputs=before.num_inputs, num_tokens=num_prefix + matrix.shape[1])
        self.before, self.num_prefix, self.matrix = before, num_prefix, matrix

    def _find_source(self) -> Tensor:
        patches = self.matrix.argmax(1) + self.num_prefix
        prefix = torch.arange(self.num_prefix, device=patches.device).expand(patches.shape[0], self.num_prefix)
        return follow(torch.cat([prefix, patches], dim=1), self.before.source)

    def _find_position(self) -> Tensor:
        before = self.before.position
        patches = before[:, self.num_prefix :].gather(1, self.matrix.argmax(2))
        return torch.cat([before[:, : self.num_prefix], patches], dim=1)


class BankedIndices:
    """Indices of the tokens that one reduction put into the bank: ``dropped`` (B, K) of those that ``before`` maps."""

    def __init__(self, before: IndexMap, dropped: Tensor) -> None:
        self.before, self.dropped = before, dropped
        self.count = dropped.shape[1]
        self._member: Tensor | None = None
        self._position: Tensor | None = None

    @property
    def position(self) -> Tensor:
        """(B, K) input index of each banked token's anchor."""
        if self._position is None:
            self._position = self.before.position.gather(1, self.dropped)
        return self._position

    @property
    def member(self) -> Tensor:
        """(B, N0) the banked token in [0, K) that holds each input token, -1 for none."""
        if self._member is None:
            self._member = follow(new_index(self.before.num_tokens, self.dropped), self.before.source)
        return self._member


class Refilled(IndexMap):
    """The map after ``banked`` tokens were appended, in order, to those of ``before``."""

    def __init__(self, before: IndexMap, banked: Sequence[BankedIndices]) -> None:
        end = before.num_tokens + sum(entry.count for entry in banked)
        super().__init__(num_inputs=before.num_inputs, num_tokens=end)
        self.before, self.banked = before, tuple(banked)

    def _find_source(self) -> Tensor:
        source, end = self.before.source, self.before.num_tokens
        # Entries of the bank are appended in order, so each one's tokens begin where those of the one before end.
        for entry in self.banked:
            source = torch.where(entry.member >= 0, entry.member + end, source)
            end += entry.count
        return source

    def _find_position(self) -> Tensor:
        return torch.cat([self.before.position, *(entry.position for entry in self.banked)], dim=1)


def follow(index: Tensor, source: Tensor) -> Tensor:
    """(B, N0) entries of ``index`` (B, N) at ``source`` (B, N0), -1 where ``source`` is."""
    return index.gather(1, source.clamp_min(0)).masked_fill(source < 0, -1)


def new_index(
    n: int,
    anchor: Tensor,
    moved: Tensor | None = None,
    into: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """(B, n) int64: the new index of each of ``n`` old tokens, -1 where it is gone; see `assignment.Hard`.

    Example:
        >>> new_index(4, torch.tensor([[0, 3]]), torch.tensor([[1]]), torch.tensor([[1]]))
        tensor([[ 0,  1, -1,  1]])
    """
    batch, m = anchor.shape
    new = torch.arange(m, device=anchor.device).expand(batch, m)
    if valid is None:
        target = anchor.new_full((batch, n), -1).scatter(1, anchor, new)
        return target if moved is None or into is None else target.scatter(1, moved, into)
    # invalid anchors and moves that do not happen write into a spare column, which is cut off
    target = anchor.new_full((batch, n + 1), -1).scatter(1, torch.where(valid, anchor, n), new)
    if moved is not None and into is not None:
        target = target.scatter(1, torch.where(into < m, moved, n), into)
    return target[:, :n]


STAMP = "_vitrim_state"
Record = TypeVar("Record")


def decision_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, similarities and sizes: float32, or float64 for a float64 model.

    Half precision cannot hold integers above 256 (bfloat16) or order close scores.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products of ``x``: autocast's where that is on."""
    kind = x.device.type
    # meta has no autocast
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else x.dtype


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` (B, M) of the tokens ``x`` (B, N, C), as (B, M, C)."""
    # One `index_select` on flattened tokens (B*N, C): several times faster on a CPU than a gather with an index
    # expanded over channels, and as fast on a GPU.
    batch, n, channels = x.shape
    return x.reshape(batch * n, channels).index_select(0, flat_index(index, n)).view(batch, index.shape[1], channels)


def take_flat(x: Tensor, index: Tensor) -> Tensor:
    """The result of `take`, flattened to (B*M, C)."""
    batch, n, channels = x.shape
    return x.reshape(batch * n, channels).index_select(0, flat_index(index, n))


def flat_index(index: Tensor, n: int) -> Tensor:
    """(B*M,) positions of ``index`` (B, M) in tokens flattened from (B, n, C) to (B*n, C)."""
    if index.shape[0] == 1:
        return index.reshape(-1)
    offset = torch.arange(index.shape[0], device=index.device).mul_(n).unsqueeze(1)
    return (index + offset).reshape(-1)


def whole(size: int) -> int:
    """A length as an int: `torch.jit.trace` gives tensors, and a traced model has fixed numbers of tokens."""
    return int(size) if isinstance(size, Tensor) else size


def changed(record: Record, **fields: Any) -> Record:
    """`dataclasses.replace` without its checks, for frozen records: those cost five operators, in every block."""
    if torch.compiler.is_compiling():
        return replace(record, **fields)  # type: ignore[type-var]
    new = object.__new__(type(record))
    vars(new).update(vars(record), **fields)
    return new


def no_gradient() -> AbstractContextManager[object]:
    """`torch.no_grad` where gradients are on: entering it costs as much as several small operations."""
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def sizes_follow(x: Tensor) -> bool:
    """True during an export for single images (1, ...), where numbers of tokens may depend on the image."""
    return torch.compiler.is_exporting() and isinstance(x.shape[0], int) and x.shape[0] == 1


def flagged(flags: Tensor) -> Tensor:
    """(1, K) places of the set ``flags`` (1, N) of a single image, in order: a data-dependent shape."""
    # Every call gives an exported graph an independent size, so sizes do not nest from block to block.
    places: Tensor = flags[0].nonzero(as_tuple=True)[0]
    return places.unsqueeze(0)


def is_traced() -> bool:
    """True inside `torch.jit.trace`, where values that Python reads from tensors would become constants."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Asked:
    """The outputs that a forward is asked for besides its own, fixed when it begins (`Trace.asking`).

    Attributes:
        full_grids: all N0 tokens after every block (dense outputs): merged ones as copies of their group, pruned ones
            as zeros. Blocks still compute on reduced tokens.
        spares_last: except after the last block, which returns what it otherwise would (survivors, soft tokens).
        compact: the remaining tokens as they are, for a language model; their states are kept.
        watched: depths of the blocks whose attention is kept, in `Call.attentions`.
    """

    full_grids: bool = False
    spares_last: bool = False
    compact: bool = False
    watched: frozenset[int] = frozenset()

    def __or__(self, other: Asked) -> Asked:
        return Asked(
            self.full_grids or other.full_grids,
            self.spares_last or other.spares_last,
            self.compact or other.compact,
            self.watched | other.watched,
        )


class Banked(NamedTuple):
    """Tokens (B, K, C) that one reduction put into the bank, with size (B, K) and carry (B, K, ...)."""

    tokens: Tensor
    size: Tensor
    indices: BankedIndices
    carry: Mapping[str, Tensor]


class PatchPixels(NamedTuple):
    """Pixels (B, rows, columns, C, h, w) of patches: a view of the images, and the ``std``, by channel or of all, that
    brings them to the scale of [0, 1]; None if no method needs it."""

    values: Tensor
    std: tuple[float, ...] | None


@dataclass(frozen=True)
class TokenState:
    """Bookkeeping of the current tokens. Every (B, N) field includes the prefix; index 0 is token 0 of x.

    Attributes:
        size: (B, N) float32 (float64 in a float64 model), the number of input tokens each token represents.
        index_map: where the tokens come from; `source` and `position` are computed from it on first use.
        mask: (B, N) bool, False for padding; None if every image has the same count.
        uniform: nothing has merged: every size is 1, and attention needs no key bias.
        reduced: order or length has changed: position tables must be gathered by ``position``.
        lost: some input tokens were pruned for good.
        mixed: some tokens are soft mixtures, which cannot be recovered from the full grid.
        grid: rows and columns of the patches, in raster order; None if no method needs them, or they are unknown.
        pixels: of the patches that enter the first block; None as for ``grid``.
        held: (B, N, C) tokens for the next block, where the full grid does not determine them; else None.
        bank: pruned tokens that a later block brings back.
        banking: everything pruned goes to the bank, because its place will be read (`MethodConfig.restore`).
        carry: tensors (B, N, ...) of a method, moved with the tokens.
        aux: auxiliary outputs of this forward as (name, depth, tensor).

    Example:
        >>> state = TokenState.start(torch.zeros(2, 5, 8), num_prefix=1)
        >>> state.size.shape, state.num_patches, state.uniform
        (torch.Size([2, 5]), 4, True)
    """

    size: Tensor
    index_map: IndexMap
    num_prefix: int
    mask: Tensor | None = None
    uniform: bool = True
    reduced: bool = False
    lost: bool = False
    mixed: bool = False
    grid: tuple[int, int] | None = None
    pixels: PatchPixels | None = None
    held: Tensor | None = None
    bank: tuple[Banked, ...] = ()
    banking: bool = False
    carry: Mapping[str, Tensor] = field(default_factory=dict)
    aux: tuple[tuple[str, int, Tensor], ...] = ()
    asked: Asked = Asked()

    @classmethod
    def start(
        cls,
        x: Tensor,
        num_prefix: int,
        grid: tuple[int, int] | None = None,
        banking: bool = False,
        asked: Asked = Asked(),
        pixels: PatchPixels | None = None,
    ) -> TokenState:
        """The state of unreduced tokens ``x`` (B, N, C). ``grid`` and ``pixels`` are ignored if dropout left fewer."""
        batch, n = x.shape[0], x.shape[1]
        if grid is not None and grid[0] * grid[1] != n - num_prefix:
            grid = pixels = None
        index = torch.arange(n, device=x.device).unsqueeze(0).expand(batch, n)
        size = torch.ones(batch, n, device=x.device, dtype=decision_dtype(x.dtype))
        index_map = IndexMap(index, index)
        return cls(size, index_map, num_prefix, grid=grid, pixels=pixels, banking=banking, asked=asked)

    @property
    def source(self) -> Tensor:
        """(B, N0) int64, the current index that holds each input token, -1 where it was pruned."""
        return self.index_map.source

    @property
    def position(self) -> Tensor:
        """(B, N) int64, the input index of each token's anchor: for rotary tables, relative bias and plots."""
        return self.index_map.position

    @property
    def pruned(self) -> bool:
        """True if some input tokens have no current index: lost, or in the bank."""
        return self.lost or len(self.bank) > 0

    @property
    def num_tokens(self) -> int:
        """N, prefix included."""
        return whole(self.size.shape[1])

    @property
    def num_patches(self) -> int:
        """Patch tokens, padding included."""
        return whole(self.size.shape[1]) - self.num_prefix

    def mean_tokens(self) -> float:
        """Mean tokens per image, prefix included, padding excluded."""
        return self.num_tokens if self.mask is None else self.mask.sum(dim=1).double().mean().item()

    def tokens_of_images(self) -> list[int]:
        """Tokens of each image, prefix included, padding excluded."""
        if self.mask is None:
            return [self.num_tokens] * self.size.shape[0]
        return [int(count) for count in self.mask.sum(dim=1).tolist()]

    @property
    def initial_patches(self) -> int:
        """Patch tokens that entered the first block."""
        return self.num_inputs - self.num_prefix

    @property
    def num_inputs(self) -> int:
        """N0, tokens that entered the first block."""
        return whole(self.index_map.num_inputs)

    def known_grid(self, method: str) -> tuple[int, int]:
        """``grid``, for a ``method`` that needs it."""
        if self.grid is None:
            raise VitrimError(
                f"{method} needs the rows and columns of the {self.initial_patches} patches, which this forward does "
                "not show: give the model images, without patch dropout and all of one size"
            )
        return self.grid

    def known_pixels(self, method: str) -> Tensor:
        """(B, rows, columns, C, V) pixels of the patches, for a ``method`` that needs them; see `Needs.pixel_std`."""
        if self.pixels is None or self.pixels.values.shape[0] != self.size.shape[0]:
            raise VitrimError(
                f"{method} needs the pixels of the {self.initial_patches} patches, which this forward does not show: "
                "give the model images (B, C, H, W) in whole patches, without patch dropout"
            )
        values, std = self.pixels
        found = values.flatten(-2).to(decision_dtype(values.dtype))
        return found if std is None else found * found.new_tensor(std).view(-1, 1)

    def key_bias(self, dtype: torch.dtype, proportional: bool) -> Tensor | None:
        """The bias (B, 1, 1, N) of the attention logits: log(size) (ToMe section 3) and the mask, or None."""
        bias = None
        if proportional and not self.uniform:
            # A token that represents s tokens gets s times the weight.
            bias = self.size.log()
        if self.mask is not None:
            bias = torch.zeros_like(self.size) if bias is None else bias
            # Finite, so that an image of masked tokens only gives no NaN.
            bias = bias.masked_fill(~self.mask, -1e4)
        return None if bias is None else bias.to(dtype).unsqueeze(1).unsqueeze(1)

    def patch_rows(self, table: Tensor) -> Tensor:
        """Rows of a ``table`` over the input patches, for the current ones (B, ..., P, d): a merged token reads its
        anchor's.

        ``table``: (..., P0, d) for all images, or (B, ..., P0, d) with four dimensions; itself if nothing was reduced.
        """
        if not self.reduced:
            return table
        index = self.position[:, self.num_prefix :] - self.num_prefix
        if table.dim() == 4:
            spread = index[:, None, :, None].expand(-1, table.shape[1], -1, table.shape[3])
            return table.expand(index.shape[0], -1, -1, -1).gather(2, spread)
        rows: Tensor = table.index_select(-2, index.reshape(-1)).unflatten(-2, index.shape)
        return rows.movedim(-3, 0)

    def pair_bias(self, table: Tensor, rows: int | None = None) -> Tensor:
        """A ``table`` (H, N0, N0) over pairs of input tokens, for the current ones: (B, H, N or ``rows``, N)."""
        heads, n = table.shape[0], table.shape[-1]
        if not self.reduced:
            return table[:, :rows].unsqueeze(0)
        # The pair (i, j) of input tokens is entry i * N0 + j of the flattened table.
        pairs = self.position[:, :rows].unsqueeze(2) * n + self.position.unsqueeze(1)
        return table.reshape(heads, n * n)[:, pairs].transpose(0, 1)

    def pad_prefix(self, values: Tensor, fill: float | bool = 1.0) -> Tensor:
        """(B, N) values of all tokens from those of the patches (B, P), with ``fill`` for the prefix.

        Example:
            >>> TokenState.start(torch.zeros(1, 3, 8), num_prefix=1).pad_prefix(torch.zeros(1, 2))
            tensor([[1., 0., 0.]])
        """
        return F.pad(values, (self.num_prefix, 0), value=fill)

    def report(self, name: str, depth: int, value: Tensor) -> TokenState:
        """This state with one more auxiliary output, for ``reduction.aux(name)``."""
        return replace(self, aux=(*self.aux, (name, depth, value)))

    def refill(self, x: Tensor) -> tuple[Tensor, TokenState]:
        """Append the banked tokens to ``x`` (B, N, C) and empty the bank (Cropr's last layer fusion, Evo-ViT)."""
        if not self.bank:
            return x, self
        if self.mask is not None:
            raise NotImplementedError("banked tokens cannot be brought back next to a mask")
        if any(entry.carry.keys() != self.carry.keys() for entry in self.bank):
            raise NotImplementedError(
                "banked tokens cannot be brought back: they were set aside with other per-token carry than there is now"
            )
        state = replace(
            self,
            size=torch.cat([self.size, *(entry.size for entry in self.bank)], dim=1),
            index_map=Refilled(self.index_map, [entry.indices for entry in self.bank]),
            reduced=True,
            bank=(),
            carry={
                name: torch.cat([value, *(entry.carry[name] for entry in self.bank)], dim=1)
                for name, value in self.carry.items()
            },
        )
        return torch.cat([x, *(entry.tokens.to(x.dtype) for entry in self.bank)], dim=1), state

    def bring_back(self, x: Tensor) -> tuple[Tensor, TokenState]:
        """Do what `refill` does, without `carry`, which belongs to the tokens that the method kept."""
        if not self.bank:
            return x, self
        bank = tuple(entry._replace(carry={}) for entry in self.bank)
        return replace(self, carry={}, bank=bank).refill(x)

    def __copy__(self) -> TokenState:
        return self  # it is never changed in place, and tensors of a graph cannot be copied

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenState:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A user may save a tensor that carries this state as an attribute, which torch pickles, and which
        # torch.load(weights_only=True) would refuse. The blocks ignore an empty dict.
        return OrderedDict, ()


def unmerge(x: Tensor, state: TokenState) -> Tensor:
    """Lay the current tokens (B, N, C) out on the input tokens (B, N0, C): every input gets its group's value.

    Exactly inverts a merge of values that are constant on groups. Pruned tokens become zeros.

    Example:
        >>> state = TokenState.start(torch.zeros(1, 3, 2), num_prefix=1)
        >>> unmerge(torch.ones(1, 3, 2), state).shape
        torch.Size([1, 3, 2])
    """
    if not state.pruned:
        return take(x, state.source)
    return take(x, state.source.clamp_min(0)) * (state.source >= 0).unsqueeze(-1).to(x.dtype)


class ImagePlaces(NamedTuple):
    """The tokens of one image that went to a language model.

    Attributes:
        kept: (Q,) bool, on the CPU: which of the image's places in the prompt keep a token.
        merged: (Q,) bool, on the CPU: which of these hold a token that a selector made from several.
        extra: further tokens without a place in the image.
    """

    kept: Tensor
    merged: Tensor
    extra: int = 0

    @property
    def number(self) -> int:
        """All tokens."""
        return int(self.kept.sum()) + self.extra


class Entered(NamedTuple):
    """The tokens that entered the first block together, of images of one size.

    Attributes:
        config: the method's options at that time.
        rows: batch rows: images, or their windows.
        patches: of a row.
        windows: rows per image, which are reduced separately.
    """

    config: Any
    rows: int
    patches: int
    grid: tuple[int, int] | None = None
    windows: int = 1


class Note(NamedTuple):
    """The attention of one watched block (`Asked.watched`), without values, and the state of its tokens.

    ``images`` are the indices of the rows among the images of the whole call; None for all in order.
    """

    depth: int
    attention: Any
    state: TokenState
    images: tuple[int, ...] | None = None


@dataclass(eq=False)
class Call:
    """A thread's running or last forward: what is asked of it, and what it records.

    Attributes:
        asked: of all forwards in the current context.
        once: of the next forward alone; None for nothing more.
        grid, pixels: of the latest patches (`vitrim.core.host.GridHook`), if the method asks for them.
        patches: the number of the latest patches, at most; None if unknown.
        entered: what entered the first block, once per image size.
        latest: depth and state of the last block that ran; ``final``: the state after the last block.
        states: the initial one, then one per block that has run. Empty unless recording.
        image_places: tokens of each image that last went to the language model; None before.
    """

    asked: Asked = Asked()
    once: Asked | None = None
    grid: tuple[int, int] | None = None
    pixels: PatchPixels | None = None
    patches: int | None = None
    entered: tuple[Entered, ...] = ()
    latest: tuple[int, TokenState] | None = None
    final: TokenState | None = None
    states: tuple[TokenState, ...] = ()
    attentions: list[Note] = field(default_factory=list)
    image_places: list[ImagePlaces] | None = None


class Form(Protocol):
    """Checks of a model that is about to run, see `Trace`."""

    def __call__(self, more: int = 0) -> None:
        """Raise `UnsupportedModelError` if the model changed, or if ``more`` tokens than patches entered block 0."""


class _Calls(threading.local):
    """This thread's `Call`, in an object of its own because torch.compile loses writes to a thread-local."""

    def __init__(self, kind: type[Call]) -> None:
        self.own = kind()


class Trace:
    """Record shared by the blocks of one reduced model, kept per thread (`call`): threads may share the model.

    Auxiliary outputs keep their autograd graph alive until the thread's next forward. Copies and pickles start empty,
    so an EMA copy never shares the state of the original.

    Attributes:
        recording: keep the state after every block.
        form: raises `UnsupportedModelError` if the reduced model was modified in a way it does not support, or given
            more tokens than it has patches (`vitrim.core.host.FormOfModel`); None for no check.
        kind: of the calls (`ReducedBlock.call_class`).
        changing: the reduction is being changed; forwards that start now are refused.
    """

    def __init__(self, recording: bool = False, form: Form | None = None, kind: type[Call] = Call) -> None:
        self.kind = kind
        self.recording = recording
        self.form = form
        self.changing = False
        self._calls = _Calls(kind)

    @property
    def call(self) -> Call:
        return self._calls.own

    @property
    def asked(self) -> Asked:
        """The outputs that this thread's next forward is asked for."""
        call = self._calls.own
        return call.asked if call.once is None else call.asked | call.once

    def start(self, state: TokenState, config: Any = None) -> None:
        """Begin a forward under ``config``: discard this thread's previous states, and check `form`."""
        call = self._calls.own
        more = 0 if call.patches is None else state.initial_patches - whole(call.patches)
        call.patches = None  # used once, as the grid
        if self.form is not None:
            self.form(more)
        call.once = None
        call.entered = (Entered(config, whole(state.size.shape[0]), state.initial_patches, state.grid),)
        call.latest = call.final = None
        call.states = (state,) if self.recording or state.asked.compact else ()

    def leave(self, depth: int, state: TokenState, last: bool) -> None:
        """Record the state in which block ``depth`` left the tokens."""
        call = self._calls.own
        call.latest = (depth, state)
        if call.states and len(call.states) == depth + 1:  # a recomputed block is already there
            call.states = (*call.states, state)
        if last:
            call.final = state

    @contextmanager
    def asking(self, asked: Asked) -> Iterator[list[Note]]:
        """Ask more of this thread's forwards within the context; yields the list that watched blocks add to."""
        call = self._calls.own
        before, notes = call.asked, call.attentions
        call.asked = before | asked
        if not before.watched:
            call.attentions = []
        try:
            yield call.attentions
        finally:
            call.asked, call.attentions = before, notes

    def __reduce__(self) -> tuple[type[Trace], tuple[bool, Form | None, type[Call]]]:
        return Trace, (self.recording, self.form, self.kind)
