"""Fewer image tokens for the language model of a vision-language model: the tower merges, and the prompt gets shorter.

    python examples/vlm.py                                                       # a tiny random model, offline
    python examples/vlm.py llava-hf/llava-1.5-7b-hf cat.jpg "USER: <image> What is this? ASSISTANT:"

Prints, dense and with merged tokens, the image tokens in the prompt, the multiply-adds of the prefill (tower and
language model together) and the text that is generated.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import vitrim

METHOD = "tome:r=8"


def tiny_model() -> tuple[Any, dict[str, torch.Tensor]]:
    """An untrained model of 6 blocks on 64 patches, and a prompt with two images: this runs without a download."""
    tower = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 128}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**tower, image_size=64, patch_size=8),
        text_config=LlamaConfig(**tower, vocab_size=100, pad_token_id=0),
        image_token_id=1,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor([[7, 8, *[1] * 64, 9, *[1] * 64, 10, 11]])
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 64, 64)}


def report(title: str, model: Any, inputs: dict[str, torch.Tensor], image_tokens: list[int] | int, decode: Any) -> None:
    """Run the prompt once to count, and generate."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    spoken = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    if image_tokens == 0:
        image_tokens = vitrim.get_reduction(model).image_tokens
    macs = counter.get_total_flops() / 2e6
    print(f"{title}: image tokens {image_tokens}, prefill {macs:.1f} million multiply-adds")
    print("  says:", decode(spoken[0, inputs["input_ids"].shape[1] :]))


def main(arguments: list[str]) -> None:
    """Answer one prompt: ``arguments`` are the model, the image and the prompt, all of them or none."""
    if arguments:
        name, path, text = arguments
        model = AutoModelForImageTextToText.from_pretrained(name).eval()
        processor = AutoProcessor.from_pretrained(name)
        inputs = dict(processor(images=Image.open(path).convert("RGB"), text=text, return_tensors="pt"))
        decode: Any = processor.decode
    else:
        model, inputs = tiny_model()
        decode = torch.Tensor.tolist

    report("dense", model, inputs, int((inputs["input_ids"] == model.config.image_token_id).sum()), decode)
    vitrim.reduce_(model, METHOD, compact=True)  # the prompt is prepared as before, and follows the images by itself
    report(METHOD, model, inputs, 0, decode)
    vitrim.restore_(model)


if __name__ == "__main__":
    main(sys.argv[1:])
