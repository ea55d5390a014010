"""Reduced blocks and hooks, put on a model and taken off: the only code that edits a model's modules."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, cast

from torch import nn

from vitrim.core.block import ReducedBlock, Reducer, class_of
from vitrim.core.checks import FittedMethod, pixel_std
from vitrim.core.host import GridHook, Host, ZeroHook, norms_behind, take_off
from vitrim.core.method import MethodConfig
from vitrim.core.registry import check_model, host_of
from vitrim.core.tokens import Trace
from vitrim.errors import UnsupportedModelError, VitrimError


def reduced_forms(host: type[Host], model: nn.Module) -> list[type[ReducedBlock]]:
    """The reduced form of every block of ``model``, or `UnsupportedModelError`."""
    blocks = host.blocks(model)
    if len(set(map(id, blocks))) < len(blocks):
        raise UnsupportedModelError(
            f"a block of this {type(model).__name__} stands in two places: each place reduces other tokens, so blocks "
            "cannot be shared"
        )
    check_model(host, model)
    trunk = host.trunk_host(model)
    return [trunk.reduced_class(block) for block in blocks]


def refuse_while_running(model: nn.Module) -> None:
    """Refuse to change a model whose blocks another thread is running."""
    # Inspects what other threads execute now, so forwards pay nothing, and one that failed leaves no trace.
    others = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    if not others:
        return
    modules = set(map(id, model.modules()))
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, innermost in others.items():
        frame: FrameType | None = innermost
        while frame is not None:
            if id(frame.f_locals.get("self")) in modules:  # the object whose method is executed
                raise VitrimError(
                    f"this {type(model).__name__} runs in another thread ({names.get(ident, ident)}): call reduce_, "
                    "set and restore_ while no forward runs"
                )
            frame = frame.f_back


def adopt(
    blocks: Sequence[nn.Module],
    forms: Sequence[type[ReducedBlock]],
    config: MethodConfig,
    fit: FittedMethod,
    compact: bool,
    trace: Trace,
) -> None:
    """Turn ``blocks`` into their reduced ``forms``, in place. ``compact``: a language model gets fewer tokens."""
    whole = config.unplaced() is None and (compact or fit.facts.averages_patches or fit.restore is not None)
    for depth, (block, form, reducer) in enumerate(zip(blocks, forms, fit.reducers, strict=True)):
        last = depth == len(blocks) - 1
        form.adopt(
            block,
            reducer,
            depth=depth,
            num_prefix=fit.facts.num_prefix,
            proportional=config.proportional,
            last=last,
            head_rows=fit.head_rows if last else None,
            # repeating merged tokens is exact for any pooling head; soft tokens belong to no patch and stay as they are
            unmerge_at_end=last and whole,
            restore=fit.restore,
            trace=trace,
        )


def install_hooks(model: nn.Module, config: MethodConfig, trace: Trace, last: ReducedBlock) -> None:
    """Install what a ``model`` needs besides reduced blocks, of which ``last`` is the last one."""
    host = host_of(model)
    host.install(model, trace)
    maker = host.patch_maker(model)
    if maker is not None:
        facts = host.facts(model)
        height, width = (size // number for size, number in zip(facts.input_size[1:], facts.grid_size, strict=True))
        std = pixel_std(config, host, model)
        maker.register_forward_hook(GridHook(host.trunk_host(model), trace, config.needs(), (height, width), std))
    if config.kind in ("prune", "mixed"):
        for norm in norms_behind(model, host.blocks(model)[-1]):
            norm.register_forward_hook(ZeroHook(trace, always=last.restore == "zeros"))


def release(model: nn.Module, blocks: Sequence[ReducedBlock]) -> Callable[[], None]:
    """Turn ``blocks`` into the host's own, and take off hooks; return a function that adopts them again."""
    for module in model.modules():
        take_off(module)
    own: list[tuple[ReducedBlock, type[ReducedBlock], Reducer[Any], dict[str, Any]]] = []
    for block in blocks:
        # Before the block is released: its own attributes go with it.
        settings = {name: getattr(block, name) for name in block.OWN}
        own.append((block, cast("type[ReducedBlock]", class_of(block)), block.reducer, settings))
        block.release()
    host_of(model).uninstall(model)

    def adopt_again() -> None:
        for block, kind, reducer, settings in own:
            kind.adopt(block, reducer, **settings)

    return adopt_again
