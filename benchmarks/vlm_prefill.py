"""Prefill of a vision-language model with fewer image tokens: what its MACs promise, and what the clock says.

    python benchmarks/vlm_prefill.py                      # a tiny and a realistic random model, one thread
    python benchmarks/vlm_prefill.py --size realistic --method tome:r=16 --rounds 9

Both models are LLaVA's, untrained: shapes are all that counts. What is counted and timed is what `vitrim bench` does
with a vision-language model: one forward of a prompt with one image, dense and compact in turn. "faster" is the median
of the ratio within a round, with its quartiles; "kept" is that over what MACs promise. For a model of your own:

    vitrim profile hf:FOLDER -m tome:r=8
    vitrim bench hf:FOLDER -m tome:r=8 -b 1 --threads 1
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from script import from_shell
from vitrim.core.registry import parse_method
from vitrim.measure.latency import Budget
from vitrim.measure.prefill import Prefill
from vitrim.speed.bench import measure, random_images

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
}


def create(size: str) -> nn.Module:
    """A random model on 14 x 14 patches."""
    torch.manual_seed(0)
    parts = SIZES[size]
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**parts["vision"], image_size=224, patch_size=16),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, action="append")
    parser.add_argument("--method", default="tome:r=8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| model | method | image tokens | promised by MACs | prefill faster | kept |\n|---|---|---|---|---|---|")
    for size in options.size or SIZES:
        print(compare(size, options.method, options.rounds), flush=True)


if __name__ == "__main__":
    from_shell(main)
