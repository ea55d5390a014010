"""Train the demo's digits ViT and write its checkpoint.

    python benchmarks/train_digits.py --out src/vitrim/demo/digits_vit.safetensors

The number of epochs is fixed and the averaged weights of the last step are kept: the held-out split is looked at once,
after training. To choose hyperparameters use --validate, which trains on a part of the training split, scores the rest
and writes nothing.

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

from vitrim.demo import digits

BATCH_SIZE = 64
LEARNING_RATE = 1.5e-3
WEIGHT_DECAY = 0.05
WARMUP_EPOCHS = 5
GRADIENT_CLIP = 1.0
EMA_DECAY = 0.99
POSITION_TEMPERATURE = 16.0
MIXUP_ALPHA = 0.2
LABEL_SMOOTHING = 0.1

AFFINE_PROBABILITY = 0.5
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
    rows = [torch.stack([cosine, shear * cosine - sine, shift[0]]), torch.stack([sine, shear * sine + cosine, shift[1]])]
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
def initialise_positions(model: VisionTransformer) -> None:
    """Start the learned positions (1, 1 + H * W, C) of the patches from sines and cosines."""
    grid = [digits.IMAGE_SIZE, digits.IMAGE_SIZE]
    positions = build_sincos2d_pos_embed(grid, dim=digits.EMBED_DIM, temperature=POSITION_TEMPERATURE)
    model.pos_embed[:, model.num_prefix_tokens :] = positions


def train(images: Tensor, labels: Tensor, epochs: int) -> VisionTransformer:
    """Train a fresh model on images (B, 1, 8, 8) and labels (B,); return the moving average of its weights."""
    model = digits.create_digits_vit()
    initialise_positions(model)
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
    mixup = Mixup(mixup_alpha=MIXUP_ALPHA, label_smoothing=LABEL_SMOOTHING, num_classes=digits.NUM_CLASSES)
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
