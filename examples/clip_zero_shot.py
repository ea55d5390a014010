"""Zero-shot classification with CLIP, dense and with merged image tokens. The text tower is not touched.

    python examples/clip_zero_shot.py                                          # a tiny random model, offline
    python examples/clip_zero_shot.py openai/clip-vit-base-patch16 cat.jpg cat dog car

Prints the probability of every label before and after, and how close the two image embeddings are.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

import vitrim

LABELS = ["cat", "dog", "car"]


def tiny_model() -> tuple[CLIPModel, CLIPProcessor]:
    """An untrained model of 6 blocks on 64 patches, with a tokenizer that spells: this runs without a download."""
    characters = "abcdefghijklmnopqrstuvwxyz"
    words = [*characters, *(f"{letter}</w>" for letter in characters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={word: index for index, word in enumerate(words)}, merges=[])
    tower = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 128}
    config = CLIPConfig(
        text_config={**tower, "vocab_size": len(words), "bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1},
        vision_config={**tower, "image_size": 64, "patch_size": 8},
        projection_dim=32,
    )
    torch.manual_seed(0)
    size = {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}
    return CLIPModel(config).eval(), CLIPProcessor(CLIPImageProcessor(**size), tokenizer)


def main(arguments: list[str]) -> None:
    """Classify one image: ``arguments`` are the model, the image and the labels, all optional."""
    name, path, *labels = (*arguments, None, None)[: max(2, len(arguments))]
    if name is None:
        model, processor = tiny_model()
    else:
        model, processor = CLIPModel.from_pretrained(name).eval(), CLIPProcessor.from_pretrained(name)
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    image = Image.fromarray(noise) if path is None else Image.open(path).convert("RGB")
    labels = labels or LABELS
    texts = [f"a photo of a {label}" for label in labels]
    inputs = processor(text=texts, images=image, padding=True, return_tensors="pt")

    with torch.no_grad():
        dense = model(**inputs)
        # only the class token of the last block is read: the other rows need not be computed there
        reduction = vitrim.reduce_(model, "tome:r=8,last_block=auto", record=True)
        reduced = model(**inputs)
    for title, out in (("dense", dense), (reduction.config.describe(), reduced)):
        probabilities = out.logits_per_image.softmax(dim=-1)[0].tolist()
        pairs = (f"{label} {p:.3f}" for label, p in zip(labels, probabilities, strict=True))
        print(f"{title}: " + ", ".join(pairs))
    print("image tokens after every block:", reduction.tokens_per_block)
    cosine = torch.nn.functional.cosine_similarity(dense.image_embeds, reduced.image_embeds).item()
    print(f"cosine between the image embeddings: {cosine:.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
