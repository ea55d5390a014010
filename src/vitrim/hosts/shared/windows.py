"""Windowed hosts (SAM, ViTDet): most blocks attend within windows of the image, some across them.

Windows are batch rows: tokens travel as (B*W, n, C), W windows of n patches, through ordinary reduced blocks. A block
that attends across windows also decides per window, so all keep the same count; only its attention uses the keys of the
whole image (`AcrossWindows`). After the last block, and after every block for full grids, windows are laid out as the
host's map (B, rows, columns, C). Stochastic depth is drawn per window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from vitrim.core.attention import Attention, add_bias
from vitrim.core.host import Host
from vitrim.core.plan import Head, HostFacts
from vitrim.core.tokens import IndexMap, TokenState, Trace
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.shared.blocks import NamedBlock, hand_stamp

FIELDS = tuple(own.name for own in fields(TokenState))  # read once: torch.compile cannot
Lines = tuple[Tensor, Tensor]
"""Row and column of every token, (B, N) each."""


class Windows(NamedTuple):
    """The division of an image's patches into windows, in raster order.

    Attributes:
        rows, columns: windows of an image.
        height, width: patches of a window.
    """

    rows: int
    columns: int
    height: int
    width: int

    @classmethod
    def of(cls, grid: tuple[int, int], side: int) -> Windows:
        """The windows of ``side`` x ``side`` patches, which must divide the ``grid`` (rows, columns); with 0, one."""
        height, width = grid
        if side == 0:
            return cls(1, 1, height, width)
        if height % side or width % side:
            # The nearest sizes that windows divide, for the error.
            lower, upper = (
                f"{rows} x {columns}"
                for rows, columns in (
                    (max(height // side, 1) * side, max(width // side, 1) * side),
                    (-(-height // side) * side, -(-width // side) * side),
                )
            )
            raise UnsupportedModelError(
                f"windows of {side} x {side} do not divide {height} x {width} patches: the model fills the last ones "
                "with padding that its attention reads, so they would keep another number of patches than the others; "
                f"use an image size of {lower} or {upper} patches"
            )
        return cls(height // side, width // side, side, side)

    @property
    def number(self) -> int:
        """W, windows per image."""
        return self.rows * self.columns

    def split(self, x: Tensor) -> Tensor:
        """The map (B, rows, columns, C) as windows (B*W, n, C)."""
        batch, channels = x.shape[0], x.shape[3]
        # The axes are window row, row within it, window column, column within it: windows come first, then their
        # insides.
        parts = x.reshape(batch, self.rows, self.height, self.columns, self.width, channels).transpose(2, 3)
        return parts.reshape(batch * self.number, self.height * self.width, channels)

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `split`."""
        batch, channels = x.shape[0] // self.number, x.shape[2]
        parts = x.view(batch, self.rows, self.columns, self.height, self.width, channels).transpose(2, 3)
        return parts.reshape(batch, self.rows * self.height, self.columns * self.width, channels)

    def together(self, x: Tensor) -> Tensor:
        """Heads (B*W, H, N, d) of windows as heads of images, (B, H, W*N, d)."""
        heads: Tensor = x.unflatten(0, (x.shape[0] // self.number, self.number))
        return heads.transpose(1, 2).flatten(2, 3)

    def apart(self, x: Tensor) -> Tensor:
        """The inverse of `together`."""
        heads: Tensor = x.unflatten(2, (self.number, x.shape[2] // self.number))
        return heads.transpose(1, 2).flatten(0, 1)

    def lines(self, position: Tensor, in_image: bool) -> Lines:
        """Rows and columns of ``position`` (B*W, N) in the window, or if ``in_image`` in the image, (B, W*N)."""
        rows, columns = position // self.width, position % self.width
        if not in_image:
            return rows, columns
        # Batch rows are the windows of one image after another.
        window = torch.arange(position.shape[0], device=position.device)[:, None] % self.number
        return (
            self.of_images(rows + window // self.columns * self.height),
            self.of_images(columns + window % self.columns * self.width),
        )

    def of_images(self, x: Tensor) -> Tensor:
        """Values (B*W, N) of tokens as (B, W*N)."""
        return x.reshape(x.shape[0] // self.number, self.number * x.shape[1])

    def of_images_behind(self, x: Tensor, prefix: int) -> Tensor:
        """The result of `of_images`, with each window's ``prefix`` tokens moved to the front of the image."""
        if prefix == 0:
            return self.of_images(x)
        return torch.cat([self.of_images(x[:, :prefix]), self.of_images(x[:, prefix:])], dim=1)

    def bias_of_images(self, bias: Tensor | None) -> Tensor | None:
        """The bias (B*W, 1, 1, N) of a window's keys as that of all keys of its image, (B*W, 1, 1, W*N)."""
        if bias is None:
            return None
        return self.of_images(bias.flatten(1)).repeat_interleave(self.number, 0)[:, None, None]


@dataclass(frozen=True)
class WindowState(TokenState):
    """The state of tokens whose batch rows are windows; ``source`` and ``position`` count within the window."""

    windows: Windows = field(kw_only=True)

    @classmethod
    def of(cls, state: TokenState, windows: Windows) -> WindowState:
        """``state``, for rows that are ``windows``; its grid becomes the window's."""
        known = {name: getattr(state, name) for name in FIELDS}
        return cls(**{**known, "grid": (windows.height, windows.width)}, windows=windows)

    def lines(self, in_image: bool) -> Lines:
        """Rows and columns of the tokens' anchors, in the window or ``in_image``; one batch row while all agree."""
        # Unreduced, all windows have the same places: one row (or one image's) stands for the batch.
        position = self.position if self.reduced else self.position[: self.windows.number if in_image else 1]
        return self.windows.lines(position, in_image)

    def of_images(self) -> TokenState:
        """The state of whole images, for reading: tokens window by window, input patches in raster order.

        Prefix tokens of all windows are in front, window by window.
        """
        windows, prefix = self.windows, self.num_prefix
        known = {name: getattr(self, name) for name in FIELDS}
        own = {
            "size": windows.of_images_behind(self.size, prefix),
            "index_map": ImageIndexMap(self.index_map, windows, prefix),
            "num_prefix": prefix * windows.number,
            "grid": (windows.rows * windows.height, windows.columns * windows.width),
            "held": None,
            "bank": (),
            "carry": {},
        }
        return TokenState(**{**known, **own})


class ImageIndexMap(IndexMap):
    """The index map of images, from that of their windows with ``prefix`` tokens each."""

    def __init__(self, before: IndexMap, windows: Windows, prefix: int = 0) -> None:
        number = windows.number
        super().__init__(num_inputs=before.num_inputs * number, num_tokens=before.num_tokens * number)
        self.before, self.windows, self.prefix = before, windows, prefix

    def _find_source(self) -> Tensor:
        source, prefix, number = self.before.source, self.prefix, self.windows.number
        # Within a window, tokens count from 0; in the image, those of all windows follow one another behind all
        # prefixes.
        window = torch.arange(source.shape[0], device=source.device)[:, None] % number
        # Every prefix token of the image comes first, so patch tokens of window w begin behind those of the windows
        # before it.
        patch = number * prefix + window * (self.before.num_tokens - prefix) + source - prefix
        source = torch.where(source >= prefix, patch, torch.where(source >= 0, window * prefix + source, source))
        patches = self.windows.join(source[:, prefix:].unsqueeze(-1)).flatten(1)
        return torch.cat([self.windows.of_images(source[:, :prefix]), patches], dim=1)

    def _find_position(self) -> Tensor:
        position, prefix = self.before.position, self.prefix
        rows, columns = self.windows.lines(position[:, prefix:] - prefix, in_image=True)
        patches = rows * (self.windows.columns * self.windows.width) + columns
        window = torch.arange(position.shape[0], device=position.device)[:, None] % self.windows.number
        front = self.windows.of_images(window * prefix + position[:, :prefix])
        return torch.cat([front, patches + front.shape[1]], dim=1)


@dataclass(frozen=True)
class AcrossWindows(Attention):
    """Attention of windows' tokens to those of the whole image.

    q, k and v are per window, (B*W, H, N, d), as methods compare and select them. The bias has a column for every key
    of the image, (B*W, 1 or H, 1 or M, W*N).
    """

    windows: Windows = field(kw_only=True)

    def output(self) -> Tensor:
        return self.windows.apart(self.together().output())

    def column_mean(self) -> Tensor:
        received = self.together().column_mean()
        return received.view(-1, self.k.shape[2])

    def together(self) -> Attention:
        """The same as ordinary attention of B images."""
        bias = self.bias
        if bias is not None:
            # A bias per key is the same for every window of an image: the first of each stands for all.
            bias = bias[:: self.windows.number] if bias.shape[2] == 1 else self.windows.together(bias)
        q, k = self.windows.together(self.q), self.windows.together(self.k)
        v = None if self.v is None else self.windows.together(self.v)
        return Attention(q, k, v, self.scale, bias, self.dropout, fused=self.fused, drop=self.drop, own=self.own)

    def logits(self) -> Tensor:
        raise UnsupportedModelError(
            "this method reads the attention map of a window, and blocks of this model attend across windows"
        )


class WindowBlock(NamedBlock):
    """The reduced form of a block on maps (B, rows, columns, C) that attends within windows or across them.

    `WindowedHost` sets ``side`` in every block: the side of the model's windows, 0 without windows.
    """

    channels_first: ClassVar[bool] = False
    """The maps are (B, C, rows, columns)."""
    OWN = (*NamedBlock.OWN, "side")

    window_size: int
    side: int

    @property
    def crosses(self) -> bool:
        """True if this block attends across windows, in a model that has windows."""
        return self.window_size == 0

    def incoming(self, x: Tensor) -> TokenState:
        if x.dim() == 3:
            return super().incoming(x)
        grid = (x.shape[2], x.shape[3]) if self.channels_first else (x.shape[1], x.shape[2])
        # At every call: images of another size have other windows.
        windows = Windows.of(grid, self.side)
        rows = self.rows_of(x, windows)
        # The state is stamped on the map that the last block left, and this block reads windows.
        hand_stamp(x, rows)
        state = super().incoming(rows)
        hand_stamp(rows, x)
        return state if isinstance(state, WindowState) else self.begin(state, windows)

    def begin(self, state: TokenState, windows: Windows) -> WindowState:
        """The ``state`` of the tokens that enter the first block, as one of ``windows``."""
        call, begun = self.trace.call, WindowState.of(state, windows)
        (entered,) = call.entered
        call.entered = (entered._replace(grid=begun.grid, windows=windows.number),)
        call.states = (begun,) if call.states else ()
        return begun

    def rows_of(self, x: Tensor, windows: Windows) -> Tensor:
        """The windows of a map, as batch rows (B*W, n, C)."""
        return windows.split(x.permute(0, 2, 3, 1) if self.channels_first else x)

    def receive(self, x: Tensor, state: TokenState, given: Any) -> tuple[Tensor, TokenState]:
        assert isinstance(state, WindowState)
        if x.dim() == 4:
            x = self.rows_of(x, state.windows)
        return super().receive(x, state, given)

    def outgoing(self, x: Tensor, state: TokenState) -> Tensor:
        assert isinstance(state, WindowState)
        x = super().outgoing(x, state)
        # Between blocks, windows stay apart unless a layer's full grid is asked for.
        if self.last:
            self.leave_states_of_images()
        elif not state.asked.full_grids:
            return x
        image = state.windows.join(x)
        if self.channels_first:
            image = image.permute(0, 3, 1, 2)
        hand_stamp(x, image)
        return image

    def leave_states_of_images(self) -> None:
        """After the last block, replace states of windows by states of images."""
        call = self.trace.call
        assert isinstance(call.final, WindowState)
        call.final = call.final.of_images()
        # a recomputed block finds those of images
        call.states = tuple(state.of_images() if isinstance(state, WindowState) else state for state in call.states)

    def rows_of_table(self, table: Tensor, state: WindowState, batch: int) -> Tensor:
        """Rows of a rotary ``table`` (P, d) for the tokens of ``batch`` windows, (1 or B*W, 1, N, d).

        The table is a window's, or the image's if this block attends across windows.
        """
        windows = state.windows
        crosses = self.crosses and windows.number > 1
        down, across = state.lines(crosses)
        rows = table[down * (windows.columns * windows.width if crosses else windows.width) + across]
        if crosses:
            rows = rows.view(-1, state.num_tokens, rows.shape[-1])  # for the windows of all images, or of one
            rows = rows.repeat(batch // len(rows), 1, 1)
        return rows.unsqueeze(1)

    def window_attention(
        self,
        state: TokenState,
        attn: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        scale: float,
        *,
        relative: Callable[[int, int, Tensor], Tensor] | None = None,
        **more: Any,
    ) -> Attention:
        """Attention of heads (B*W, H, N, d) within windows, or across them if this block does that.

        ``relative`` maps (S, S, parameter) to vectors (S, S, d) that queries are multiplied with, S being the rows or
        columns and the parameter ``attn``'s for that axis, if it has any. ``more`` are further fields of `Attention`.
        """
        assert isinstance(state, WindowState)
        bias, windows = state.key_bias(q.dtype, self.proportional), state.windows
        crosses = self.crosses and windows.number > 1
        if crosses:
            bias = windows.bias_of_images(bias)
        if relative is not None and getattr(attn, "rel_pos_h", None) is not None:
            down, across = (windows.rows, windows.columns) if self.crosses else (1, 1)
            # Across windows, relative positions reach over the whole image.
            lines = (down * windows.height, across * windows.width)
            tables = (relative(lines[0], lines[0], attn.rel_pos_h), relative(lines[1], lines[1], attn.rel_pos_w))
            own = relative_bias(windows.together(q) if crosses else q, tables, state.lines(crosses))
            # Back to windows: their queries are batch rows again.
            bias = add_bias(windows.apart(own) if crosses else own, bias)
        if crosses:
            return AcrossWindows(q, k, v, scale, bias, windows=windows, **more)
        return Attention(q, k, v, scale, bias, **more)


def relative_bias(q: Tensor, tables: tuple[Tensor, Tensor], lines: Lines) -> Tensor:
    """The bias (B, H, N, N) of decomposed relative positions (MViTv2, section 4.1): q times two vectors.

    ``q`` (B, H, N, d) is not scaled. The ``tables`` (S, S, d), for rows and columns, are indexed by the query's and the
    key's line; the ``lines`` of the tokens are (B, N) or (1, N) each.
    """
    heads, n = q.shape[1], q.shape[2]
    total = None
    for table, line in zip(tables, lines, strict=True):
        # Each query with the vectors of all lines, then of each key's line: no (N, N, d) tensor.
        to_lines = torch.einsum("bhnd,bnsd->bhns", q, table.to(q.dtype)[line])
        own = to_lines.gather(3, line[:, None, None].expand(q.shape[0], heads, n, n))
        total = add_bias(total, own)
    assert total is not None
    return total


class WindowedHost(Host):
    """A family of `WindowBlock`s whose output is read as a map; mixed in before the library's host class."""

    heads: ClassVar[tuple[Head, ...]] = ("grid",)

    @classmethod
    def check(cls, model: nn.Module) -> None:
        super().check(model)
        cls.facts(model)  # refuses windows that do not divide the patches

    @classmethod
    def side(cls, model: nn.Module) -> int:
        """The side of the model's windows in patches, 0 without windows."""
        return max(int(block.window_size) for block in cls.blocks(model))  # type: ignore[arg-type]

    @classmethod
    def facts(cls, model: nn.Module) -> HostFacts:
        facts = super().facts(model)
        windows = Windows.of(facts.grid_size, cls.side(model))
        return replace(
            facts,
            grid_size=(windows.height, windows.width),
            head_rows=None,
            dense=True,
            windows=windows.number,
            across_windows=windows.number > 1 and any(block.window_size == 0 for block in cls.blocks(model)),
        )

    @classmethod
    def install(cls, model: nn.Module, trace: Trace) -> None:
        super().install(model, trace)
        side = cls.side(model)
        for block in cls.blocks(model):
            block.side = side  # type: ignore[assignment]
