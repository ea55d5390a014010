"""Draws the two pictures that README and the site begin with, each for light and for dark pages.

    python benchmarks/hero.py photo --checkpoint vit_tiny_patch16_224.safetensors
    python benchmarks/hero.py chart                         # from hero.json, which this folder has
    python benchmarks/hero.py chart --points frontier.json

`photo` shows a photograph as the model gets it and what is left of it after some blocks. `chart` shows top-1 over
milliseconds. Its JSON has a title, the setting, what the milliseconds are of, those of the dense model, and lines: the
method, its label, points of milliseconds, change of top-1 in points and the standard error of that, and where the label
stands: `label_at` is a point of the chart, by default the line's last one in view, and `label_by` what it is moved by.

`cat.jpg` is Chelsea, photographed by Stefan van der Walt, CC0, as scikit-image has it, cut to a square.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

import vitrim
from script import from_shell
from vitrim.plots.patches import draw_kept, sources_of
from vitrim.style import colours, sheet

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"
METHOD, BLOCKS = "tome:r=13", (3, 6, 11)
INK = {"light": "#1f2328", "dark": "#e6edf3"}
GREY = {"light": "#6e7781", "dark": "#8b949e"}
PALER = {"light": 0.0, "dark": 0.3}
"""Share of white in the colours of methods."""
SIZE = (4.4, 5.0)
"""Inches of a picture: where the site shows it, half as wide as a column, 11 points are 12 pixels."""
LOWEST = -8.5
"""Changes of top-1 below this are cut off: nobody would use them."""


def photograph() -> NDArray[np.float32]:
    """The cat, (224, 224, 3) in [0, 1]."""
    image = Image.open(HERE / "cat.jpg").convert("RGB").resize((224, 224), Image.Resampling.BICUBIC)
    return np.asarray(image, dtype=np.float32) / 255


def vit_tiny(checkpoint: str | Path) -> nn.Module:
    """timm's ViT-Ti with weights of a file."""
    import timm

    model = timm.create_model("vit_tiny_patch16_224")
    model.load_state_dict(load_file(checkpoint))
    return model.eval()


def as_input(image: NDArray[np.float32]) -> Tensor:
    """An image (H, W, 3) as ViT-Ti takes it."""
    return (torch.from_numpy(image).permute(2, 0, 1)[None] - 0.5) / 0.5


def answer(logits: Tensor) -> str:
    """The first class of ImageNet and its probability."""
    from timm.data import ImageNetInfo

    share, place = logits.softmax(-1)[0].max(-1)
    name = ImageNetInfo().index_to_description(int(place)).split(",")[0]
    return f"{name}, {100 * share.item():.0f} %"


def photo(checkpoint: str) -> None:
    torch.set_num_threads(1)
    image, model = photograph(), vit_tiny(checkpoint)
    pixels = as_input(image)
    with torch.no_grad():
        dense = answer(model(pixels))
        reduction = vitrim.reduce_(model, METHOD, record=True)
        reduced = answer(model(pixels))
    sources, tokens = sources_of(reduction.states[1:]), reduction.tokens_per_block
    total = reduction.states[0].num_patches + 1
    panels = [("dense", f"{total} tokens in every block\n{dense}", image.repeat(2, 0).repeat(2, 1))]
    for block in BLOCKS:
        left = draw_kept(image, sources[:block], (14, 14), scale=2)
        last = f"\n{reduced}" if block == BLOCKS[-1] else "\n"
        panels.append((f"after block {block} of {len(tokens)}", f"{tokens[block - 1]} tokens{last}", left))
    for theme in INK:
        figure = blank(*SIZE)
        figure.get_layout_engine().set(h_pad=0.08, hspace=0.03)
        head = "Tokens that ToMe leaves of a photograph"
        figure.suptitle(head, x=0.02, ha="left", fontsize=12, fontweight="bold", color=INK[theme])
        for axis, (title, note, picture) in zip(figure.subplots(2, 2).flat, panels, strict=True):
            axis.imshow(picture, interpolation="antialiased")
            axis.set_axis_off()
            axis.set_title(title, fontsize=11, color=INK[theme], loc="left", pad=5)
            axis.text(
                0, -0.03, note, transform=axis.transAxes, va="top", fontsize=11, color=INK[theme], linespacing=1.3
            )
        write(figure, IMAGES / f"hero_photo_{theme}.webp")


