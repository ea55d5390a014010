"""Options of several commands, and groups of them: a command's parameters, which `flat` replaces by their options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from vitrim.cli.help import IMAGES, MACHINE, MODEL, OPTIONS
from vitrim.errors import VitrimError

if TYPE_CHECKING:
    from vitrim.engines.exported import Exported
    from vitrim.engines.prefill import Prompt
    from vitrim.measure.inputs import DataSpec, PageData, ScoredData

METHOD = typer.Option("--method", "-m", metavar="METHOD", help="e.g. tome:r=13, or @FILE; may repeat")
MethodTexts = Annotated[list[str], METHOD]
MethodsBesideDense = Annotated[list[str] | None, METHOD]
MAX_BATCH = 2**20
MAX_SEED = 2**63 - 1
MAX_THREADS = 1024
MAX_WORKERS = 256
MAX_SECONDS = 24 * 3600.0
MAX_REPEATS = 100_000
"""Limits far above useful values, to catch typing errors early."""
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, max=MAX_BATCH, help="images per batch")]
Workers = Annotated[
    int, typer.Option("--workers", min=0, max=MAX_WORKERS, help="processes that read images; 0: this one")
]


CLASSIFIERS = (
    "a timm name (`vitrim list models`), vitrim:NAME, torchvision:NAME, hf: or open_clip:NAME_OR_FOLDER, "
    "run:FOLDER of a finished run"
)
MODEL_NAMES = f"{CLASSIFIERS}; segmenter: or vitdet: before any of these"
Dtype = Annotated[str, typer.Option("--dtype", help="of parameters and images: fp32 or bf16")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, max=MAX_THREADS, help="CPU threads; default: torch's")]
DataOptions = Annotated[
    list[str] | None, typer.Option("--data-option", metavar="K=V", help="option of the data's reader; may repeat")
]
Select = Annotated[
    str | None,
    typer.Option(
        "--select",
        help="a selector of image tokens after every method, e.g. divprune:tokens=64",
    ),
]
Preprocess = Annotated[
    bool, typer.Option("--preprocess", help="input: uint8 images (batch, height, width, 3), normalised in the graph")
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="number of images, spread evenly over all")]


def parse_options(texts: Sequence[str] | None, what: str = "model option") -> dict[str, Any]:
    """Parse ``["img_size=384"]`` into ``{"img_size": 384}``."""
    from vitrim.core.options import read_value

    options: dict[str, Any] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key or not value:
            raise VitrimError(f"cannot read '{text}': write key=value, e.g. img_size=384")
        if key in options:
            raise VitrimError(f"{what} {key} is given twice")
        options[key] = read_value(value, f"{what} {key}")
    return options


def whole_numbers(text: str | None, takes: str, least: int = 0) -> list[int] | None:
    """Parse ``"0,3"``; None stays. ``takes`` is the beginning of the error.

    Example:
        >>> whole_numbers("224,384", "--sizes takes whole numbers")
        [224, 384]
    """
    if text is None:
        return None
    parts = text.split(",")
    wrong = next((part for part in parts if not part.strip().isdecimal() or int(part) < least), None)
    if wrong is not None:
        raise VitrimError(f"{takes}; got '{wrong}'")
    return [int(part) for part in parts]


# ---- the groups ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A group of options: fields annotated like parameters, with their names; ``panel`` is its heading in the help."""

    panel: ClassVar[str] = OPTIONS


@dataclass(frozen=True, kw_only=True)
class Compute(Setup):
    panel = MACHINE

    threads: Threads = None
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="of random weights, inputs and methods")] = 0

    def start(self) -> None:
        from vitrim.engines.machine import set_threads

        set_threads(self.threads)


@dataclass(frozen=True, kw_only=True)
class Machine(Compute):
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:0, mps, xpu")] = "cpu"


@dataclass(frozen=True, kw_only=True)
class Weights(Setup):
    panel = MODEL

    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="load the library's pretrained weights (a download)")
    ] = False
    checkpoint: Annotated[Path | None, typer.Option(help="weights: a file (safetensors, .pth) or a run's folder")] = (
        None
    )
    model_option: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="of the library's model, e.g. img_size=384; may repeat")
    ] = None

    def spec(self, model: Any, kind: str = "ModelSpec", **more: Any) -> Any:
        """The description of one or several models, of a ``kind`` that has ``more``."""
        from vitrim import loading

        options, make = parse_options(self.model_option), getattr(loading, kind)
        return make(model, pretrained=self.pretrained, checkpoint=self.checkpoint, options=options, **more)


