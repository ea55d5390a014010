"""Merging copies of a token changes nothing: attention and every head count a merged token as often as it was there.

On every host: images whose patch tokens are copies of one another, merged before block 0, against the host's own
forward on all of them. A copy is a copy in its place, too: it shares the rotary angles and the relative positions of
the token it was copied from, since it is that position a merged token keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import tiny
import vitrim
from vitrim.core.registry import host_of
from vitrim.core.tokens import TokenState, take

PATCHES = 36
DISTINCT = 15
EXACT = {"atol": 1e-6, "rtol": 1e-5}  # in float64, but some hosts take their softmax in float32

every_host = pytest.mark.parametrize("host", tiny.HOSTS)


class MergeCopies(vitrim.MethodConfig):
    """Merges every patch that is a copy into its original, before block 0."""

    name: ClassVar[str] = "merge_copies"
    kind: ClassVar[Any] = "merge"

    proportional: bool = True
    originals: tuple[tuple[int, ...], ...]
    """For every image and patch the patch it is a copy of: itself where it is none."""


class Merger(vitrim.Reducer[MergeCopies]):
    site = "before"

    def follow(self, config: MergeCopies, layer: vitrim.Layer) -> None:
        super().follow(config, layer)
        self.originals = torch.tensor(config.originals)

    def assign(self, x: Tensor, attention: object, state: TokenState) -> vitrim.Hard:
        itself = self.originals == torch.arange(PATCHES)
        keep = itself.nonzero()[:, 1].view(len(x), -1)
        moved = (~itself).nonzero()[:, 1].view(len(x), -1)
        into = torch.searchsorted(keep, self.originals.gather(1, moved))
        return vitrim.merge(state, keep, moved, into)


@vitrim.reduces(MergeCopies)
def first_block(config: MergeCopies, layer: vitrim.Layer) -> type[Merger] | None:
    return Merger if layer.depth == 0 else None


def copied_patches(batch: int) -> Tensor:
    """(B, P) the patch that each is a copy of, other ones in every image."""
    generator = torch.Generator().manual_seed(7)
    originals = torch.arange(PATCHES).repeat(batch, 1)
    for row in originals:
        order = torch.randperm(PATCHES, generator=generator)
        chosen = torch.randint(DISTINCT, (PATCHES - DISTINCT,), generator=generator)
        row[order[DISTINCT:]] = order[chosen]
    return originals


def with_prefix(originals: Tensor, model: nn.Module) -> Tensor:
    """(B, N) token indices, in the host's own order, for (B, P) patch indices."""
    behind = tiny.num_behind(model)
    front = tiny.num_prefix(model) - behind
    prefix, others = torch.arange(front), torch.arange(behind) + front + PATCHES
    batch = len(originals)
    return torch.cat([prefix.expand(batch, -1), originals + front, others.expand(batch, -1)], dim=1)


def feed_copies(model: nn.Module, originals: Tensor) -> None:
    """From now on block 0 of ``model`` gets tokens in which every patch is a copy of its original (B, P)."""
    index = with_prefix(originals, model)

    def copies(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return take(args[0], index), *args[1:]

    tiny.blocks(model)[0].register_forward_pre_hook(copies)


def share_positions(model: nn.Module, originals: Tensor) -> None:
    """From now on the host's own blocks see every patch (P,) in the place of its original.

    Whatever a block knows of places is a table over patches or tokens: handed to it (rotary angles, a shared bias), an
    index it keeps as a buffer, or what its module for relative positions returns.
    """
    patches, tokens = originals, with_prefix(originals[None], model)[0]

    def shared(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(shared(entry) for entry in value)
        if not isinstance(value, Tensor):
            return value
        for axis, length in enumerate(value.shape):
            if length in (len(patches), len(tokens)):
                value = value.index_select(axis, patches if length == len(patches) else tokens)
        return value

    def hand_over(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return (args[0], *shared(args[1:])), {name: shared(value) for name, value in kwargs.items()}

    for module in model.modules():
        if "MidPosition" in type(module).__name__:  # YOLOS adds them between its blocks
            module.register_forward_hook(lambda module, args, table: shared(table))
    for block in tiny.blocks(model):
        block.register_forward_pre_hook(hand_over, with_kwargs=True)
        for module in block.modules():
            if "RelativePosition" in type(module).__name__:
                module.register_forward_hook(lambda module, args, bias: shared(bias))
    for module in model.modules():
        for name, index in module.named_buffers(recurse=False):
            if name == "relative_position_index":
                side = next(n for n in (len(patches), len(tokens)) if index.numel() == n * n)
                setattr(module, name, shared(index.view(side, side)).reshape(index.shape))


def tensors(output: Any) -> list[Tensor]:
    """Everything a model returns, not its logits alone."""
    if isinstance(output, Tensor):
        return [output]
    entries = output.to_tuple() if hasattr(output, "to_tuple") else output
    return [tensor for entry in entries for tensor in tensors(entry)]


def dense_on_copies(create: Callable[[], nn.Module], images: Tensor, originals: Tensor) -> list[Tensor]:
    """What the host itself returns for images (B, 3, H, W) whose patches are copies (B, P). One image at a time:
    the tables of a host are the same for a whole batch."""
    outputs = []
    for image, row in zip(images, originals, strict=True):
        model = create().double()
        share_positions(model, row)
        feed_copies(model, row[None])
        last: list[Tensor] = []
        tiny.blocks(model)[-1].register_forward_hook(lambda block, args, out, last=last: last.append(out))
        outputs.append(tensors(model(image[None])))
        index = with_prefix(row[None], model)
        torch.testing.assert_close(last[0], take(last[0], index), **EXACT)  # copies stayed copies
    return [torch.cat(parts) for parts in zip(*outputs, strict=True)]


def merged(create: Callable[[], nn.Module], images: Tensor, originals: Tensor, **options: Any) -> list[Tensor]:
    """What the reduced host returns when the copies are merged."""
    model = create().double()
    config = MergeCopies(originals=tuple(map(tuple, originals.tolist())), **options)
    reduction = vitrim.reduce_(model, config)
    feed_copies(model, originals)
    outputs = tensors(model(images))
    assert reduction.state.num_patches == DISTINCT
    return outputs


@pytest.mark.sampled(5)
@every_host
@torch.no_grad()
def test_merged_copies_give_what_all_copies_give(host: str) -> None:
    create, images = tiny.HOSTS[host], tiny.images().double()
    originals = copied_patches(len(images))
    expected = dense_on_copies(create, images, originals)
    found = merged(create, images, originals)
    if host_of(create()).facts(create()).head_rows is not None:
        # tokens that CLIP hands out beside what its head makes of the class token are those that are left
        found, expected = found[:1], expected[:1]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **EXACT)
    without = merged(create, images, originals, proportional=False)
    assert (without[0] - expected[0]).abs().max() > 1e-5  # the sizes are what makes them equal


@pytest.mark.sampled(5)
@every_host
@torch.no_grad()
def test_the_rows_the_head_reads_are_enough(host: str) -> None:
    model = tiny.HOSTS[host]()
    if host_of(model).facts(model).head_rows is None:
        pytest.skip("this head reads patches")
    create, images = tiny.HOSTS[host], tiny.images().double()
    originals = copied_patches(len(images))
    expected = dense_on_copies(create, images, originals)
    found = merged(create, images, originals, last_block="class_token")
    torch.testing.assert_close(found[0], expected[0], **EXACT)