def chart(points: str) -> None:
    given = json.loads(Path(points).read_text())
    shown = colours([line["method"] for line in given["lines"]])
    for theme in INK:
        figure = blank(*SIZE)
        axis = figure.subplots()
        axis.axvline(given["dense"], color=GREY[theme], linestyle=(0, (4, 3)), linewidth=1.2)
        axis.axhline(0, color=GREY[theme], linestyle=(0, (4, 3)), linewidth=1.2)
        axis.plot(given["dense"], 0, "o", color=INK[theme], markersize=8)
        axis.annotate(
            f"dense\n{given['dense']:g} ms", (given["dense"], 0), (-8, 34), textcoords="offset points", ha="right",
            fontsize=11, fontweight="bold", color=INK[theme],
        )  # fmt: skip
        for line in given["lines"]:
            draw_line(axis, line, mixed(shown[line["method"]], PALER[theme]))
        axis.set_ylim(LOWEST, 2.2)
        seen = [point[0] for line in given["lines"] for point in line["points"] if point[1] > LOWEST]
        axis.set_xlim(min(seen) - 6, given["dense"] + 4)
        axis.set_xlabel(f"{given['ms']}  (faster: left)", fontsize=11, color=INK[theme])
        axis.set_ylabel("change of top-1, points", fontsize=11, color=INK[theme])
        axis.tick_params(colors=INK[theme], labelsize=10)
        for name, edge in axis.spines.items():
            edge.set_visible(name in ("left", "bottom"))
            edge.set_color(GREY[theme])
        figure.suptitle(given["title"], x=0.02, ha="left", fontsize=12, fontweight="bold", color=INK[theme])
        axis.set_title(fill(given["setting"], 42), loc="left", x=-0.12, fontsize=10.5, color=INK[theme])
        write(figure, IMAGES / f"hero_chart_{theme}.webp")


def draw_line(axis: Any, line: dict[str, Any], colour: str) -> None:
    """One method: its points with their errors, and its name beside the last one that is in view."""
    points = sorted(line["points"], reverse=True)
    x, y, error = (list(part) for part in zip(*points, strict=True))
    axis.errorbar(x, y, error, color=colour, linewidth=2.4, elinewidth=1, capsize=0, marker="o", markersize=6)
    inside = [point for point in points if point[1] > LOWEST + 0.5]
    at = line.get("label_at") or inside[-1][:2]
    axis.annotate(
        line["label"], at, line.get("label_by", (7, -13)), textcoords="offset points", color=colour, fontsize=12,
        fontweight="bold",
    )  # fmt: skip


def mixed(colour: str, white: float) -> str:
    from matplotlib.colors import to_hex, to_rgb

    return to_hex(tuple((1 - white) * part + white for part in to_rgb(colour)))


def blank(width: float, height: float) -> Any:
    made = sheet(width, height)
    made.set_dpi(160)
    return made


def write(figure: Any, path: Path, *, dpi: int = 160, quality: int = 82) -> None:
    """Write a figure as WebP on a transparent ground."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi, transparent=True)
    Image.open(file).save(path, "WEBP", quality=quality, method=6)
    print(f"{path} {path.stat().st_size // 1024} KB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("photo").add_argument("--checkpoint", required=True)
    kinds.add_parser("chart").add_argument("--points", default=str(HERE / "hero.json"))
    given = parser.parse_args()
    photo(given.checkpoint) if given.kind == "photo" else chart(given.points)


if __name__ == "__main__":
    from_shell(main)
