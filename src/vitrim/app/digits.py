"""Data and model of the offline demo: handwritten digits of scikit-learn, and a small ViT trained on them.

Every pixel is a token, so 8x8 scans give 64 patch tokens and a class token. `benchmarks/train_digits.py` makes the
weights. The writers of the scans are unknown, so the split is by image: a writer may be in both parts.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from timm.models import VisionTransformer
from torch import Tensor

from vitrim.errors import check_installed

IMAGE_SIZE = 8
PATCH_SIZE = 1
IN_CHANS = 1
NUM_CLASSES = 10
EMBED_DIM = 64
DEPTH = 8
NUM_HEADS = 4

# Of the raw pixels (0 to 16: inked dots of a 4x4 cell) in the training part of the split.
PIXEL_MEAN = 4.89
PIXEL_STD = 6.02

SPLIT_SEED = 0
TEST_IMAGES_PER_CLASS = 45

CHECKPOINT = Path(__file__).with_name("digits_vit.safetensors")


class Split(NamedTuple):
    """Training and held-out digits.

    Images are float32 (B, 1, 8, 8), normalised, in [-PIXEL_MEAN / PIXEL_STD, (16 - PIXEL_MEAN) / PIXEL_STD]; labels are
    int64 (B,) in [0, 9].
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def held_out_indices(labels: NDArray[np.int64], per_class: int, seed: int) -> NDArray[np.int64]:
    """Draw ``per_class`` images of every class: their indices in ``labels`` (B,), ascending."""
    classes, counts = np.unique(labels, return_counts=True)
    if counts.min() < per_class:
        raise ValueError(f"cannot hold out {per_class} images per class: the rarest class has {counts.min()}")
    # NumPy freezes the stream of RandomState; that of default_rng() may change between versions.
    permutation = np.random.RandomState(seed).permutation(len(labels))
    drawn = [permutation[labels[permutation] == label][:per_class] for label in classes]
    return np.sort(np.concatenate(drawn)).astype(np.int64)


def load_split() -> Split:
    """Load the 1,797 scans, always split into the same 1,347 for training and 450 held out (45 per digit)."""
    check_installed("the demo", "sklearn", extra="demo")
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    labels = np.asarray(targets, dtype=np.int64)
    held_out = np.zeros(len(labels), dtype=np.bool_)
    held_out[held_out_indices(labels, TEST_IMAGES_PER_CLASS, SPLIT_SEED)] = True
    scaled = (np.asarray(pixels, dtype=np.float64) - PIXEL_MEAN) / PIXEL_STD
    images = torch.from_numpy(scaled).float().reshape(-1, IN_CHANS, IMAGE_SIZE, IMAGE_SIZE)
    target = torch.from_numpy(labels)
    test = torch.from_numpy(held_out)
    return Split(images[~test], target[~test], images[test], target[test])


def create_digits_vit() -> VisionTransformer:
    """Build the demo's classifier of images (B, 1, 8, 8), with random weights, in training mode."""
    return VisionTransformer(
        img_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        in_chans=IN_CHANS,
        num_classes=NUM_CLASSES,
        embed_dim=EMBED_DIM,
        depth=DEPTH,
        num_heads=NUM_HEADS,
    )


def load_digits_vit() -> VisionTransformer:
    """Load `create_digits_vit` as trained on the training part of `load_split`, in float32 and eval mode."""
    model = create_digits_vit()
    # The file is in half precision; load_state_dict copies it into float32 parameters.
    model.load_state_dict(load_file(CHECKPOINT), strict=True)
    return model.eval()
