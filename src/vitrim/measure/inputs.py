"""Inputs of measurements: images without labels, and methods without learned parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from vitrim.checked import Natural, Positive, Refined, checked
from vitrim.core.method import MethodConfig
from vitrim.core.registry import input_size_of
from vitrim.core.saving import saved_method
from vitrim.core.selection import Selector
from vitrim.data import ImageDataset, eval_transform, load_data, load_images, spread, to_tensor
from vitrim.data.transforms import AtSizes
from vitrim.engines.copies import reduced_copy
from vitrim.engines.prefill import Prefill
from vitrim.errors import VitrimError, check_known, unknown
from vitrim.loading import Loaded, ModelSpec, as_trained
from vitrim.tasks import tasks

EMBEDDING = "embedding"
"""Task of a model without a classifier."""
ZERO_SHOT = "zero_shot"
"""Task of a model with a text tower, which gets the names of the classes."""
RETRIEVAL = "retrieval"
"""Task of a model that makes vectors of pages and of queries."""


@checked
class DataSpec(Refined):
    """Images and how to read them; most calls can pass a source or a dataset (see `open_data`) instead.

    Attributes:
        source: source of images, see `open_data`, or a dataset of `vitrim.data`; for some functions, batches.
        split, image_column, label_column, options: see `open_data`; only with a source. The option ``by_number`` also
            works with a dataset: true if labels are the indices of the model's classes, whatever their names.
        limit: largest number of images, spread evenly over the data.
    """

    source: Any
    split: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    options: Mapping[str, Any] | None = None
    limit: Positive | None = None

    @property
    def by_name(self) -> bool:
        """True if the source is a name or path."""
        return isinstance(self.source, str | Path)

    @property
    def columns(self) -> dict[str, Any]:
        """Split and columns, as arguments of `open_data`."""
        return {"split": self.split, "image_column": self.image_column, "label_column": self.label_column}

    def name(self, dataset: Any) -> str:
        """The name of the source, or the source of the given ``dataset``."""
        return str(self.source) if self.by_name else str(dataset.source)


@checked
class ScoredData(DataSpec):
    """Images that models are scored on.

    Attributes:
        task: task, for a model with several.
        protocol: protocol of segmentation, such as ``{"mode": "slide"}``; overrides that of the training.
        workers: processes that read images; 0 for this one.
    """

    task: Any = None
    protocol: Mapping[str, Any] | None = None
    batch_size: Positive = 32
    workers: Natural = 0


@checked
class PageData(ScoredData):
    """Pages with queries, for a retriever, and what makes their vectors fewer.

    Attributes:
        select: selectors of image tokens, after every method.
        pool_factors: also pool the dense model's vectors, n of a page to about n / factor, see
            `vitrim.measure.late_interaction.pooled`.
    """

    select: Sequence[Selector | str] = ()
    pool_factors: Sequence[Annotated[int, Field(ge=2)]] = ()


JUDGED = 30
"""Fewest images to judge losses on: ten for each third."""


@checked
class JudgedData(DataSpec):
    """Images that losses are judged on: by ``labels``, classes of the model; ``few``, too few to detect a result."""

    limit: Annotated[int, Field(ge=JUDGED)] | None = None
    labels: bool = True
    few: bool = False


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
    """Open a source of images as a dataset, which all functions of vitrim accept.

    Args:
        source: a folder of classes, parquet files, ``hfds/OWNER/NAME``, or ``LAYOUT:ROOT``, such as ``imagenet:ROOT``;
            see docs/data.md.
        model: its task decides if masks or boxes are read, and the recipe of its training run sets default options.
        task: task, for a model with several or without ``model``.
        split: part of the data, such as ``val``.
        image_column, label_column: columns of a table that has several.
        limit: largest number of images, spread evenly over the data.
        options: options of the layout's reader.

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
    spec = DataSpec(source, split, image_column, label_column, options, limit)
    trained: dict[str, Any] = {}
    if model is not None:
        loaded = ModelSpec(model).load()
        task = task_name(loaded, task)
        _, trained = as_trained(loaded.name)
    # A name that is no task may be what the reader calls its targets.
    reads = None if task is None else tasks()[task].reads if task in tasks() else task
    dataset: Any = load_data(source, task=reads, **spec.columns, **{**trained, **(options or {})})
    return dataset if limit is None else dataset.part(spread(len(dataset), limit).tolist())