@dataclass(frozen=True, kw_only=True)
class Model(Weights):
    name: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_NAMES)]


@dataclass(frozen=True, kw_only=True)
class Sizes(Setup):
    panel = MODEL

    img_size: Annotated[
        str | None,
        typer.Option(
            metavar="PIXELS",
            help="also at other image sizes, e.g. 176,208",
        ),
    ] = None

    @property
    def given(self) -> list[int]:
        return whole_numbers(self.img_size, "--img-size takes whole numbers with commas, e.g. 176,208", least=1) or []


@dataclass(frozen=True, kw_only=True)
class Reading(Setup):
    panel = IMAGES

    split: Annotated[str | None, typer.Option(help="split, e.g. test, or 0.1: what train held out")] = None
    image_column: Annotated[str | None, typer.Option(help="column of images, if not the only one")] = None
    label_column: Annotated[str | None, typer.Option(help="column of labels, if not called label")] = None

    def spec(self, source: Any, make: Callable[..., Any] | None = None, **more: Any) -> Any:
        """The description of the images, ``make`` with ``more``; the group may have ``limit`` and ``data_option``."""
        from vitrim.measure.inputs import DataSpec

        own = vars(self)
        # A group has those of these fields that its command offers.
        given = {name: own[name] for name in ("split", "image_column", "label_column", "limit") if name in own}
        options = parse_options(own.get("data_option"), "data option")
        return (make or DataSpec)(source, **given, options=options, **more)


@dataclass(frozen=True, kw_only=True)
class Data(Reading):
    source: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="SOURCE",
            help="images: a folder of classes, parquet files, hfds/OWNER/NAME, or LAYOUT:ROOT, see docs/data.md",
        ),
    ]
    limit: Limit = None
    data_option: DataOptions = None
    task: Annotated[str | None, typer.Option(help="for models with several tasks: segmentation, zero_shot, ...")] = None

    def read(self, **more: Any) -> ScoredData:
        from vitrim.measure.inputs import ScoredData

        return self.spec(self.source, ScoredData, task=self.task, **more)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Files(Setup):
    file: Annotated[
        list[Path] | None, typer.Option(help="an exported file to measure beside the model; may repeat")
    ] = None
    trust: Annotated[bool, typer.Option("--trust", help="run .pt2 files, which are code")] = False

    def beside(self, methods: Sequence[str] | None) -> list[Any]:
        return [*(methods or ()), *map(self.opened, self.file or ())]

    def opened(self, path: str | Path) -> Exported:
        from vitrim.engines.exported import Exported

        return Exported.open(path, trust=self.trust)

    def model(self, name: str) -> Exported | str:
        from vitrim.engines.formats import formats

        path = Path(name)
        suffixes = {kind.suffix for kind in formats().values()}
        return self.opened(path) if path.suffix in suffixes else name


@dataclass(frozen=True, kw_only=True)
class Images(Reading):
    source: Annotated[
        str | None, typer.Option("--images", help="as --data of `vitrim eval`; default: random images")
    ] = None

    def read(self, **more: Any) -> Any:
        return self.spec(self.source, **more)

    def __post_init__(self) -> None:
        given = (field.name for field in dataclasses.fields(Reading) if getattr(self, field.name) is not None)
        name = next(given, None)
        if self.source is None and name is not None:
            option = name.replace("_", "-")
            raise VitrimError(f"--{option} says which images to read, and none are: give --images too")


@dataclass(frozen=True, kw_only=True)
class NeededImages(Images):
    source: Annotated[str, typer.Option("--images", help="as --data of `vitrim eval`")] = dataclasses.field()


@dataclass(frozen=True, kw_only=True)
class Prompting(Setup):
    text_tokens: Annotated[
        int | None, typer.Option(min=1, max=2**20, help="of a vision-language model's prompt; default: 32")
    ] = None
    prompt_images: Annotated[
        int | None, typer.Option(min=1, max=2**12, help="of a vision-language model's prompt; default: 1")
    ] = None
    select: Select = None
    new_tokens: Annotated[
        int | None, typer.Option(min=0, max=2**16, help="decode so many tokens after the prefill; default: 0")
    ] = None

    @property
    def given(self) -> Prompt | None:
        from vitrim.engines.prefill import Prompt

        prompt = Prompt(self.text_tokens, self.prompt_images, self.select, self.new_tokens)
        return None if prompt == Prompt() else prompt


