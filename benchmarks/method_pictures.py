"""Draws the pictures of the method pages, what each method leaves of photographs or digits, and that of `vitrim show`.

    python benchmarks/method_pictures.py --checkpoint vit_tiny_patch16_224.safetensors
    python benchmarks/method_pictures.py --checkpoint vit_tiny_patch16_224.safetensors tome mctf
    python benchmarks/method_pictures.py cropr

Methods that need no training are shown on three photographs (that of hero.py, and two that scikit-learn has), under
ViT-Ti, after all blocks but the last, with the class that the model sees. Methods that must be learned are shown on
digits, under the model of the demo: they are fine-tuned on the training part first, model and reducers together, by the
method's own loss, half a minute each. Every registered method has a picture here or a reason in `NO_PICTURE`; without
either the script, asked for all, stops.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.text import Text
from torch import Tensor, nn

import vitrim
from hero import HERE, answer, as_input, photograph, vit_tiny, write
from script import from_shell
from vitrim.app.digits import PIXEL_MEAN, PIXEL_STD, Split, load_digits_vit, load_split
from vitrim.core.registry import methods
from vitrim.core.tokens import TokenState
from vitrim.errors import unknown
from vitrim.plots.patches import Image, draw_kept, gallery, plot_merged, sources_of
from vitrim.training.objectives import cropr, dynamicvit

FOLDER = HERE.parent / "docs" / "images"
GREY = "#7d7d7d"
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

PHOTOGRAPHS: dict[str, list[tuple[str, str]]] = {
    "random": [("keep 0.73", "random:keep_rate=0.733"), ("keep 0.56", "random:keep_rate=0.555")],
    "fixed_radial": [(name, f"{name}:keep_rate=0.7") for name in ("l1", "l2", "linf")],
    "topk": [("keep 0.72", "topk:keep_rate=0.718"), ("keep 0.53", "topk:keep_rate=0.525")],
    "evit": [("keep 0.70", "evit:keep_rate=0.703"), ("keep 0.50", "evit:keep_rate=0.495")],
    "evo_vit": [
        # which patches wait after the last stage; they come back at the end by default
        ("keep 0.7", "evo_vit:keep_rate=0.7,rejoin=false"),
        ("keep 0.5", "evo_vit:keep_rate=0.5,rejoin=false"),
    ],
    "bat": [("keep 0.70", "bat:keep_rate=0.703"), ("keep 0.50", "bat:keep_rate=0.495")],
    "ats": [("rate 0.85", "ats:keep_rate=0.852"), ("rate 0.48", "ats:keep_rate=0.48")],
    "zero_tprune": [("keep 0.70", "zero_tprune:keep_rate=0.703"), ("keep 0.47", "zero_tprune:keep_rate=0.466")],
    "pixelprune": [("tau = 0.1", "pixelprune:tau=0.1"), ("tau = 0.3", "pixelprune:tau=0.3")],
    "gtp": [("12 a block", "gtp:num_prop=12"), ("17 a block", "gtp:num_prop=17")],
    "tome": [("r = 11", "tome:r=11"), ("r = 16", "tome:r=16")],
    "atm": [
        # image by image: an adaptive method then keeps for each what it keeps for that image alone
        ("theta >= 0.88", "atm:alpha=0.97,beta=0.045,theta_min=0.88,granularity=image"),
        ("theta >= 0.8", "atm:alpha=0.97,beta=0.045,theta_min=0.8,granularity=image"),
    ],
    "atc": [("keep 0.7", "atc:keep_rate=0.7"), ("keep 0.5", "atc:keep_rate=0.5")],
    "ppt": [("7e-5", "ppt:r=48"), ("2e-4", "ppt:r=48,threshold=2e-4")],
    "saint": [("t = 0.75", "saint"), ("t = 0.65", "saint:threshold=0.65")],
    "vid_tldr": [("r = 40, 3 blocks", "vid_tldr:r=[40,40,40]"), ("r = 25 %", "vid_tldr:r=0.25,blocks=[0,1,2]")],
    "cubist_merge": [("11 x 11", "cubist_merge:rows=3"), ("9 x 9", "cubist_merge:rows=5")],
    "algm": [("0.64", "algm:threshold=0.6438"), ("0.57", "algm:threshold=0.5677")],
    "mctf": [("r = 13", "mctf:r=13"), ("r = 19", "mctf:r=19")],
    "pitome": [("keep 0.92", "pitome:keep_rate=0.924"), ("keep 0.87", "pitome:keep_rate=0.874")],
    "tofu": [("keep 0.93", "tofu:keep_rate=0.926"), ("keep 0.88", "tofu:keep_rate=0.878")],
    "diffrate": [
        ("r = 11", "diffrate:r=11"),
        (
            "both lists",
            "diffrate:prune_kept=[191,179,167,155,143,131,119,107,95,83,71,59],"
            "merge_kept=[186,174,162,150,138,126,114,102,90,78,66,54]",
        ),
    ],
    "dpc_knn": [("keep 0.72", "dpc_knn:keep_rate=0.718"), ("keep 0.54", "dpc_knn:keep_rate=0.54")],
    "kmedoids": [("keep 0.71", "kmedoids:keep_rate=0.711"), ("keep 0.54", "kmedoids:keep_rate=0.54")],
}
"""Label and method of every row, on photographs."""
DIGITS: dict[str, list[tuple[str, str]]] = {
    "dynamicvit": [("keep 0.6", "dynamicvit:keep_rate=0.6")],
    "cropr": [("r = 6", "cropr:r=6,fusion=none")],
    "patchmerger": [("keep 0.5", "patchmerger:keep_rate=0.5,blocks=[4]")],
    "sit": [("keep 0.5", "sit:keep_rate=0.5,blocks=[4]")],
    "sinkhorn": [("keep 0.5", "sinkhorn:keep_rate=0.5,blocks=[4]")],
}
"""The same on digits."""
SHOWN = ("topk:keep_rate=0.7", "tome:r=13", "evit:keep_rate=0.7")
"""Methods in the picture of docs/show.md."""


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
"""Losses of the methods that must learn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="weights of ViT-Ti, for photographs")
    parser.add_argument("names", nargs="*", help="pictures to draw; default: all")
    given = parser.parse_args()
    every = [*PHOTOGRAPHS, *DIGITS, "show"]
    missing = sorted({SHARED.get(name, name) for name in methods()} - set(every) - set(NO_PICTURE))
    if missing and not given.names:
        raise vitrim.VitrimError(
            f"no picture of {', '.join(missing)}: add rows to PHOTOGRAPHS or DIGITS, or a reason to NO_PICTURE"
        )
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in given.names or every:
        if name not in every:
            raise unknown("picture", name, every)
        if name in DIGITS:
            draw_digits(name)
        elif given.checkpoint is None:
            raise vitrim.VitrimError(f"the picture of {name} needs weights of ViT-Ti: give --checkpoint")
        elif name == "show":
            shown = vitrim.show(vit_tiny(given.checkpoint), SHOWN, HERE / "cat.jpg", blocks=[3, 6, 9])
            write(on_any_ground(shown.figure), FOLDER / "show.webp", dpi=150, quality=50)
        else:
            draw_photographs(name, vit_tiny(given.checkpoint))


