"""``vitrim.show``: patches that methods keep, block by block, their scores, and the models' predictions."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrim.core.block import ReducedBlock, Reducer
from vitrim.core.method import MethodConfig
from vitrim.core.registry import ask, host_of, parse_method, parse_methods
from vitrim.core.selection import Selector
from vitrim.data import ImageDataset, eval_transform, spread
from vitrim.data.folders import loose_images
from vitrim.data.transforms import geometry_of
from vitrim.errors import MissingPackageError, VitrimError, check_kinds, check_known, check_read, check_whole
from vitrim.files import check_folder
from vitrim.hosts.shared.classes import class_names as names_of
from vitrim.hosts.shared.classes import described
from vitrim.loading import MADE, Loaded, ModelSpec
from vitrim.measure.contestants import Contestant, ModelOutput, contestants
from vitrim.measure.earlier import earlier
from vitrim.measure.inputs import EMBEDDING, WHERE, DataSpec, open_data, task_name
from vitrim.measure.machine import drawing, environment, select_device
from vitrim.measure.prefill import Prefill, Prompt, as_measured
from vitrim.measure.task_data import open_task
from vitrim.plots.charts import short
from vitrim.plots.dense import check_drawable, draw_comparison, scene
from vitrim.plots.handed import copies, draw_handed, handed_rows, preparing
from vitrim.plots.patches import Image, draw_kept, groups_of, in_colour, overlay, sources_of
from vitrim.plots.style import DENSE_COLOUR, FORMATS, OKABE_ITO, SMALL, TEXT, TITLE, encoded, save, sheet
from vitrim.report import Report, Results, Table
from vitrim.tasks import make_task

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

    from vitrim.data.decoding import Transform

FEW = 8
"""Default number of images of a dataset; also the most figures kept in memory if files are written."""
MOST_BLOCKS = 8
"""Default number of columns, at most."""
LARGE = 224
"""Narrower images are enlarged, so that outlines are thin."""
LABEL, PANEL, TITLES = 1.9, 1.2, 0.3
"""Inches of the label of a row, of a panel, and of the title of a panel."""
DIFFERENT = OKABE_ITO[5]


class MethodRow(NamedTuple):
    """One method and one image.

    Attributes:
        prediction: class and probability, as text.
        cost: tokens left and share of the MACs, as text.
        sources: (L, P), the token that holds each patch after each block, -1 for none.
        scores: by block, the method's ranking of the patches (P,), nan for removed patches; empty for a method that
            does not rank them.
    """

    name: str
    prediction: str
    cost: str
    same: bool
    sources: NDArray[np.int64]
    scores: Mapping[int, NDArray[np.float64]]

    def changed(self) -> list[int]:
        """The blocks that change the tokens."""
        start = np.arange(self.sources.shape[1])
        every = [start, *(_partition(groups_of(self.sources[: depth + 1])) for depth in range(len(self.sources)))]
        return [depth for depth in range(len(self.sources)) if not np.array_equal(every[depth], every[depth + 1])]


def _partition(groups: NDArray[Any]) -> NDArray[Any]:
    """Groups renamed to the index of their first patch, so that only membership counts; -1 stays."""
    found = np.full(len(groups), -1)
    first: dict[int, int] = {}
    for place, group in enumerate(groups.tolist()):
        if group >= 0:
            found[place] = first.setdefault(group, place)
    return found


@dataclass
class Shown(Report):
    """The findings of `show`: a row of predictions and a figure for every image.

    Attributes:
        figures: matplotlib figures in the order of the images; only the first 8 if files are written.
    """

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


@earlier(model=ModelSpec, images=DataSpec, out=Results)
def show(
    model: nn.Module | str | ModelSpec,
    methods: MethodConfig | str | Sequence[MethodConfig | str],
    images: Any,
    *,
    blocks: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    select: Selector | str | None = None,
    out: str | Path | Results | None = None,
    seed: int = 0,
    on_progress: Callable[[Mapping[str, Any]], None] | None = None,
) -> Shown:
    """Draw the patches that methods keep, block by block: a figure per image, a row per method.

    Each row gives prediction and cost beside those of the dense model; methods that rank patches also show their scores
    as heat maps. For segmentation and detection, on data with masks or boxes, predictions are drawn beside the kept
    tokens and the truth. For a vision-language model, the figure shows the patches that the language model receives.
    The command is ``vitrim show``.

    Args:
        model: a supported classifier that is not reduced, its name, or a `vitrim.ModelSpec`. A module is not changed.
        methods: one or several, configs or their text form.
        images: one or several: image files and folders of images; or Pillow images and tensors (C, H, W), preprocessed
            (`vitrim.data.eval_transform`). Or a labelled dataset, such as from `vitrim.open_data`, or a
            `vitrim.DataSpec`, whose ``limit`` is 8 by default for a dataset, and all for a list.
        blocks: the columns, from 0; default: at most eight blocks in which any method changes tokens.
        class_names: default: those of the model, of the data, or of ImageNet if the number fits; else numbers.
        select: selector of a vision-language model's image tokens, applied after every method, or alone without one.
        out: folder for the pictures, one per image, or a `vitrim.Results`, which also sets the format (png, svg);
            default: no files.
        seed: seed of random weights and of methods that draw at random. The global generators do not change.
        on_progress: called after every image with its row of the report.

    Returns:
        A report with a row per image, which holds the predictions by method, and the figures.

    Raises:
        VitrimError: no images, or unreadable images; no method, a duplicate, or a method that does not fit; a model
            that cannot be created or has no supported task; a block that does not exist; an output that cannot be
            written.
        MissingPackageError: matplotlib is not installed.

    Example:
        >>> shown = show("test_vit", ["topk:keep_rate=0.5", "tome:r=8"], torch.rand(3, 160, 160), blocks=[1, 3])
        >>> [axis.get_title() for axis in shown.figure.axes if axis.get_title()]
        ['image', 'after block 1', 'after block 3']
        >>> sorted(shown.rows[0])
        ['dense', 'file', 'image', 'tome:r=8', 'topk:keep_rate=0.5']
    """
    spec, data, results, configs = ModelSpec.of(model), DataSpec.of(images), Results.of(out), parse_methods(methods)
    check_read(spec, (*MADE, "device"))
    check_read(data, (*WHERE, "options", "limit"))
    check_read(results, ("formats",))
    format = results.formats if isinstance(results.formats, str) else ",".join(results.formats)
    check_known("format", format, FORMATS)
    check_kinds(blocks=blocks, class_names=class_names, on_progress=on_progress)
    for block in blocks or ():
        check_whole(block=(block, 0))
    if find_spec("matplotlib") is None:
        raise MissingPackageError("pictures need the package 'matplotlib': pip install 'vitrim[analysis]'")
    if results.path is not None:
        check_folder(results.path)
    source = hasattr(data.source, "read_image") or (isinstance(images, DataSpec) and data.by_name)
    if not source:  # a source is opened later, in a way that depends on the model
        opened = _loose(data)
    selected = None if spec.device is None else select_device(str(spec.device))
    with drawing(torch.device("cpu"), seed):
        loaded = spec.load("cpu")
    dense, pictures = loaded.model, _Pictures(loaded, results.path, format, seed, on_progress)
    host = as_measured(dense, Prompt(select=select))
    limit = FEW if source and data.limit is None else data.limit
    if isinstance(host, Prefill):
        if blocks is not None or class_names is not None:
            raise VitrimError("what a language model gets is drawn behind the tower: leave blocks and class names out")
        shown = _opened(data) if source else opened
        return _handed(pictures, host, configs, shown, limit, loose=not source, device=selected)
    if task_name(dense) not in (None, EMBEDDING):
        return _dense(pictures, configs, data if source else None, blocks, class_names, selected)
    dataset = _opened(data) if source else opened
    models = prepared(dense, configs, device=selected, learned=loaded.learned)
    names = class_names or names_of(dense, getattr(dataset, "class_names", None))
    facts = host_of(dense).facts(dense)
    shape, (rows, columns) = tuple(facts.input_size), facts.grid_size
    for name, title, image in _images(dataset, limit, partial(eval_transform, dense), shape, loose=not source):
        drawn, predicted = rows_of(models, image, names, seed=seed)
        pixels = pixels_of(dense, image)
        figure = draw_show(pixels, drawn, (rows, columns), dense=predicted, blocks=blocks, title=title)
        pictures.add(name, title, figure, {"dense": predicted, **{row.name: row.prediction for row in drawn}})
    return pictures.report(models[0].forward, ["dense", *(config.describe() for config in configs)])


@dataclass
class _Pictures:
    """Collects the pictures of a call; without a folder ``out``, it keeps all figures in memory."""

    loaded: Loaded
    out: Path | None
    format: str
    seed: int
    on_progress: Callable[[Mapping[str, Any]], None] | None
    rows: list[dict[str, Any]] = field(default_factory=list)
    figures: list[Any] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def add(self, name: str, title: str, figure: Any, said: Mapping[str, str]) -> None:
        """Write a figure, if there is a folder, keep the first few, and report the text ``said`` in it by model."""
        file = None if self.out is None else self.out / f"{name}.{self.format}"
        if file is not None:
            save(figure, file)
            self.files.append(file)
        if file is None or len(self.figures) < FEW:
            self.figures.append(figure)
        self.rows.append({"image": title, "file": None if file is None else str(file), **said})
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


def _handed(
    pictures: _Pictures,
    host: Prefill,
    configs: Sequence[MethodConfig],
    dataset: Any,
    limit: int | None,
    *,
    loose: bool,
    device: torch.device | None,
) -> Shown:
    """Draw the patches that a language model receives, one figure per image."""
    if host.select is not None:
        configs = configs or [parse_method("none")]
    if not configs:
        raise VitrimError("there is nothing to show without a method or a selector: give one, e.g. divprune:tokens=64")
    if device is not None:
        host = copy.deepcopy(host).to(device)
    models = copies(host, configs)
    make, pixels = preparing(host)
    for name, title, image in _images(dataset, limit, make, host.shape[1:], loose=loose):
        with drawing(next(host.parameters()).device, pictures.seed):
            drawn = handed_rows(host, models, image)
        figure = draw_handed(pixels(image), drawn, title=title)
        pictures.add(name, title, figure, {row.name: row.text for row in drawn})
    report = pictures.report(host, list(models), "Image tokens that the language model gets")
    if host.select is not None and host.select.needs().text:
        report.notes = [f"{host.select.describe()}: the text of the prompt is a made one"]
    return report


def _dense(
    pictures: _Pictures,
    configs: Sequence[MethodConfig],
    data: DataSpec | None,
    blocks: Sequence[int] | None,
    class_names: Sequence[str] | None,
    device: torch.device | None,
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
    models = contestants(loaded.model, configs, task, device=device, learned=loaded.learned)
    for place in map(int, spread(len(dataset), FEW if data.limit is None else data.limit)):
        title = f"image {place}"
        notes: dict[str, str] = {}
        image, target = dataset[place]
        figure = draw_comparison(
            models, task, scene(image, target, transform), class_names or dataset.class_names,
            title=f"{loaded.name}, {title}", seed=pictures.seed, notes=notes,
        )  # fmt: skip
        pictures.add(f"image_{place}", title, figure, notes)
    return pictures.report(models[0].forward, ["dense", *(config.describe() for config in configs)])


def _opened(data: DataSpec) -> Any:
    """The dataset of a source, or a copy of a dataset, whose transform may be replaced."""
    if not data.by_name:
        if any(data.columns.values()) or data.options:
            raise VitrimError("split, columns and options say how to read a source, and a dataset is given")
        return copy.copy(data.source)
    return open_data(data.source, **data.columns, options=data.options)


def _loose(data: DataSpec) -> Any:
    """A dataset of image files with dummy labels; or the images or tensors themselves."""
    images: Any = data.source
    if images is not None and not isinstance(images, list | tuple):
        images = list(images) if isinstance(images, Tensor) and images.ndim == 4 else [images]
    if not images:
        raise VitrimError("give the images to show: files or folders, or a dataset as data; not both")
    name = next((name for name, value in {**data.columns, "data_options": data.options}.items() if value), None)
    if name is not None:
        raise VitrimError(f"{name} says how to read a dataset: give its source as data")
    if not any(isinstance(one, str | Path) for one in images):
        return images
    if not all(isinstance(one, str | Path) for one in images):
        raise VitrimError("files and images that are read already do not mix: give either")
    found = loose_images(Path(one) for one in images)
    return ImageDataset(found, [0] * len(found), source="the images")


def _images(
    dataset: Any, limit: int | None, make: Callable[[], Transform], shape: Sequence[int], *, loose: bool
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the file name, the title and the pixels of every image to draw, from a dataset or a list.

    ``make`` makes the transform; ``shape`` is that of the input, (C, H, W); the labels of ``loose`` images are dummies.
    """
    from vitrim.measure.decisions import file_name  # imports torchmetrics

    places = [int(place) for place in spread(len(dataset), limit)]
    if isinstance(dataset, list | tuple):
        for place in places:
            yield f"image_{place}", f"image {place}", _pixels(dataset[place], make, shape)
        return
    dataset.transform = make()
    taken: set[str] = set()
    for place in places:
        image = dataset.read_image(place)
        if not loose:
            labels, names = getattr(dataset, "labels", None), described(dataset.class_names or []) or None
            label = "" if labels is None else f": {labels[place] if names is None else names[labels[place]]}"
            yield f"image_{place}", f"image {place}{label}", image
            continue
        path = dataset.images[place]
        name = stem = file_name(path.stem)
        number = 1
        while name in taken:
            number += 1
            name = f"{stem}_{number}"
        taken.add(name)
        yield name, path.name, image


