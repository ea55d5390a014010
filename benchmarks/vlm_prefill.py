"""Prefill of a vision-language model with fewer image tokens: what its MACs promise, and what the clock says.

    python benchmarks/vlm_prefill.py                      # a tiny and a realistic random model, one thread
    python benchmarks/vlm_prefill.py --size realistic --method tome:r=16 --rounds 9

Both models are LLaVA's, untrained: shapes are all that counts. MACs are those of tower, projector and language model in
one forward of a prompt with one image. Dense and compact run in turn, and the ratio is that of their best times; "kept"
is the speed-up over the one that MACs promise.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import vitrim

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


def create(size: str) -> tuple[Any, dict[str, Tensor]]:
    """A random model on 14 x 14 patches, and a prompt of one image."""
    torch.manual_seed(0)
    parts = SIZES[size]
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**parts["vision"], image_size=224, patch_size=16),
        text_config=LlamaConfig(**parts["text"], vocab_size=1000, pad_token_id=0),
        image_token_id=1,
    )
    ids = torch.cat([torch.full((1, 196), 1), torch.full((1, TEXT_TOKENS), 7)], dim=1)
    return LlavaForConditionalGeneration(config).eval(), {"input_ids": ids, "pixel_values": torch.randn(1, 3, 224, 224)}


def macs_of(model: Any, prompt: dict[str, Tensor]) -> float:
    with FlopCounterMode(display=False) as counter:
        model(**prompt)
    return counter.get_total_flops() / 2


def seconds_of(model: Any, prompt: dict[str, Tensor]) -> float:
    start = time.perf_counter()
    model(**prompt)
    return time.perf_counter() - start


def compare(size: str, method: str, rounds: int) -> str:
    """One row of the table."""
    dense, prompt = create(size)
    few, _ = create(size)
    reduction = vitrim.reduce_(few, method, compact=True)
    promised = macs_of(dense, prompt) / macs_of(few, prompt)
    times = [(seconds_of(dense, prompt), seconds_of(few, prompt)) for _ in range(rounds)]
    faster = min(pair[0] for pair in times) / min(pair[1] for pair in times)
    tokens = f"196 -> {reduction.image_tokens[0]}"
    return f"| {size} | {method} | {tokens} | {promised:.2f} | {faster:.2f} | {faster / promised:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, action="append")
    parser.add_argument("--method", default="tome:r=8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| model | method | image tokens | promised by MACs | prefill faster | kept |\n|---|---|---|---|---|---|")
    with torch.no_grad():
        for size in options.size or SIZES:
            print(compare(size, options.method, options.rounds), flush=True)


if __name__ == "__main__":
    main()
