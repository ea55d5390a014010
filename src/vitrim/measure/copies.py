"""Copies of a model that share its weights: as it is, with each of its attention kernels, reduced."""

from __future__ import annotations

import copy
from itertools import chain
from pathlib import Path

from torch import nn

from vitrim.core.method import MethodConfig
from vitrim.core.reduce import Reduction, reduce_, refuse_reduced, saved_method
from vitrim.core.registry import ask
from vitrim.measure.prefill import Prefill


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy of ``model`` with its own modules and the same parameters and buffers: it takes almost no memory.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> shared_copy(layer).weight is layer.weight
        True
    """
    weights = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(weight): weight for weight in weights})


def take_learned(reduction: Reduction, learned: Path | None) -> None:
    """Load the parameters of a saved reduction where it is of the same method; others that learn keep random ones.

    Args:
        reduction: the handle of a reduced model.
        learned: folder of `Reduction.save`, or None.

    Raises:
        VitrimError: the folder holds no reduction, or its parameters do not fit.
    """
    if learned is not None and reduction.config.name == saved_method(learned):
        reduction.load_parameters(learned)


def reduced_copy(model: nn.Module, method: MethodConfig | str, learned: Path | None = None) -> nn.Module:
    """A copy of ``model`` that shares its weights and is reduced by ``method``; a `Prefill` gets fewer image tokens.

    ``learned`` is a folder as of `take_learned`.

    Raises:
        VitrimError: as `vitrim.reduce_`. ``model`` is never changed.
    """
    refuse_reduced(model)
    reduced = shared_copy(model)
    select = model.select if isinstance(model, Prefill) else None
    take_learned(reduce_(reduced, method, compact=isinstance(model, Prefill), select=select), learned)
    return reduced


def dense_copies(model: nn.Module) -> dict[str, nn.Module]:
    """The unreduced model with every attention kernel that its library offers, as copies that share its weights.

    Which is faster depends on device, dtype and shape, so a fair baseline is the faster one, measured.

    Returns:
        ``{"fused": ..., "unfused": ...}`` for hosts that can do both, else ``{"host": ...}``.

    Example:
        >>> from timm.models import VisionTransformer
        >>> model = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2)
        >>> copies = dense_copies(model)
        >>> [dense.blocks[0].attn.fused_attn for dense in copies.values()]
        [True, False]
    """
    library = ask(model)
    fused, unfused = shared_copy(model), shared_copy(model)
    if not library.set_fused(fused, True):
        return {"host": fused}
    library.set_fused(unfused, False)
    return {"fused": fused, "unfused": unfused}
