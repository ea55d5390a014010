"""Prefill of a vision-language model with fewer image tokens: what its MACs promise, and what the clock says.

    python benchmarks/vlm_prefill.py                      # a tiny and a realistic random model, one thread
    python benchmarks/vlm_prefill.py --size realistic --method tome:r=16 --rounds 9
    python benchmarks/vlm_prefill.py --selectors --threads 2                 # 64 of 576 image tokens, every selector

All models are LLaVA's, untrained: shapes are all that counts. The first two tables are `vitrim bench` of such a model,
one forward of a prompt with one image, dense and compact in turn. For selectors the model has the widths of
LLaVA-1.5-7B, with 12 of 24 and 2 of 32 layers, so that it runs in seconds: the share of a selection is of half a tower.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

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


@torch.inference_mode()
def choose(rounds: int, tokens: int, only: Sequence[str] = ()) -> tuple[str, list[tuple[object, ...]]]:
    """The time of dense in words, and the rows of the table of selectors, all or ``only`` some, interleaved."""
    dense = Prefill(create("llava"), text=TEXT_TOKENS)
    images = random_images(dense, 1)
    of_images = [name for name in selectors() if name not in ("evs", "vcast")]  # those are for videos
    named = [name.partition(":") for name in only or of_images]
    names = [f"{name}:tokens={tokens}{',' * bool(more)}{more}" for name, _, more in named]
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
    """Print one of the two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, action="append")
    parser.add_argument("--method", default="tome:r=8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--selectors", action="store_true", help="all selectors, on a model as wide as LLaVA-1.5-7B")
    parser.add_argument("--only", action="append", default=[], help="of them, e.g. scope:saliency=none")
    parser.add_argument("--tokens", type=int, default=64, help="that they keep")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.selectors:
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
