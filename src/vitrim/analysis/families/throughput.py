"""Throughput: speed over image sizes, precisions, attention kernels and token counts (Cropr, Fig. 1-3 and Tab. 5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from vitrim.analysis.family import FamilyResult, TableRow, Tables, grouped, names_of
from vitrim.analysis.figures import Panel, draws, line_of, line_panels, styles
from vitrim.analysis.subject import Subject
from vitrim.core.image_size import at_size
from vitrim.core.method import MethodConfig
from vitrim.core.registry import able_host, host_of, input_size_of
from vitrim.engines.copies import dense_copies, reduced_copy, shared_copy
from vitrim.engines.formats.base import DTYPES
from vitrim.engines.memory import peak_memory_mib
from vitrim.errors import VitrimError, one_line_errors
from vitrim.measure.inputs import random_images
from vitrim.measure.latency import Budget, speed_row, time_interleaved
from vitrim.plots.charts import line
from vitrim.report import DENSE
from vitrim.style import SMALL, TEXT, names_below, panels

MULTIPLE = 8
OWN = "own"
"""Label of a model's own number of tokens."""
BUDGET = Budget(min_rounds=10, min_seconds=0.5, warmup_rounds=2)
AUTOCAST = "autocast"


def throughput(subject: Subject, budget: Budget = BUDGET) -> FamilyResult:
    """Images per second of the dense model and the methods, on fused and unfused attention, with random images.

    A float32 model is also timed under autocast. ``tokens`` names the variant: the model's own tokens ("own"), one per
    patch ("M", which drops the last patch of a model with a class token), one less ("M-1"), or counts after every block
    rounded up to multiples of 8, prefix included ("aligned"). All variants of one size and precision are timed in turn.
    ``speedup`` compares with the dense model at that size, precision and kernel with all its tokens: median and
    quartiles of the ratios within rounds. Memory is the peak of one forward beyond weights and images.
    """
    own, notes, rows = input_size_of(subject.model)[-1], list[str](), list[TableRow]()
    for size in subject.sizes or (own,):
        model = subject.model if size == own else at_size(subject.model, size)
        variants = dict(_variants(model, subject.methods, notes))
        dtype = next(model.parameters()).dtype
        named = next((name for name, kind in DTYPES.items() if kind == dtype), str(dtype).removeprefix("torch."))
        for precision in (named, AUTOCAST) if dtype == torch.float32 else (named,):
            with one_line_errors(f"{size} pixels, {precision}"):
                rows += _timed(variants, precision, size, subject, budget)
    result = FamilyResult(notes=list(dict.fromkeys(notes)))
    result.add("throughput", "Speed, timed in turn; speed-up over the dense model", rows)
    return result


Variant = tuple[str, str, str]
"""A method, an attention kernel, and a variant of token counts."""


def _variants(
    model: nn.Module, methods: Sequence[MethodConfig], notes: list[str]
) -> Iterator[tuple[Variant, nn.Module]]:
    """Every method with every kernel and variant of token counts that it supports, the dense model first."""
    for kernel, dense in dense_copies(model).items():
        fewer: dict[str, int] = {}
        if (host := able_host(model)) is not None:
            prefix = host.facts(dense).num_prefix
            fewer = {"M": prefix, "M-1": prefix + 1} if prefix else {"M-1": 1}
        yield (DENSE, kernel, OWN), dense
        for tokens, number in fewer.items():
            yield (DENSE, kernel, tokens), without_last(shared_copy(dense), number)
        for method in methods:
            name = method.describe()
            yield (name, kernel, OWN), reduced_copy(dense, method)
            if method.needs().grid:
                notes.append(f"{name} is left out of M and M-1 tokens: it needs the whole grid")
            else:
                for tokens, number in fewer.items():
                    yield (name, kernel, tokens), without_last(reduced_copy(dense, method), number)
            if method.can_align():
                yield (name, kernel, "aligned"), reduced_copy(dense, method.changed(align=MULTIPLE))
            else:
                notes.append(f"{name} is left out of aligned counts: it has none to round")


def _timed(
    variants: Mapping[Variant, nn.Module], precision: str, size: int, subject: Subject, budget: Budget
) -> Iterator[TableRow]:
    """Yield the rows of one size and precision."""
    like, (some, *_) = next(subject.model.parameters()), variants.values()
    # Time does not depend on pixels, but where counts do: those methods see noise here.
    images = random_images(some, subject.batch_size, subject.seed).to(like.device, like.dtype)

    def forward(model: nn.Module) -> None:
        with torch.autocast(like.device.type, enabled=precision == AUTOCAST):  # it keeps cast weights until its end
            model(images)

    with torch.inference_mode():
        runs = {"|".join(variant): partial(forward, model) for variant, model in variants.items()}
        times = dict(zip(variants, time_interleaved(runs, like.device, budget).values(), strict=True))
        for variant, model in variants.items():
            method, kernel, tokens = variant
            row = {"method": method, "size": size, "precision": precision, "kernel": kernel, "tokens": tokens}
            speed = speed_row(times[variant], times[DENSE, kernel, OWN], len(images), promised=1.0)
            # of a copy, because this forward would release what the model still holds of its last one
            peak = peak_memory_mib(partial(forward, shared_copy(model)), like.device)
            yield {
                **row,
                "batch_size": len(images),
                "images_per_second": speed["images_per_second"],
                "latency_ms": speed["latency_ms"]["p50"],
                "latency_iqr_ms": speed["latency_ms"]["iqr"],
                **{name: speed[name] for name in ("rounds", "speedup", "speedup_q1", "speedup_q3")},
                "peak_memory_mib": peak,
            }


