"""Prefill of a vision-language model with fewer image tokens: what its MACs promise, and what the clock says.

    python benchmarks/vlm_prefill.py                      # a tiny and a realistic random model, one thread
    python benchmarks/vlm_prefill.py --size realistic --method tome:r=16 --rounds 9
    python benchmarks/vlm_prefill.py --selectors --threads 2                 # 64 of 576 image tokens, every selector
    python benchmarks/vlm_prefill.py --page                                  # a page of text, cells that repeat go
    python benchmarks/vlm_prefill.py --kept PHOTOS --only pixelprune:tau=0.02      # how many cells of images stay

Models are untrained: shapes are all that counts. The first two tables are `vitrim bench` of a LLaVA, one forward of a
prompt with one image, dense and compact in turn. For selectors it has the widths of LLaVA-1.5-7B, with 12 of 24 and 2
of 32 layers, so that it runs in seconds: the share of a selection is of half a tower. The page is for a model with the
widths of Qwen2-VL-2B, with 2 of 32 and 2 of 28 layers; beside `pixelprune` stands a smaller image of as many tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.utils.constants import OPENAI_CLIP_STD

from script import exactly, from_shell, spread, table
from vitrim import Prompt, bench, open_data, parse_selector
from vitrim.core.registry import selectors
from vitrim.data import to_tensor
from vitrim.engines.copies import reduced_copy
from vitrim.engines.macs import count_macs
from vitrim.engines.prefill import Prefill
from vitrim.measure.inputs import random_images
from vitrim.measure.latency import paired_speedup, summarise, time_interleaved
from vitrim.measure.stopwatch import Stopwatch

TEXT_TOKENS = 32
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "vision": {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3, "intermediate_size": 768},
        "text": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024},
    },
    "realistic": {
        "vision": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
        "text": {"hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "intermediate_size": 2816},
    },
    "llava": {
        "vision": {
            "hidden_size": 1024,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "image_size": 336,
            "patch_size": 14,
        },
        "text": {"hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32, "intermediate_size": 11008},
    },
}


PAGE: dict[str, Any] = {
    "vision_config": {"embed_dim": 1280, "hidden_size": 1536, "depth": 2, "num_heads": 16, "patch_size": 14},
    "text_config": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "pad_token_id": 0,
        "bos_token_id": 5,
        "eos_token_id": 6,
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
    },
}
SIDE = 28
"""Pixels of a cell of that model."""
PRUNING = ["pixelprune", "pixelprune:tau=0.02", "pixelprune:tau=0.05", "pixelprune:tau=0.1"]


def create(size: str) -> nn.Module:
    """A random model, on 14 x 14 patches where nothing else is said."""
    torch.manual_seed(0)
    parts = SIZES[size]
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**{"image_size": 224, "patch_size": 16, **parts["vision"]}),
        text_config=LlamaConfig(**parts["text"], vocab_size=1000, pad_token_id=0),
        image_token_id=1,
    )
    return LlavaForConditionalGeneration(config).eval()


def compare(size: str, method: str, rounds: int) -> tuple[object, ...]:
    """One row of the table of methods."""
    report = bench(create(size), method, Prompt(text=TEXT_TOKENS), batch_size=1, budget=exactly(rounds))
    dense, row = report.rows
    faster = spread(row["speedup"], row["speedup_q1"], row["speedup_q3"])
    tokens = f"{dense['image_tokens']:g} -> {row['image_tokens']:g}"
    return size, method, tokens, f"{row['macs_speedup']:.2f}", faster, f"{row['ratio']:.2f}"


def choose(rounds: int, tokens: int, only: Sequence[str] = ()) -> tuple[str, list[tuple[object, ...]]]:
    """The time of dense in words, and the rows of the table of selectors, all or ``only`` some, interleaved."""
    dense = Prefill(create("llava"), text=TEXT_TOKENS)
    # Some are for videos, or find a number of their own for pages.
    of_images = [name for name in selectors() if name not in ("evs", "vcast", "pixelprune")]
    named = [name.partition(":") for name in only or of_images]
    names = [f"{name}:tokens={tokens}{',' * bool(more)}{more}" for name, _, more in named]
    return timed(dense, random_images(dense, 1), names, rounds)


def page(rows: int, columns: int, side: int) -> Image.Image:
    """A page of ``rows`` x ``columns`` cells of ``side`` pixels: a title, paragraphs, a table, white margins."""
    width, height = columns * side, rows * side
    picture = Image.new("RGB", (width, height), "white")
    draw, margin, size = ImageDraw.Draw(picture), width // 10, max(width // 55, 6)
    draw.text((margin, margin), "Annual report, section 3", "black", ImageFont.load_default(2 * size))
    font, line = ImageFont.load_default(size), 3 * size // 2
    words = "the committee notes that results of the third quarter exceed those of the year before by a wide margin"
    for number in range((height - 5 * margin - 2 * line) // line):
        if number % 9 == 8:  # between paragraphs
            continue
        turn = 7 * number % len(words)
        text = words[turn:] + " " + words[:turn]
        while draw.textlength(text, font) > width - 2 * margin:
            text = text[:-1]
        draw.text((margin, 2 * margin + number * line), text, "black", font)
    for number in range(4):
        top = height - 3 * margin + number * line
        draw.line((margin, top, width - margin, top), "gray")
        draw.text((margin, top), f"item {number}          {17 * number + 3}          {5 * number}.4 %", "black", font)
    return picture


def in_cells(pixels: Tensor, side: int) -> Tensor:
    """(R, C, V) cells of ``side`` pixels of an image (channels, H, W); what fills no cell is cut off."""
    rows, columns = (size // side for size in pixels.shape[1:])
    whole = pixels[:, : rows * side, : columns * side].unflatten(1, (rows, side)).unflatten(3, (columns, side))
    return whole.permute(1, 3, 0, 2, 4).flatten(2)


def kept_of(source: str, only: Sequence[str], limit: int = 200) -> list[tuple[object, ...]]:
    """A row for every selector: the share of an image's cells that stays, mean and least, in percent."""
    given = [in_cells(image, SIDE) for image, _ in open_data(source, limit=limit)]
    rows: list[tuple[object, ...]] = []
    for name in only or PRUNING:
        kept: Any = parse_selector(name)
        shares = [100 * float(kept.kept_cells(cells).float().mean()) for cells in given]
        rows.append((name, len(shares), f"{sum(shares) / len(shares):.1f}", f"{min(shares):.1f}"))
    return rows


