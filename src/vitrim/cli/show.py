"""``vitrim show``: one picture per image of what methods leave of it, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli import common
from vitrim.cli.setup import DataOptions, Machine, Model, Reading, Record
from vitrim.errors import MissingPackageError, VitrimError

if TYPE_CHECKING:
    from torch import Tensor, nn

FEW = 8
"""Images of a dataset that are drawn where nobody says how many."""

Out = Annotated[Path, typer.Option("--out", help="folder for the pictures, one per image")]
Blocks = Annotated[
    str | None, typer.Option("--blocks", help="columns, from 0, with commas; default: those that change tokens")
]
Format = Annotated[str, typer.Option("--format", help="of the pictures: png or svg")]


@dataclass(frozen=True, kw_only=True)
class Pictures(Reading):
    """Images from files and folders, or from a dataset.

    Raises:
        VitrimError: neither is given, both are, or options of a dataset without one.
    """

    files: Annotated[
        list[Path] | None, typer.Argument(metavar="IMAGE", help="image files, or folders that images lie in")
    ] = None
    source: Annotated[str | None, typer.Option("--data", help="instead, images as for `vitrim eval`")] = None
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help=f"so many images only, spread evenly; default: {FEW} of --data"),
    ] = None
    data_option: DataOptions = None

    def __post_init__(self) -> None:
        if (self.source is None) == (not self.files):
            raise VitrimError("give the images to show: files or folders behind the model, or --data; not both")
        options = ("split", "image_column", "label_column", "data_option")
        given = next((name for name in options if getattr(self, name)), None)
        if self.source is None and given is not None:
            raise VitrimError(f"--{given.replace('_', '-')} is of a dataset: give --data too")

    def open(self) -> Any:
        """The dataset; the labels of files mean nothing."""
        from vitrim.data import ImageDataset
        from vitrim.data.folders import loose_images

        if self.source is not None:
            return self.load_any(self.source, None, common.parse_options(self.data_option, "data option"))
        found = loose_images(self.files or ())
        return ImageDataset(found, [0] * len(found), source="the images")

    def places(self, count: int) -> list[int]:
        """Which of so many images to draw."""
        from vitrim.data import spread

        limit = FEW if self.limit is None and self.source is not None else self.limit
        return [int(place) for place in spread(count, limit)]


def show(
    *,
    model: Model,
    pictures: Pictures,
    methods: common.MethodsBesideDense = None,
    out: Out,
    blocks: Blocks = None,
    format: Format = "png",
    machine: Machine,
    record: Record,
) -> None:
    """Draw what methods leave of images, block by block: one picture per image, a row per method.

    Each row names the prediction and the cost beside those of the dense model; methods that rank patches have their
    scores below, as heat maps. For classifiers.
    """
    configs = common.parse_methods(methods or ())
    from vitrim.files import check_folder
    from vitrim.plots.show import prepared
    from vitrim.plots.style import FORMATS

    common.check_choice("format", format, FORMATS)
    columns = _blocks(blocks)
    if find_spec("matplotlib") is None:
        raise MissingPackageError("pictures need the package 'matplotlib': pip install 'vitrim[analysis]'")
    check_folder(out)
    device = machine.select()
    dataset = pictures.open()
    dense = model.load()
    models = prepared(dense, configs, device=device, learned=model.learned)
    console, rows = record.console(), []
    for name, title, image in _images(dense, dataset, pictures):
        file = out / f"{name}.{format}"
        rows.append({"image": title, "file": str(file), **_draw(dense, models, image, dataset, columns, title, file)})
        console.print(f"wrote {file}", markup=False, highlight=False, soft_wrap=True)
    record.write("show", model=model.name, weights=model.weights, environment=machine.environment("float32"), rows=rows)


def _blocks(text: str | None) -> list[int] | None:
    """The blocks of ``--blocks``.

    Example:
        >>> _blocks("0,3")
        [0, 3]
    """
    if text is None:
        return None
    parts = text.split(",")
    wrong = next((part for part in parts if not part.strip().isdecimal()), None)
    if wrong is not None:
        raise VitrimError(f"--blocks takes numbers of blocks with commas, e.g. 0,3,11; got '{wrong}'")
    return [int(part) for part in parts]


def _images(dense: nn.Module, dataset: Any, pictures: Pictures) -> Iterator[tuple[str, str, Tensor]]:
    """The name of the file, the title and the pixels of every image to draw."""
    from vitrim.data import eval_transform
    from vitrim.measure.decisions import file_name

    dataset.transform = eval_transform(dense)
    taken: set[str] = set()
    for place in pictures.places(len(dataset)):
        image = dataset.read_image(place)
        if pictures.source is not None:
            yield f"image_{place}", f"image {place}{_label(dataset, place)}", image
            continue
        path = dataset.images[place]
        name = stem = file_name(path.stem)
        number = 1
        while name in taken:
            number += 1
            name = f"{stem}_{number}"
        taken.add(name)
        yield name, path.name, image


def _label(dataset: Any, place: int) -> str:
    """The label of an image in words, where it has one."""
    labels = getattr(dataset, "labels", None)
    if labels is None:
        return ""
    names = dataset.class_names
    return f": {labels[place] if names is None else names[labels[place]]}"


def _draw(
    dense: nn.Module, models: Any, image: Tensor, dataset: Any, blocks: list[int] | None, title: str, file: Path
) -> dict[str, Any]:
    """Draw one image, and return what it shows for the record."""
    from vitrim.core.registry import ask, host_of
    from vitrim.plots.show import draw_show, pixels_of, rows_of
    from vitrim.plots.style import save

    facts = host_of(dense).facts(dense)
    known = ask(dense).class_names(dense)
    names = next((each for each in (known, dataset.class_names) if each and len(each) == facts.num_classes), None)
    rows, predicted = rows_of(models, image, names)
    rows_and_columns = (facts.grid_size[0], facts.grid_size[1])
    save(draw_show(pixels_of(dense, image), rows, rows_and_columns, dense=predicted, blocks=blocks, title=title), file)
    return {"dense": predicted, **{row.name: row.prediction for row in rows}}
