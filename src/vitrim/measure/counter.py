"""The counter of multiply-accumulates: one forward, what ran in it by kind of product and by module.

PyTorch's counter does the counting; here are formulas for operations that it has none for, and which operation belongs
to which part of `vitrim.measure.macs.Macs`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitrim.core.block import Reducer
from vitrim.core.modules import Exchange
from vitrim.core.scoring import EarlyScorer
from vitrim.errors import VitrimError
from vitrim.measure.prefill import Prefill

PARTS = ("linear", "attention", "matching", "norm")

WHOLE = "Global"
"""The counter's name for everything that ran."""

NORM_PER_ELEMENT = 5  # as fvcore: mean, variance, normalise, scale, shift
BATCH_NORM_PER_ELEMENT = 2  # as fvcore: in evaluation it scales and shifts

Shape = Sequence[int]


def count_parts(model: nn.Module, images: Tensor) -> Counter[str]:
    """MACs of each part, attributes of `Macs`, in one forward of the whole batch (B, C, H, W).

    The forward is that of `vitrim.measure.macs.count_macs`.

    Example:
        >>> count_parts(nn.Sequential(nn.Conv2d(3, 8, 2, stride=2)), torch.zeros(5, 3, 4, 4))["linear"]
        1920
    """
    return count_shares(model, images)[WHOLE]


def count_shares(model: nn.Module, images: Tensor) -> dict[str, Counter[str]]:
    """`count_parts`, and where ``model`` is a `Prefill` the same for tower, connector and language model, by name."""
    if images.ndim == 0 or images.shape[0] == 0:
        raise VitrimError("no images to count on; give at least one image (1, C, H, W)")
    with _as_written(model, images.device), FlopCounterMode(display=False, custom_mapping=_MAPPING) as counter:
        model(images.detach())
    by_module = counter.get_flop_counts()
    whole = _parts_of(by_module, model, WHOLE)
    if not any(whole.values()):
        raise RuntimeError(f"{type(model).__name__} ran no product that can be counted")
    if not isinstance(model, Prefill):
        return {WHOLE: whole}
    names = {module: name for name, module in _named(model)}

    def together(modules: Sequence[nn.Module]) -> Counter[str]:
        return sum((_parts_of(by_module, model, names[module]) for module in modules), Counter())

    shares = {}
    for share, (modules, others) in model.shares().items():
        shares[share] = together(modules)
        shares[share].subtract(together(others))
    connector = Counter(whole)
    for parts in shares.values():
        connector.subtract(parts)
    return {WHOLE: whole, "tower": shares["tower"], "connector": connector, **shares}


def _parts_of(by_module: Mapping[str, Mapping[Any, int]], model: nn.Module, place: str) -> Counter[str]:
    """MACs of each part in the module that the counter knows as ``place``."""
    flops: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
    for operation, count in by_module.get(place, {}).items():
        if operation not in _PART_OF:
            raise RuntimeError(
                f"{operation} ran {count} FLOPs that belong to no part; add it to vitrim.measure.counter"
            )
        flops[_PART_OF[operation]] += count
    inside = "" if place == WHOLE else f"{place}."
    for name in (*_names_of(Reducer, model, inside), *_names_of(EarlyScorer, model, inside)):
        deciding = _attention(by_module.get(name, {}))
        flops["attention"] -= deciding
        flops["matching"] += deciding
    flops["exchange"] = sum(_attention(by_module.get(name, {})) for name in _names_of(Exchange, model, inside))
    return Counter({part: count // 2 for part, count in flops.items()})  # a MAC is two FLOPs


def _attention(operations: Mapping[Any, int]) -> int:
    return sum(flops for operation, flops in operations.items() if _PART_OF[operation] == "attention")


def _named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules by their names in the counter's module tracker."""
    root = type(model).__name__
    modules = model.named_modules(remove_duplicate=False)  # the tracker knows a shared module by its last name
    return [(f"{root}.{name}" if name else root, module) for name, module in modules]


def _names_of(kind: type[nn.Module], model: nn.Module, inside: str) -> list[str]:
    """Names of a class's modules whose names begin with ``inside``; a reducer decides in such a module call."""
    return [name for name, module in _named(model) if isinstance(module, kind) and name.startswith(inside)]


@contextmanager
def _as_written(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run in eval mode, without gradients or autocast; operations reach the counter as the model wrote them.

    Below autograd, PyTorch hands over ``linear`` and ``scaled_dot_product_attention`` themselves and not what they
    become: a linear layer on tokens that are not contiguous runs as the same batched product as attention, and
    attention as one of many kernels, so parts and devices could not be told apart. (Inference mode does that too, but
    would leave tensors behind that can never be trained with, in models that cache some.) The counter's module tracker
    hooks the gradient of every input that wants one, which is not possible there, so no parameter wants one. The fast
    path of ``nn.MultiheadAttention`` is one opaque operation and therefore off.
    """
    training = [(module, module.training) for module in model.modules()]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fastpath = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    model.requires_grad_(False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch._C._AutoDispatchBelowAutograd())
            if torch.amp.is_autocast_available(device.type):
                stack.enter_context(torch.autocast(device.type, enabled=False))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for module, mode in training:
            module.training = mode
        for parameter in trainable:
            parameter.requires_grad_(True)


# FLOPs of operations that PyTorch's counter has no formula for, from shapes. A MAC is two.


def _linear_flops(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(x) * prod(weight[:-1])


def _vector_flops(matrix: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(matrix)


def _attention_flops(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _distance_flops(a: Shape, b: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
    return 2 * prod(out_shape) * a[-1]


def _norm_flops(x: Shape, *_: Any, **__: Any) -> int:
    return 2 * NORM_PER_ELEMENT * prod(x)


def _batch_norm_flops(x: Shape, *_: Any, **__: Any) -> int:
    return 2 * BATCH_NORM_PER_ELEMENT * prod(x)


_aten = torch.ops.aten

_FORMULAS = {
    _aten.linear: _linear_flops,
    _aten.mv: _vector_flops,
    _aten.dot: _vector_flops,
    _aten.scaled_dot_product_attention: _attention_flops,
    _aten.cdist: _distance_flops,
    _aten.native_layer_norm: _norm_flops,
    _aten.batch_norm: _batch_norm_flops,
}

# Older versions of the counter (torch 2.11 and 2.13) look the overload up before they take an operation apart, and the
# packet when they count it: without the overloads, linear layers and attention would reach them as kernels.
_MAPPING: dict[Any, Any] = {**_FORMULAS, **{operation.default: formula for operation, formula in _FORMULAS.items()}}
# torch 2.11 has no formula for this kernel: called by its own name it would be missed, and not refused as of no part
_MAPPING[_aten._scaled_dot_product_flash_attention_for_cpu] = _attention_flops

# A batched product outside of a reducer is attention, however it is written; a plain one is a learned layer.
_PART_OF = {
    _aten.linear: "linear",
    _aten.mm: "linear",
    _aten.addmm: "linear",
    _aten.mv: "linear",
    _aten.dot: "linear",
    _aten.convolution: "linear",
    _aten.bmm: "attention",
    _aten.baddbmm: "attention",
    _aten.scaled_dot_product_attention: "attention",
    _aten.cdist: "attention",
    _aten.native_layer_norm: "norm",
    _aten.batch_norm: "norm",
}