def photographs() -> list[Image]:
    """The cat, a flower and a temple, (224, 224, 3) in [0, 1] each."""
    from PIL import Image as Pillow
    from sklearn.datasets import load_sample_image

    found = [photograph()]
    for name, left in (("flower.jpg", 106), ("china.jpg", 40)):
        whole = Pillow.fromarray(load_sample_image(name)).crop((left, 0, left + 427, 427))
        found.append(np.asarray(whole.resize((224, 224), Pillow.Resampling.BICUBIC), dtype=np.float32) / 255)
    return found


def draw_photographs(name: str, model: nn.Module) -> None:
    """The remains of every photograph after all blocks but the last, and the class that the model sees."""
    images = photographs()
    rows: list[tuple[str, list[tuple[str, Image | None]]]] = []
    with torch.no_grad():
        rows.append(("dense", [(answer(model(as_input(image))), image) for image in images]))
        for label, method in PHOTOGRAPHS[name]:
            row: list[tuple[str, Image | None]] = []
            for image in images:
                torch.manual_seed(0)
                reduction = vitrim.reduce_(model, method, record=True)
                seen = answer(model(as_input(image)))
                left = sources_of(reduction.states[1:-1])
                row.append((seen, draw_kept(image, left, (14, 14), scale=2)))
                vitrim.restore_(model)
            rows.append((label, row))
    write(on_any_ground(gallery(rows, side=1.75)), FOLDER / f"{name}.webp", dpi=100, quality=50)


def on_any_ground(figure: Any) -> Any:
    """The figure with its text in a grey that is legible on light pages and on dark ones."""
    for text in figure.findobj(Text):
        text.set_color(GREY)
    return figure


def draw_digits(name: str) -> None:
    """The remains of eight digits at the end."""
    split = load_split()
    first = [int((split.test_labels == digit).nonzero()[1]) for digit in range(8)]
    images = split.test_images[first]
    pixels = ((images[:, 0] * PIXEL_STD + PIXEL_MEAN) / 16.0).clamp(0, 1).numpy()
    rows = [(label, final_state(method, images, split, LOSSES[name])) for label, method in DIGITS[name]]
    plot_merged(pixels, rows, (8, 8), FOLDER / f"{name}.png")
    print(FOLDER / f"{name}.png")


def final_state(
    method: str, images: Tensor, split: Split, loss: Callable[[vitrim.Reduction, Tensor, Tensor], Tensor]
) -> TokenState:
    """The remains of ``images`` (B, 1, 8, 8) under ``method``, after learning by ``loss``."""
    torch.manual_seed(0)
    model = load_digits_vit()
    reduction = vitrim.reduce_(model, method)
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