def _pixels(image: Tensor | PillowImage, make: Callable[[], Transform], taken: Sequence[int]) -> Tensor:
    """The model's input (C, H, W) for a Pillow image or a tensor; other types and shapes are refused."""
    if isinstance(image, Tensor):
        if tuple(image.shape) != tuple(taken):
            wrong = tuple(image.shape)
            raise VitrimError(
                f"an image is a tensor (C, H, W) as the model takes it, {tuple(taken)}, not one of {wrong}"
            )
        return image
    if not hasattr(image, "convert"):
        raise VitrimError(f"an image is a file, an image of Pillow or a tensor (C, H, W), not {type(image).__name__}")
    return make()(image)


def prepared(
    model: nn.Module,
    methods: Sequence[MethodConfig | str],
    *,
    device: torch.device | None = None,
    learned: Any = None,
) -> list[Contestant]:
    """The dense model and its reductions, see `vitrim.measure.contestants.contestants`.

    Raises:
        VitrimError: no method, a method that does not fit, or a model that is not a classifier.
    """
    if not methods:
        raise VitrimError("there is nothing to show without a method: give one, e.g. tome:r=8")
    check_shown(model)
    task = make_task("classification", host_of(model).facts(model).num_classes)
    return contestants(model, methods, task, device=device, learned=learned)


