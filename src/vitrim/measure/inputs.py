"""Inputs of functions that measure: images without labels, and methods whose parameters nobody learned."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.core.registry import ask, input_size_of
from vitrim.core.saving import saved_method
from vitrim.data import ImageDataset, eval_transform, load_data, load_images, spread, to_tensor
from vitrim.errors import VitrimError, check_kinds, check_whole, unknown
from vitrim.loading import as_trained, load
from vitrim.measure.copies import reduced_copy
from vitrim.measure.prefill import Prefill
from vitrim.tasks import tasks

EMBEDDING = "embedding"
"""The task of a model without a classifier."""
ZERO_SHOT = "zero_shot"
"""The task of one that was trained with a text tower, and is told the classes by their names."""


WHERE = ("split", "image_column", "label_column")
"""The fields of a `DataSpec` that every function reads."""
SCORED = (*WHERE, "options", "limit", "task", "protocol", "batch_size", "workers")
"""Those of functions that score models on images."""


@dataclass(frozen=True)
class DataSpec:
    """Images and how they are read, by the function that takes them: for its model, and in its batches.

    A source alone, or a dataset as of `open_data`, says enough in most cases.

    Attributes:
        source: of images, as of `open_data`, or a dataset of `vitrim.data`; where a function says so, batches.
        split, image_column, label_column, options: as of `open_data`; only with a source. With a dataset, too, the
            option ``by_number``: true where labels are the numbers of the model's classes, whatever these are called.
        limit: so many images only, spread evenly over the data.
        task: of a model that is made for several.
        protocol: of segmentation, such as ``{"mode": "slide"}``, over that of the training.
        labels: the images have labels of the model's classes.
        few: they may be fewer than a result can be seen on (`vitrim.optimize`).
        batch_size: images at once where a model is scored.
        workers: processes that read images; 0: this one.

    Raises:
        VitrimError: a value of another kind.
    """

    source: Any
    split: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    options: Mapping[str, Any] | None = None
    limit: int | None = None
    task: Any = None
    protocol: Mapping[str, Any] | None = None
    labels: bool = True
    few: bool = False
    batch_size: int = 32
    workers: int = 0

    def __post_init__(self) -> None:
        check_kinds(split=self.split, image_column=self.image_column, label_column=self.label_column)
        check_kinds(data_options=self.options, protocol=self.protocol)
        check_whole(limit=(self.limit, 1), batch_size=(self.batch_size, 1), workers=(self.workers, 0))

    @classmethod
    def of(cls, data: Any) -> DataSpec:
        """The description of images: itself where it is one."""
        return data if isinstance(data, cls) else cls(data)

    @property
    def by_name(self) -> bool:
        """True of images that are given by their source."""
        return isinstance(self.source, str | Path)

    @property
    def columns(self) -> dict[str, Any]:
        """The part of a source, and its columns."""
        return {"split": self.split, "image_column": self.image_column, "label_column": self.label_column}

    def name(self, dataset: Any) -> str:
        """The source as it was given, or that of the ``dataset`` that was."""
        return str(self.source) if self.by_name else str(dataset.source)


def open_data(
    source: str | Path,
    *,
    model: nn.Module | None = None,
    task: str | None = None,
    split: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    limit: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Open a source of images as a dataset, which every function of vitrim takes in place of the source.

    Args:
        source: a folder of classes, parquet files, ``hfds/OWNER/NAME``, or ``LAYOUT:ROOT``, such as
            ``imagenet:ROOT``; see docs/data.md.
        model: that the images are for: its task says whether masks or boxes are read, and the recipe of its run holds
            where the options say nothing.
        task: of a model that is made for several, or of the data where no model is given.
        split: part of the data, such as ``val``.
        image_column, label_column: of a table, where there are several.
        limit: so many images only, spread evenly over the data.
        options: of the layout's reader.

    Returns:
        A dataset of `vitrim.data`, whose images nothing has prepared yet: that follows from the model.

    Raises:
        VitrimError: the data cannot be read, or the model is not for the task.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for name in ("cat", "dog"):
        ...         (Path(root) / name).mkdir()
        ...         Image.new("RGB", (8, 8)).save(f"{root}/{name}/0.png")
        ...     data = open_data(root, limit=1)
        >>> len(data), data.class_names
        (1, ['cat', 'dog'])
    """
    check_kinds(split=split, image_column=image_column, label_column=label_column, data_options=options)
    check_whole(limit=(limit, 1))
    trained: dict[str, Any] = {}
    if model is not None:
        loaded = load(model)
        task = task_name(loaded.model, task)
        _, trained = as_trained(loaded.name)
    reads = None if task is None else tasks()[task].reads if task in tasks() else task
    where = {"split": split, "image_column": image_column, "label_column": label_column}
    dataset: Any = load_data(source, task=reads, **where, **{**trained, **(options or {})})
    return dataset if limit is None else dataset.part(spread(len(dataset), limit).tolist())


