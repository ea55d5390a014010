"""Pictures of a dense model beside the same with fewer tokens: predictions, the tokens that were kept, the truth.

    python examples/dense_pictures.py                            # a random model on a made image, offline
    python examples/dense_pictures.py run:runs/camvid -m tome:r=50 -m topk:keep_rate=0.7,restore=last_block \
        --data CAMVID_FOLDER --split test --limit 2 --out pictures

The model is of any name that vitrim knows and that predicts masks or boxes: `run:FOLDER`, `vitrim:NAME`,
`segmenter:NAME`, `vitdet:NAME`. Writes one PNG per image, and prints its name.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitrim.cli.options import parse_options
from vitrim.core.registry import parse_methods
from vitrim.data import SegmentationDataset, load_data, spread
from vitrim.data.transforms import geometry_of
from vitrim.errors import VitrimError
from vitrim.loading import ModelSpec, as_trained, create_model, learned_reduction
from vitrim.measure.contestants import contestants
from vitrim.measure.task_data import check_dataset, task_of
from vitrim.plots.dense import check_drawable, draw_comparison, palette, scene
from vitrim.tasks import Task, tasks

OFFLINE = ("segmenter:test_vit", {"num_classes": 3})
WIDTH, SHADES = 1000, 96
METHODS = ["tome:r=12", "topk:keep_rate=0.7,restore=last_block"]


def made_data() -> SegmentationDataset:
    """One image of 200 x 150 pixels: a disc and a field on a background, with noise."""
    y, x = np.mgrid[:150, :200]
    mask = (y > 90).astype(np.uint8)
    mask[(y - 60) ** 2 + (x - 70) ** 2 < 40**2] = 2
    shades = np.array([(120, 170, 220), (90, 140, 70), (200, 80, 60)])[mask]
    image = (shades + np.random.default_rng(0).normal(0, 12, shades.shape)).clip(0, 255).astype(np.uint8)
    return SegmentationDataset([encoded(image)], [encoded(mask)], class_names=["sky", "field", "disc"], source="made")


def encoded(pixels: np.ndarray[Any, Any]) -> bytes:
    """A PNG file."""
    from io import BytesIO

    file = BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: a random model on a made image")
    parser.add_argument("-m", "--method", action="append", help=f"may repeat; default: {' '.join(METHODS)}")
    parser.add_argument("--data", help="as of `vitrim eval`")
    parser.add_argument("--split")
    parser.add_argument("--limit", type=int, default=2, help="images, spread evenly over the data")
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder")
    parser.add_argument("--model-option", action="append", help="key=value; may repeat")
    parser.add_argument("--data-option", action="append", help="key=value; may repeat")
    parser.add_argument("--protocol", action="append", help="of segmentation, key=value; may repeat")
    parser.add_argument("--checkpoint", type=Path, help="weights: a safetensors file")
    parser.add_argument("--small", action="store_true", help=f"{WIDTH} pixels wide, in {SHADES} colours: for a page")
    given = parser.parse_args(arguments)
    if (given.model is None) != (given.data is None):
        parser.error("give a model and --data, or neither")
    return given


def task_and_data(model: torch.nn.Module, given: argparse.Namespace) -> tuple[Task, Any]:
    """The task of the model, and the images with all labels; a run's recipe adds what the command line leaves out."""
    protocol, options = as_trained(given.model or "", parse_options(given.protocol, "protocol option"))
    options = {**options, **parse_options(given.data_option, "data option")}
    loaded = ModelSpec(model).load()
    name = next(iter(loaded.tasks), None)
    reads = None if name is None else tasks()[name].reads
    data = made_data() if given.data is None else load_data(given.data, task=reads, split=given.split, **options)
    task = task_of(loaded, data)
    task.follow(protocol)
    check_drawable(task)
    check_dataset(data, task, given.model or OFFLINE[0])
    data.transform = lambda image, target: (image, target)  # as stored: `scene` prepares both
    return task, data


def make_small(file: Path, num_classes: int) -> None:
    """Write a picture again with fewer pixels and colours, among them exactly those of its legend."""
    with Image.open(file) as picture:
        drawn = picture.convert("RGB")
    drawn = drawn.resize((WIDTH, round(drawn.height * WIDTH / drawn.width)), Image.Resampling.LANCZOS)
    fixed = [(0, 0, 0), (255, 255, 255), *(tuple((255 * one).round().astype(int)) for one in palette(num_classes)[:24])]
    found = drawn.quantize(SHADES - len(fixed), method=Image.Quantize.MEDIANCUT, kmeans=4).getpalette() or []
    shades = Image.new("P", (1, 1))
    shades.putpalette([*found, *(int(part) for colour in fixed for part in colour)])
    drawn.quantize(palette=shades, dither=Image.Dither.NONE).save(file, optimize=True)


def main(arguments: list[str]) -> None:
    """Write the pictures that the command line asks for."""
    given = parsed(arguments)
    torch.manual_seed(0)
    name, options = OFFLINE if given.model is None else (given.model, parse_options(given.model_option))
    model = create_model(name, options=options, checkpoint=given.checkpoint)
    task, data = task_and_data(model, given)
    learned = learned_reduction(name, given.checkpoint)
    models = contestants(model, parse_methods(given.method or METHODS), task, learned=learned)
    transform = task.eval_transform(geometry_of(model))
    given.out.mkdir(parents=True, exist_ok=True)
    for index in spread(len(data), given.limit).tolist():
        shown = scene(*data[index], transform)
        title = f"{name}, image {index} of {Path(data.source).name}"
        file = given.out / f"{index:05d}.png"
        draw_comparison(models, task, shown, data.class_names, title=title).savefig(file)
        if given.small:
            make_small(file, task.num_classes)
        print(f"wrote {file}: {', '.join(one.name for one in models)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except VitrimError as error:
        sys.exit(f"error: {error}")