def check_shown(model: nn.Module) -> None:
    """Refuse models for dense tasks, and models without classes."""
    facts = host_of(model).facts(model)
    if facts.dense or not facts.num_classes:
        kind = "predicts places, not one class" if facts.dense else "has no classes"
        raise VitrimError(
            f"this model {kind}: only classifiers are shown; see `vitrim show MODEL --data SOURCE` for others"
        )


def rows_of(
    models: Sequence[Contestant], image: Tensor, class_names: Sequence[str] | None = None, *, seed: int = 0
) -> tuple[list[MethodRow], str]:
    """Run the models on one image: a row for every method, and the dense model's prediction as text.

    Args:
        models: from `prepared`, the dense model first.
        image: (C, H, W), preprocessed.
        class_names: default: numbers.

    Raises:
        VitrimError: outputs that are not finite.
    """
    like = next(models[0].forward.parameters())
    images = image[None].to(like.device, like.dtype)
    rows, dense = [], None
    for model in models:
        with torch.no_grad(), drawing(like.device, seed):
            counted = model.run(images, count=True)
        with torch.no_grad(), drawing(like.device, seed), _scores(model) as scores:
            output = model.run(images)
        dense = dense or counted
        if model.reduction is not None:
            text, chosen = _prediction(output, class_names)
            macs, full = (sum((one.macs or {}).values()) for one in (counted, dense))
            cost = f"{output.tokens_at_end} of {dense.tokens_at_end} tokens\n{100 * macs / full:.0f} % of the MACs"
            same = chosen == _prediction(dense, None)[1]
            sources = sources_of(model.reduction.states[1:])
            rows.append(MethodRow(model.name, text, cost, same, sources, scores))
    assert dense is not None
    return rows, _prediction(dense, class_names)[0]