def task_name(model: nn.Module, wanted: str | None = None) -> str | None:
    """The task that ``model`` is evaluated in: the ``wanted`` one, else that it is made for; None: labels of images.

    A model without a classifier is evaluated by its embeddings, and any other one may be.

    Raises:
        VitrimError: the model is not for the wanted task.
    """
    own = ask(model).tasks(model)
    if not own and (wanted == EMBEDDING or (wanted is None and ask(model).num_classes(model) == 0)):
        return EMBEDDING
    if wanted == ZERO_SHOT and not own:
        return ZERO_SHOT
    if wanted is None or wanted in own:
        return wanted or (own[0] if own else None)
    if not own:
        raise VitrimError(f"this {type(model).__name__} predicts labels of whole images: leave task {wanted} out")
    raise unknown(f"task of {type(model).__name__}", wanted, own)


def open_images(model: nn.Module, images: Any) -> Any:
    """Images prepared as ``model`` takes them; None where there are none.

    Args:
        model: says how its images are prepared.
        images: a `DataSpec`, a source, as of `vitrim.data.load_images`, or a dataset, which stays as it is and keeps a
            transform that was set on it.

    Raises:
        VitrimError: the images cannot be read, or are described and not given.

    Example:
        >>> import io, timm
        >>> from PIL import Image
        >>> Image.new("RGB", (40, 30)).save(file := io.BytesIO(), "png")
        >>> open_images(timm.create_model("test_vit"), ImageDataset([file.getvalue()], [0]))[0][0].shape
        torch.Size([3, 160, 160])
    """
    spec = DataSpec.of(images)
    given = next((name for name, value in spec.columns.items() if value is not None), None)
    if given is not None and not spec.by_name:
        raise VitrimError(f"{given} says which images of a source to read, and there is no source: give images too")
    if spec.source is None:
        return None
    if spec.by_name:
        dataset = load_images(str(spec.source), **spec.columns)
        dataset.transform = eval_transform(model)
        return dataset
    if not isinstance(spec.source, ImageDataset):
        raise VitrimError(f"expected a source of images or a dataset of vitrim.data, got {type(spec.source).__name__}")
    dataset = copy.copy(spec.source)
    if dataset.transform is to_tensor:
        dataset.transform = eval_transform(model)
    return dataset


def random_images(model: nn.Module, count: int, seed: int = 0) -> Tensor:
    """Standard normal images (count, C, H, W), float32 on the CPU, of the size and channels that ``model`` takes.

    (count, n, C, H, W) for a `Prefill` of prompts with n images.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *image_shape(model), generator=generator)


def image_shape(model: nn.Module) -> tuple[int, ...]:
    """Channels, height and width of the images that ``model`` takes, of a `Prefill` behind the images of a prompt."""
    return model.shape if isinstance(model, Prefill) else input_size_of(model)


def untrained_counts(host: nn.Module, configs: Iterable[MethodConfig], learned: Path | None = None) -> list[str]:
    """The methods whose counts in ``host`` depend on parameters of their own, which are random here.

    Those that are in the folder ``learned`` (`vitrim.measure.copies.take_learned`) are not.

    Example:
        >>> import timm, vitrim
        >>> host = timm.create_model("test_vit", img_size=32, patch_size=8, depth=3)
        >>> configs = map(vitrim.parse_method, ("ia_red2", "ia_red2:r=[1,1,1]", "a_vit", "atm"))
        >>> untrained_counts(host, configs)
        ['ia_red2']
    """
    found, own = [], len(list(host.parameters()))
    trained = None if learned is None else saved_method(learned)
    for config in configs:
        if config.is_adaptive() and not config.training_free and config.name != trained:
            with torch.random.fork_rng(devices=[]):  # a look changes nothing that is drawn later
                reduced = reduced_copy(host, config)
            if len(list(reduced.parameters())) > own:  # a_vit learns with weights of the host, and those are given
                found.append(config.describe())
    return found


def untrained_notes(untrained: Iterable[str]) -> Iterator[str]:
    """A note on the methods of `untrained_counts`, if there are any."""
    names = ", ".join(untrained)
    if names:
        yield (
            f"{names}: counts depend on parameters of its own, and those are random here, also where a run learned "
            "them; `vitrim eval` reads what a run learned, and counts with it"
        )
