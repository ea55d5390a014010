"""Draws the pictures of the method pages: what each method leaves of digits after its last reduction.

python benchmarks/method_pictures.py
"""

from __future__ import annotations

from pathlib import Path

import torch

import vitrim
from vitrim.demo.digits import PIXEL_MEAN, PIXEL_STD, load_digits_vit, load_split
from vitrim.plots.merged import plot_merged
from vitrim.tokens import TokenState

FOLDER = Path(__file__).parents[1] / "docs" / "images"
PICTURES: dict[str, list[tuple[str, str]]] = {
    "random": [("keep 0.7", "random:keep_rate=0.7"), ("keep 0.5", "random:keep_rate=0.5")],
    "fixed_radial": [(f"{name} keep 0.7", f"{name}:keep_rate=0.7") for name in ("l1", "l2", "linf")],
    "topk": [("keep 0.7", "topk:keep_rate=0.7"), ("keep 0.5", "topk:keep_rate=0.5")],
    "evit": [("keep 0.7", "evit:keep_rate=0.7"), ("keep 0.5", "evit:keep_rate=0.5")],
    "tome": [("r = 4", "tome:r=4"), ("r = 7", "tome:r=7")],
    "atm": [
        ("theta >= 0.9", "atm:alpha=1.0,beta=0.014,theta_min=0.9"),
        ("theta >= 0.8", "atm:alpha=0.985,beta=0.05,theta_min=0.8"),
    ],
}


def main() -> None:
    split, model = load_split(), load_digits_vit()
    images = split.test_images[[int((split.test_labels == digit).nonzero()[1]) for digit in range(8)]]
    pixels = ((images[:, 0] * PIXEL_STD + PIXEL_MEAN) / 16.0).clamp(0, 1).numpy()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, settings in PICTURES.items():
        rows = [(f"{label}", final_state(model, method, images)) for label, method in settings]
        plot_merged(pixels, rows, (8, 8), FOLDER / f"{name}.png")
        print(FOLDER / f"{name}.png")


def final_state(model: torch.nn.Module, method: str, images: torch.Tensor) -> TokenState:
    torch.manual_seed(0)
    # one image at a time: an adaptive method then keeps for each image what it keeps for that image alone
    if method.startswith("atm"):
        method += ",granularity=image"
    reduction = vitrim.reduce_(model, method)
    with torch.no_grad():
        model(images)
    vitrim.restore_(model)
    return reduction.state


if __name__ == "__main__":
    main()