def _prediction(output: ModelOutput, class_names: Sequence[str] | None) -> tuple[str, int]:
    """The predicted class as text, and its number."""
    shares = output.prediction[0].double().softmax(-1)
    chosen = int(shares.argmax())
    name = f"class {chosen}" if class_names is None or chosen >= len(class_names) else class_names[chosen]
    return f"{name} ({100 * shares[chosen].item():.0f} %)", chosen


@contextmanager
def _scores(model: Contestant) -> Iterator[dict[int, NDArray[np.float64]]]:
    """Record the reducers' rankings of patches during forwards within the block."""
    found: dict[int, NDArray[np.float64]] = {}
    with ExitStack() as hooks:
        reduced = model.forward.model
        for block in host_of(reduced).blocks(reduced):
            if isinstance(block, ReducedBlock):
                hooks.enter_context(block.reducer.register_forward_pre_hook(_recorder(found, block.depth)))
        yield found


def _recorder(found: dict[int, NDArray[np.float64]], depth: int) -> Any:
    def record(reducer: Reducer[Any], args: tuple[Any, ...]) -> None:
        x, attention, state = args
        if reducer.planned and reducer.num_removed(state) == 0:  # the reducer does not decide either
            return
        cuda = [x.device] if x.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(cuda):  # later random draws do not change
            scores = reducer.ranking(x, attention, state)
        if scores is not None:
            # by anchor patch; nan for patches without a token
            found[depth] = np.full(state.initial_patches, np.nan)
            places = (state.position[0, state.num_prefix :] - state.num_prefix).cpu().numpy()
            found[depth][places] = scores[0].double().cpu().numpy()

    return record


