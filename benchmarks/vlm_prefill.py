"""Prefill of a vision-language model with fewer image tokens: what its MACs promise, and what the clock says.

    python benchmarks/vlm_prefill.py                      # a tiny and a realistic random model, one thread
    python benchmarks/vlm_prefill.py --size realistic --method tome:r=16 --rounds 9
    python benchmarks/vlm_prefill.py --selectors --threads 2                 # 64 of 576 image tokens, every selector

All models are LLaVA's, untrained: shapes are all that counts. What is counted and timed is what `vitrim bench` does
with a vision-language model: one forward of a prompt with one image, dense and compact in turn. "faster" is the median
of the ratio within a round, with its quartiles; "kept" is that over what MACs promise. For a model of your own:

    vitrim profile hf:FOLDER -m tome:r=8
    vitrim bench hf:FOLDER -m tome:r=8 -b 1 --threads 1

For selectors the model is LLaVA-1.5-7B in width (CLIP-L on 336 px, a language model 4096 wide), with 12 of 24 and 2 of
32 layers, so that it runs in seconds. What a selection costs depends on widths alone: its share is of a tower with half
of the layers, so of the whole tower it is half of that.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from script import from_shell
from vitrim.core.registry import parse_method, parse_selector, selectors
from vitrim.core.selection import Seen
from vitrim.measure.bench import measure
from vitrim.measure.copies import reduced_copy
from vitrim.measure.inputs import random_images
from vitrim.measure.latency import Budget, paired_speedup, summarise, time_interleaved
from vitrim.measure.macs import count_macs
from vitrim.measure.prefill import Prefill
from vitrim.measure.stopwatch import Stopwatch

TEXT_TOKENS = 32
FRAMES = 8
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


def compare(size: str, method: str, rounds: int) -> str:
    """One row of the table."""
    model = Prefill(create(size), text=TEXT_TOKENS)
    budget = Budget(min_rounds=rounds, min_seconds=0.0)
    _, row = measure(model, {method: parse_method(method)}, random_images(model, 1), budget=budget)
    faster = f"{row['speedup']:.2f} [{row['speedup_q1']:.2f}, {row['speedup_q3']:.2f}]"
    tokens = f"{model.places} -> {row['image_tokens']:g}"
    return f"| {size} | {method} | {tokens} | {row['promised_speedup']:.2f} | {faster} | {row['ratio']:.2f} |"


@torch.inference_mode()
def choose(rounds: int, tokens: int) -> list[str]:
    """The rows of the table of selectors: all of them in one interleaved run."""
    dense = Prefill(create("llava"), text=TEXT_TOKENS)
    images = random_images(dense, 1)
    names = [f"{name}:tokens={tokens}" for name in selectors() if name != "evs"]
    models: dict[str, nn.Module] = {"dense": dense}
    for name in names:
        dense.select = parse_selector(name)
        models[name] = reduced_copy(dense, "none")
    dense.select = None
    macs = {name: count_macs(model, images).total for name, model in models.items()}
    watches = {name: Stopwatch(model, lambda model=model: model(images), "cpu") for name, model in models.items()}
    for watch in watches.values():
        watch.__enter__()
    times = time_interleaved(watches, budget=Budget(min_rounds=rounds, min_seconds=0.0, warmup_rounds=1))
    tower = watches["dense"].medians(rounds)["tower"]
    rows = [f"dense: {summarise(times['dense']).p50_ms:.0f} ms, of which the tower {tower:.0f} ms"]
    for name in names:
        faster, promised = paired_speedup(times["dense"], times[name]), macs["dense"] / macs[name]
        spread = f"{faster.median:.2f} [{faster.q1:.2f}, {faster.q3:.2f}]"
        took = [each["selection"] for each in watches[name].rounds[-rounds:]]
        chosen = summarise(took)
        share = 100 * chosen.p50_ms / tower
        rows.append(
            f"| {name} | {models[name].image_tokens(images):g} | {promised:.2f} | {spread} | "
            f"{faster.median / promised:.2f} | {chosen.p50_ms:.1f} ± {chosen.iqr_ms:.1f} | {share:.2f} |"
        )
    # a video has no place in LLaVA's prompts: the selection alone, against the tower on as many frames
    seen = Seen(torch.randn(1, FRAMES * 576, 4096), (FRAMES, 24, 24))
    evs = parse_selector("evs:keep=0.25")
    alone = time_interleaved({"evs": lambda: evs.select(seen)}, budget=Budget(min_rounds=rounds, min_seconds=0.0))
    took_ms = summarise(alone["evs"]).p50_ms
    rows.append(f"evs:keep=0.25 on {FRAMES} frames: {took_ms:.1f} ms, {100 * took_ms / (FRAMES * tower):.2f} %")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, action="append")
    parser.add_argument("--method", default="tome:r=8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--selectors", action="store_true", help="all selectors, on a model as wide as LLaVA-1.5-7B")
    parser.add_argument("--tokens", type=int, default=64, help="that they keep")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.selectors:
        first, *rows = choose(options.rounds, options.tokens)
        print(first)
        print("| selector | image tokens | promised | prefill faster | kept | selection ms | % of the tower |")
        print("|---|---|---|---|---|---|---|", *rows, sep="\n", flush=True)
        return
    print("| model | method | image tokens | promised by MACs | prefill faster | kept |\n|---|---|---|---|---|---|")
    for size in options.size or ("tiny", "realistic"):
        print(compare(size, options.method, options.rounds), flush=True)


if __name__ == "__main__":
    from_shell(main)
