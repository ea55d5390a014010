"""Train the demo's digits ViT and write its checkpoint.

    python benchmarks/train_digits.py --out src/vitrim/app/digits_vit.safetensors

It takes about eleven minutes of one CPU core. The number of epochs is fixed and the averaged weights of the last step
are kept: the held-out split is looked at once, after training. To choose hyperparameters use --validate, which trains
on a part of the training split, scores the rest and writes nothing.

The run is repeatable on one machine: all randomness follows --seed, and one thread keeps the order of sums. Other
processors and versions of torch round differently and end at slightly different weights.
"""

import argparse
import math
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from timm.data import Mixup
from timm.layers import build_sincos2d_pos_embed
from timm.loss import SoftTargetCrossEntropy
from timm.models import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor
from torch.nn import functional

from script import from_shell
from vitrim.app import digits

BATCH_SIZE = 32
LEARNING_RATE = 1.5e-3
WEIGHT_DECAY = 0.05
WARMUP_EPOCHS = 5
GRADIENT_CLIP = 1.0
EMA_DECAY = 0.98
LABEL_SMOOTHING = 0.1
MIXUP_ALPHA = 0.2
MIXUP_PROBABILITY = 0.5
POSITION_TEMPERATURE = 16.0

AFFINE_PROBABILITY = 0.75
MAX_ROTATION_DEGREES = 12.0
MAX_SCALE = 0.12
MAX_SHEAR = 0.12
MAX_SHIFT_PIXELS = 1.0

VALIDATION_IMAGES_PER_CLASS = 27
STORAGE_DTYPE = torch.float16


def uniform(count: int, limit: float) -> Tensor:
    """Draw float32 (count,) from [-limit, limit]."""
    return (torch.rand(count) * 2 - 1) * limit


def random_affine(images: Tensor) -> Tensor:
    """Rotate, scale, shear and shift each image of (B, C, H, W) a little or not at all, filling with background."""
    count, _, _, width = images.shape
    angle = uniform(count, math.radians(MAX_ROTATION_DEGREES))
    scale = 1 + uniform(count, MAX_SCALE)
    shear = uniform(count, MAX_SHEAR)
    # affine_grid's coordinates run from -1 to 1 over the width
    shift = uniform(2 * count, 2 * MAX_SHIFT_PIXELS / width).reshape(2, count)
    cosine, sine = angle.cos() * scale, angle.sin() * scale
    rows = [
        torch.stack([cosine, shear * cosine - sine, shift[0]]),
        torch.stack([sine, shear * sine + cosine, shift[1]]),
    ]
    grid = functional.affine_grid(torch.stack(rows).permute(2, 0, 1), list(images.shape), align_corners=False)
    # grid_sample pads with zero, so the background is moved there and back
    background = -digits.PIXEL_MEAN / digits.PIXEL_STD
    moved = functional.grid_sample(images - background, grid, align_corners=False) + background
    # resampling blurs, so the model must also see scans as sharp as those it is tested on
    chosen = torch.rand(count) < AFFINE_PROBABILITY
    return torch.where(chosen[:, None, None, None], moved, images)


@torch.inference_mode()
def accuracy(model: VisionTransformer, images: Tensor, labels: Tensor) -> float:
    """Score a model on images (B, 1, 8, 8) and labels (B,): the fraction that is right."""
    predictions = model.eval()(images).argmax(dim=1)
    return (predictions == labels).double().mean().item()


@torch.no_grad()
def initialise(model: VisionTransformer) -> None:
    """Start the weights in Xavier's scale and the positions of the patches from sines and cosines.

    A token here is one grey value. With timm's default positions (standard deviation 0.02) it hardly knows where it is,
    and the loss stays on its first plateau for tens of epochs.
    """
    model.init_weights("jax")
    grid = [digits.IMAGE_SIZE, digits.IMAGE_SIZE]
    positions = build_sincos2d_pos_embed(grid, dim=digits.EMBED_DIM, temperature=POSITION_TEMPERATURE)
    model.pos_embed[:, model.num_prefix_tokens :] = positions


