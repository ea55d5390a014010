"""Parameters, multiply-accumulates and tokens per block of dense and reduced models: ``vitrim profile``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrim.checked import Positive, Seed, checked_call
from vitrim.core.method import MethodConfig
from vitrim.core.reduce import get_reduction
from vitrim.core.registry import ask, has_trunk, parse_methods, parse_selector, reads_prompts
from vitrim.data import ImageDataset, batches, load_images, to_tensor
from vitrim.engines.copies import apart
from vitrim.engines.machine import environment, seeded_draws
from vitrim.engines.macs import PARTS, Convention, Profile, profile_of
from vitrim.engines.prefill import Prefill, Prompt, as_measured
from vitrim.engines.static import schedules_in_words
from vitrim.errors import VitrimError, one_line_errors
from vitrim.loading import Loaded, ModelSpec
from vitrim.measure.inputs import (
    DataSpec,
    adaptive_note,
    check_own_transform,
    image_shape,
    open_images,
    random_images,
    untrained_counts,
    untrained_notes,
)
from vitrim.report import DENSE, Report, Table, at_px

IMAGES = 32
"""Default number of images for adaptive methods."""
GROUPS_SHOWN = 6


@checked_call
def profile(
    models: nn.Module | str | ModelSpec | Sequence[nn.Module | str | ModelSpec],
    methods: MethodConfig | str | Sequence[MethodConfig | str] | None = None,
    *,
    convention: Convention = "all",
    batch_size: Positive = 8,
    images: Any = None,
    prompt: Prompt | None = None,
    seed: Seed = 0,
) -> Report:
    """Count parameters, multiply-accumulates per image and tokens per block, dense and reduced.

    Counts of most methods follow from shapes: weights and images do not matter, and the weights of a named model are
    not even initialised. Adaptive methods run on images, which should be real, with real weights. For a vision-language
    model the prefill of a prompt is counted: tower, connector and language model.

    Args:
        models: one or several; each a module, which is not changed, a name as on the command line, or a
            `vitrim.ModelSpec`. A reduced module is also counted as it is.
        methods: one or several, configs or text such as ``"tome:r=13"``; rows start with the dense model and a reduced
            module's own method.
        convention: the parts in the table's total: all, no-attention or no-norm.
        batch_size: batch size for adaptive methods.
        images: images for adaptive methods: a source (see `vitrim.data.load_images`), a dataset, or a
            `vitrim.DataSpec`, whose ``limit`` defaults to 32. Default: random images.
        prompt: prompt of a vision-language model.
        seed: seed of random weights and images; the global generators do not change.

    Returns:
        A report with a row per model and method: ``model, method, params, unused_params``, ``gmacs`` (10^9 per image,
        by part: linear, attention, matching and norm), ``exchange_gmacs`` (the part of attention between two streams),
        ``tokens_per_block`` and, for a vision-language model, ``prefill``. Notes name the schedules of adaptive methods
        on the images (`vitrim.freeze`). Its ``record`` is the output of
        ``vitrim profile --json``.

    Raises:
        VitrimError: an unknown model, method or convention, a method that does not fit a model, images that cannot be
            read or that no method needs.

    Example:
        >>> report = profile("test_vit", "tome:r=10")
        >>> [(row["method"], row["tokens_per_block"]) for row in report.rows]
        [('dense', [101, 101, 101, 101, 101, 101]), ('tome:r=10', [91, 81, 71, 61, 51, 41])]
        >>> print(report.tables[0].cells()[1][1][-2], "% of the multiply-accumulates saved")
        28.0 % of the multiply-accumulates saved
    """
    configs = [config for config in parse_methods(methods) if config.describe() != "none"]
    spec, prompt = DataSpec.of(images), prompt or Prompt()
    if not isinstance(spec.source, str | Path | ImageDataset | None):
        raise VitrimError(f"expected a source of images or a dataset of vitrim.data, got {type(spec.source).__name__}")
    given = ModelSpec.each(models)
    adaptive = _adaptive(given, configs)
    content = _content(spec, adaptive, batch_size, seed)
    # only shapes matter, unless a method depends on the content
    filled = any(one.pretrained or one.checkpoint is not None for one in given)
    device = "cpu" if adaptive or filled else "meta"
    counted = [_counted(one, configs, prompt, content, device, alone=len(given) == 1) for one in given]
    rows = [row for each in counted for row in each.rows]
    weights = ", ".join(dict.fromkeys(each.weights for each in counted))
    untrained = list(dict.fromkeys(name for each in counted for name in each.untrained))
    facts = {
        "environment": environment(device=counted[-1].device, seed=seed),
        "weights": weights,
        "model_options": dict(given[0].options or {}),
        "untrained": untrained,
        "images": content.facts if adaptive else None,
    }
    prompts = [row for row in rows if row.prefill is not None]
    tables = [_table(rows, convention), *([_prompt_table(prompts, convention)] if prompts else [])]
    notes = [*_notes(rows, convention, adaptive, content, weights), *untrained_notes(untrained)]
    notes += [line for each in counted for line in each.notes]
    return Report("profile", facts, [_row(row) for row in rows], tables, notes)


def _adaptive(models: Sequence[ModelSpec], methods: Sequence[MethodConfig]) -> list[str]:
    """The adaptive ones among the methods of the models and ``methods``."""
    given = [getattr(one.model, "_orig_mod", one.model) for one in models if not one.named]
    own = [found.config for model in given if (found := get_reduction(model))]
    return list(dict.fromkeys(one.describe() for one in [*own, *methods] if one.is_adaptive()))


@dataclass(frozen=True)
class _Content:
    """The images for adaptive methods.

    Attributes:
        dataset: None for random images.
        source: as given; None for random images.
        count: number of images.
        seed: of random images.
    """

    dataset: ImageDataset | None
    source: str | None
    count: int
    batch_size: int
    seed: int

    @property
    def facts(self) -> dict[str, Any]:
        return {"source": self.source or "random", "count": self.count, "batch_size": self.batch_size}

    def batches(self, host: nn.Module) -> list[Tensor]:
        """Batches (B, C, H, W) for ``host``."""
        weight = next(host.parameters())
        if self.dataset is not None:
            dataset = open_images(host, self.dataset)
            found = [images for images, _ in batches(dataset, self.batch_size, limit=self.count)]
        elif weight.is_meta:
            return [torch.empty(1, *image_shape(host), device="meta")]
        else:
            found = list(random_images(host, self.count, self.seed).split(self.batch_size))
        return [images.to(weight.device, weight.dtype) for images in found]


def _content(spec: DataSpec, adaptive: Sequence[str], batch_size: int, seed: int) -> _Content:
    """The images, which are read only if a method is ``adaptive``."""
    images, count = spec.source, spec.limit or IMAGES
    if spec.limit is not None and not adaptive:
        raise VitrimError("limit says how many images to run, and none are: no method here adapts to its images")
    if not spec.by_name and any(value is not None for value in spec.columns.values()):
        raise VitrimError("split, image_column and label_column say how to read a source of images, and none is given")
    if isinstance(images, ImageDataset):
        return _Content(images if adaptive else None, images.source, min(count, len(images)), batch_size, seed)
    if images is None or not adaptive:
        return _Content(None, None if images is None else str(images), count, batch_size, seed)
    dataset = load_images(images, **spec.columns, **(spec.options or {}))
    return _Content(dataset, str(images), min(count, len(dataset)), batch_size, seed)


class _Counted(NamedTuple):
    """The rows of one model, with the origin of its weights, its methods with random parameters, and its device."""

    rows: list[Profile]
    weights: str
    untrained: list[str]
    device: str
    notes: list[str]


def _counted(
    spec: ModelSpec, methods: Sequence[MethodConfig], prompt: Prompt, content: _Content, device: str, *, alone: bool
) -> _Counted:
    """Count one model, dense and under every method; a named model is created on ``device``.

    Sizes that it cannot take are left out, with a line, unless it is ``alone``.
    """
    place = torch.device(device) if spec.named else next(spec.model.parameters(), torch.empty(0)).device
    with seeded_draws(place, content.seed):
        loaded = _created(replace(spec, img_sizes=()), device)
        others, notes = list[Loaded](), list[str]()
        try:
            others = loaded.at_sizes(spec.img_sizes)
        except VitrimError as error:
            if alone:
                raise
            notes = [f"{loaded.name} is counted at its own size only: {error}"]
        if content.dataset is not None and content.dataset.transform is not to_tensor:
            check_own_transform(content.dataset, others)
        with apart(loaded.model) as own:
            select = prompt.select or own.select
            host = as_measured(own.model, replace(prompt, select=select))
            _check_host(host, content)
            images = content.batches(host)
            configs = [config for config in own.with_own(methods) if config.describe() != "none"]
            reduced: list[MethodConfig | None] = [*configs] or ([] if select is None else [None])
            with one_line_errors(loaded.name, kept=""):
                rows = [profile_of(host, None, images, name=loaded.name, dense=True)]
                rows += [profile_of(host, each, images, name=loaded.name, learned=own.learned) for each in reduced]
                if others:
                    rows = [replace(row, img_size=loaded.side) for row in rows]
                for one in others:
                    resized = content.batches(one.model)
                    for each in [None, *configs]:
                        row = profile_of(one.model, each, resized, name=loaded.name, learned=own.learned)
                        named = at_px(row.method, one.img_size)
                        rows.append(replace(row, method=named, img_size=one.img_size))
                untrained = untrained_counts(host, configs, own.learned)
                if content.dataset is not None and not isinstance(host, Prefill):
                    notes += schedules_in_words(host, configs, images, own.learned)
    weights = "random" if spec.named and device == "meta" else loaded.weights
    return _Counted(rows, weights, untrained, str(place), notes)


def _check_host(host: nn.Module, content: _Content) -> None:
    """Refuse a model that reads text beside the images, and images for a prompt."""
    towers = [name for name, part in host.named_children() if has_trunk(part)]
    # a bare tower has the library's default of this name
    if towers and has_trunk(host) and getattr(host, "main_input_name", "pixel_values") == "input_ids":
        raise VitrimError(
            f"this {type(host).__name__} reads text beside the images: give its tower of images, model.{towers[0]}"
        )
    if content.source is not None and isinstance(host, Prefill):
        raise VitrimError("images are for models of images alone: prompts are made of random images and text")


def _created(spec: ModelSpec, device: str) -> Loaded:
    """The loaded model; on the CPU if it is made here and cannot run on the meta device."""
    loaded = spec.load(device)
    if not spec.named or device != "meta":
        return loaded
    # a prompt selects tokens by their values, so it needs them
    shapes_alone = ask(loaded.model).runs_on_meta and not reads_prompts(type(loaded.model))
    return loaded if shapes_alone else spec.load("cpu")


# ---- rows, tables, notes ---------------------------------------------------------------------------------------------


def _row(row: Profile) -> dict[str, Any]:
    found = {
        "model": row.model,
        "method": row.method,
        **({} if row.img_size is None else {"img_size": row.img_size}),
        "params": row.params,
        "unused_params": row.unused_params,
        "gmacs": row.macs.gmacs(),
        "exchange_gmacs": row.macs.exchange / 1e9,
        "tokens_per_block": list(row.tokens_per_block),
    }
    if row.select is not None:
        found["select"] = row.select
    if row.prefill is not None:
        found["prefill"] = {
            "text_tokens": row.prefill.text,
            "prompt_images": row.prefill.images,
            "image_tokens": row.prefill.image_tokens,
            "new_tokens": row.prefill.new_tokens,
            "kv_cache_bytes": row.prefill.cache_bytes,
            "gmacs": {share: macs.gmacs() for share, macs in row.prefill.shares.items()},
        }
    return found


def _table(rows: Sequence[Profile], convention: str) -> Table:
    prompts = sum(row.prefill is not None for row in rows)
    several = len({row.model for row in rows}) > 1
    columns = ("method", "params M", *PARTS, "total", "MACs saved %", "tokens after each block")
    cells = []
    dense = 1
    for row in rows:
        total = row.macs.under(convention)
        dense = total if row.method == DENSE else dense
        cells.append(
            (
                *([row.model if row.method == DENSE else ""] if several else []),
                row.method,
                f"{row.params / 1e6:.2f}",
                *map(_number, row.macs.gmacs().values()),
                _number(total / 1e9),
                f"{100 * (1 - total / dense):.1f}",
                compact(row.tokens_per_block),
            )
        )
    unit = "GMACs per prompt" if prompts == len(rows) else "GMACs per image" + (" or prompt" if prompts else "")
    title = unit if several else f"{rows[0].model}: {unit}"
    names = ("model", *columns) if several else columns
    return Table("profile", title, names, cells, text_columns=1 + several)


def _prompt_table(rows: Sequence[Profile], convention: str) -> Table:
    """The cost of the prefill by part of the model."""
    cells: list[tuple[str, ...]] = []
    dense = 1
    for row in rows:
        assert row.prefill is not None
        shares = [macs.under(convention) for macs in row.prefill.shares.values()]
        dense = sum(shares) if row.method == DENSE else dense
        numbers = [_number(value / 1e9) for value in (*shares, sum(shares))]
        model, saved = row.model if row.method == DENSE else "", f"{100 * (1 - sum(shares) / dense):.1f}"
        held = "-" if row.prefill.cache_bytes is None else f"{row.prefill.cache_bytes / 2**20:.2f}"
        cells.append((model, row.method, f"{row.prefill.image_tokens:g}", *numbers, saved, held))
    cost = rows[0].prefill
    assert cost is not None
    title = f"prefill: GMACs per prompt of {cost.text} tokens of text and {cost.images} image{'s' * (cost.images > 1)}"
    if cost.new_tokens:
        title += f", and an answer of {cost.new_tokens}"
    columns = ("model", "method", "image tokens", *cost.shares, "total", "MACs saved %", "KV cache MiB")
    return Table("prefill", title, columns, cells, text_columns=2)


def _number(gmacs: float) -> str:
    """Format with two decimals as in papers, more for small values."""
    return f"{gmacs:.2f}" if gmacs >= 1 or gmacs == 0 else f"{gmacs:.3f}" if gmacs >= 0.001 else f"{gmacs:.1e}"


def compact(tokens: Sequence[float]) -> str:
    """Format tokens per block briefly: equal neighbours joined, and the middle of long lists left out.

    Example:
        >>> compact([197, 197, 197, 138, 138, 97.5])
        '197x3 138x2 97.5'
        >>> compact([184, 171, 158, 145, 132, 119, 106, 93])
        '184 171 158 .. 106 93'
    """
    texts = [f"{count:.1f}".removesuffix(".0") for count in tokens]
    groups = [(text, len(list(group))) for text, group in groupby(texts)]
    words = [text if count == 1 else f"{text}x{count}" for text, count in groups]
    return " ".join(words if len(words) <= GROUPS_SHOWN else [*words[:3], "..", *words[-2:]])


def _notes(
    rows: Sequence[Profile], convention: str, adaptive: Sequence[str], content: _Content, weights: str
) -> Iterator[str]:
    # published numbers of parameters may include some that the authors' code never uses
    for name, params, unused in {(row.model, row.params, row.unused_params): None for row in rows if row.unused_params}:
        yield (
            f"{name}: {params / 1e6:.2f} M parameters; the published {(params + unused) / 1e6:.2f} M include "
            f"{unused / 1e6:.2f} M that are never used"
        )
    yield {
        "all": "total = linear + attention + matching + norm",
        "no-attention": "total = linear + matching + norm, as fvcore counts where attention is a fused kernel that it "
        "does not see (ViT-S 4.25, ViT-B 16.87: the ViT and DeiT rows of ViTTM), plus, in models with two streams, the "
        "attention between them, which it sees (the ViTTM and LookupViT rows)",
        "no-norm": "total = linear + attention + matching (DeiT-S 4.60: ATM)",
    }[convention] + "; tokens: class token included; papers count in several ways: see the help of --convention"
    for select in dict.fromkeys(row.select for row in rows if row.select is not None):
        yield from adaptive_note(parse_selector(select))
    if not adaptive:
        if content.source is not None:
            yield f"{content.source} was not read: no method here adapts to its images"
        return
    what = f"images of {content.source}" if content.source else "random images (give real ones as images)"
    these = (
        "random weights (neither pretrained nor of a checkpoint)"
        if weights == "random"
        else "the model's given weights"
    )
    yield f"{', '.join(adaptive)}: counts depend on the images; means over {content.count} {what} under {these}"
