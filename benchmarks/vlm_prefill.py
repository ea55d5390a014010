"""Prefill of a vision-language model with fewer image tokens: what its MACs promise, and what the clock says.

    python benchmarks/vlm_prefill.py                      # a tiny and a realistic random model, one thread
    python benchmarks/vlm_prefill.py --size realistic --method tome:r=16 --rounds 9
    python benchmarks/vlm_prefill.py --selectors --threads 2                 # 64 of 576 image tokens, every selector
    python benchmarks/vlm_prefill.py --page                                  # a page of text, cells that repeat go
    python benchmarks/vlm_prefill.py --page photo.jpg --only pixelprune:tau=0.02

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
from pathlib import Path
from typing import Any

import numpy as np
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

from script import exactly, from_shell, spread, table
from vitrim import Prompt, bench, parse_selector
from vitrim.core.registry import selectors
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


def choose_on_page(
    rounds: int, only: Sequence[str] = (), file: str = "", grid: tuple[int, int] = (28, 20)
) -> tuple[str, list[tuple[object, ...]]]:
    """The same for a page of ``grid`` cells, or an image of a ``file``: `pixelprune`, and as many by `resize`."""
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(**PAGE, image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4)
    ).eval()
    side = 2 * PAGE["vision_config"]["patch_size"]
    picture = (
        page(*grid, side)
        if not file
        else Image.open(Path(file)).convert("RGB").resize((grid[1] * side, grid[0] * side))
    )
    pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) / 127.5 - 1
    dense = Prefill(model, text=TEXT_TOKENS)
    dense.shape, dense.places = (1, *pixels.shape), grid[0] * grid[1]
    names = list(only) or ["pixelprune"]
    kept = [tokens_of(dense, name, pixels) for name in names]
    return timed(dense, pixels[None, None], [*names, *(f"resize:tokens={own:g}" for own in kept)], rounds)


@torch.inference_mode()
def tokens_of(dense: Prefill, select: str, pixels: Tensor) -> float:
    """The tokens that a selector leaves of an image (C, H, W)."""
    dense.select = parse_selector(select)
    model: Any = reduced_copy(dense, "none")
    dense.select = None
    model(pixels[None, None])
    return float(model.image_tokens(pixels[None, None]))


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
    parser.add_argument("--page", nargs="?", const="", help="pixelprune on a page, or on an image of a file")
    parser.add_argument("--only", action="append", default=[], help="of the selectors, e.g. scope:saliency=none")
    parser.add_argument("--tokens", type=int, default=64, help="that they keep")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.selectors or options.page is not None:
        if options.page is None:
            said, rows = choose(options.rounds, options.tokens, options.only)
        else:
            said, rows = choose_on_page(options.rounds, options.only, options.page)
        head = ("selector", "image tokens", "promised", "prefill faster", "kept", "selection ms", "% of the tower")
        print(said, table(head, rows), sep="\n")
        return
    head = ("model", "method", "image tokens", "promised", "prefill faster", "kept")
    print(
        table(head, (compare(size, options.method, options.rounds) for size in options.size or ("tiny", "realistic")))
    )


if __name__ == "__main__":
    from_shell(main)