def train(images: Tensor, labels: Tensor, epochs: int) -> VisionTransformer:
    """Train a fresh model on images (B, 1, 8, 8) and labels (B,); return the moving average of its weights."""
    model = digits.create_digits_vit()
    initialise(model)
    average = ModelEmaV3(model, decay=EMA_DECAY, use_warmup=True)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = len(images) // BATCH_SIZE
    schedule = CosineLRScheduler(
        optimizer,
        t_initial=(epochs - WARMUP_EPOCHS) * steps,
        warmup_t=WARMUP_EPOCHS * steps,
        warmup_prefix=True,
        t_in_epochs=False,
    )
    mixup = Mixup(
        mixup_alpha=MIXUP_ALPHA,
        prob=MIXUP_PROBABILITY,
        label_smoothing=LABEL_SMOOTHING,
        num_classes=digits.NUM_CLASSES,
    )
    criterion = SoftTargetCrossEntropy()
    for epoch in range(epochs):
        start = time.perf_counter()
        total = 0.0
        order = torch.randperm(len(images))[: steps * BATCH_SIZE].reshape(steps, BATCH_SIZE)
        for step, batch in enumerate(order, start=epoch * steps):
            schedule.step_update(step)
            inputs, targets = mixup(random_affine(images[batch]), labels[batch])
            loss = criterion(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
            optimizer.step()
            average.update(model, step=step)
            total += loss.item()
        seconds = time.perf_counter() - start
        print(f"epoch {epoch + 1}/{epochs}  loss {total / steps:.4f}  seconds {seconds:.1f}", flush=True)
    return average.module


def round_weights(model: VisionTransformer) -> dict[str, Tensor]:
    """Round a model's weights in place to what half precision holds; return them in half precision."""
    weights = {name: weight.to(STORAGE_DTYPE).contiguous() for name, weight in model.state_dict().items()}
    model.load_state_dict(weights)
    return weights


def describe(score: float, seed: int, epochs: int) -> dict[str, str]:
    """Say how a checkpoint was made, for its header (which holds strings only)."""
    packages = ("torch", "timm", "numpy", "scikit-learn")
    return {
        "data": "sklearn.datasets.load_digits",
        "accuracy": f"{score:.6f}",
        "seed": str(seed),
        "epochs": str(epochs),
        "split_seed": str(digits.SPLIT_SEED),
        **{f"{package}_version": version(package) for package in packages},
    }


def validate(split: digits.Split, epochs: int) -> None:
    """Train on four fifths of the training split, balanced by class, and print the score on the rest."""
    labels = split.train_labels.numpy()
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    held_out[digits.held_out_indices(labels, VALIDATION_IMAGES_PER_CLASS, digits.SPLIT_SEED)] = True
    model = train(split.train_images[~held_out], split.train_labels[~held_out], epochs)
    print(f"training accuracy {accuracy(model, split.train_images[~held_out], split.train_labels[~held_out]):.4f}")
    print(f"validation accuracy {accuracy(model, split.train_images[held_out], split.train_labels[held_out]):.4f}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the digits ViT of the offline demo.")
    parser.add_argument("--out", type=Path, default=digits.CHECKPOINT, help="checkpoint to write (safetensors)")
    parser.add_argument("--epochs", type=int, default=100, help=f"more than {WARMUP_EPOCHS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validate", action="store_true", help="score a part of the training split, write nothing")
    arguments = parser.parse_args()
    if arguments.epochs <= WARMUP_EPOCHS:
        parser.error(f"--epochs must be more than the {WARMUP_EPOCHS} of the warm-up, got {arguments.epochs}")
    return arguments


def main() -> None:
    """Train, score on the held-out split once, and write the checkpoint."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(arguments.seed)
    np.random.seed(arguments.seed)  # timm's Mixup draws from NumPy's global stream
    split = digits.load_split()
    if arguments.validate:
        validate(split, arguments.epochs)
        return
    model = train(split.train_images, split.train_labels, arguments.epochs)
    weights = round_weights(model)
    score = accuracy(model, split.test_images, split.test_labels)
    save_file(weights, arguments.out, metadata=describe(score, arguments.seed, arguments.epochs))
    print(f"held-out accuracy {score:.4f}, {arguments.out.stat().st_size} bytes written to {arguments.out}")


if __name__ == "__main__":
    from_shell(main)
