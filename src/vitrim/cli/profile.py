"""``vitrim profile``: parameters, MACs and tokens per block of dense and reduced models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli import common
from vitrim.cli.setup import MODEL_NAMES, Compute, Images, Prompt, Record, Weights
from vitrim.errors import VitrimError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from vitrim.core.method import MethodConfig
    from vitrim.data import ImageDataset
    from vitrim.measure.macs import PrefillCost, Profile

DENSE = "none"
GROUPS_SHOWN = 6

Models = Annotated[list[str], typer.Argument(metavar="MODEL", help=f"models {MODEL_NAMES}")]
Convention = Annotated[
    str, typer.Option("--convention", help="what the total adds up: all, no-attention or no-norm of the four parts")
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", min=1, max=common.MAX_BATCH, help="so many images, for such methods; default: 32"),
]
IMAGES = 32


def profile(
    *,
    models: Models,
    methods: common.MethodsBesideDense = None,
    convention: Convention = "all",
    batch_size: common.BatchSize = 8,
    limit: Limit = None,
    prompt: Prompt,
    images: Images,
    weights: Weights,
    compute: Compute,
    record: Record,
) -> None:
    """Count parameters, MACs per image and tokens per block, dense and reduced.

    The four parts are counted apart: linear and convolution layers, attention products, a method's matching, LayerNorm.
    Random weights are enough, unless the method adapts to the images: then give --pretrained and --images. Of a
    vision-language model the prefill of a prompt is counted: tower, connector and language model.
    """
    configs = [config for config in common.parse_methods(methods or ()) if config.describe() != DENSE]
    if weights.checkpoint is not None and len(models) > 1:
        raise VitrimError(f"--checkpoint holds the weights of one model; {len(models)} models are given")
    from vitrim.errors import one_line_errors
    from vitrim.measure.machine import environment
    from vitrim.measure.macs import CONVENTIONS

    common.check_choice("convention", convention, CONVENTIONS)
    adaptive = [config.describe() for config in configs if config.is_adaptive()]
    if limit is not None and not adaptive:
        raise VitrimError("--limit says how many images to run, and none are: no method here adapts to its images")
    # shapes are all that counts, unless a method looks at the content
    device = "cpu" if adaptive or weights.pretrained or weights.checkpoint is not None else "meta"
    dataset = images.open() if adaptive else None
    count = (limit or IMAGES) if dataset is None else min(limit or IMAGES, len(dataset))
    rows: list[Profile] = []
    untrained: dict[str, None] = {}
    for name in models:
        compute.start()
        host = prompt.around(_create(weights, name, device), images.source)
        with one_line_errors(name, kept=""):
            rows += _profiles(name, host, configs, _batches(host, dataset, batch_size, count, compute.seed))
            untrained |= dict.fromkeys(untrained_counts(host, configs))
    of = "random" if device == "meta" else ", ".join(dict.fromkeys(weights.of(name) for name in models))
    out = record.console()
    _print(out, rows, convention)
    notes = (*_unused(rows), *_notes(convention, adaptive, images.source, count, of), *untrained_notes(untrained))
    for note in notes:
        out.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    read = {"source": images.source or "random", "count": count, "batch_size": batch_size}
    record.write(
        "profile",
        environment=environment(device=device, seed=compute.seed),
        weights=of,
        model_options=weights.options,
        untrained=list(untrained),
        images=read if adaptive else None,
        rows=[_row(row) for row in rows],
    )


def _create(weights: Weights, name: str, device: str) -> nn.Module:
    """The model ``name``, on the processor instead of the meta ``device`` if it does not run there."""
    from vitrim.core.registry import ask, reads_prompts

    host = weights.create(name, device)
    # which tokens of a prompt stay is read from values, so those are needed
    shapes_alone = ask(host).runs_on_meta and not reads_prompts(type(host))
    return host if device != "meta" or shapes_alone else weights.create(name, "cpu")


def _profiles(
    name: str, host: nn.Module, configs: Sequence[MethodConfig], batches: Iterable[Tensor]
) -> Iterator[Profile]:
    """The dense model, then every method."""
    from vitrim.measure.macs import profile as profile_one

    for config in (None, *configs):
        yield profile_one(host, config, batches, name=name)


def _batches(host: nn.Module, dataset: ImageDataset | None, batch_size: int, limit: int, seed: int) -> list[Tensor]:
    """Batches (B, C, H, W) for every method in turn: of ``dataset``, else random ones."""
    import torch

    from vitrim.data import batches, eval_transform

    if dataset is not None:
        dataset.transform = eval_transform(host)
        return [images for images, _ in batches(dataset, batch_size, limit=limit)]
    shape = _input_size(host)
    if next(host.parameters()).is_meta:
        return [torch.empty(1, *shape, device="meta")]
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(limit, *shape, generator=generator).split(batch_size))


def _input_size(model: nn.Module) -> tuple[int, ...]:
    """Channels, height and width of the images that ``model`` takes: a host, or any other model that declares them.

    Of a prefill, with the number of images of a prompt in front.
    """
    from vitrim.core.registry import ask, has_trunk, host_of
    from vitrim.measure.prefill import Prefill

    if isinstance(model, Prefill):
        return model.shape
    told = None if has_trunk(model) else ask(model).input_size(model)
    return host_of(model).facts(model).input_size if told is None else told


# ---- output ----------------------------------------------------------------------------------------------------------


def _row(row: Profile) -> dict[str, Any]:
    return {
        "model": row.model,
        "method": row.method,
        "params": row.params,
        "unused_params": row.unused_params,
        "gmacs": row.macs.gmacs(),
        "exchange_gmacs": row.macs.exchange / 1e9,
        "tokens_per_block": list(row.tokens_per_block),
        **({} if row.prefill is None else {"prefill": _prefill(row.prefill)}),
    }


def _prefill(cost: PrefillCost) -> dict[str, Any]:
    return {
        "text_tokens": cost.text,
        "prompt_images": cost.images,
        "image_tokens": cost.image_tokens,
        "gmacs": {share: macs.gmacs() for share, macs in cost.shares.items()},
    }


def _print(out: Console, rows: Sequence[Profile], convention: str) -> None:
    """Print one table; every model starts with its dense row."""
    from rich.markup import escape

    prompts = [(row, row.prefill) for row in rows if row.prefill is not None]
    several = len({row.model for row in rows}) > 1
    columns = ["method", "params M", "tokens per block", "linear", "attention", "matching", "norm", "total", "saved %"]
    cells = []
    dense = 1
    for row in rows:
        gmacs, total = row.macs.gmacs(), row.macs.under(convention)
        if row.method == DENSE:
            dense = total
        cells.append(
            [
                *([escape(row.model) if row.method == DENSE else ""] if several else []),
                escape(row.method),
                f"{row.params / 1e6:.2f}",
                compact(row.tokens_per_block),
                *(_number(value) for value in gmacs.values()),
                _number(total / 1e9),
                f"{100 * (1 - total / dense):.1f}",
            ]
        )
    unit = "GMACs per prompt" if len(prompts) == len(rows) else "GMACs per image" + (" or prompt" if prompts else "")
    title = unit if several else f"{escape(rows[0].model)}: {unit}"
    common.print_table(out, title, ["model", *columns] if several else columns, cells)
    if prompts:
        _print_prompts(out, prompts, convention)


def _print_prompts(out: Console, rows: Sequence[tuple[Profile, PrefillCost]], convention: str) -> None:
    """Print a table of what the prefill of a prompt is spent in."""
    from rich.markup import escape

    cells = []
    dense = 1
    for row, cost in rows:
        shares = [macs.under(convention) for macs in cost.shares.values()]
        dense = sum(shares) if row.method == DENSE else dense
        numbers = [_number(value / 1e9) for value in (*shares, sum(shares))]
        model = escape(row.model) if row.method == DENSE else ""
        cells.append(
            [model, escape(row.method), f"{cost.image_tokens:g}", *numbers, f"{100 * (1 - sum(shares) / dense):.1f}"]
        )
    cost = rows[0][1]
    title = f"prefill: GMACs per prompt of {cost.text} tokens of text and {cost.images} image{'s' * (cost.images > 1)}"
    columns = ["model", "method", "image tokens", *cost.shares, "total", "saved %"]
    common.print_table(out, title, columns, cells, text_columns=2)


def _number(gmacs: float) -> str:
    """Format with two decimals as papers print them, more where that would hide the value."""
    return f"{gmacs:.2f}" if gmacs >= 1 or gmacs == 0 else f"{gmacs:.3f}" if gmacs >= 0.001 else f"{gmacs:.1e}"


def compact(tokens: Sequence[float]) -> str:
    """Format tokens per block in short: equal neighbours together, and the middle of long lists left out.

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


