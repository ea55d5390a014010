"""The main job, offline: what reduction costs in accuracy on real scans, and what it saves in time on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn

from vitrim.config import MethodConfig
from vitrim.demo.digits import PIXEL_MEAN, PIXEL_STD, load_digits_vit, load_split
from vitrim.evaluation import Row, evaluate
from vitrim.methods.atm import ATM
from vitrim.plots.merged import plot_merged
from vitrim.plots.tradeoff import plot_accuracy_over_macs
from vitrim.profiling.bench import measure, random_images
from vitrim.profiling.latency import Budget
from vitrim.profiling.macs import profile
from vitrim.reduce import reduce_, restore_
from vitrim.registry import parse_method
from vitrim.tune import match_macs

# Amounts that cut the MACs of the digits model by about 30 and 50 %; the table shows what they really cut.
DIGITS_METHODS = (
    "random:keep_rate=0.79",
    "random:keep_rate=0.57",
    "topk:keep_rate=0.77",
    "topk:keep_rate=0.52",
    "evit:keep_rate=0.72",
    "evit:keep_rate=0.45",
    "tome:r=4,last_block=class_token",
    "tome:r=[8,8,8,8,7,6,5],last_block=class_token",
    "atm:alpha=1.0,beta=0.014,theta_min=0.8",
    "atm:alpha=0.985,beta=0.05,theta_min=0.8",
)

SPEED_MODEL = "deit_small_patch16_224"
SPEED_TOME = "tome:r=13,last_block=class_token"
SPEED_BATCH = 8


class Demo(NamedTuple):
    """Results of the two halves.

    Attributes:
        digits: accuracy on the 450 held-out scans, dense first.
        speed: rows of `vitrim bench` for DeiT-S, dense first.
    """

    digits: list[Row]
    speed: list[dict[str, Any]]


def evaluate_digits(seed: int = 0) -> list[Row]:
    """Accuracy and MACs of the shipped digits ViT, dense and under every one of `DIGITS_METHODS`."""
    split = load_split()
    batches = zip(split.test_images.split(150), split.test_labels.split(150), strict=True)
    return evaluate(load_digits_vit(), DIGITS_METHODS, batches, seed=seed)


def measure_speed(budget: Budget | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Speed of DeiT-S geometry on this machine: dense, ToMe, and ATM at the same MACs.

    Weights and images are random: time depends on counts only. ATM's threshold is set so that its MACs are ToMe's.
    """
    torch.manual_seed(seed)
    model = timm.create_model(SPEED_MODEL).eval()
    images = random_images(model, SPEED_BATCH, seed)
    tome = parse_method(SPEED_TOME)
    methods = {tome.describe(): tome}
    atm = atm_at_the_macs_of(tome, model, images)
    methods[atm.describe()] = atm
    budget = budget or Budget(min_rounds=7, min_seconds=0.0, warmup_rounds=1)
    setting = {"model": SPEED_MODEL, "batch_size": SPEED_BATCH, "dtype": "fp32", "compiled": False}
    return [{**setting, **row} for row in measure(model, methods, images, budget=budget)]


def atm_at_the_macs_of(method: MethodConfig, model: nn.Module, images: Tensor) -> MethodConfig:
    """ATM with one threshold for all layers that spends on ``images`` the MACs of ``method``."""
    share = profile(model, method, images).macs.total / profile(model, None, images).macs.total

    def setting(theta: float) -> MethodConfig:
        return ATM(alpha=round(theta, 4), beta=0.0, theta_min=0.0)

    return match_macs(model, images[:2], setting, share, low=0.05, high=1.0)


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """Write the two figures into ``folder``; their paths."""
    tradeoff, merged = folder / "accuracy_over_macs.png", folder / "merged_patches.png"
    points = [(row.method.partition(":")[0], sum(row.gmacs.values()), row.top1) for row in rows[1:]]
    dense = (sum(rows[0].gmacs.values()), rows[0].top1)
    title = f"Handwritten digits, {rows[0].images} held-out scans, small ViT without retraining"
    plot_accuracy_over_macs(points, dense, tradeoff, title=title)
    draw_merged(merged)
    return [tradeoff, merged]


def draw_merged(path: Path, count: int = 10) -> None:
    """Write what the stronger settings leave of one scan of each digit."""
    split, model = load_split(), load_digits_vit()
    first = [int((split.test_labels == digit).nonzero()[0]) for digit in range(count)]
    images = split.test_images[first]
    states = []
    for text in ("topk:keep_rate=0.52", "evit:keep_rate=0.45", *DIGITS_METHODS[7:10:2]):
        reduction = reduce_(model, text)
        with torch.no_grad():
            model(images)
        states.append((f"{text.partition(':')[0]}\n{reduction.state.num_tokens - 1} of 64 left", reduction.state))
        restore_(model)
    pixels = ((images[:, 0] * PIXEL_STD + PIXEL_MEAN) / 16.0).clamp(0, 1).numpy()
    plot_merged(
        pixels,
        states,
        (8, 8),
        path,
        captions=[str(digit) for digit in range(count)],
        title="What each method leaves: outlined = merged into one token, pale red = pruned",
    )
