"""Throughput: speed over image sizes, precisions, attention kernels and token counts (Cropr, Fig. 1-3 and Tab. 5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.analysis.family import FamilyResult, Tables, draws, names_of, styles
from vitrim.analysis.subject import Subject, reduced_blocks
from vitrim.core.method import MethodConfig
from vitrim.core.reduce import Reduction, handle_of
from vitrim.core.registry import able_host, ask, host_of, input_size_of
from vitrim.core.schedule import Amount, BringBack, Keep, Remove
from vitrim.engines.copies import dense_copies, reduced_copy, shared_copy
from vitrim.engines.formats.base import DTYPES
from vitrim.engines.memory import peak_memory_mib
from vitrim.errors import VitrimError, one_line_errors
from vitrim.measure.inputs import random_images
from vitrim.measure.latency import Budget, images_per_second, paired_speedup, summarise, time_interleaved
from vitrim.plots.charts import Line, line
from vitrim.report import DENSE, Table
from vitrim.style import SMALL, TEXT, names_below, panels

MULTIPLE = 8
OWN = "own"
"""Label of a model's own number of tokens."""
BUDGET = Budget(min_rounds=10, min_seconds=0.5, warmup_rounds=2)
COLUMNS = (
    *("method", "size", "precision", "kernel", "tokens", "batch_size", "images_per_second", "latency_ms"),
    *("latency_iqr_ms", "rounds", "speedup", "speedup_q1", "speedup_q3", "peak_memory_mib"),
)
AUTOCAST = "autocast"
Context = Callable[[], AbstractContextManager[Any]]
SHOWN = tuple(name for name in COLUMNS if name not in ("batch_size", "latency_iqr_ms", "rounds"))


def throughput(subject: Subject, budget: Budget = BUDGET) -> FamilyResult:
    """Images per second of the dense model and the methods, on fused and unfused attention, with random images.

    A float32 model is also timed under autocast. ``tokens`` names the variant: the model's own tokens ("own"), one per
    patch ("M", which drops the last patch of a model with a class token), one less ("M-1"), or counts after every block
    rounded up to multiples of 8, prefix included ("aligned"). All variants of one size and precision are timed in turn.
    ``speedup`` compares with the dense model at that size, precision and kernel with all its tokens: median and
    quartiles of the ratios within rounds. Memory is the peak of one forward beyond weights and images.
    """
    result = FamilyResult()
    own = input_size_of(subject.model)[-1]
    rows: list[tuple[object, ...]] = []
    sizes = subject.sizes or (own,)
    for size in sizes:
        model = subject.model if size == own else ask(subject.model).resized(subject.model, size)
        if model is None:
            raise VitrimError(
                f"this {type(subject.model).__name__} cannot be given images of {size} pixels: leave it out"
            )
        variants = list(_variants(model, subject.methods, result.notes if size == sizes[0] else []))
        dtype = next(model.parameters()).dtype
        named = next((name for name, kind in DTYPES.items() if kind == dtype), str(dtype).removeprefix("torch."))
        for precision in (named, AUTOCAST) if dtype == torch.float32 else (named,):
            with one_line_errors(f"{size} pixels, {precision}"):
                rows += _timed(variants, precision, size, subject, budget)
    result.tables.append(
        Table("throughput", "Speed, timed in turn; speed-up over the dense model", COLUMNS, rows, SHOWN)
    )
    return result


@dataclass(frozen=True)
class _Variant:
    """One model to time: a method with a kernel and a variant of token counts."""

    method: str
    kernel: str
    tokens: str
    model: nn.Module

    def called(self, images: Tensor, context: Context) -> object:
        with context():
            return self.model(images)


def _variants(model: nn.Module, methods: Sequence[MethodConfig], notes: list[str]) -> Iterator[_Variant]:
    """Every method with every kernel and variant of token counts that it supports, the dense model first."""
    for number, (kernel, dense) in enumerate(dense_copies(model).items()):
        left_out = notes if number == 0 else []
        fewer: dict[str, int] = {}
        if (host := able_host(model)) is not None:
            prefix = host.facts(dense).num_prefix
            fewer = {"M": prefix, "M-1": prefix + 1} if prefix else {"M-1": 1}
        yield _Variant(DENSE, kernel, OWN, dense)
        for tokens, number in fewer.items():
            yield _Variant(DENSE, kernel, tokens, without_last(shared_copy(dense), number))
        for method in methods:
            name = method.describe()
            yield _Variant(name, kernel, OWN, reduced_copy(dense, method))
            if method.needs().grid:
                left_out.append(f"{name} is left out of M and M-1 tokens: it needs the whole grid")
            else:
                for tokens, number in fewer.items():
                    yield _Variant(name, kernel, tokens, without_last(reduced_copy(dense, method), number))
            reduced = reduced_copy(dense, method)
            if align(handle_of(reduced), MULTIPLE):
                yield _Variant(name, kernel, "aligned", reduced)
            else:
                left_out.append(f"{name} is left out of aligned counts: its counts do not follow from plain amounts")


