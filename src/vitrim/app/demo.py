"""The offline demo: the loss of accuracy on real scans, and the speed-up on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrim.app.digits import PIXEL_MEAN, PIXEL_STD, load_digits_vit, load_split
from vitrim.core.method import MethodConfig
from vitrim.core.reduce import reduce_, restore_
from vitrim.core.registry import host_of, parse_method
from vitrim.data import batches, eval_transform, load_images
from vitrim.engines.machine import environment, set_threads
from vitrim.engines.macs import profile_of
from vitrim.errors import VitrimError
from vitrim.files import check_file
from vitrim.loading import ModelSpec, create_model
from vitrim.measure.evaluation import standard_probes
from vitrim.measure.inputs import random_images
from vitrim.measure.latency import Budget
from vitrim.measure.records import Row
from vitrim.measure.run import run
from vitrim.measure.task_data import task_of
from vitrim.measure.timing import measure
from vitrim.methods.atm import ATM
from vitrim.plots.charts import plot_accuracy_over_macs
from vitrim.plots.images import pixels_of
from vitrim.plots.patches import plot_merged
from vitrim.report import Report, Table
from vitrim.tuning.cost import MacsCost, within
from vitrim.tuning.space import Space

# Amounts that save about 30 and 50 % of the MACs of the digits model; the table shows the exact numbers.
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

PHOTO_MODEL = "vitrim:cifar10_vit"
PHOTOS = 1000
PHOTO_METHODS = (
    "random:keep_rate=0.807",
    "random:keep_rate=0.614",
    "topk:keep_rate=0.777",
    "topk:keep_rate=0.555",
    "evit:keep_rate=0.725",
    "evit:keep_rate=0.48",
    "tome:r=6",
    "tome:r=[12,11,10,9,8,7]",
    "atm:alpha=0.985,beta=0.025,theta_min=0.8",
    "atm:alpha=0.97,beta=0.062,theta_min=0.7",
)
"""The methods shown for the CIFAR-10 model."""

SPEED_MODEL = "deit_small_patch16_224"
SPEED_TOME = "tome:r=13,last_block=class_token"
SPEED_BATCH = 8
SHOWN = 10
"""Number of pictures in a figure."""


class DemoReport(Report):
    """The result of `demo`, with facts ``digits``, ``cifar10`` and ``speed``."""

    @property
    def record(self) -> dict[str, Any]:
        return {"command": self.command, **self.facts}

    def parts(self) -> Iterator[Any]:
        yield from super().parts()
        yield "written: " + ", ".join(str(path) for path in self.files)


def demo(
    out: str | Path = "vitrim-demo",
    *,
    cifar10: str | None = None,
    threads: int | None = None,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> DemoReport:
    """Reduce a small ViT on real handwritten digits, measure DeiT-S on this machine, draw both. Offline.

    Args:
        out: folder for ``demo.json`` and the figures.
        cifar10: a source of CIFAR-10 for `vitrim.data.load_images`: also score the shipped model on it.
        threads: of torch on the CPU; None: unchanged.
        on_progress: called with the next step in words.

    Returns:
        A report with one table: accuracy and MACs, then speed-up and MACs.

    Raises:
        VitrimError: ``out`` cannot be written, or ``cifar10`` is not CIFAR-10.
    """
    say = on_progress or (lambda text: None)
    out = Path(out)
    check_file(out / "demo.json")
    set_threads(threads)
    exhibits = {"digits": digits()} | ({} if cifar10 is None else {"cifar10": photos(cifar10)})
    rows = {}
    for key, exhibit in exhibits.items():
        say(f"evaluating the {exhibit.name} under every method")
        task = task_of(ModelSpec(exhibit.model).load(), None)
        probes = standard_probes(task)
        rows[key] = run(exhibit.model, exhibit.methods, exhibit.batches, probes, task=task, seed=seed)
    say(f"timing {SPEED_MODEL}, batch {SPEED_BATCH}, dense against tome and atm")
    speed = measure_speed(seed=seed)
    accuracy = {key: [{"model": exhibits[key].name, **row} for row in found] for key, found in rows.items()}
    report = DemoReport("demo", {"environment": environment(seed=seed), **accuracy, "speed": speed})
    report.save(out / "demo.json")
    say("drawing")
    figures = [path for key, exhibit in exhibits.items() for path in draw(exhibit, rows[key], out)]
    report.files = [out / "demo.json", *figures]
    report.tables = [_table({exhibits[key].name: found for key, found in rows.items()}, speed)]
    return report


def _table(found: dict[str, list[Row]], speed: list[dict[str, Any]]) -> Table:
    rows: list[tuple[Any, ...]] = []
    for name, measured in found.items():
        dense = sum(measured[0]["gmacs"].values())
        for row in measured:
            fewer = 1 - sum(row["gmacs"].values()) / dense
            shares = (f"{100 * share:.1f}" for share in (row["top1"], row["agreement"]))
            rows.append((name, row.method, *shares, f"{100 * fewer:.0f}", "", "", ""))
    for each in speed:
        times = (f"{each['images_per_second']:.1f}", f"{each['speedup']:.2f}", f"{each['macs_speedup']:.2f}")
        rows.append(("DeiT-S", each["method"], "", "", f"{100 * (1 - 1 / each['macs_speedup']):.0f}", *times))
    images = ", ".join(f"{name} on {measured[0]['images']} images" for name, measured in found.items())
    title = (
        f"{images} it never saw, no retraining; then the speed of DeiT-S geometry here "
        f"(batch {speed[0]['batch_size']}, {speed[0]['dtype']}, random weights)"
    )
    columns = ("model", "method", "top-1 %", "as dense %", "fewer MACs %", "images/s", "speed-up", "promised")
    return Table("demo", title, columns, rows)


@dataclass(frozen=True)
class Exhibit:
    """A model with held-out images and methods.

    Attributes:
        name, images: in the table; the images' description, for titles.
        prefix: of the figures' files.
        batches: images (B, C, H, W) and labels (B,).
        methods: two settings of each method, the stronger second; random first.
        drawn: methods of the figure of patches: the stronger settings, without random.
        pictures, pixels: (SHOWN, C, H, W) preprocessed images of that figure; (SHOWN, H, W) or (SHOWN, H, W, 3) in [0,
            1].
        captions: of these images.
    """

    name: str
    images: str
    prefix: str
    model: nn.Module
    batches: Sequence[tuple[Tensor, Tensor]]
    methods: tuple[str, ...]
    drawn: tuple[str, ...]
    pictures: Tensor
    pixels: NDArray[np.float32]
    captions: Sequence[str]


def digits() -> Exhibit:
    """The shipped digits ViT on the 450 held-out scans of scikit-learn's digits."""
    split = load_split()
    first = [int((split.test_labels == digit).nonzero()[0]) for digit in range(SHOWN)]
    pictures = split.test_images[first]
    return Exhibit(
        name="digits ViT",
        images="handwritten digits, held-out scans",
        prefix="",
        model=load_digits_vit(),
        batches=list(zip(split.test_images.split(150), split.test_labels.split(150), strict=True)),
        methods=DIGITS_METHODS,
        drawn=DIGITS_METHODS[3::2],
        pictures=pictures,
        pixels=((pictures[:, 0] * PIXEL_STD + PIXEL_MEAN) / 16.0).clamp(0, 1).numpy(),
        captions=[str(digit) for digit in range(SHOWN)],
    )