def choose_on_page(
    rounds: int, only: Sequence[str] = (), grid: tuple[int, int] = (28, 20)
) -> tuple[str, list[tuple[object, ...]]]:
    """The same for a page of ``grid`` cells: `pixelprune`, and a smaller image of as many tokens."""
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(**PAGE, image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4)
    ).eval()
    pixels = to_tensor(page(*grid, SIDE))
    dense = Prefill(model, text=TEXT_TOKENS)
    dense.shape, dense.places = (1, *pixels.shape), grid[0] * grid[1]
    names = list(only) or PRUNING[:1]
    chosen: list[Any] = [parse_selector(name) for name in names]
    kept = [int(one.kept_cells(in_cells(pixels, SIDE)).sum()) for one in chosen]
    images = (pixels - 0.5) / torch.tensor(OPENAI_CLIP_STD)[:, None, None]
    return timed(dense, images[None, None], [*names, *(f"resize:tokens={own}" for own in kept)], rounds)


@torch.inference_mode()
def timed(dense: Prefill, images: Tensor, names: Sequence[str], rounds: int) -> tuple[str, list[tuple[object, ...]]]:
    """The time of ``dense`` in words, and a row for every selector."""
    models: dict[str, nn.Module] = {"dense": dense}
    for name in names:
        dense.select = parse_selector(name)
        models[name] = reduced_copy(dense, "none")
    dense.select = None
    macs = {name: count_macs(model, images).total for name, model in models.items()}
    watches = {name: Stopwatch(model, partial(model, images), "cpu") for name, model in models.items()}
    with ExitStack() as watching:
        for watch in watches.values():
            watching.enter_context(watch)
        times = time_interleaved(watches, budget=exactly(rounds))
    tower = watches["dense"].medians(rounds)["tower"]
    rows: list[tuple[object, ...]] = []
    for name in names:
        faster, promised = paired_speedup(times["dense"], times[name]), macs["dense"] / macs[name]
        took = summarise([parts["selection"] for parts in watches[name].rounds[-rounds:]])
        cost = f"{took.p50_ms:.1f} ± {took.iqr_ms:.1f}", f"{100 * took.p50_ms / tower:.2f}"
        ratio = spread(faster.median, faster.q1, faster.q3), f"{faster.median / promised:.2f}"
        rows.append((name, f"{models[name].image_tokens(images):g}", f"{promised:.2f}", *ratio, *cost))
    return f"dense: {summarise(times['dense']).p50_ms:.0f} ms, of which the tower {tower:.0f} ms", rows


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, action="append")
    parser.add_argument("--method", default="tome:r=8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--selectors", action="store_true", help="all selectors, on a model as wide as LLaVA-1.5-7B")
    parser.add_argument(
        "--page", action="store_true", help="pixelprune on a page, before a model as wide as Qwen2-VL-2B"
    )
    parser.add_argument("--kept", help="images, of which pixelprune leaves so many cells")
    parser.add_argument("--only", action="append", default=[], help="of the selectors, e.g. scope:saliency=none")
    parser.add_argument("--tokens", type=int, default=64, help="that they keep")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.kept is not None:
        print(table(("selector", "images", "cells that stay, %", "least"), kept_of(options.kept, options.only)))
        return
    if options.selectors or options.page:
        if options.page:
            said, rows = choose_on_page(options.rounds, options.only)
        else:
            said, rows = choose(options.rounds, options.tokens, options.only)
        head = ("selector", "image tokens", "promised", "prefill faster", "kept", "selection ms", "% of the tower")
        print(said, table(head, rows), sep="\n")
        return
    head = ("model", "method", "image tokens", "promised", "prefill faster", "kept")
    print(
        table(head, (compare(size, options.method, options.rounds) for size in options.size or ("tiny", "realistic")))
    )


if __name__ == "__main__":
    from_shell(main)
