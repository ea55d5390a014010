"""Image classification with a Hugging Face pipeline, dense and with merged tokens.

    python examples/huggingface_pipeline.py                                              # a tiny random model, offline
    python examples/huggingface_pipeline.py google/vit-base-patch16-224 cat.jpg tome:r=8  # a model of the hub

Prints the best classes before and after, and how many tokens leave every block.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, pipeline

import vitrim


def tiny_model() -> tuple[ViTForImageClassification, ViTImageProcessor]:
    """An untrained model of 6 blocks on 64 patches, so that this runs without a download."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=5,
    )
    return ViTForImageClassification(config).eval(), ViTImageProcessor(size={"height": 64, "width": 64})


def main(arguments: list[str]) -> None:
    """Classify one image with the model, the image and the method named in ``arguments``, each optional."""
    name, path, method = (*arguments, None, None, None)[:3]
    if name is None:
        model, processor = tiny_model()
        classify = pipeline("image-classification", model=model, image_processor=processor)
    else:
        classify = pipeline("image-classification", model=name)
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    image = Image.fromarray(noise) if path is None else Image.open(path).convert("RGB")

    show("dense", classify(image, top_k=3))
    reduction = vitrim.reduce_(classify.model, method or "tome:r=8", record=True)
    show(reduction.config.describe(), classify(image, top_k=3))
    print("tokens after every block:", reduction.tokens_per_block)
    vitrim.restore_(classify.model)


def show(title: str, classes: list[dict[str, float]]) -> None:
    """One line with the best classes and their probabilities."""
    print(f"{title}: " + ", ".join(f"{entry['label']} {entry['score']:.3f}" for entry in classes))


if __name__ == "__main__":
    main(sys.argv[1:])
