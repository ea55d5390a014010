"""Batches of images with different numbers of patches, padded to one length (NaFlex, SigLIP 2).

Images of one grid run together, without their padding, and results are padded again: no method ever matches, scores or
counts padding, and each image gets the result it gets alone. A batch costs one pass per grid in it, outside of compiled
graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from vitrim.core.block import ReducedBlock, sharded
from vitrim.core.tokens import Entered, IndexMap, TokenState, Trace, is_traced
from vitrim.errors import UnsupportedModelError


@dataclass(frozen=True)
class Group:
    """Images of one grid: (b,) int64 on the CPU, ascending indices in the batch, and the patches of each."""

    images: Tensor
    patches: int

    def take(self, value: Tensor, cut: bool = True) -> Tensor:
        """(b, patches, ...), the group's part of ``value`` (B, P, ...); with ``cut=False`` only of the batch."""
        if len(self.images) < value.shape[0]:
            value = value.index_select(0, self.images.to(value.device))
        return value[:, : self.patches] if cut else value


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of groups depends on the images
def groups_of(valid: Tensor, shapes: Tensor) -> list[Group]:
    """The images of a batch grouped by grid, in order of appearance.

    ``valid`` (B, P) is True for real patches; ``shapes`` (B, 2) are rows and columns of every image.
    `UnsupportedModelError` for an image without patches, padding that is not at the end, export or tracing.

    Example:
        >>> valid = torch.tensor([[True, True, False], [True, True, True], [True, True, False]])
        >>> groups_of(valid, torch.tensor([[1, 2], [1, 3], [1, 2]]))
        [Group(images=tensor([0, 2]), patches=2), Group(images=tensor([1]), patches=3)]
    """
    if is_traced() or torch.compiler.is_compiling():
        raise UnsupportedModelError(
            "torch.export and torch.jit.trace take no padded batches: how they split depends on the images"
        )
    real = valid.bool()
    counts = real.sum(dim=1)
    at_end = (real == (torch.arange(real.shape[1], device=real.device) < counts[:, None])).all(dim=1)
    keys = torch.cat([counts[:, None], shapes.to(counts), at_end[:, None].to(counts)], dim=1).tolist()  # one transfer
    if any(count == 0 for count, *_ in keys):
        raise UnsupportedModelError("a reduced model takes no image without patches: its mask is all padding")
    if not all(key[-1] for key in keys):
        raise UnsupportedModelError("a reduced model takes padding behind an image's patches only, not among them")
    # Groups in the order of their first images, so that a batch of one grid keeps its order.
    places: dict[tuple[int, ...], list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(tuple(key), []).append(place)
    if not places:
        return [Group(torch.arange(0), real.shape[1])]
    return [Group(torch.tensor(images), key[0]) for key, images in places.items()]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiler would recompile for every grid
def run_groups(
    model: nn.Module, trace: Trace, groups: Sequence[Group], num_patches: int, call: Callable[[Group], Any]
) -> Any:
    """Run ``call`` on every group, and join outputs and the trace's states in the order of the batch.

    ``trace`` is that of the blocks of ``model``; ``call`` runs the forward of a group's images without padding.
    Refused: several groups on a sharded model, and auxiliary outputs with one entry per patch.
    """
    if len(groups) > 1 and any(sharded(module) for module in model.modules() if isinstance(module, ReducedBlock)):
        raise UnsupportedModelError(
            f"this batch has images of {len(groups)} grids, each of which takes a pass: processes of a model under "
            "fully_shard would wait for each other; give every process images of one grid"
        )
    asked = trace.asked
    outputs: list[Any] = []
    histories: list[tuple[TokenState, ...]] = []
    finals: list[TokenState] = []
    entered: list[Entered] = []
    for group in groups:
        with trace.asking(asked):
            outputs.append(call(group))
        final = trace.call.final
        assert final is not None
        finals.append(final)
        histories.append(trace.call.states)
        entered += trace.call.entered
    # index of each image in the concatenated groups
    places = torch.cat([group.images for group in groups]).argsort()
    trace.call.entered = tuple(entered)
    trace.call.final = _join_states(finals, places, num_patches)
    trace.call.states = tuple(_join_states(states, places, num_patches) for states in zip(*histories, strict=True))
    return _join(outputs, groups, places, num_patches, finals[0].num_prefix)


def _join(parts: Sequence[Any], groups: Sequence[Group], places: Tensor, num_patches: int, num_prefix: int) -> Any:
    """Join the outputs of a model, tensors in any nesting of containers, for the whole batch.

    Tokens (b, n, C) of all patches are padded to ``num_patches``; other lengths that differ to the longest, with 0.
    """

    def together(*found: Any) -> Any:
        if not isinstance(found[0], Tensor):
            return found[0]
        # Tokens of all patches, with or without a prefix, have a length that follows from the group's patches.
        full = found[0].dim() == 3 and all(
            part.shape[1] in (group.patches, group.patches + num_prefix)
            for part, group in zip(found, groups, strict=True)
        )
        if not full:
            return _padded(found, places)
        extra = [num_patches - group.patches for group in groups]
        return _stack([F.pad(part, (0, 0, 0, more)) for part, more in zip(found, extra, strict=True)], places)

    return tree_map(together, *parts)


def _padded(parts: Sequence[Tensor], places: Tensor, value: float = 0.0) -> Tensor:
    """The ``parts`` for the whole batch, with every dimension but the first padded to the largest."""
    longest = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    padded = []
    for part in parts:
        padding: list[int] = []
        for dim in range(part.dim() - 1, 0, -1):  # the last comes first
            padding += [0, longest[dim] - part.shape[dim]]
        padded.append(F.pad(part, padding, value=value) if any(padding) else part)
    return _stack(padded, places)


def _stack(parts: Sequence[Tensor], places: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts)).index_select(0, places.to(parts[0].device))