def photos(data: str) -> Exhibit:
    """The shipped CIFAR-10 ViT on test photographs of CIFAR-10, a source for `load_images` with a split `test`."""
    model: Any = create_model(PHOTO_MODEL)
    dataset = load_images(data, split="test")
    if dataset.num_classes != model.num_classes:
        raise VitrimError(f"{data} has {dataset.num_classes} classes: it is not CIFAR-10")
    dataset.transform = eval_transform(model)
    read = list(batches(dataset, 100, limit=PHOTOS))
    images, labels = (torch.cat(part) for part in zip(*read, strict=True))
    if len(labels.unique()) < SHOWN:
        raise VitrimError(f"{data} has images of {len(labels.unique())} classes among {len(labels)}: it needs all ten")
    # One picture per class, each its first.
    first = [int((labels == label).nonzero()[0]) for label in range(SHOWN)]
    return Exhibit(
        name="CIFAR-10 ViT",
        images="CIFAR-10, test photographs",
        prefix="cifar10_",
        model=model,
        batches=read,
        methods=PHOTO_METHODS,
        drawn=PHOTO_METHODS[3::2],
        pictures=images[first],
        pixels=np.stack([pixels_of(model, image) for image in images[first]]),
        captions=[str(label) for label in dataset.class_names or range(SHOWN)],
    )


