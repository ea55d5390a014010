"""The record that the blocks of one reduced model share: the state on its way from block to block, by thread."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vitrim.core.tokens import TokenState
from vitrim.errors import VitrimError


def refuse_while_running(model: nn.Module) -> None:
    """Refuse to go on while another thread is inside ``model``, whose blocks are about to change.

    Looks at what the other threads execute just now, so a forward pays nothing for it, and one that ended with an error
    counts for nothing.

    Raises:
        VitrimError: naming the thread.
    """
    others = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    if not others:
        return
    modules = set(map(id, model.modules()))
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in others.items():
        if any(id(owner) in modules for owner in _owners(frame)):
            raise VitrimError(
                f"this {type(model).__name__} runs in another thread ({names.get(ident, ident)}): call reduce_, set "
                "and restore_ while no forward runs"
            )


def _owners(frame: FrameType | None) -> Iterator[object]:
    """The objects whose methods a thread is executing, innermost first."""
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back


class Form(Protocol):
    """The basis of a model's reduction: how its head pools, the grid of its images."""

    def check(self) -> None:
        """Raise `UnsupportedModelError` if the model's form has changed since it was reduced."""


class _Call:
    """The state left by the forward that is running in a thread, or last ran in it."""

    def __init__(self) -> None:
        self.full_grids = False
        self.next_full_grid = False
        self.spares_last = False
        self.compact = False
        self.handed: list[int] | None = None
        self.latest: tuple[int, TokenState] | None = None
        self.final: TokenState | None = None
        self.states: tuple[TokenState, ...] = ()
        self.running: tuple[TokenState, ...] = ()
        self.grid: tuple[int, int] | None = None
        self.maps = False
        self.map: Tensor | None = None
        self.table: Tensor | None = None
        self.watched: frozenset[int] = frozenset()
        self.attentions: list[tuple[int, Any, TokenState, tuple[int, ...] | None]] = []
        self.images: tuple[int, ...] | None = None


class _Calls(threading.local):
    """The `_Call` of this thread. Every thread has its own.

    An ordinary object inside, because torch.compile does not carry out what a graph would set on a thread's local.
    """

    def __init__(self) -> None:
        self.own = _Call()