def _timed(
    variants: Sequence[_Variant], precision: str, size: int, subject: Subject, budget: Budget
) -> list[tuple[object, ...]]:
    """The rows of one size and precision."""
    like = next(subject.model.parameters())
    images = random_images(variants[0].model, subject.batch_size, subject.seed).to(like.device, like.dtype)
    context: Context = partial(torch.autocast, like.device.type) if precision == AUTOCAST else nullcontext
    runs = {str(place): partial(variant.called, images, context) for place, variant in enumerate(variants)}
    with torch.inference_mode():
        times = list(time_interleaved(runs, like.device, budget).values())
        copies = [replace(variant, model=shared_copy(variant.model)) for variant in variants]
        peaks = [peak_memory_mib(partial(copy.called, images, context), like.device) for copy in copies]
    dense = {
        variant.kernel: times[place]
        for place, variant in enumerate(variants)
        if (variant.method, variant.tokens) == (DENSE, OWN)
    }
    rows: list[tuple[object, ...]] = []
    for variant, measured, peak in zip(variants, times, peaks, strict=True):
        latency, ratio = summarise(measured), paired_speedup(dense[variant.kernel], measured)
        speed = (images_per_second(len(images), latency.p50_ms), latency.p50_ms, latency.iqr_ms, len(measured))
        setting = (variant.method, size, precision, variant.kernel, variant.tokens, len(images))
        rows.append((*setting, *speed, ratio.median, ratio.q1, ratio.q3, peak))
    return rows


def without_last(model: nn.Module, number: int) -> nn.Module:
    """Drop the last ``number`` patches, fewer than all, before the first block, in place: pass a private copy."""
    host = host_of(model)
    rows, columns = host.facts(model).grid_size
    if rows * columns <= number:
        raise VitrimError(f"a model of {rows * columns} patches cannot have {number} fewer")
    host.blocks(model)[0].register_forward_pre_hook(lambda module, args: (args[0][:, :-number], *args[1:]))
    return model


@dataclass(frozen=True)
class Aligned:
    """An amount whose number of tokens (``num_prefix`` included) is rounded up to a multiple.

    Matrix units prefer row counts divisible by 8 or 16; rounding up never keeps fewer tokens than requested.

    Example:
        >>> Aligned(Remove(13), multiple=8, num_prefix=1).keep(196, 196)  # 184 tokens in all
        183
    """

    amount: Amount
    multiple: int
    num_prefix: int = 0

    def keep(self, initial: int, current: int) -> int:
        total = self.amount.keep(initial, current) + self.num_prefix
        return math.ceil(total / self.multiple) * self.multiple - self.num_prefix


def align(reduction: Reduction, multiple: int) -> bool:
    """Round the tokens that every block keeps, prefix included, up to a multiple; `Reduction.set` undoes this.

    Return False, with nothing changed, if the counts do not follow from plain amounts.

    Example:
        >>> import timm, vitrim
        >>> reduction = vitrim.reduce_(timm.create_model("test_vit").eval(), "tome:r=8", record=True)
        >>> align(reduction, 8)
        True
        >>> _ = reduction.model(torch.zeros(1, 3, 160, 160))
        >>> reduction.tokens_per_block
        [96, 88, 80, 72, 64, 56]
    """
    blocks = reduced_blocks(reduction)
    amounts, prefix = blocks[0].reducer.layer.amounts, blocks[0].num_prefix
    known = (type(None), Keep, Remove, BringBack)
    config = reduction.config
    fixed = config.is_adaptive() or config.kind == "soft"  # the counts of soft tokens are shapes of parameters
    if fixed or not any(amounts) or not all(isinstance(amount, known) for amount in amounts):
        return False
    plan = tuple(
        Aligned(amount, multiple, prefix) if isinstance(amount, Keep | Remove) else amount for amount in amounts
    )
    for block in blocks:
        block.reducer.follow(config, replace(block.reducer.layer, amounts=plan))
    return True


# ---- figures ---------------------------------------------------------------------------------------------------------

WIDE = 0.3
"""Width of a bar."""