def measure_speed(seed: int) -> list[dict[str, Any]]:
    """Speed of DeiT-S geometry on this machine: dense, ToMe, and ATM at the same MACs.

    Weights and images are random, because the time depends only on token counts.
    """
    torch.manual_seed(seed)
    model = timm.create_model(SPEED_MODEL).eval()
    images = random_images(model, SPEED_BATCH, seed)
    tome = parse_method(SPEED_TOME)
    methods = {tome.describe(): tome}
    atm = atm_at_the_macs_of(tome, model, images)
    methods[atm.describe()] = atm
    budget = Budget(min_rounds=7, min_seconds=0.0, warmup_rounds=1)
    setting = {"model": SPEED_MODEL, "batch_size": SPEED_BATCH, "dtype": "fp32", "compiled": False}
    return [{**setting, **row} for row in measure(model, methods, images, budget=budget)]


def atm_at_the_macs_of(method: MethodConfig, model: nn.Module, images: Tensor) -> MethodConfig:
    """ATM with one threshold for all layers and the MACs of ``method`` on ``images``."""
    # On the images that are timed: adaptive counts depend on them.
    share = profile_of(model, method, images).macs.total / profile_of(model, None, images).macs.total
    space = Space.of(model, ATM())
    found = within(space, None, MacsCost(model, space, [images[:2]]), share)
    assert found is not None, "ATM merges nearly everything at its lowest threshold"
    return found


def draw(exhibit: Exhibit, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the two figures of an exhibit to ``folder``, and return their paths.

    They show accuracy over MACs, and the remaining patches of one image per class under the stronger settings.
    """
    tradeoff = folder / f"{exhibit.prefix}accuracy_over_macs.png"
    merged = folder / f"{exhibit.prefix}merged_patches.png"
    points = [(row.method.partition(":")[0], sum(row["gmacs"].values()), row["top1"]) for row in rows[1:]]
    dense = (sum(rows[0]["gmacs"].values()), rows[0]["top1"])
    title = f"{exhibit.name}, without retraining: {rows[0]['images']} images ({exhibit.images})"
    plot_accuracy_over_macs(points, dense, tradeoff, title=title)
    states = []
    model = exhibit.model
    for text in exhibit.drawn:
        reduction = reduce_(model, text)
        with torch.no_grad():
            model(exhibit.pictures)
        # `source` spans the tokens of the input, so its width counts them before any reduction.
        patches = reduction.state.source.shape[1] - reduction.state.num_prefix
        left = reduction.state.num_tokens - reduction.state.num_prefix
        states.append((f"{text.partition(':')[0]}\n{left} of {patches} left", reduction.state))
        restore_(model)
    plot_merged(
        exhibit.pixels,
        states,
        host_of(model).facts(model).grid_size,
        merged,
        captions=exhibit.captions,
        title="What each method leaves: outlined = merged into one token, hatched = pruned",
    )
    return [tradeoff, merged]