class Trace:
    """Shared record of the blocks of one reduced model: the state the last block left, and all states when recording.

    Whatever belongs to a forward is kept by thread, so that threads may share the model: none sees the full grids, the
    states or the auxiliary outputs of another. It holds the autograd graph of auxiliary outputs until the next forward
    of the same thread. Copies and pickles start empty, so an EMA copy of a model never shares or drags along the state
    of the original.

    Attributes:
        recording: keep the state after every block.
        form: what a user may change about the reduced model and must not (see `Form`); None where there is nothing.
        changing: the reduction is being changed: forwards that start now are refused.
    """

    def __init__(self, recording: bool = False, form: Form | None = None) -> None:
        self.recording = recording
        self.form = form
        self.changing = False
        self._calls = _Calls()

    @property
    def _call(self) -> _Call:
        return self._calls.own

    @property
    def latest(self) -> tuple[int, TokenState] | None:
        """Depth and state of the block that ran last in this thread."""
        return self._call.latest

    @property
    def final(self) -> TokenState | None:
        """The state after the last block of this thread's last forward."""
        return self._call.final

    @property
    def states(self) -> tuple[TokenState, ...]:
        """The states of this thread's last complete forward: the initial one, then one per block. Empty unless
        recording."""
        return self._call.states

    @property
    def full_grid(self) -> bool:
        """True if the next forward of this thread hands out full grids (dense outputs)."""
        return self._call.full_grids or self._call.next_full_grid

    def see_grid(self, grid: tuple[int, int] | None) -> None:
        """Note rows and columns of the patches that this thread's forward has just made (see `GridHook`)."""
        self._call.grid = grid

    def take_grid(self) -> tuple[int, int] | None:
        """Return what `see_grid` noted, once: tokens that no patch embedding made must not find an older one's."""
        call = self._call
        grid = call.grid
        if grid is not None:
            call.grid = None
        return grid

    def start(self, state: TokenState) -> None:
        """Begin a forward: the state left by this thread's previous one is no longer valid.

        Raises:
            UnsupportedModelError: the model has another form now than when it was reduced.
        """
        if self.form is not None:
            self.form.check()
        call = self._call
        call.next_full_grid = False
        call.latest = call.final = None
        call.states = ()
        call.running = (state,) if self.recording or call.compact else ()

    def leave(self, depth: int, state: TokenState, last: bool) -> None:
        """Note the state in which block ``depth`` left the tokens."""
        call = self._call
        call.latest = (depth, state)
        if call.running and len(call.running) == depth + 1:  # a recomputed block is already there
            call.running = (*call.running, state)
        if last:
            call.final = state
            call.states = call.running

    def conclude(self, final: TokenState, states: tuple[TokenState, ...]) -> None:
        """Replace the state of this thread's last forward by that of the whole it was a part of (see `padding.py`)."""
        self._call.final, self._call.states = final, states

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Forwards that this thread starts within hand out all N0 tokens after every block: merged ones as copies of
        their group, pruned ones as zeros. Computation inside the blocks stays reduced; the cost is two gathers per
        block."""
        before, self._call.full_grids = self._call.full_grids, True
        try:
            yield
        finally:
            self._call.full_grids = before

    @contextmanager
    def handing_out_fewer(self) -> Iterator[None]:
        """Forwards that this thread starts within hand out the tokens that are left, un-merged nowhere, unless `dense`
        says otherwise, and their states are kept: a language model is to get fewer of them."""
        before, self._call.compact = self._call.compact, True
        try:
            yield
        finally:
            self._call.compact = before

    @property
    def compact(self) -> bool:
        """True if this thread is `handing_out_fewer`."""
        return self._call.compact

    @contextmanager
    def watching(self, depths: Iterable[int]) -> Iterator[list[tuple[int, Any, TokenState, tuple[int, ...] | None]]]:
        """Within, forwards that this thread starts keep the attention of the blocks at ``depths``.

        Yields:
            A list that fills: depth, `Attention`, state of its tokens, and which images of a call those are; None: all.
        """
        call = self._call
        before = call.watched, call.attentions
        call.watched, call.attentions = frozenset(depths), []
        try:
            yield call.attentions
        finally:
            call.watched, call.attentions = before

    def watches(self, depth: int) -> bool:
        """True if this thread is `watching` the block at ``depth``."""
        return depth in self._call.watched

    def note_attention(self, depth: int, attention: Any, state: TokenState) -> None:
        """Keep the attention of a watched block."""
        self._call.attentions.append((depth, attention, state, self._call.images))

    def run_images(self, images: Sequence[int] | None) -> None:
        """Note which images of a call the next forward of this thread is of; None: all of them."""
        self._call.images = None if images is None else tuple(images)

    def hand_over(self, counts: list[int]) -> None:
        """Note how many tokens of each image went to the language model."""
        self._call.handed = counts

    @property
    def handed(self) -> list[int] | None:
        """Tokens of each image that `hand_over` noted last in this thread; None before."""
        return self._call.handed

    def next_dense(self, wanted: bool, spare_last: bool = False) -> None:
        """Choose as in `dense`, for the next forward of this thread alone; with ``spare_last`` see `spares_last`."""
        self._call.next_full_grid = wanted
        self._call.spares_last = wanted and spare_last

    @property
    def spares_last(self) -> bool:
        """The last block hands its head what it does where nobody asks for full grids: survivors, soft tokens."""
        return self._call.spares_last

    @property
    def maps(self) -> bool:
        """True if forwards of this thread hand out attention maps."""
        return self._call.maps

    def hand_out_maps(self, wanted: bool) -> None:
        """Choose `maps`, for the forwards of this thread from now on."""
        self._call.maps = wanted

    def note_map(self, attention_map: Tensor) -> None:
        """Keep the attention map of the running block, replacing one noted before."""
        self._call.map = attention_map

    def take_map(self) -> Tensor | None:
        """Return what `note_map` kept, once."""
        found, self._call.map = self._call.map, None
        return found

    def leave_table(self, table: Tensor | None) -> None:
        """Keep what a module of the host made for the blocks of this thread's forward; None to forget it."""
        self._call.table = table

    @property
    def table(self) -> Tensor | None:
        """The table that `leave_table` kept."""
        return self._call.table

    def __deepcopy__(self, memo: dict[int, Any]) -> Trace:
        return Trace(self.recording, copy.deepcopy(self.form, memo))

    def __reduce__(self) -> tuple[type[Trace], tuple[bool, Form | None]]:
        return Trace, (self.recording, self.form)


def recomputes() -> bool:
    """True if a backward pass runs: a block then repeats a forward, which did not leave the latest state."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
