"""Draws the pictures of the method pages: what each method leaves of digits after its last reduction.

    python benchmarks/method_pictures.py
    python benchmarks/method_pictures.py tome mctf

The model is that of the demo. Methods that must be learned are fine-tuned on the training part of the digits first,
model and reducers together, by the method's own loss: half a minute each. Every registered method has a picture here
or a reason in `NO_PICTURE`; without either the script, asked for all, stops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrim
from script import from_shell
from vitrim.core.registry import methods
from vitrim.core.tokens import TokenState
from vitrim.demo.digits import PIXEL_MEAN, PIXEL_STD, Split, load_digits_vit, load_split
from vitrim.errors import unknown
from vitrim.methods import cropr, dynamicvit
from vitrim.plots.patches import plot_merged

FOLDER = Path(__file__).parents[1] / "docs" / "images"
EPOCHS = 5
BATCH_SIZE = 64
LEARNING_RATE = 1e-3

SHARED: dict[str, str] = {"l1": "fixed_radial", "l2": "fixed_radial", "linf": "fixed_radial"}
"""Methods that share a page and a picture."""
NO_PICTURE = {
    "none": "it reduces nothing",
    "a_vit": "what counts is when a token halts, and that needs long training: after a short one all halt together",
    "ia_red2": "its policy is learned by REINFORCE, group after group",
}

# label and method of every row
PICTURES: dict[str, list[tuple[str, str]]] = {
    "random": [("keep 0.7", "random:keep_rate=0.7"), ("keep 0.5", "random:keep_rate=0.5")],
    "fixed_radial": [(f"{name} keep 0.7", f"{name}:keep_rate=0.7") for name in ("l1", "l2", "linf")],
    "topk": [("keep 0.7", "topk:keep_rate=0.7"), ("keep 0.5", "topk:keep_rate=0.5")],
    "evit": [("keep 0.7", "evit:keep_rate=0.7"), ("keep 0.5", "evit:keep_rate=0.5")],
    "evo_vit": [
        # which patches wait after the last stage; they come back at the end by default
        ("keep 0.7", "evo_vit:keep_rate=0.7,rejoin=false"),
        ("keep 0.5", "evo_vit:keep_rate=0.5,rejoin=false"),
    ],
    "bat": [("keep 0.7", "bat:keep_rate=0.7"), ("keep 0.5", "bat:keep_rate=0.5")],
    "ats": [("rate 1", "ats"), ("rate 0.5", "ats:keep_rate=0.5")],
    "zero_tprune": [
        ("3, then 0.8", "zero_tprune:num_similar=3,keep_rate=0.8"),
        ("4, then 0.6", "zero_tprune:num_similar=4,keep_rate=0.6"),
    ],
    "gtp": [("4 a block", "gtp:num_prop=4"), ("6 a block", "gtp:num_prop=6")],
    "tome": [("r = 4", "tome:r=4"), ("r = 7", "tome:r=7")],
    "atm": [
        # image by image: an adaptive method then keeps for each what it keeps for that image alone
        ("theta >= 0.9", "atm:alpha=1.0,beta=0.014,theta_min=0.9,granularity=image"),
        ("theta >= 0.8", "atm:alpha=0.985,beta=0.05,theta_min=0.8,granularity=image"),
    ],
    "algm": [("0.88", "algm:threshold=0.88"), ("0.6", "algm:threshold=0.6")],
    "mctf": [("r = 4", "mctf:r=4"), ("r = 7", "mctf:r=7")],
    "pitome": [("keep 0.92", "pitome:keep_rate=0.92"), ("keep 0.84", "pitome:keep_rate=0.84")],
    "tofu": [("keep 0.92", "tofu:keep_rate=0.92"), ("keep 0.84", "tofu:keep_rate=0.84")],
    "diffrate": [
        ("r = 4", "diffrate:r=4"),
        ("both lists", "diffrate:prune_kept=[62,56,50,44,38,32,26,20],merge_kept=[59,53,47,41,35,29,23,17]"),
    ],
    "dpc_knn": [("keep 0.7", "dpc_knn:keep_rate=0.7"), ("keep 0.5", "dpc_knn:keep_rate=0.5")],
    "kmedoids": [("keep 0.7", "kmedoids:keep_rate=0.7"), ("keep 0.5", "kmedoids:keep_rate=0.5")],
    "dynamicvit": [("keep 0.6", "dynamicvit:keep_rate=0.6")],
    "cropr": [("r = 6", "cropr:r=6,fusion=none")],
    "patchmerger": [("keep 0.5", "patchmerger:keep_rate=0.5,blocks=[4]")],
    "sit": [("keep 0.5", "sit:keep_rate=0.5,blocks=[4]")],
    "sinkhorn": [("keep 0.5", "sinkhorn:keep_rate=0.5,blocks=[4]")],
}


def cross_entropy(reduction: vitrim.Reduction, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def cropr_loss(reduction: vitrim.Reduction, logits: Tensor, labels: Tensor) -> Tensor:
    return cropr.objective(reduction, logits, labels)["total"]


def dynamicvit_loss(reduction: vitrim.Reduction, logits: Tensor, labels: Tensor) -> Tensor:
    return dynamicvit.objective(reduction, logits, labels)["total"]


LOSSES: dict[str, Callable[[vitrim.Reduction, Tensor, Tensor], Tensor]] = {
    "dynamicvit": dynamicvit_loss,
    "cropr": cropr_loss,
    "patchmerger": cross_entropy,
    "sit": cross_entropy,
    "sinkhorn": cross_entropy,
}
"""How the methods that must be learned are taught."""


def main() -> None:
    split = load_split()
    first = [int((split.test_labels == digit).nonzero()[1]) for digit in range(8)]
    images = split.test_images[first]
    pixels = ((images[:, 0] * PIXEL_STD + PIXEL_MEAN) / 16.0).clamp(0, 1).numpy()
    missing = sorted({SHARED.get(name, name) for name in methods()} - set(PICTURES) - set(NO_PICTURE))
    if missing and not sys.argv[1:]:
        raise vitrim.VitrimError(f"no picture of {', '.join(missing)}: add rows to PICTURES or a reason to NO_PICTURE")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        if name not in PICTURES:
            raise unknown("picture", name, PICTURES)
        rows = [(label, final_state(method, images, split, LOSSES.get(name))) for label, method in PICTURES[name]]
        plot_merged(pixels, rows, (8, 8), FOLDER / f"{name}.png")
        print(FOLDER / f"{name}.png")


def final_state(
    method: str, images: Tensor, split: Split, loss: Callable[[vitrim.Reduction, Tensor, Tensor], Tensor] | None
) -> TokenState:
    """What ``method`` has left of the ``images`` (B, 1, 8, 8), after learning by ``loss`` if there is one."""
    torch.manual_seed(0)
    model = load_digits_vit()
    reduction = vitrim.reduce_(model, method)
    if loss is not None:
        teach(model, split, lambda logits, labels: loss(reduction, logits, labels))
    with torch.no_grad():
        right = (model(split.test_images).argmax(1) == split.test_labels).double().mean().item()
        torch.manual_seed(0)
        model(images)
    left = (reduction.state.source[:, 1:] >= 0).double().sum(1).mean().item()
    print(f"{method}: top-1 {100 * right:.1f} %, {reduction.state.num_patches} tokens for {left:.1f} of 64 patches")
    return reduction.state


def teach(model: nn.Module, split: Split, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Fine-tune ``model`` and what its reducers learn."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    steps = len(split.train_labels) // BATCH_SIZE
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=EPOCHS * steps)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(split.train_labels))[: steps * BATCH_SIZE].split(BATCH_SIZE):
            optimizer.zero_grad()
            loss(model(split.train_images[batch]), split.train_labels[batch]).backward()
            optimizer.step()
            schedule.step()
    model.eval()


if __name__ == "__main__":
    from_shell(main)
