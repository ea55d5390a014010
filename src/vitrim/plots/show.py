"""``vitrim.show``: patches that methods keep, block by block, their scores, and the models' predictions."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.checked import Natural, Seed, checked_call
from vitrim.core.method import MethodConfig
from vitrim.core.registry import host_of, parse_method, parse_methods
from vitrim.core.selection import Selector
from vitrim.data import eval_transform, spread
from vitrim.data.transforms import geometry_of
from vitrim.engines.machine import environment, seeded_draws, select_device
from vitrim.engines.prefill import Prefill, Prompt, as_measured
from vitrim.engines.static import schedules_in_words
from vitrim.errors import VitrimError, check_installed
from vitrim.files import check_folder
from vitrim.loading import Loaded, ModelSpec, PlacedModel
from vitrim.measure.contestants import contestants
from vitrim.measure.inputs import EMBEDDING, DataSpec, task_name
from vitrim.measure.task_data import open_task
from vitrim.plots.classifier import draw_show, prepared, rows_of
from vitrim.plots.dense import check_drawable, draw_comparison, scene
from vitrim.plots.image_tokens import copies, draw_image_tokens, image_token_rows, preparing
from vitrim.plots.images import Pictured, from_source, given_images, pixels_of
from vitrim.report import Report, Table
from vitrim.results import PictureFormat, Pictures
from vitrim.style import encoded, save
from vitrim.tasks.classes import class_names as names_of

FEW = 8
"""Default number of images of a dataset; also the most figures kept in memory if files are written."""


@dataclass
class Shown(Report):
    """The findings of `show`: a row and a matplotlib figure (the first 8, if files are written) for every image."""

    figures: list[Any] = field(default_factory=list)

    @property
    def figure(self) -> Any:
        return self.figures[0]

    def parts(self) -> Iterator[Any]:
        """The files written or, without files, the predictions."""
        yield from (f"wrote {file}" for file in self.files)
        if not self.files:
            yield from super().parts()

    def _repr_html_(self) -> str:
        pictures = (base64.b64encode(encoded(figure)).decode() for figure in self.figures)
        return "".join(f'<img src="data:image/png;base64,{one}">' for one in pictures) + super()._repr_html_()


@checked_call
def show(
    model: nn.Module | str | ModelSpec,
    methods: MethodConfig | str | Sequence[MethodConfig | str],
    images: Any,
    *,
    blocks: Sequence[Natural] | None = None,
    class_names: Sequence[str] | None = None,
    select: Selector | str | None = None,
    out: str | Path | Pictures | None = None,
    seed: Seed = 0,
    on_progress: Callable[[Mapping[str, Any]], None] | None = None,
) -> Shown:
    """Draw the patches that methods keep, block by block: a figure per image, a row per method.

    Each row gives prediction and cost beside those of the dense model; methods that rank patches also show their scores
    as heat maps. For segmentation and detection, on data with masks or boxes, predictions are drawn beside the kept
    tokens and the truth; for a vision-language model, the patches that the language model receives. The command is
    ``vitrim show``.

    Args:
        model: a supported classifier that is not reduced, its name, or a `vitrim.PlacedModel`. A module is not changed.
        methods: one or several, configs or their text form.
        images: one or several: image files and folders of images; or Pillow images and tensors (C, H, W), preprocessed
            (`vitrim.data.eval_transform`). Or a labelled dataset, such as from `vitrim.open_data`, or a
            `vitrim.DataSpec`, whose ``limit`` is 8 by default for a dataset, and all for a list.
        blocks: the columns, from 0; default: at most eight blocks in which any method changes tokens.
        class_names: default: those of the model, of the data, or of ImageNet if the number fits; else numbers.
        select: selector of a vision-language model's image tokens, applied after every method, or alone without one.
        out: folder for the pictures, one per image, or a `vitrim.Pictures`, which also sets the format (png, svg).
        seed: seed of random weights and of methods that draw at random. The global generators do not change.
        on_progress: called after every image with its row of the report.

    Returns:
        A report with a row per image, which holds the predictions by method, and the figures. Notes name the schedules
        of adaptive methods on the images (`vitrim.freeze`).

    Raises:
        VitrimError: images, methods, a model or blocks that cannot be shown, or an output that cannot be written.
        MissingPackageError: matplotlib is not installed.

    Example:
        >>> shown = show("test_vit", ["topk:keep_rate=0.5", "tome:r=8"], torch.rand(3, 160, 160), blocks=[1, 3])
        >>> [axis.get_title() for axis in shown.figure.axes if axis.get_title()]
        ['image', 'after block 1', 'after block 3']
        >>> sorted(shown.rows[0])
        ['dense', 'file', 'image', 'tome:r=8', 'topk:keep_rate=0.5']
    """
    spec, data, results, configs = PlacedModel.of(model), DataSpec.of(images), Pictures.of(out), parse_methods(methods)
    check_installed("a picture", "matplotlib")
    folder = None if results.folder is None else Path(results.folder)
    if folder is not None:
        check_folder(folder)
    # a source is opened after the model, on which its reading depends
    source = hasattr(data.source, "read_image") or (isinstance(images, DataSpec) and data.by_name)
    given = None if source else given_images(data)
    device = None if spec.device is None else select_device(str(spec.device))

    with seeded_draws(torch.device("cpu"), seed):
        loaded = spec.load("cpu")
    pictures = _Drawn(loaded, device, folder, results.formats, seed, on_progress)
    # A list is short by itself; a dataset may have millions.
    data = replace(data, limit=FEW) if source and data.limit is None else data
    host = as_measured(loaded.model, Prompt(select=select))
    if isinstance(host, Prefill):
        if blocks is not None or class_names is not None:
            raise VitrimError("what a language model gets is drawn behind the tower: leave blocks and class names out")
        return _image_tokens(pictures, host, configs, given or from_source(data))
    if task_name(loaded) not in (None, EMBEDDING):
        return _dense(pictures, configs, data if source else None, blocks, class_names)
    return _classified(pictures, configs, given or from_source(data), blocks, class_names)


@dataclass
class _Drawn:
    """Collects the pictures of a call; without a folder ``out``, it keeps all figures in memory."""

    loaded: Loaded
    device: torch.device | None
    out: Path | None
    formats: Sequence[PictureFormat]
    seed: int
    on_progress: Callable[[Mapping[str, Any]], None] | None
    rows: list[dict[str, Any]] = field(default_factory=list)
    figures: list[Any] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def add(self, name: str, title: str, figure: Any, said: Mapping[str, str]) -> None:
        """Write a figure, if there is a folder, keep the first few, and report the text ``said`` in it by model."""
        files = [] if self.out is None else [self.out / f"{name}.{kind}" for kind in self.formats]
        for file in files:
            save(figure, file)
        self.files += files
        if not files or len(self.figures) < FEW:
            self.figures.append(figure)
        self.rows.append({"image": title, "file": str(files[0]) if files else None, **said})
        if self.on_progress is not None:
            self.on_progress(self.rows[-1])

    def report(self, model: nn.Module, names: Sequence[str], title: str = "Predictions") -> Shown:
        """The report on all pictures, with a column for each of ``names``; ``model`` provides device and dtype."""
        like = next(model.parameters())
        machine = environment(device=str(like.device), dtype=str(like.dtype).removeprefix("torch."), seed=self.seed)
        facts = {"model": self.loaded.name, "weights": self.loaded.weights, "environment": machine}
        columns = ("image", *names)
        cells = [tuple(row[column] for column in columns) for row in self.rows]
        table = Table("show", title, columns, cells, text_columns=len(columns))
        return Shown("show", facts, self.rows, [table], files=self.files, figures=self.figures)


def _classified(
    pictures: _Drawn,
    configs: Sequence[MethodConfig],
    images: Pictured,
    blocks: Sequence[int] | None,
    class_names: Sequence[str] | None,
) -> Shown:
    """Draw the patches that a classifier keeps, one figure per image."""
    dense = pictures.loaded.model
    models = prepared(dense, configs, device=pictures.device, learned=pictures.loaded.learned)
    names = class_names or names_of(pictures.loaded.class_names, pictures.loaded.num_classes, images.class_names)
    facts = host_of(dense).facts(dense)
    grid = (facts.grid_size[0], facts.grid_size[1])
    like, shown = next(dense.parameters()), list[Tensor]()
    for name, title, image in images.each(partial(eval_transform, dense, in_patches=False), tuple(facts.input_size)):
        drawn, predicted = rows_of(models, image, names, seed=pictures.seed)
        figure = draw_show(pixels_of(dense, image), drawn, grid, dense=predicted, blocks=blocks, title=title)
        pictures.add(name, title, figure, {"dense": predicted, **{row.name: row.prediction for row in drawn}})
        shown.append(image[None].to(like.device, like.dtype))
    report = pictures.report(models[0].model, [model.name for model in models])
    report.notes = schedules_in_words(dense, configs, shown, pictures.loaded.learned)
    return report


def _image_tokens(pictures: _Drawn, host: Prefill, configs: Sequence[MethodConfig], images: Pictured) -> Shown:
    """Draw the patches that a language model receives, one figure per image."""
    if host.select is not None:
        configs = configs or [parse_method("none")]
    if not configs:
        raise VitrimError("there is nothing to show without a method or a selector: give one, e.g. divprune:tokens=64")
    if pictures.device is not None:
        host = copy.deepcopy(host).to(pictures.device)
    models = copies(host, configs)
    make, pixels = preparing(host)
    for name, title, image in images.each(make, host.shape[1:]):
        with seeded_draws(next(host.parameters()).device, pictures.seed):
            drawn = image_token_rows(host, models, image)
        figure = draw_image_tokens(pixels(image), drawn, title=title)
        pictures.add(name, title, figure, {row.name: row.text for row in drawn})
    report = pictures.report(host, list(models), "Image tokens that the language model gets")
    if host.select is not None and host.select.needs().text:
        report.notes = [f"{host.select.describe()}: the text of the prompt is a made one"]
    return report


def _dense(
    pictures: _Drawn,
    configs: Sequence[MethodConfig],
    data: DataSpec | None,
    blocks: Sequence[int] | None,
    class_names: Sequence[str] | None,
) -> Shown:
    """Draw predictions of a dense task, kept tokens, and the truth, one figure per image."""
    loaded = pictures.loaded
    if not configs:
        raise VitrimError("there is nothing to show without a method: give one, e.g. tome:r=8")
    if data is None:
        raise VitrimError(
            f"{loaded.name} predicts places, which are drawn beside the truth: give images with their masks or boxes, "
            "--data SOURCE, instead of image files"
        )
    if blocks is not None:
        raise VitrimError(f"{loaded.name} predicts places, and its tokens are drawn at the end: leave the blocks out")
    task, dataset = open_task(loaded, data)
    check_drawable(task)
    transform = task.eval_transform(geometry_of(loaded.model))
    assert transform is not None  # every dense task has a transform
    dataset.transform = lambda image, target: (image, target)  # stored pixels: `scene` prepares both
    models = contestants(loaded.model, configs, task, device=pictures.device, learned=loaded.learned)
    for place in map(int, spread(len(dataset), data.limit)):
        title = f"image {place}"
        notes: dict[str, str] = {}
        image, target = dataset[place]
        figure = draw_comparison(
            models, task, scene(image, target, transform), class_names or dataset.class_names,
            title=f"{loaded.name}, {title}", seed=pictures.seed, notes=notes,
        )  # fmt: skip
        pictures.add(f"image_{place}", title, figure, notes)
    return pictures.report(models[0].model, [model.name for model in models])
