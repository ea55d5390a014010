"""Setups: groups of options that several commands share, each with the objects it leads to.

A command names the groups that it takes, and `flat` gives it their options:

    def bench(*, model: Model, images: Images, machine: Machine, record: Record, repeats: Repeats = 10) -> None: ...
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from vitrim.cli import common
from vitrim.errors import VitrimError

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from torch import nn

    from vitrim.data import ImageDataset

CLASSIFIERS = (
    "of timm, e.g. deit_small_patch16_224, torchvision:vit_b_16, hf: and a local folder or a Hub name, "
    "vitrim:cifar10_vit, which comes with vitrim, run: and the folder of a finished run"
)
MODEL_NAMES = f"{CLASSIFIERS}, vitrim:camvid_vit, which comes with vitrim, too, segmenter: or vitdet: and any of these"
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help=f"model {MODEL_NAMES}")]
Pretrained = Annotated[
    bool, typer.Option("--pretrained", help="load the library's pretrained weights (downloads them)")
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        help="weights: a local file (safetensors or .pth), or the folder of a finished run of `vitrim train`",
    ),
]
ModelOptions = Annotated[
    list[str] | None,
    typer.Option("--model-option", help="key=value for the library's model, e.g. img_size=384 (timm); may repeat"),
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:0, mps, xpu")]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, max=common.MAX_THREADS, help="CPU threads; default: as torch chooses")
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, max=common.MAX_SEED, help="seed of random weights, inputs and random methods")
]
DataSource = Annotated[
    str,
    typer.Option(
        "--data",
        help="parquet file or folder, folder with one folder per class, hfds/owner/name, or a layout by its name, such "
        "as imagenet:ROOT or coco:ROOT (docs/data.md has all)",
    ),
]
DataOptions = Annotated[
    list[str] | None,
    typer.Option("--data-option", help="key=value for the data's reader, e.g. num_classes=11; may repeat"),
]
TaskName = Annotated[
    str | None,
    typer.Option(
        "--task", help="of a model for several, as EoMT: segmentation, detection, instances; default: its own"
    ),
]
ImagesSource = Annotated[
    str | None, typer.Option("--images", help="images, as --data of `vitrim eval`; default: random images")
]
TextTokens = Annotated[
    int | None,
    typer.Option("--text-tokens", min=1, max=2**20, help="of a vision-language model: text of a prompt; default: 32"),
]
PromptImages = Annotated[
    int | None,
    typer.Option(
        "--prompt-images", min=1, max=2**12, help="of a vision-language model: images of a prompt; default: 1"
    ),
]
Split = Annotated[str | None, typer.Option("--split", help="which part of the images, e.g. test, if there are several")]
ImageColumn = Annotated[str | None, typer.Option("--image-column", help="column of images, if not the only one")]
LabelColumn = Annotated[str | None, typer.Option("--label-column", help="column of labels, if not called label")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="so many images only, spread evenly over the data")]
Json = Annotated[str | None, typer.Option("--json", help="write the record to this file, or - for standard output")]


# ---- the groups ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A group of options: the fields of a dataclass, annotated as parameters of a command are."""


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


@dataclass(frozen=True, kw_only=True)
class Record(Setup):
    """The results of a command, as JSON.

    Raises:
        VitrimError: it cannot be written there; found before any work.
    """

    json: Json = None

    def __post_init__(self) -> None:
        common.check_json(self.json)

    @property
    def on_stdout(self) -> bool:
        """Whether standard output carries the record and nothing else."""
        return self.json == "-"

    def console(self) -> Console:
        """The console for tables."""
        return common.console(self.json)

    def write(self, command: str, **entries: Any) -> None:
        """Write the results of ``command``, if a record is wanted."""
        common.write_json(self.json, {"command": command, **entries})


# ---- from groups to options ------------------------------------------------------------------------------------------


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with the fields of its setups spread out in their place, as typer reads it.

    Setups are made, and so checked, before ``command`` runs.

    Example:
        >>> def show(*, record: Record, wide: bool = False) -> None:
        ...     print(record, wide)
        >>> list(inspect.signature(flat(show)).parameters)
        ['json', 'wide']
        >>> flat(show)(json=None, wide=True)
        Record(json=None) True
    """
    own = inspect.signature(command, eval_str=True).parameters
    setups = {name: one.annotation for name, one in own.items() if _is_setup(one.annotation)}
    parameters = [given for name, one in own.items() for given in (_options(setups[name]) if name in setups else [one])]
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
            for name, kind in setups.items()
        }
        command(**made, **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _is_setup(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Setup)


def _options(setup: type[Setup]) -> list[inspect.Parameter]:
    """The fields of a group as parameters, its own before the inherited ones."""
    annotations = get_type_hints(setup, include_extras=True)
    bases = [base for base in setup.__bases__ if dataclasses.is_dataclass(base)]
    shared = {field.name for base in bases for field in dataclasses.fields(base)}
    fields = sorted(dataclasses.fields(setup), key=lambda field: field.name in shared)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=annotations[field.name],
        )
        for field in fields
    ]