def without_last(model: nn.Module, number: int) -> nn.Module:
    """Drop the last ``number`` patches, fewer than all, before the first block, in place: pass a private copy."""
    host = host_of(model)
    rows, columns = host.facts(model).grid_size
    if rows * columns <= number:
        raise VitrimError(f"a model of {rows * columns} patches cannot have {number} fewer")
    host.blocks(model)[0].register_forward_pre_hook(lambda module, args: (args[0][:, :-number], *args[1:]))
    return model


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
    sizes = sorted({row["size"] for row in rows})
    if len(sizes) > 1:
        return _draw_speedups(tables, sizes)
    groups, (colour, _) = grouped(rows, "precision", "kernel"), styles(tables)
    figure, axes = panels(len(groups), across=2, size=(4.2, 2.6), above=0.2 + 0.2 * -(-len(names) // 3))
    for axis, (group, own) in zip(axes, groups.items(), strict=True):
        axis.set_title(" ".join(group), fontsize=TEXT)
        ticks = dict[float, str]()
        for place, (name, some) in enumerate(grouped(own, "method").items()):  # a bar for each number of tokens
            x = [1.2 * place + (WIDE + 0.04) * number for number, _ in enumerate(some)]
            axis.bar(x, [row["images_per_second"] for row in some], color=colour[name], width=WIDE, label=name)
            for left, row in zip(x, some, strict=True):
                ticks[left] = str(row["tokens"]).replace("aligned", "x 8")
                _annotate(axis, row, left, (0, 4), ha="center")
        axis.margins(y=0.15)
        axis.set_xticks(list(ticks), list(ticks.values()), fontsize=SMALL)
    axes[0].set_ylabel("images per second", fontsize=TEXT)
    names_below(figure, axes)
    return figure


def _draw_speedups(tables: Tables, sizes: Sequence[int]) -> Any:
    """The speed-up over several sizes, at equal distances on the axis, with each model's own tokens."""
    rows = [
        {**row, "place": sizes.index(row["size"])} for row in tables["throughput"].records() if row["tokens"] == OWN
    ]
    groups = grouped(rows, "precision", "kernel")
    given = [Panel("speedup", grouped(own, "method"), " ".join(group), "place", "") for group, own in groups.items()]
    figure, axes = line_panels(given, styles(tables), across=2)
    for axis, own in zip(axes, groups.values(), strict=True):
        rates = {row["size"]: row["images_per_second"] for row in own if row["method"] == DENSE}
        axis.set_xticks(range(len(sizes)), [f"{size} px\n{rates[size]:.3g}/s" for size in sizes], fontsize=SMALL)
        axis.margins(x=0.1)
    axes[0].set_ylabel("speed-up", fontsize=TEXT)
    return figure


def _annotate(axis: Any, row: TableRow, x: float, offset: tuple[int, int], **look: Any) -> None:
    """Write the speed-up of a row beside its images per second."""
    place = {"textcoords": "offset points", "xytext": offset, "fontsize": SMALL}
    axis.annotate(f"{row['speedup']:.2f}", (x, row["images_per_second"]), **place, **look)


@draws("throughput", "throughput", "Speed of M tokens and of one less")
def draw_one_token_less(tables: Tables) -> Any:
    """Images per second over the size of the images, on logarithmic axes, one panel per precision and attention kernel:
    solid with one token per patch, dotted with one token less. Numbers are speed-ups over the dense model."""
    rows, names = tables["throughput"].records(), names_of(tables["throughput"])
    sizes = sorted({row["size"] for row in rows})
    if len(sizes) < 2:  # `draw_throughput` shows these as bars
        return None
    most = "M" if any(row["tokens"] == "M" for row in rows) else OWN  # the same without a class token
    groups, (colour, marker) = grouped(rows, "precision", "kernel"), styles(tables)
    figure, axes = panels(len(groups), across=2, size=(4.2, 3.0), above=0.2 + 0.2 * -(-len(names) // 3))
    for axis, (group, own) in zip(axes, groups.items(), strict=True):
        axis.set_title(" ".join(group), fontsize=TEXT)
        for (name, tokens), some in grouped(own, "method", "tokens").items():
            if tokens in (most, "M-1"):
                label = name if tokens == most else f"_{name}, one token less"
                given = line_of(some, "images_per_second", "size")
                drawn = line(axis, given, colour=colour[name], marker=marker[name], label=label)
                drawn.set_linestyle("-" if tokens == most else ":")
                for row in some:
                    _annotate(axis, row, row["size"], (4, 3))
        axis.set(xscale="log", yscale="log")
        axis.set_xticks(sizes, [f"{size} px" for size in sizes], fontsize=SMALL)
        axis.minorticks_off()
    axes[0].set_ylabel("images per second", fontsize=TEXT)
    names_below(figure, axes)
    return figure
