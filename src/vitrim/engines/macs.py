"""Multiply-accumulates (MACs) of dense and reduced models, from one counter that separates parts.

PyTorch's counter counts one forward; this file adds formulas that it lacks, and assigns operations to parts, from which
the totals of published tables can be made (`CONVENTIONS`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from vitrim.core.block import Exchange, Reducer
from vitrim.core.method import MethodConfig
from vitrim.core.reduce import Reduction, Selection, reduce_, refuse_reduced, restore_
from vitrim.core.registry import ask, parse_method, reducible
from vitrim.core.scoring import EarlyScorer
from vitrim.core.selection import Choosing, ImageSelector
from vitrim.engines.copies import take_learned
from vitrim.engines.prefill import Prefill
from vitrim.errors import VitrimError
from vitrim.report import DENSE

PARTS = ("linear", "attention", "matching", "norm")

WHOLE = "Global"
"""The counter's name for the entire model."""

NORM_PER_ELEMENT = 5  # as fvcore: mean, variance, normalise, scale, shift
BATCH_NORM_PER_ELEMENT = 2  # as fvcore: in evaluation it scales and shifts

InputShape = Sequence[int]


def count_parts(model: nn.Module, images: Tensor) -> Counter[str]:
    """MACs of each part (see `Macs`) in one forward of the entire batch (B, C, H, W), run as in `count_macs`.

    Example:
        >>> count_parts(nn.Sequential(nn.Conv2d(3, 8, 2, stride=2)), torch.zeros(5, 3, 4, 4))["linear"]
        1920
    """
    return count_shares(model, images)[WHOLE]


def count_shares(model: nn.Module, images: Tensor) -> dict[str, Counter[str]]:
    """`count_parts` by share: the total and, for a `Prefill`, tower, connector, language model, selection, decoding."""
    if isinstance(model, Prefill) and model.new_tokens:
        # A forward with an answer contains the prefill: decoding is the difference of the two.
        number, model.new_tokens = model.new_tokens, 0
        try:
            shares = count_shares(model, images)
        finally:
            model.new_tokens = number
        prefill, answer = shares[WHOLE], _counted(model, images)[WHOLE]
        decoding = Counter(answer)
        decoding.subtract(prefill)
        return {**shares, WHOLE: answer, "decoding": decoding}
    return _counted(model, images)


def _counted(model: nn.Module, images: Tensor) -> dict[str, Counter[str]]:
    """`count_shares` of a single forward."""
    if images.ndim == 0 or images.shape[0] == 0:
        raise VitrimError("no images to count on; give at least one image (1, C, H, W)")
    quicker = _MetaResults() if images.is_meta else nullcontext()
    counter = FlopCounterMode(display=False, custom_mapping=_MAPPING)
    with _as_written(model, images.device), quicker, counter:
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
    # Parts of the connector may lie inside the tower; what is in neither share is the connector's.
    for share, (modules, others) in model.shares().items():
        shares[share] = together(modules)
        shares[share].subtract(together(others))
    if model.select is not None:
        shares["selection"] = together([module for module in names if isinstance(module, Choosing)])
    connector = Counter(whole)
    for parts in shares.values():
        connector.subtract(parts)
    return {WHOLE: whole, "tower": shares["tower"], "connector": connector, **shares}