def _unused(rows: Sequence[Profile]) -> Iterator[str]:
    """Notes on models whose published parameter count is higher because the authors' code never uses some of them."""
    for name, params, unused in {(row.model, row.params, row.unused_params): None for row in rows if row.unused_params}:
        yield (
            f"{name}: {params / 1e6:.2f} M parameters; the published {(params + unused) / 1e6:.2f} M include "
            f"{unused / 1e6:.2f} M that are never used"
        )


def _notes(convention: str, adaptive: Sequence[str], images: str | None, count: int, weights: str) -> Iterator[str]:
    """Notes needed to compare the table with a published one."""
    yield {
        "all": "total = linear + attention + matching + norm, as fvcore counts attention written as matrix products "
        "(DeiT-S 4.61, DeiT-B 17.58: MCTF, and the ToMe rows of ViTTM)",
        "no-attention": "total = linear + matching + norm, as fvcore counts where attention is a fused kernel that it "
        "does not see (ViT-S 4.25, ViT-B 16.87: the ViT and DeiT rows of ViTTM), plus, in models with two streams, the "
        "attention between them, which it sees (the ViTTM and LookupViT rows)",
        "no-norm": "total = linear + attention + matching (DeiT-S 4.60: ATM)",
    }[convention] + "; other tables need another --convention"
    if not adaptive:
        if images is not None:
            yield f"{images} was not read: no method here adapts to its images"
        return
    what = f"images of {images}" if images else "random images (give real ones with --images)"
    these = "random weights (give --pretrained or --checkpoint)" if weights == "random" else "the model's given weights"
    yield f"{', '.join(adaptive)}: counts depend on the images; means over {count} {what} under {these}"