def _join_states(states: Sequence[TokenState], places: Tensor, num_patches: int) -> TokenState:
    """The state of the whole batch, for reading: padding is masked and holds no input token."""
    first = states[0]
    masks = [torch.ones_like(s.size, dtype=torch.bool) if s.mask is None else s.mask for s in states]
    ragged = any(s.mask is not None for s in states) or len({s.num_tokens for s in states}) > 1
    inputs = first.num_prefix + num_patches
    # The sources are as long as the longest grid's: places of padding have no token.
    sources = [F.pad(s.source, (0, inputs - s.source.shape[1]), value=-1) for s in states]
    return replace(
        first,
        size=_padded([s.size for s in states], places, 1.0),
        index_map=IndexMap(_stack(sources, places), _padded([s.position for s in states], places)),
        mask=_padded(masks, places) if ragged else None,
        uniform=all(s.uniform for s in states),
        reduced=any(s.reduced for s in states),
        lost=any(s.lost for s in states) or any(s.num_inputs < inputs for s in states),
        mixed=any(s.mixed for s in states),
        held=None,
        bank=(),
        carry={},
        aux=_join_aux(states, places),
    )


def _join_aux(states: Sequence[TokenState], places: Tensor) -> tuple[tuple[str, int, Tensor], ...]:
    if len(states) == 1:
        return states[0].aux
    joined = []
    for entries in zip(*(s.aux for s in states), strict=True):
        name, depth, _ = entries[0]
        values = [value for _, _, value in entries]
        # A value per image can be put in the order of the batch; one per patch has no common length.
        per_image = all(value.dim() and len(value) == len(s.size) for value, s in zip(values, states, strict=True))
        if not per_image or len({value.shape[1:] for value in values}) > 1:
            raise UnsupportedModelError(
                f"'{name}' of images of different grids cannot be put together: give batches of images of one grid"
            )
        joined.append((name, depth, _stack(values, places)))
    return tuple(joined)