def _parts_of(by_module: Mapping[str, Mapping[Any, int]], model: nn.Module, place: str) -> Counter[str]:
    """MACs of each part in the module that the counter calls ``place``."""
    flops: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
    for operation, count in by_module.get(place, {}).items():
        if operation not in _PART_OF:
            raise RuntimeError(f"{operation} ran {count} FLOPs that belong to no part; add it to vitrim.engines.macs")
        flops[_PART_OF[operation]] += count
    inside = "" if place == WHOLE else f"{place}."
    chosen = [name for name in _names_of(Choosing, model, "") if f"{name}.".startswith(inside)]
    # A reducer's products are those it decides by, whatever operation they are written as.
    for name in (*_names_of(Reducer, model, inside), *_names_of(EarlyScorer, model, inside), *chosen):
        deciding = _attention(by_module.get(name, {}))
        flops["attention"] -= deciding
        flops["matching"] += deciding
    flops["exchange"] = sum(_attention(by_module.get(name, {})) for name in _names_of(Exchange, model, inside))
    return Counter({part: count // 2 for part, count in flops.items()})  # a MAC is two FLOPs


def _attention(operations: Mapping[Any, int]) -> int:
    return sum(flops for operation, flops in operations.items() if _PART_OF[operation] == "attention")


def _named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules with their names in the counter's module tracker."""
    root = type(model).__name__
    modules = model.named_modules(remove_duplicate=False)  # the tracker uses the last name of a shared module
    return [(f"{root}.{name}" if name else root, module) for name, module in modules]


def _names_of(kind: type[nn.Module], model: nn.Module, inside: str) -> list[str]:
    """Names, starting with ``inside``, of the modules of a class."""
    return [name for name, module in _named(model) if isinstance(module, kind) and name.startswith(inside)]


@contextmanager
def _as_written(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run in eval mode, without gradients or autocast, so that operations reach the counter as the model wrote them."""
    # Below autograd, the counter receives `linear` and `scaled_dot_product_attention` themselves, not their
    # decompositions: a linear layer on non-contiguous tokens becomes the same batched product as attention, and
    # attention becomes one of many kernels. (Inference mode does that too, but models that cache tensors could never be
    # trained with them.) The counter's module tracker hooks the gradient of every input that requires one, which fails
    # there, so no parameter does. The fast path of `nn.MultiheadAttention` is one opaque operation and therefore off.
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


class _MetaResults(TorchDispatchMode):
    """Empty results on the meta device for frequent operations; a rule returns None where it does not apply."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # PyTorch's decompositions took more than half the time of a count, which needs only the shapes of results.
        quick = _META_RESULTS.get(func)
        result = None if quick is None else quick(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is None else result


def _linear_result(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    fits = weight.ndim == 2 and x.shape[-1:] == weight.shape[1:] and x.dtype == weight.dtype and x.ndim > 1
    fits = fits and (bias is None or (bias.shape == weight.shape[:1] and bias.dtype == x.dtype))
    return x.new_empty(*x.shape[:-1], weight.shape[0]) if fits else None


def _norm_result(
    x: Tensor, shape: InputShape, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    size = tuple(x.shape[-len(shape) :])
    if size != tuple(shape) or any(given is not None and tuple(given.shape) != size for given in (weight, bias)):
        return None
    statistics = x.new_empty(*x.shape[: -len(shape)], *(1 for _ in shape))
    return torch.empty_like(x), statistics, statistics


def _attention_result(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> Tensor | None:
    fits = q.shape[:-2] == k.shape[:-2] == v.shape[:-2] and q.dtype == k.dtype == v.dtype
    if not (fits and q.shape[-1] == k.shape[-1] and k.shape[-2] == v.shape[-2]):
        return None
    if attn_mask is not None:
        attn_mask.expand(*q.shape[:-1], k.shape[-2])  # raises for a mask that does not fit
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _elementwise_result(x: Any, other: Any = 0, **_: Any) -> Tensor | None:
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        return None
    if isinstance(other, Tensor) and (other.shape != x.shape or other.dtype != x.dtype):
        return None
    return torch.empty_like(x)


_aten = torch.ops.aten


def _attention_flops(q: InputShape, k: InputShape, v: InputShape, *_: Any, **__: Any) -> int:
    return 2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten.linear: lambda x, weight, *_, **__: 2 * prod(x) * prod(weight[:-1]),
    _aten.mv: lambda matrix, *_, **__: 2 * prod(matrix),
    _aten.dot: lambda vector, *_, **__: 2 * prod(vector),
    _aten.scaled_dot_product_attention: _attention_flops,
    _aten.cdist: lambda a, *_, out_shape, **__: 2 * prod(out_shape) * a[-1],
    _aten.native_layer_norm: lambda x, *_, **__: 2 * NORM_PER_ELEMENT * prod(x),
    _aten.batch_norm: lambda x, *_, **__: 2 * BATCH_NORM_PER_ELEMENT * prod(x),
}
"""FLOPs, from shapes, of operations without a formula in PyTorch's counter. A MAC is two FLOPs."""

_META_RESULTS: dict[Any, Callable[..., Any]] = {
    _aten.linear.default: _linear_result,
    _aten.native_layer_norm.default: _norm_result,
    _aten.scaled_dot_product_attention.default: _attention_result,
    _aten.gelu.default: _elementwise_result,
    _aten.clamp_min.default: _elementwise_result,
    _aten.log.default: _elementwise_result,
    _aten.add.Tensor: _elementwise_result,
    _aten.sub.Tensor: _elementwise_result,
    _aten.mul.Tensor: _elementwise_result,
    _aten.div.Tensor: _elementwise_result,
}

# torch 2.11 and 2.13 look up the overload before decomposing an operation, and the packet when counting it: without the
# overloads, linear layers and attention would be counted as kernels.
_MAPPING: dict[Any, Any] = {**_FORMULAS, **{operation.default: formula for operation, formula in _FORMULAS.items()}}
# torch 2.11 has no formula for this kernel, and would silently miss it
_MAPPING[_aten._scaled_dot_product_flash_attention_for_cpu] = _attention_flops

# A batched product outside of a reducer is attention, however it is written; a plain product is a learned layer.
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


Convention = Literal["all", "no-attention", "no-norm"]
CONVENTIONS: dict[str, tuple[str, ...]] = {
    "all": PARTS,
    "no-attention": ("linear", "exchange", "matching", "norm"),
    "no-norm": ("linear", "attention", "matching"),
}
"""The parts in a published total.

``all``: as fvcore counts attention that is written as matrix products (DeiT-S 4.61; MCTF, ToMe rows of ViTTM).
``no-attention``: as fvcore counts a fused kernel, which it misses (ViT-S 4.25), but not the exchange between two
streams (ViTTM-S 1.84, LookupViT 5.26). ``no-norm``: plain multiply-accumulates (DeiT-S 4.60; ATM).
"""


@dataclass(frozen=True)
class Macs:
    """Multiply-accumulates per image; one multiply-add is 1. Softmax, activations, sorting and gathering count 0.

    Attributes:
        linear: linear and convolution layers, including a method's learned predictors.
        attention: q k^T and the product with v.
        matching: similarities and scores that a method computes to decide (products inside its `Reducer`).
        norm: 5 per input element of a LayerNorm and 2 per element of a batch norm; others count 0, as in fvcore.
        exchange: the part of ``attention`` between two streams of tokens (products inside an `Exchange` module).

    Example:
        >>> Macs(linear=4_000_000_000, attention=500_000_000, matching=0, norm=0).total
        4500000000
    """

    linear: int
    attention: int
    matching: int
    norm: int
    exchange: int = 0

    @property
    def total(self) -> int:
        return self.under("all")

    def under(self, convention: str) -> int:
        """The total under ``convention``, a key of `CONVENTIONS`."""
        return sum(getattr(self, part) for part in CONVENTIONS[convention])

    def gmacs(self) -> dict[str, float]:
        """The four parts in units of 10^9 MACs."""
        return {part: getattr(self, part) / 1e9 for part in PARTS}


@dataclass(frozen=True)
class PrefillCost:
    """The cost of a vision-language model's prompt, by part of the model.

    Attributes:
        text: text tokens of the prompt.
        image_tokens: image tokens per prompt, mean over prompts.
        shares: MACs per prompt by name: tower, connector, language model.
        new_tokens: tokens of the answer; 0 for prefill only.
        cache_bytes: final bytes of the KV cache per prompt; None without a cache.
    """

    text: int
    images: int
    image_tokens: float
    shares: Mapping[str, Macs]
    new_tokens: int = 0
    cache_bytes: float | None = None


@dataclass(frozen=True)
class Profile:
    """The cost of one model under one method.

    Attributes:
        params: parameters of the host and of the reducers.
        macs: MACs per image, padding too; per prompt for a `Prefill`, whose parts are in ``prefill``.
        tokens_per_block: tokens after every block, prefix included, means over images without padding; empty for a
            model that vitrim cannot reduce, and for another image than the dense model's (`ImageSelector`).
        unused_params: parameters of the authors' code that are never used; published counts include them.
        select: selector of image tokens, also part of ``method``; None without one.
        img_size: side of the images in pixels; None if the model was counted at its own size only.
    """

    model: str
    method: str
    params: int
    macs: Macs
    tokens_per_block: tuple[float, ...]
    unused_params: int = 0
    prefill: PrefillCost | None = None
    select: str | None = None
    img_size: int | None = None


def profile_of(
    model: nn.Module,
    method: MethodConfig | str | None,
    images: Tensor | Iterable[Tensor],
    *,
    name: str | None = None,
    dense: bool = False,
    learned: Path | None = None,
) -> Profile:
    """Parameters, MACs and tokens per block of ``model`` under ``method``. The model is restored afterwards.

    Counts of a static method follow from shapes: one image is enough, and model and images may be on the meta device.
    An adaptive method runs on all images, batch by batch; results are means over images.

    Args:
        model: a supported host that is not reduced, or its `Prefill`; without a method, any model.
        method: config or text, e.g. ``"tome:r=13"``; None or ``"none"`` for the dense model, "dense" in the result.
        images: one batch (B, C, H, W) or several, on the device and in the dtype of the model; (B, n, C, H, W) for a
            `Prefill`. Not on meta for an adaptive method, as they would have no content.
        dense: ignore the selector of a `Prefill`.
        learned: see `vitrim.engines.copies.take_learned`.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("test_vit")
        >>> profile_of(model, "tome:r=10", torch.zeros(1, 3, 160, 160)).tokens_per_block
        (91, 81, 71, 61, 51, 41)
    """
    config = method if isinstance(method, MethodConfig) else parse_method("none" if method is None else method)
    batches = _batches(config, images)
    refuse_reduced(model)
    unused = getattr(model, "published_unused_params", 0)
    whole = model.model if isinstance(model, Prefill) else model
    name = name or ask(whole).architecture(whole)
    select = model.select if isinstance(model, Prefill) and not dense else None
    # Without a reduction, any model can be counted.
    if config.describe() == "none" and select is None and (isinstance(model, Prefill) or not reducible(model)):
        params = sum(parameter.numel() for parameter in model.parameters())
        macs, tokens, cost = _measure(model, None, batches)
        return Profile(name, DENSE, params, macs, tokens, unused, cost)
    # The tower is as it was, but with some selectors it reads other images.
    behind = select is not None and not isinstance(select, ImageSelector)
    whole_tower = model.dense_tokens() if isinstance(model, Prefill) and behind else ()
    reduction = reduce_(model, config, record=True, compact=isinstance(model, Prefill), select=select)
    try:
        take_learned(reduction, learned)
        params = sum(parameter.numel() for parameter in model.parameters())
        macs, tokens, cost = _measure(model, reduction, batches, whole_tower)
    finally:
        restore_(model)
    own = config.describe()
    if select is not None:
        return Profile(name, f"{own} + {select.describe()}", params, macs, tokens, unused, cost, select.describe())
    return Profile(name, DENSE if own == "none" else own, params, macs, tokens, unused, cost)


def count_macs(model: nn.Module, images: Tensor) -> Macs:
    """MACs of one forward of ``model``, dense or reduced, per image (rounded mean over the batch).

    The forward runs in eval mode, without gradients and without autocast; padding is computed, and counted. ``images``
    are (B, C, H, W) on the device and in the dtype of the model, on meta only if nothing depends on their content. A
    `RuntimeError` tells that a product is assigned to no part: no number is better than a wrong one.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 2, stride=2), nn.Flatten(), nn.Linear(32, 10))
        >>> count_macs(model, torch.zeros(5, 3, 4, 4))
        Macs(linear=704, attention=0, matching=0, norm=0, exchange=0)
    """
    return _per_image(count_parts(model, images), images.shape[0])


def _measure(
    model: nn.Module, reduction: Reduction | None, batches: Iterable[Tensor], whole_tower: Sequence[float] = ()
) -> tuple[Macs, tuple[float, ...], PrefillCost | None]:
    """MACs, tokens per block and the shares of a `Prefill`, as means over the images of all batches."""
    counted: dict[str, Counter[str]] = {}
    tokens: list[list[float]] = []
    number, image_tokens = 0, 0.0
    for batch in batches:
        for share, parts in count_shares(model, batch).items():
            counted.setdefault(share, Counter()).update(parts)
        # A batch counts as many times as it has images, as in a mean over all of them.
        number += len(batch)
        if reduction is not None:
            blocks = whole_tower if isinstance(reduction, Selection) else reduction.mean_tokens_per_block
            tokens.append([len(batch) * count for count in blocks])
            image_tokens += sum(reduction.image_tokens) if reduction.compact else 0
        elif isinstance(model, Prefill):
            tokens.append([len(batch) * count for count in model.dense_tokens()])
            image_tokens += len(batch) * model.places * model.shape[0]
    if number == 0:
        raise VitrimError("no images to profile on; give at least one batch (B, C, H, W)")
    per_block = tuple(tidy(sum(block) / number) for block in zip(*tokens, strict=True))
    cost = None
    if isinstance(model, Prefill):
        shares = {share: _per_image(parts, number) for share, parts in counted.items() if share != WHOLE}
        numbers = tidy(image_tokens / number), shares, model.new_tokens, model.cache_bytes
        cost = PrefillCost(model.text, model.shape[0], *numbers)
    return _per_image(counted[WHOLE], number), per_block, cost


def _batches(config: MethodConfig, images: Tensor | Iterable[Tensor]) -> Iterable[Tensor]:
    """The batches to run: all of them, or one image if the content does not matter."""
    batches = [images] if isinstance(images, Tensor) else images
    if not config.is_adaptive():
        return [batch[:1] for batch in islice(batches, 1)]
    if isinstance(images, Tensor) and images.is_meta:
        raise VitrimError(f"{config.name} adapts to the content of the images: profile it on real ones, not on meta")
    return batches


def tidy(count: float) -> float:
    """``count``, as an int if it is integral, for JSON and tables."""
    return int(count) if float(count).is_integer() else count


def _per_image(counted: Mapping[str, int], number: int) -> Macs:
    return Macs(**{part: round(counted[part] / number) for part in (*PARTS, "exchange")})