def untrained_counts(host: nn.Module, configs: Iterable[MethodConfig]) -> list[str]:
    """The methods whose counts in ``host`` depend on parameters of their own, which are random here.

    Example:
        >>> import timm, vitrim
        >>> host = timm.create_model("test_vit", img_size=32, patch_size=8, depth=3)
        >>> configs = map(vitrim.parse_method, ("ia_red2", "ia_red2:r=[1,1,1]", "a_vit", "atm"))
        >>> untrained_counts(host, configs)
        ['ia_red2']
    """
    import torch

    from vitrim.measure.latency import reduced_copy

    found, own = [], len(list(host.parameters()))
    for config in configs:
        if config.is_adaptive() and not config.training_free:
            with torch.random.fork_rng(devices=[]):  # a look changes nothing that is drawn later
                reduced = reduced_copy(host, config)
            if len(list(reduced.parameters())) > own:  # a_vit learns with weights of the host, and those are given
                found.append(config.describe())
    return found


def untrained_notes(untrained: Iterable[str]) -> Iterator[str]:
    """A note on the methods of `untrained_counts`, if there are any."""
    names = ", ".join(untrained)
    if names:
        yield (
            f"{names}: counts depend on parameters of its own, and those are random here, also where a run learned "
            "them; `vitrim eval` reads what a run learned, and counts with it"
        )