@draws("throughput", "throughput", "Speed")
def draw_throughput(tables: Tables) -> Any:
    """One panel per precision and attention kernel. For several sizes: the speed-up over the dense model, a line per
    method, with the images per second of the dense model below each size. For one size: images per second as bars, for
    the model's own number of tokens, one token per patch (M), one less, and multiples of 8, with the speed-up above
    each."""
    rows, names = tables["throughput"].records(), names_of(tables["throughput"])
    groups = list(dict.fromkeys((row["precision"], row["kernel"]) for row in rows))
    sizes = sorted({row["size"] for row in rows})
    colour, marker = styles(tables)
    figure, axes = panels(len(groups), across=2, size=(4.2, 2.6), above=0.2 + 0.2 * -(-len(names) // 3))
    for axis, group in zip(axes, groups, strict=True):
        own = [row for row in rows if (row["precision"], row["kernel"]) == group]
        axis.set_title(" ".join(map(str, group)), fontsize=TEXT)
        if len(sizes) > 1:  # with each model's own tokens, at equal distances on the axis
            found = {(row["method"], row["size"]): row for row in own if row["tokens"] == OWN}
            for name in names:
                y = [found[name, size]["speedup"] if (name, size) in found else float("nan") for size in sizes]
                given = Line(range(len(sizes)), y)
                line(axis, given, colour=colour[name], marker=marker[name], label=name)
            rates = [found[names[0], size]["images_per_second"] for size in sizes]  # the dense model comes first
            labels = [f"{size} px\n{rate:.3g}/s" for size, rate in zip(sizes, rates, strict=True)]
            axis.set_xticks(range(len(sizes)), labels, fontsize=SMALL)
            axis.margins(x=0.1)
            continue
        ticks = dict[float, str]()
        for place, name in enumerate(names):  # a bar for each number of tokens
            some = [row for row in own if row["method"] == name]
            x = [1.2 * place + (WIDE + 0.04) * number for number, _ in enumerate(some)]
            heights = [row["images_per_second"] for row in some]
            axis.bar(x, heights, color=colour[name], width=WIDE, label=name)
            for left, height, row in zip(x, heights, some, strict=True):
                ticks[left] = str(row["tokens"]).replace("aligned", "x 8")
                note = {"textcoords": "offset points", "xytext": (0, 4), "ha": "center", "fontsize": SMALL}
                axis.annotate(f"{row['speedup']:.2f}", (left, height), **note)
        axis.margins(y=0.15)
        axis.set_xticks(list(ticks), list(ticks.values()), fontsize=SMALL)
    axes[0].set_ylabel("speed-up" if len(sizes) > 1 else "images per second", fontsize=TEXT)
    names_below(figure, axes)
    return figure


@draws("throughput", "throughput", "Speed of M tokens and of one less")
def draw_one_token_less(tables: Tables) -> Any:
    """Images per second over the size of the images, on logarithmic axes, one panel per precision and attention kernel:
    solid with one token per patch, dotted with one token less. Numbers are speed-ups over the dense model."""
    rows, names = tables["throughput"].records(), names_of(tables["throughput"])
    groups = list(dict.fromkeys((row["precision"], row["kernel"]) for row in rows))
    if len({row["size"] for row in rows}) < 2:  # `draw_throughput` shows these as bars
        return None
    most = "M" if any(row["tokens"] == "M" for row in rows) else OWN  # the same without a class token
    colour, marker = styles(tables)
    figure, axes = panels(len(groups), across=2, size=(4.2, 3.0), above=0.2 + 0.2 * -(-len(names) // 3))
    for axis, group in zip(axes, groups, strict=True):
        axis.set_title(" ".join(map(str, group)), fontsize=TEXT)
        for name in names:
            for tokens in (most, "M-1"):
                wanted = (*group, name, tokens)
                own = [row for row in rows if tuple(row[key] for key in KEYS) == wanted]
                own.sort(key=lambda row: row["size"])
                label = name if tokens == most else f"_{name}, one token less"
                given = Line([row["size"] for row in own], [row["images_per_second"] for row in own])
                drawn = line(axis, given, colour=colour[name], marker=marker[name], label=label)
                drawn.set_linestyle("-" if tokens == most else ":")
                for row in own:
                    beside = {"textcoords": "offset points", "xytext": (4, 3), "fontsize": SMALL}
                    axis.annotate(f"{row['speedup']:.2f}", (row["size"], row["images_per_second"]), **beside)
        sizes = sorted({row["size"] for row in rows})
        axis.set(xscale="log", yscale="log")
        axis.set_xticks(sizes, [f"{size} px" for size in sizes], fontsize=SMALL)
        axis.minorticks_off()
    axes[0].set_ylabel("images per second", fontsize=TEXT)
    names_below(figure, axes)
    return figure


KEYS = ("precision", "kernel", "method", "tokens")