def task_name(loaded: Loaded, wanted: str | None = None) -> str | None:
    """The task to evaluate a model in: the ``wanted`` task, else the model's own; None for labels of entire images.

    A model without a classifier is evaluated by its embeddings; other models can be, too.
    """
    own, kind = loaded.tasks, type(loaded.model).__name__
    # Without classes or a task of its own, an embedding is all there is.
    if not own and (wanted == EMBEDDING or (wanted is None and loaded.num_classes == 0)):
        return EMBEDDING
    if wanted == ZERO_SHOT and not own:
        return ZERO_SHOT
    if wanted is None or wanted in own:
        return wanted or (own[0] if own else None)
    if not own:
        check_known("task", wanted, [*tasks(), RETRIEVAL])
        raise VitrimError(f"this {kind} predicts labels of whole images: leave task {wanted} out")
    raise unknown(f"task of {kind}", wanted, own)


def open_images(model: nn.Module, images: Any, *, in_patches: bool = True, others: Sequence[Loaded] = ()) -> Any:
    """Images with the transform of ``model``; None without a source.

    Args:
        images: a `DataSpec`, a source (see `vitrim.data.load_images`), or a dataset, which is not changed and keeps a
            transform that was set.
        in_patches: see `vitrim.data.eval_transform`.
        others: the model at other sizes: an item then has the image at each, see `vitrim.data.transforms.AtSizes`.
    """
    spec = DataSpec.of(images)
    given = next((name for name, value in spec.columns.items() if value is not None), None)
    if given is not None and not spec.by_name:
        raise VitrimError(f"{given} says which images of a source to read, and there is no source: give images too")
    if spec.source is None:
        return None
    if spec.by_name:
        dataset = load_images(str(spec.source), **spec.columns, **(spec.options or {}))
    elif isinstance(spec.source, ImageDataset):
        dataset = copy.copy(spec.source)
    else:
        raise VitrimError(f"expected a source of images or a dataset of vitrim.data, got {type(spec.source).__name__}")
    if dataset.transform is to_tensor:
        dataset.transform = at_all_sizes(eval_transform(model, in_patches=in_patches), others)
    else:
        check_own_transform(dataset, others)
    return dataset


def at_all_sizes(own: Any, others: Sequence[Loaded]) -> Any:
    """The transform ``own`` of a model; with ``others``, `AtSizes` of it and theirs."""
    return AtSizes({None: own, **{one.img_size: eval_transform(one.model) for one in others}}) if others else own


def check_own_transform(dataset: Any, others: Sequence[Loaded]) -> None:
    """Refuse a dataset with a transform, which makes images of one size."""
    if others:
        raise VitrimError(
            f"{dataset.source} has a transform of its own, for one image size: leave it out, so that the images are "
            "prepared as the model's own transform does at every size"
        )


def random_images(model: Any, count: int, seed: int = 0) -> Tensor:
    """Standard normal images (count, *`image_shape`) of the model's input size, float32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *image_shape(model), generator=generator)


def image_shape(model: Any) -> tuple[int, ...]:
    """The shape (C, H, W) of a model's input; (n, C, H, W) for a `Prefill`."""
    return model.shape if isinstance(model, Prefill) else input_size_of(model)


def untrained_methods(configs: Iterable[MethodConfig], learned: Path | None) -> list[str]:
    """The learned methods without learned parameters: theirs are random."""
    known = None if learned is None else saved_method(learned)
    return [config.describe() for config in configs if not config.traits.training_free and config.name != known]


def untrained_counts(host: nn.Module, configs: Iterable[MethodConfig], learned: Path | None = None) -> list[str]:
    """The methods whose token counts in ``host`` depend on parameters that are random here, not in ``learned``.

    Example:
        >>> import timm, vitrim
        >>> host = timm.create_model("test_vit", img_size=32, patch_size=8, depth=3)
        >>> configs = map(vitrim.parse_method, ("ia_red2", "ia_red2:r=[1,1,1]", "a_vit", "atm"))
        >>> untrained_counts(host, configs)
        ['ia_red2']
    """
    found, configs = [], list(configs)
    untrained = untrained_methods(configs, learned)
    for config in configs:
        if config.is_adaptive() and config.describe() in untrained:
            with torch.random.fork_rng(devices=[]):  # this check must not change later random draws
                reduced = reduced_copy(host, config)
            own = len(list(host.parameters()))  # a_vit learns with these, which are not random
            if len(list(reduced.parameters())) > own:
                found.append(config.describe())
    return found


def adaptive_note(selector: Selector | None) -> Iterator[str]:
    """A note on a ``selector`` whose number of tokens depends on the image: images of prompts are random."""
    if selector is not None and selector.is_adaptive():
        yield (
            f"{selector.describe()}: the number of tokens depends on the image; this is that of random images, which "
            "are not like real ones"
        )


def untrained_notes(untrained: Iterable[str]) -> Iterator[str]:
    names = ", ".join(untrained)
    if names:
        yield (
            f"{names}: counts depend on parameters of its own, and those are random here, also where a run learned "
            "them; `vitrim eval` reads what a run learned, and counts with it"
        )