@dataclass(frozen=True, kw_only=True)
class RunOn(Images, Prompting):
    def inputs(self) -> DataSpec | Prompt:
        if self.given is not None and self.source is not None:
            raise VitrimError("images are for models of images alone: prompts are made of random images and text")
        return self.read() if self.given is None else self.given


@dataclass(frozen=True, kw_only=True)
class Scoring(Setup):
    batch_size: BatchSize = 32
    workers: Workers = 0
    protocol: Annotated[
        list[str] | None,
        typer.Option(help="of segmentation, key=value: mode, window, stride, size, side, flip; may repeat"),
    ] = None

    def read(self, data: Data) -> ScoredData:
        changes = parse_options(self.protocol, "protocol option")
        return data.read(protocol=changes, batch_size=self.batch_size, workers=self.workers)


@dataclass(frozen=True, kw_only=True)
class PageScoring(Scoring):
    select: Annotated[
        list[str] | None,
        typer.Option(help="a selector of a retriever of pages; may repeat"),
    ] = None
    pool_factor: Annotated[
        list[int] | None,
        typer.Option(min=2, help="also pool a retriever's vectors; may repeat"),
    ] = None

    def read(self, data: Data) -> PageData:
        from vitrim.measure.inputs import PageData

        pages = PageData.of(super().read(data))
        return dataclasses.replace(pages, select=self.select or (), pool_factors=self.pool_factor or ())


# ---- from groups to options ------------------------------------------------------------------------------------------

FILES, FOLDERS = ("json", "figure", "target", "predictions"), ("out", "decisions")
"""Options that name an output; several folders may be the same."""


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with the fields of its setups as parameters, for typer.

    Setups are created, and so checked, before ``command`` runs. Two outputs to one file are refused.

    Example:
        >>> def show(*, compute: Compute, wide: bool = False) -> None:
        ...     print(compute, wide)
        >>> list(inspect.signature(flat(show)).parameters)
        ['threads', 'seed', 'wide']
        >>> flat(show)(threads=None, seed=1, wide=True)
        Compute(threads=None, seed=1) True
    """
    own = inspect.signature(command, eval_str=True).parameters
    kinds = {name: one.annotation for name, one in own.items()}
    # Groups become their fields, other parameters stay as they are.
    setups = {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Setup)}
    parameters = [given for name, one in own.items() for given in (_options(setups[name]) if name in setups else [one])]
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        places = {name: Path(given[name]) for name in (*FILES, *FOLDERS) if given.get(name) not in (None, "-")}
        # Links and relative names are followed: two names may be one file. A pipe or device takes both.
        real = [os.path.realpath(place) for place in places.values()]
        for name, place in places.items():
            if name in FILES and real.count(os.path.realpath(place)) > 1 and (place.is_file() or not place.exists()):
                raise VitrimError(f"two results would be written to {place}: give each a place of its own")
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
            for name, kind in setups.items()
        }
        command(**made, **given)

    # Typer reads the signature and the annotations, and finds the options in them.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


@functools.cache
def _declared(group: type) -> dict[str, Any]:
    """The annotations of a group's own fields; evaluated once, so that an option of several commands is one."""
    return inspect.get_annotations(group, eval_str=True)


def _options(setup: type[Setup]) -> list[inspect.Parameter]:
    """The fields of a group as parameters, its own before inherited fields."""
    annotations = {name: kind for group in reversed(setup.__mro__) for name, kind in _declared(group).items()}
    bases = [base for base in setup.__bases__ if dataclasses.is_dataclass(base)]
    shared = {field.name for base in bases for field in dataclasses.fields(base)}
    fields = sorted(dataclasses.fields(setup), key=lambda field: field.name in shared)
    for field in fields:
        [option] = annotations[field.name].__metadata__
        if isinstance(option, typer.models.OptionInfo):
            # The panel is that of the group that declares the option, whatever class inherits it.
            groups: list[Any] = [kind for kind in setup.__mro__ if issubclass(kind, Setup)]
            declared_in = [group for group in groups if field.name in _declared(group)]
            option.rich_help_panel = declared_in[-1].panel
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=annotations[field.name],
        )
        for field in fields
    ]