def pixels_of(model: nn.Module, image: Tensor) -> Image:
    """The picture (H, W, 3) in [0, 1] of a preprocessed image (C, H, W).

    Undoes the model's normalisation or, if that is unknown, scales the image to its own range.

    Example:
        >>> import timm
        >>> pixels_of(timm.create_model("test_vit"), torch.zeros(3, 8, 8))[0, 0].tolist()
        [0.5, 0.5, 0.5]
    """
    how = ask(model).preprocessing(model)
    pixels = image.detach().float().cpu()
    if how.mean and how.std and len(how.mean) == len(how.std):
        mean, std = (torch.tensor(values, dtype=torch.float32)[:, None, None] for values in (how.mean, how.std))
        if len(pixels) == 1:
            mean, std = mean.mean(0, keepdim=True), std.mean(0, keepdim=True)
        pixels = pixels * std + mean
    else:
        pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp_min(1e-12)
    return in_colour(pixels.clamp(0, 1).permute(1, 2, 0).numpy())


# ---- the figure ------------------------------------------------------------------------------------------------------


def draw_show(
    image: NDArray[Any],
    rows: Sequence[MethodRow],
    grid: tuple[int, int],
    *,
    dense: str,
    blocks: Sequence[int] | None = None,
    title: str = "",
) -> Any:
    """A figure: the image on top, then a row per method with the patches left after each block, and a row of scores.

    Args:
        image: (H, W, 3) or (H, W), values in [0, 1].
        rows: from `rows_of`.
        grid: rows and columns of the patches.
        dense: the dense model's prediction, as text.
        blocks: the columns, from 0; default: at most eight blocks in which any method changes tokens.

    Raises:
        VitrimError: a block that does not exist, or a grid that the patches do not fill.
    """
    chosen = _columns(rows, blocks)
    kinds = [(row, kind) for row in rows for kind in ("kept", "score") if kind == "kept" or row.scores]
    ratio = image.shape[0] / image.shape[1]
    count = 1 + len(kinds)
    scale = max(1, -(-LARGE // int(image.shape[1])))
    height = count * (PANEL * ratio + 0.1) + 2 * TITLES + (0.3 if title else 0)
    figure = sheet(LABEL + PANEL * max(len(chosen), 3), height)
    widths = [LABEL / PANEL, *[1.0] * max(len(chosen), 3)]
    axes = figure.subplots(count, len(widths), squeeze=False, width_ratios=widths)
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.03, wspace=0.01, hspace=0.01)
    for axis in axes.flat:
        axis.set_axis_off()
    _label(axes[0, 0], "dense", dense, "every token", DENSE_COLOUR)
    _picture(axes[0, 1], in_colour(image), "image")
    # legend, beside the image
    lines = ["grey, hatched: pruned", "orange outline: merged", "red text: another prediction", "blocks count from 0"]
    lines += ["scores: dark low, yellow high"] if any(row.scores for row in rows) else []
    axes[0, 2].set_xlim(0, 1)
    axes[0, 2].set_ylim(0, 1)
    axes[0, 2].text(0.08, 0.95, "\n".join(lines), fontsize=SMALL, va="top", linespacing=1.6).set_in_layout(False)
    for place, (row, kind) in enumerate(kinds, 1):
        if kind == "kept":
            _label(axes[place, 0], short(row.name), row.prediction, row.cost, DENSE_COLOUR if row.same else DIFFERENT)
        else:
            _label(axes[place, 0], "", "", "its scores", DENSE_COLOUR)
        for axis, block in zip(axes[place, 1:], chosen, strict=False):
            if kind == "kept":
                drawn = draw_kept(image, row.sources[: block + 1], grid, scale=scale)
            elif block in row.scores:
                drawn = overlay(image, row.scores[block], grid, scale=scale)
            else:  # no scores in this block
                continue
            _picture(axis, drawn, f"after block {block}" if place == 1 else "")
    if title:
        figure.suptitle(title, fontsize=TITLE + 1)
    return figure


def _columns(rows: Sequence[MethodRow], blocks: Sequence[int] | None) -> list[int]:
    layers = min(len(row.sources) for row in rows)
    if blocks is not None:
        wrong = next((block for block in blocks if not 0 <= block < layers), None)
        if wrong is not None or not blocks:
            raise VitrimError(f"block {wrong} is none of the model's, 0 to {layers - 1}")
        return list(blocks)
    changed = sorted({block for row in rows for block in row.changed()}) or [layers - 1]
    places = np.linspace(0, len(changed) - 1, min(MOST_BLOCKS, len(changed))).round().astype(int)
    return [changed[place] for place in places]


def _picture(axis: Any, picture: NDArray[Any], title: str) -> None:
    axis.imshow(picture, interpolation="antialiased", vmin=0, vmax=1)
    if title:
        axis.set_title(title, fontsize=TEXT)


def _label(axis: Any, name: str, prediction: str, note: str, colour: str) -> None:
    """Write name, prediction and cost beside a row, from top to bottom."""
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)
    axis.text(0, 0.92, name, fontsize=TEXT, fontweight="bold", va="top")
    weight = "normal" if colour == DENSE_COLOUR else "bold"
    axis.text(0, 0.74, prediction, fontsize=TEXT, va="top", color=colour, fontweight=weight)
    axis.text(0, 0.56, note, fontsize=SMALL, va="top", linespacing=1.4)
    for text in axis.texts:
        text.set_in_layout(False)
