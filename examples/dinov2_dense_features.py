"""Dense features of DINOv2 from a model whose tokens are merged: un-merged, they lie on the full grid of patches.

    python examples/dinov2_dense_features.py                          # a tiny random model, offline
    python examples/dinov2_dense_features.py facebook/dinov2-small cat.jpg tome:r=16

Prints the shapes and, for some layers, the cosine between the features and those of the dense model.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, BitImageProcessor, Dinov2Config, Dinov2Model

import vitrim


def tiny_model() -> tuple[Dinov2Model, BitImageProcessor]:
    """An untrained model of 6 blocks on 64 patches, so that this runs without a download."""
    torch.manual_seed(0)
    config = Dinov2Config(
        image_size=64, patch_size=8, hidden_size=64, num_hidden_layers=6, num_attention_heads=4, mlp_ratio=2
    )
    size = {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}
    return Dinov2Model(config).eval(), BitImageProcessor(**size)


def feature_maps(model: Dinov2Model, pixels: Tensor) -> list[Tensor]:
    """(B, C, rows, columns) after every block."""
    patch = model.config.patch_size
    rows, columns = pixels.shape[2] // patch, pixels.shape[3] // patch
    with torch.no_grad():
        layers = model(pixels, output_hidden_states=True).hidden_states[1:]
    maps = [tokens[:, 1:].transpose(1, 2).unflatten(2, (rows, columns)) for tokens in layers]
    assert all(entry.shape == (len(pixels), model.config.hidden_size, rows, columns) for entry in maps)
    return maps


def main(arguments: list[str]) -> None:
    """Compare the features of one image: ``arguments`` are the model, the image and the method, all optional."""
    name, path, method = (*arguments, None, None, None)[:3]
    if name is None:
        model, processor = tiny_model()
    else:
        model, processor = Dinov2Model.from_pretrained(name).eval(), AutoImageProcessor.from_pretrained(name)
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    image = Image.fromarray(noise) if path is None else Image.open(path).convert("RGB")
    pixels = processor(images=image, return_tensors="pt").pixel_values

    dense = feature_maps(model, pixels)
    reduction = vitrim.reduce_(model, method or "tome:r=6", record=True)
    reduced = feature_maps(model, pixels)
    print(f"{reduction.config.describe()}: tokens after every block {reduction.tokens_per_block}")
    print("every feature map:", tuple(reduced[-1].shape))
    for depth in (0, len(dense) // 2, len(dense) - 1):
        cosine = torch.nn.functional.cosine_similarity(dense[depth], reduced[depth], dim=1).mean().item()
        print(f"block {depth}: mean cosine to the dense features {cosine:.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
