"""A model at another image size: the same weights, with positions resampled as its library does."""

from __future__ import annotations

import copy
from itertools import chain

import torch
from torch import nn

from vitrim.core.reduce import get_reduction, restore_
from vitrim.core.registry import able_host, ask, has_trunk, input_size_of, reads_prompts, supported_parts
from vitrim.errors import UnsupportedModelError, VitrimError, first_line


def at_size(model: nn.Module, size: int) -> nn.Module:
    """A copy of ``model`` for square images of ``size`` pixels, with the same weights, and not reduced.

    The library of the model resamples its positions (`Library.set_size`). The copy is tried on one image.
    `UnsupportedModelError` gives the reason why a model cannot, `VitrimError` refuses sizes that are no whole patches.

    Example:
        >>> import timm
        >>> model = timm.create_model("test_vit")  # images of 160 px in patches of 16 px
        >>> at_size(model, 128)(torch.zeros(1, 3, 128, 128)).shape, model.pos_embed.shape
        (torch.Size([1, 1000]), torch.Size([1, 101, 64]))
    """
    found = copy.deepcopy(model)
    if get_reduction(found) is not None:
        restore_(found)
    library, kind = ask(found), type(found).__name__
    _check(found, size)
    host = able_host(found)
    try:
        library.set_size(found, size)
        made = library.input_size(found) if host is None else host.facts(found).input_size  # says why it is not able
        if made is None or made[1:] != (size, size):
            raise UnsupportedModelError("it has no way to take images of another size")
        _check_transform(found, size)
        _try(found, size)
    except _ERRORS as error:
        raise UnsupportedModelError(f"{kind} cannot be given images of {size} px: {first_line(error)}") from error
    return found


_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""The errors of libraries, `VitrimError` among them."""


def _check(model: nn.Module, size: int) -> None:
    """Refuse models that have no image size to change, and images that are no whole patches."""
    kind = type(model).__name__
    if reads_prompts(type(model)):
        raise UnsupportedModelError(f"{kind} reads prompts, and its processor chooses the sizes of their images")
    _, height, width = input_size_of(model)
    if height != width:
        raise UnsupportedModelError(f"{kind} takes images of {height} x {width} px: only square ones can be resized")
    for trunk in [model] if has_trunk(model) else [part for _, part in supported_parts(model)]:
        host = able_host(trunk)
        if host is None:
            continue
        if host.facts(trunk).any_size:
            raise UnsupportedModelError(f"{kind} takes images in sizes of their own: it has no image size to change")
        patch = max(ask(trunk).layout(trunk).patch_size)
        if size % patch == 0:
            continue
        below = size // patch * patch
        # The whole patches on both sides of the size that was asked for.
        nearest = [below, below + patch] if below else [patch]
        raise VitrimError(
            f"{size} px is not a multiple of the patch size of {kind}, {patch} px: take "
            f"{' or '.join(map(str, nearest))}"
        )


def _check_transform(model: nn.Module, size: int) -> None:
    """Refuse a transform of the model's own that still makes images of another size."""
    from PIL import Image

    transform = getattr(model, "eval_transform", None)
    if transform is None:
        return
    rows, columns = transform(Image.new("RGB", (2 * size, 3 * size))).shape[-2:]
    if (rows, columns) != (size, size):
        raise UnsupportedModelError(
            f"its eval_transform makes images of {rows} x {columns} px, and only those of libraries are known"
        )


def _try(model: nn.Module, size: int) -> None:
    """Run a copy of ``model``, in eval mode, on one image; it shares the weights."""
    like = next(model.parameters())
    if like.is_meta and not ask(model).runs_on_meta:
        return
    # The memo of `deepcopy` says that these are copied already, so the trial shares them.
    weights = chain(model.parameters(), model.buffers())
    trial = copy.deepcopy(model, {id(weight): weight for weight in weights}).eval()
    channels, *_ = input_size_of(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        trial(torch.zeros(1, channels, size, size, device=like.device, dtype=like.dtype))
