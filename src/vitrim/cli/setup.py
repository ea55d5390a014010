"""The groups of before. Setups: groups of options that several commands share, each with the objects it leads to.

A command names the groups that it takes, and `flat` gives it their options:

    def bench(*, model: Model, images: Images, machine: Machine, record: Record, repeats: Repeats = 10) -> None: ...
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrim.cli import common
from vitrim.cli.options import CLASSIFIERS as CLASSIFIERS
from vitrim.cli.options import MAX_BATCH as MAX_BATCH
from vitrim.cli.options import MAX_REPEATS as MAX_REPEATS
from vitrim.cli.options import MAX_SECONDS as MAX_SECONDS
from vitrim.cli.options import MAX_SEED as MAX_SEED
from vitrim.cli.options import MAX_THREADS as MAX_THREADS
from vitrim.cli.options import MAX_WORKERS as MAX_WORKERS
from vitrim.cli.options import MODEL_NAMES as MODEL_NAMES
from vitrim.cli.options import BatchSize as BatchSize
from vitrim.cli.options import Checkpoint as Checkpoint
from vitrim.cli.options import DataOptions as DataOptions
from vitrim.cli.options import DataSource as DataSource
from vitrim.cli.options import Device as Device
from vitrim.cli.options import ImageColumn as ImageColumn
from vitrim.cli.options import ImagesSource as ImagesSource
from vitrim.cli.options import LabelColumn as LabelColumn
from vitrim.cli.options import Limit as Limit
from vitrim.cli.options import Methods as Methods
from vitrim.cli.options import MethodsBesideDense as MethodsBesideDense
from vitrim.cli.options import ModelName as ModelName
from vitrim.cli.options import ModelOptions as ModelOptions
from vitrim.cli.options import Pretrained as Pretrained
from vitrim.cli.options import PromptImages as PromptImages
from vitrim.cli.options import Seed as Seed
from vitrim.cli.options import Setup as Setup
from vitrim.cli.options import Split as Split
from vitrim.cli.options import TaskName as TaskName
from vitrim.cli.options import TextTokens as TextTokens
from vitrim.cli.options import Threads as Threads
from vitrim.cli.options import Workers as Workers
from vitrim.cli.options import flat as flat
from vitrim.cli.output import Json as Json
from vitrim.cli.output import Output as Output
from vitrim.errors import VitrimError

Record = Output

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vitrim.data import ImageDataset

# ---- the groups ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Weights(Setup):
    """The source of a model's weights, and the options it is built with."""

    pretrained: Pretrained = False
    checkpoint: Checkpoint = None
    model_option: ModelOptions = None

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the library's model."""
        return common.parse_options(self.model_option)

    def create(self, name: str, device: str | torch.device = "cpu") -> nn.Module:
        """Create the model ``name`` in eval mode with these weights; see `vitrim.loading.create_model`."""
        from vitrim.loading import create_model

        return create_model(
            name, pretrained=self.pretrained, checkpoint=self.checkpoint, options=self.options, device=device
        )

    def of(self, name: str) -> str:
        """Describe the weights of the model ``name``, for the record."""
        from vitrim.loading import weights_of

        return weights_of(name, pretrained=self.pretrained, checkpoint=self.checkpoint)


@dataclass(frozen=True, kw_only=True)
class Model(Weights):
    """One model and its weights."""

    name: ModelName

    @property
    def weights(self) -> str:
        """Describe the model's weights, for the record."""
        return self.of(self.name)

    @property
    def learned(self) -> Path | None:
        """The folder of the run that produced the model, if a method learned parameters there."""
        from vitrim.loading import learned_reduction

        return learned_reduction(self.name, self.checkpoint)

    def load(self, device: str | torch.device = "cpu") -> nn.Module:
        """Create the model; see `create`."""
        return self.create(self.name, device)


@dataclass(frozen=True, kw_only=True)
class Compute(Setup):
    """Compute settings that hold on any device."""

    threads: Threads = None
    seed: Seed = 0

    def start(self) -> None:
        """Set the thread count and the seed."""
        import torch

        from vitrim.measure.machine import set_threads

        set_threads(self.threads)
        torch.manual_seed(self.seed)


@dataclass(frozen=True, kw_only=True)
class Machine(Compute):
    """Compute settings and the device."""

    device: Device = "cpu"

    def select(self) -> torch.device:
        """Set the thread count and the seed, and return the device if this machine has it."""
        from vitrim.measure.machine import select_device

        selected = select_device(self.device)
        self.start()
        return selected

    def environment(self, dtype: str) -> dict[str, Any]:
        """The environment of the record."""
        from vitrim.measure.machine import environment

        return environment(device=self.device, dtype=dtype, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class Reading(Setup):
    """The part of a dataset to read, and the location of its images and labels."""

    split: Split = None
    image_column: ImageColumn = None
    label_column: LabelColumn = None

    def load_any(self, source: str, task: str | None, options: dict[str, Any]) -> Any:
        """Open the dataset ``source`` for a task; see `vitrim.data.load_data`."""
        from vitrim.data import load_data

        columns = {"image_column": self.image_column, "label_column": self.label_column}
        return load_data(source, task=task, split=self.split, **columns, **options)

    def load(self, source: str) -> ImageDataset:
        """Open the dataset ``source``; see `vitrim.data.load_images`."""
        from vitrim.data import load_images

        return load_images(source, split=self.split, image_column=self.image_column, label_column=self.label_column)


@dataclass(frozen=True, kw_only=True)
class Data(Reading):
    """Images with labels."""

    source: DataSource
    limit: Limit = None
    data_option: DataOptions = None
    task: TaskName = None

    def open(self, task: str | None = None, options: dict[str, Any] | None = None) -> Any:
        """Open the images with what ``task`` reads, by default with one label each or with several.

        Args:
            task: of `vitrim.data.load_data`.
            options: of the reader, where the command line gives none.
        """
        return self.load_any(
            self.source, task, {**(options or {}), **common.parse_options(self.data_option, "data option")}
        )


@dataclass(frozen=True, kw_only=True)
class Images(Reading):
    """Images whose labels nobody reads; random ones if no source is given.

    Raises:
        VitrimError: options that say which images to read, and no source.
    """

    source: ImagesSource = None

    def __post_init__(self) -> None:
        given = (field.name for field in dataclasses.fields(Reading) if getattr(self, field.name) is not None)
        name = next(given, None)
        if self.source is None and name is not None:
            option = name.replace("_", "-")
            raise VitrimError(f"--{option} says which images to read, and none are: give --images too")

    def open(self) -> ImageDataset | None:
        """Open the images if there is a source; see `load`."""
        return None if self.source is None else self.load(self.source)


@dataclass(frozen=True, kw_only=True)
class Prompt(Setup):
    """The prompt that a vision-language model reads; other models read none."""

    text_tokens: TextTokens = None
    prompt_images: PromptImages = None

    def around(self, model: nn.Module, images: str | None) -> nn.Module:
        """The prefill of ``model`` if it reads prompts, else ``model``; see `vitrim.measure.prefill.as_measured`.

        Raises:
            VitrimError: images of a source are given, too: prompts have random ones.
        """
        from vitrim.measure.prefill import Prefill, as_measured

        measured = as_measured(model, text=self.text_tokens, images=self.prompt_images)
        if images is not None and isinstance(measured, Prefill):
            raise VitrimError("--images is for models of images alone: prompts are made of random images and text")
        return measured
