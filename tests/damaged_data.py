"""Damaged data, made by a generator: each kind of damage in each place of COCO files, masks, tables and folders.

A `Case` writes its data into a folder and says what to read. Every case has to be refused in one line, but for those
that look damaged and are not: they say why, and their targets have to be right.
"""

from __future__ import annotations

import copy
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from full_matrix import FULL_MATRIX

HEIGHT, WIDTH = 48, 64
NAMES = ["cat", "cow", "dog", "eel", "fox"]
IDS = [1, 7, 3, 90, 4]

MISSING = object()
DAMAGES: dict[str, Any] = {
    "missing": MISSING,
    "null": None,
    "text": "x",
    "NaN": float("nan"),
    "infinite": float("inf"),
    "negative": -5,
    "zero": 0,
    "huge": 10**12,
    "too large for a float": 10**400,
    "a fraction": 0.5,
    "true": True,
    "empty list": [],
    "empty text": "",
    "empty object": {},
    "nested": [[[[1]]]],
}
"""Kind -> the value in place of the right one."""


@dataclass(frozen=True)
class Case:
    """Data to read.

    Attributes:
        name: what is damaged, and how.
        task: what it is read for: of COCO files, masks, tables and folders.
        write: makes it in a folder and returns what to write after ``--data``.
        harmless: why it is not refused; empty if it has to be.
        changed: the content of the COCO file as written, for what its targets have to be.
        options: further arguments.
    """

    name: str
    task: str
    write: Callable[[Path], str]
    harmless: str = ""
    changed: Any = None
    options: tuple[str, ...] = ()


def cases() -> list[Case]:
    """All of them."""
    found = [*coco_fields(), *coco_files(), *image_files(), *masks(), *tables(), *dense_tables(), *folders(), *lists()]
    names = [case.name for case in found]
    assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]
    return found


# ---- COCO ------------------------------------------------------------------------------------------------------------


def content() -> dict[str, Any]:
    """Two images, an object of every form of outline, a crowd, and fields that nobody reads."""
    runs = [5, 3, HEIGHT * WIDTH - 8]
    return {
        "info": {"year": None},
        "images": [
            {"id": 5, "file_name": "a.png", "height": HEIGHT, "width": WIDTH, "license": "?"},
            {"id": 6, "file_name": "b.png", "height": HEIGHT, "width": WIDTH},
        ],
        "annotations": [
            entry(1, 5, 1, [40, 6, 20, 15], 300.0, [[40, 6, 60, 6, 60, 21, 40, 21]]) | {"keypoints": [0, None]},
            entry(2, 5, 7, [0, 5, 1, 3], 3, {"counts": runs, "size": [HEIGHT, WIDTH]}),
            entry(3, 6, 90, [0, 5, 1, 3], 3, {"counts": "53ho2", "size": [HEIGHT, WIDTH]}) | {"iscrowd": 1},
        ],
        "categories": [{"id": key, "name": name} for key, name in zip(IDS, NAMES, strict=True)],
    }


def entry(number: int, image: int, category: int, box: list[float], area: float, outline: Any) -> dict[str, Any]:
    values = {"id": number, "image_id": image, "category_id": category, "bbox": box, "area": area, "iscrowd": 0}
    return values | {"segmentation": outline}


PLACES: dict[str, tuple[str | int, ...]] = {
    **{name: (name,) for name in ("images", "annotations", "categories")},
    "an image": ("images", 0),
    **{f"images.{name}": ("images", 0, name) for name in ("id", "file_name", "height", "width")},
    "a category": ("categories", 0),
    **{f"categories.{name}": ("categories", 0, name) for name in ("id", "name")},
    "an annotation": ("annotations", 0),
    **{
        f"annotations.{name}": ("annotations", 0, name)
        for name in ("id", "image_id", "category_id", "bbox", "area", "iscrowd", "segmentation")
    },
    **{f"bbox[{number}]": ("annotations", 0, "bbox", number) for number in range(4)},
    "a polygon": ("annotations", 0, "segmentation", 0),
    "x of a corner": ("annotations", 0, "segmentation", 0, 0),
    "y of a corner": ("annotations", 0, "segmentation", 0, 3),
    **{f"run lengths.{name}": ("annotations", 1, "segmentation", name) for name in ("counts", "size")},
    "a run length": ("annotations", 1, "segmentation", "counts", 1),
    "height of run lengths": ("annotations", 1, "segmentation", "size", 0),
    "compressed.counts": ("annotations", 2, "segmentation", "counts"),
    "compressed.size": ("annotations", 2, "segmentation", "size"),
    "a crowd's outline": ("annotations", 2, "segmentation"),
}
"""What can be damaged in the file, and the way to it."""

_ONLY_A_NAME = "ids of annotations are only names"
HARMLESS: dict[str, dict[str, str]] = {
    "annotations": {"empty list": "images without objects are evaluated too"},
    "an annotation": {"missing": "an object fewer"},
    "annotations.id": dict.fromkeys(
        ("text", "negative", "zero", "huge", "too large for a float", "empty text"), _ONLY_A_NAME
    ),
    "categories.name": {"text": "a class may be called x"},
    "annotations.area": {"zero": "an outline can be a line", "a fraction": "areas are fractions"},
    "annotations.iscrowd": {"zero": "it was 0", "true": "true is 1"},
    "bbox[0]": {"zero": "the box begins at the edge", "a fraction": "boxes have fractions"},
    "bbox[1]": {"zero": "the box begins at the edge", "a fraction": "boxes have fractions"},
    "bbox[2]": {"zero": "boxes without area are left out", "a fraction": "boxes have fractions"},
    "bbox[3]": {"zero": "boxes without area are left out", "a fraction": "boxes have fractions"},
    "x of a corner": dict.fromkeys(("negative", "zero", "a fraction"), "polygons may reach beyond the image"),
    "y of a corner": dict.fromkeys(("negative", "zero", "a fraction"), "polygons may reach beyond the image"),
    "a crowd's outline": dict.fromkeys(
        ("missing", "null", "empty list"), "a crowd without an outline is as large as its box"
    ),
}

UNREAD = {
    "detection": ("annotations.segmentation", "a polygon", "run lengths.counts", "a crowd's outline"),
    "multilabel": ("images.height", "annotations.bbox", "annotations.area", "annotations.iscrowd", "bbox[2]"),
}
"""Places that a task does not read: whatever is there is harmless."""
READ = {
    "detection": ("annotations.bbox", "bbox[2]", "annotations.area"),
    "multilabel": ("annotations.image_id", "images.id"),
}


def coco_fields() -> Iterator[Case]:
    """Each kind of damage in each place; in `make test` in every fourth one."""
    for row, (place, way) in enumerate(PLACES.items()):
        for column, (kind, value) in enumerate(DAMAGES.items()):
            harmless = HARMLESS.get(place, {}).get(kind, "")
            if FULL_MATRIX or harmless or (row + column) % 4 == 1:  # places next to each other are of one kind
                yield coco(f"{place}: {kind}", put(content(), way, value), harmless)
    for task in UNREAD:
        for place in (*UNREAD[task], *READ[task]):
            for kind in ("missing", "null", "NaN", "nested"):
                changed = put(content(), PLACES[place], DAMAGES[kind])
                harmless = f"{task} does not read it" if place in UNREAD[task] else ""
                yield coco(f"{place} for {task}: {kind}", changed, harmless, task)


def coco_files() -> Iterator[Case]:
    """Lists with something twice, lengths, whole files."""
    for name in ("images", "annotations", "categories"):
        changed = content()
        changed[name].append(changed[name][0])
        yield coco(f"{name}: one twice", changed)
    for name, field_name in (("images", "file_name"), ("categories", "name")):
        changed = content()
        changed[name][1][field_name] = changed[name][0][field_name]
        yield coco(f"{name}: two of one {field_name}", changed)
    for way, values in {
        ("annotations", 0, "bbox"): (
            [1, 2, 3],
            [1, 2, 3, 4, 5],
            [WIDTH, 0, 5, 5],
            [0, 0, WIDTH + 2, 5],
            "[1, 2, 3, 4]",
        ),
        ("annotations", 0, "segmentation"): (
            *([[1, 2, 3, 4]], [[1, 2, 3, 4, 5, 6, 7]], [[1e9, 0, 1e9, 1e9, 0, 1e9]], [[0, 0, 1e300, 0, 0, 1e300]]),
            *([[0, 0, WIDTH - 1, HEIGHT - 1] * 10**5], [[WIDTH + 1, 0, WIDTH + 9, 0, WIDTH + 1, 9]], "5300"),
            [[*[0, 0, 1, 0, 1, 1], None]],
        ),
        ("annotations", 1, "segmentation", "counts"): (
            *([10, 10], [HEIGHT * WIDTH + 1], [1.9, 2.9, HEIGHT * WIDTH - 4.8], [-5, HEIGHT * WIDTH + 5]),
            *([2**32 + 5, 3, HEIGHT * WIDTH - 8], [5, 3, str(HEIGHT * WIDTH - 8)], [5, True, HEIGHT * WIDTH - 6]),
        ),
        ("annotations", 2, "segmentation", "counts"): (
            "zzzz",
            "53hn2",
            "5",
            "53ho",
            "53ho2~",
            "5 3",
            "oo" * 99,
            "\u00e9",
        ),
        ("annotations", 2, "segmentation", "size"): ([WIDTH, HEIGHT], [HEIGHT], [HEIGHT, WIDTH, 3], [10**5, 10**5]),
        ("images", 0, "height"): (HEIGHT + 1, float(HEIGHT), str(HEIGHT)),
        ("images", 0, "file_name"): ("/", "..", "none.png", "a.png\0", "\ud800.png", "\ud800/a.png", ["a.png"], " "),
        ("annotations", 0, "iscrowd"): ("false", "0", 2, 1.0),
        ("annotations", 0, "area"): (HEIGHT * WIDTH * 2, 1e300, "300"),
        ("annotations", 0, "image_id"): ("5", 5.0, 99),
        ("annotations", 0, "category_id"): ("1", 1.0, 2, "cat"),
    }.items():
        for number, value in enumerate(values):
            yield coco(f"{'.'.join(map(str, way))}: value {number}", put(content(), way, value))
    text = json.dumps(content())
    nested = "[" * 100_000 + "]" * 100_000
    bad: dict[str, bytes] = {
        "empty": b"",
        "blank": b" \n",
        "no JSON": b"images: []",
        "null alone": b"null",
        "a list": b"[1]",
        "a text": b'"images"',
        "two files": (text + text).encode(),
        "UTF-16": text.encode("utf-16"),
        "Latin-1": text.replace("cat", "chat\u00e9").encode("latin-1"),
        "bytes": bytes(range(256)),
        "zeros": bytes(1000),
        "nested deep": nested.encode(),
        "an outline nested deep": text.replace("[[40, 6", f"[{nested[1:-1]}, [40, 6").encode(),
        "an unread field nested deep": text.replace('"?"', nested).encode(),
        "a number of 5000 digits": text.replace("300.0", "9" * 5000).encode(),
    }
    bad |= {f"cut off at {share} %": text[: len(text) * share // 100].encode() for share in (1, 10, 50, 99)}
    for name, data in bad.items():
        yield coco(f"file: {name}", data)
    yield coco("file: mark of UTF-8", b"\xef\xbb\xbf" + text.encode(), "the mark is no part of the text")
    for name in NOT_FILES:
        yield Case(f"annotations of COCO: {name}", "instances", partial(_coco_of, name))


def coco(name: str, written: Any, harmless: str = "", task: str = "instances") -> Case:
    data = written if isinstance(written, bytes) else None
    return Case(
        f"COCO {name}",
        task,
        partial(write_coco, written=written),
        harmless,
        changed=json.loads(data.decode("utf-8-sig")) if harmless and data else written,
    )


def put(given: Any, way: tuple[str | int, ...], value: Any) -> Any:
    """``given`` with another value at the end of the way."""
    changed = copy.deepcopy(given)
    inner: Any = changed
    for step in way[:-1]:
        inner = inner[step]
    if value is MISSING:
        del inner[way[-1]]
    else:
        inner[way[-1]] = copy.deepcopy(value)
    return changed


def write_coco(root: Path, written: Any) -> str:
    data = written if isinstance(written, bytes) else json.dumps(written).encode()
    for year in (2014, 2017):
        for name in ("a.png", "b.png"):
            place(root / f"val{year}" / name, png())
        place(root / "annotations" / f"instances_val{year}.json", data)
    return f"coco:{root}"


def _coco_of(kind: str, root: Path) -> str:
    source = write_coco(root, content())
    for year in (2014, 2017):
        file = root / "annotations" / f"instances_val{year}.json"
        file.unlink()
        NOT_FILES[kind](file)
    return source


# ---- images and masks ------------------------------------------------------------------------------------------------


def place(file: Path, data: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


def encoded(image: Image.Image, kind: str = "png") -> bytes:
    file = BytesIO()
    image.save(file, kind)
    return file.getvalue()


@cache
def png(mode: str = "RGB", size: tuple[int, int] = (WIDTH, HEIGHT), value: int = 1) -> bytes:
    if mode == "I;16":
        return encoded(Image.fromarray(np.full(size[::-1], value, dtype=np.uint16)))
    if mode in ("I", "F"):
        return encoded(Image.new("L", size, value).convert(mode), "tiff")
    return encoded(
        Image.new(mode, size, value if mode in ("1", "L", "P") else None), "tiff" if mode == "CMYK" else "png"
    )


def _loop(file: Path) -> None:
    file.symlink_to(file.name)


NOT_FILES: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a broken link": lambda file: file.symlink_to("nowhere"),
    "a link to itself": _loop,
    "a link to a device": lambda file: file.symlink_to("/dev/zero"),
}
"""What can stand where a file is expected."""


def bad_images() -> dict[str, bytes]:
    """Bytes that are no image."""
    noise = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)))
    unknown = bytearray(encoded(Image.new("RGB", (WIDTH, HEIGHT)), "dds"))
    unknown[80:84] = bytes(4)  # flags of its pixels
    header = bytearray(png())
    header[16:24] = (60_000).to_bytes(4, "big") * 2  # 3.6 thousand million pixels
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    return {
        "empty": b"",
        "text": b"not an image\n",
        "cut off": noise[: len(noise) // 2],
        "header alone": png()[:30],
        "of unknown pixels": bytes(unknown),
        "corrupt": noise[:60] + bytes(100) + noise[160:],
        "of a size beyond all bounds": bytes(header),
    }


def image_files() -> Iterator[Case]:
    """Files of images, of COCO and in a folder of classes."""
    for name, data in bad_images().items():
        yield Case(f"image of COCO: {name}", "detection", partial(_coco_image, data))
        yield Case(f"image in a folder: {name}", "classification", partial(_folder_image, data))
    yield Case("image of COCO: another size", "detection", partial(_coco_image, png(size=(WIDTH + 1, HEIGHT))))
    for mode in ("1", "L", "P", "LA", "RGBA", "CMYK", "I;16"):
        harmless = f"images of mode {mode} become RGB"
        yield Case(f"image of COCO: mode {mode}", "detection", partial(_coco_image, png(mode)), harmless, content())
    yield Case("image in a folder: mode F", "classification", partial(_folder_image, png("F")))
    for kind in NOT_FILES:
        yield Case(f"image of COCO: {kind}", "detection", partial(_coco_image, kind))
        yield Case(f"image in a folder: {kind}", "classification", partial(_folder_image, kind))


def _set(file: Path, given: bytes | str) -> None:
    """Write bytes, or what `NOT_FILES` has by that name."""
    file.unlink(missing_ok=True)
    if isinstance(given, bytes):
        file.write_bytes(given)
    else:
        NOT_FILES[given](file)


def _coco_image(given: bytes | str, root: Path) -> str:
    source = write_coco(root, content())
    _set(root / "val2017" / "a.png", given)
    return source


def _folder_image(given: bytes | str, root: Path) -> str:
    for name in NAMES:
        place(root / name / "a.png", png())
    _set(root / NAMES[0] / "a.png", given)
    return str(root)


def masks() -> Iterator[Case]:
    """Pairs of images and masks."""
    options = ("--data-option", "num_classes=5")
    good = {"L": "as masks are", "P": "an index of a palette is a label", "1": "0 and 1", "I;16": "labels of 16 bits"}
    for mode in ("RGB", "RGBA", "LA", "CMYK", "F"):
        yield Case(f"mask: mode {mode}", "segmentation", partial(write_masks, mask=png(mode)), options=options)
    for mode, reason in good.items():
        write = partial(write_masks, mask=png(mode))
        yield Case(f"mask: mode {mode}", "segmentation", write, reason, options=options)
    for name, data in bad_images().items():
        yield Case(f"mask: {name}", "segmentation", partial(write_masks, mask=data), options=options)
        yield Case(f"image of a mask: {name}", "segmentation", partial(write_masks, image=data), options=options)
    for kind in NOT_FILES:
        yield Case(f"mask: {kind}", "segmentation", partial(write_masks, mask=kind), options=options)
        yield Case(f"image of a mask: {kind}", "segmentation", partial(write_masks, image=kind), options=options)
    for name, mask in {
        "wider": png("L", (WIDTH + 1, HEIGHT)),
        "turned": png("L", (HEIGHT, WIDTH)),
        "a value that is no class": png("L", value=5),
        "a value of 16 bits that is no class": png("I;16", value=261),
    }.items():
        yield Case(f"mask: {name}", "segmentation", partial(write_masks, mask=mask), options=options)
    for value in ("0", "-1", "1.5", "true", "null", '"5"', "[]", "256", "1e400", "x" * 300):
        more = ("--data-option", f"num_classes={value}")
        yield Case(f"num_classes={value[:9]}", "segmentation", partial(write_masks, mask=png("L")), options=more)
    for value in ("-1", "1.5", '"a"', "[0.5]", "[null]", "65536", "null", "{}", "[[1]]", "true"):
        more = (*options, "--data-option", f"ignore={value}")
        yield Case(f"ignore={value}", "segmentation", partial(write_masks, mask=png("L")), options=more)
    for value in ('"abcde"', "[1,2,3,4,5]", "5", "[]", "[null]", '{"a":1}'):
        more = ("--data-option", f"class_names={value}")
        yield Case(f"class_names={value}", "segmentation", partial(write_masks, mask=png("L")), options=more)


def write_masks(root: Path, mask: bytes | str | None = None, image: bytes | str | None = None) -> str:
    for name in ("a.png", "b.png"):
        place(root / "images" / "val" / name, png())
        place(root / "masks" / "val" / name, png("L"))
    for folder, given in (("masks", mask), ("images", image)):
        if given is not None:
            _set(root / folder / "val" / "a.png", given)
    return f"masks:{root}"


# ---- tables ----------------------------------------------------------------------------------------------------------


def rows(count: int = 4, **columns: Any) -> dict[str, Any]:
    """Columns of images and labels; None leaves one out."""
    table = {"image": [{"bytes": png(), "path": "x"}] * count, "label": [number % 5 for number in range(count)]}
    return {name: value for name, value in {**table, **columns}.items() if value is not None}


def parquet(**columns: Any) -> bytes:
    file = BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def tables() -> Iterator[Case]:
    """Tables of images with one label each."""
    image = {"bytes": png(), "path": "x"}
    good = parquet(**rows())
    bad: dict[str, bytes] = {
        "no images": parquet(**rows(image=None)),
        "no labels": parquet(**rows(label=None)),
        "no columns": parquet(),
        "no rows": parquet(**rows(0, image=pa.array([], pa.struct({"bytes": pa.binary(), "path": pa.string()})))),
        "images that are null": parquet(**rows(image=[image, None, image, image])),
        "images of null bytes": parquet(**rows(image=[{"bytes": None, "path": None}, image, image, image])),
        "images that are empty": parquet(**rows(image=[{"bytes": b"", "path": "x"}] * 4)),
        "images that are text": parquet(**rows(image=["x"] * 4)),
        "images that are bytes alone": parquet(**rows(image=[png()] * 4)),
        "images that are numbers": parquet(**rows(image=[1, 2, 3, 4])),
        "images of text": parquet(**rows(image=[{"bytes": "x", "path": "x"}] * 4)),
        "images of numbers": parquet(**rows(image=[{"bytes": 1, "path": 1}] * 4)),
        "images whose path is a number": parquet(**rows(image=[{"bytes": None, "path": 1}] * 4)),
        "images in no file": parquet(**rows(image=[{"bytes": None, "path": "/none/x.png"}] * 4)),
        "images in a device": parquet(**rows(image=[{"bytes": None, "path": "/dev/zero"}] * 4)),
        "images of a name with a zero": parquet(**rows(image=[{"bytes": None, "path": "a\0b"}] * 4)),
        "images of other fields": parquet(**rows(image=[{"data": png()}] * 4)),
        "lists of images": parquet(**rows(image=[[image]] * 4)),
        "two columns of images": parquet(**rows(other=[image] * 4)),
        "labels that are null": parquet(**rows(label=[0, None, 1, 2])),
        "labels that are all null": parquet(**rows(label=[None] * 4)),
        "labels that are negative": parquet(**rows(label=[0, -1, 1, 2])),
        "labels beyond the classes": parquet(**rows(label=[0, 5, 1, 2])),
        "labels that are huge": parquet(**rows(label=[0, 2**62, 1, 2])),
        "labels that are unsigned and huge": parquet(**rows(label=pa.array([0, 2**64 - 1, 1, 2], pa.uint64()))),
        "labels that are fractions": parquet(**rows(label=[0.0, 0.5, 1.0, 2.0])),
        "labels that are not numbers": parquet(**rows(label=[0.0, float("nan"), 1.0, 2.0])),
        "labels that are truths": parquet(**rows(label=[True, False, True, True])),
        "labels that are lists": parquet(**rows(label=[[0], [1], [2], [3]])),
        "labels that are objects": parquet(**rows(label=[{"a": 0}] * 4)),
        "labels that are bytes": parquet(**rows(label=[b"a"] * 4)),
        "labels that are times": parquet(**rows(label=pa.array([0, 1, 2, 3], pa.timestamp("s")))),
        "empty": b"",
        "text": b"image,label\n",
        "the mark alone": b"PAR1",
        "the mark twice": b"PAR1PAR1",
        "a footer beyond the file": good[:-8] + b"\xff\xff\xff\x7fPAR1",
        "no footer": good[:-8],
        "zeros within": good[:40] + bytes(200) + good[240:],
        "zeros in the footer": good[:-300] + bytes(100) + good[-200:],
        "notes of datasets that are no JSON": _noted(b"{"),
        "notes of datasets of another form": _noted(b'{"info": {"features": 5}}'),
        "notes of datasets of no known type": _noted(b'{"info": {"features": {"image": {"_type": "?"}}}}'),
    }
    for cut in (10, 50, 90, 99):
        bad[f"cut off at {cut} %"] = good[: len(good) * cut // 100]
    for name, data in bad.items():
        yield Case(f"table: {name}", "classification", partial(_table, data))
    for text in (b"[]", b'{"info": {"features": {"a": {"dtype": "int64", "_type": "Value"}}}}'):
        harmless = "notes on other columns are none on these"
        yield Case(f"table: notes {text.decode()}", "classification", partial(_table, _noted(text)), harmless)
    for kind in NOT_FILES:
        yield Case(f"table: {kind}", "classification", partial(_table, kind))
    yield Case("tables that differ", "classification", partial(_tables, good, bad["labels that are bytes"]))


def _noted(text: bytes) -> bytes:
    """A table with the notes that the package `datasets` keeps in a file."""
    file = BytesIO()
    pq.write_table(pa.table(rows()).replace_schema_metadata({b"huggingface": text}), file)
    return file.getvalue()


def _table(given: bytes | str, root: Path) -> str:
    _set(root / "x.parquet", given)
    return str(root / "x.parquet")


def _tables(one: bytes, other: bytes, root: Path) -> str:
    place(root / "a.parquet", one)
    place(root / "b.parquet", other)
    return str(root)


def dense_tables() -> Iterator[Case]:
    """Tables of masks, and of boxes."""
    image = {"bytes": png(), "path": None}
    mask = {"bytes": png("L"), "path": None}
    for name, columns in {
        "no masks": {},
        "masks that are null": {"mask": [mask, None]},
        "masks that have colours": {"mask": [image, image]},
        "masks of another size": {"mask": [{"bytes": png("L", (9, 9)), "path": None}, mask]},
        "masks that are text": {"mask": [{"bytes": b"x", "path": None}, mask]},
        "masks that are numbers": {"mask": [1, 2]},
    }.items():
        data = parquet(image=[image, image], **columns)
        yield Case(f"table: {name}", "segmentation", partial(_table, data), options=("--data-option", "num_classes=5"))
    right: dict[str, Any] = {"bbox": [[1.0, 2.0, 3.0, 4.0]], "category": [1]}
    for name, objects in {
        "no objects": None,
        "objects that are null": [right, None],
        "objects that are numbers": [1, 2],
        "no boxes": [{"category": [1]}] * 2,
        "boxes that are null": [right, {"bbox": None, "category": [1]}],
        "a box that is null": [right, {"bbox": [None], "category": [1]}],
        "a side that is null": [right, {"bbox": [[1.0, 2.0, None, 4.0]], "category": [1]}],
        "a side that is not a number": [right, {"bbox": [[1.0, 2.0, float("nan"), 4.0]], "category": [1]}],
        "a side that is infinite": [right, {"bbox": [[1.0, 2.0, float("inf"), 4.0]], "category": [1]}],
        "a side that is negative": [right, {"bbox": [[1.0, 2.0, -3.0, 4.0]], "category": [1]}],
        "a side that is zero": [right, {"bbox": [[1.0, 2.0, 0.0, 4.0]], "category": [1]}],
        "a side that is huge": [right, {"bbox": [[1.0, 2.0, 1e300, 4.0]], "category": [1]}],
        "boxes of three numbers": [right, {"bbox": [[1.0, 2.0, 3.0]], "category": [1]}],
        "boxes of texts": [{"bbox": [["a", "b", "c", "d"]], "category": [1]}] * 2,
        "boxes of truths": [{"bbox": [[False, False, True, True]], "category": [1]}] * 2,
        "boxes that are one list": [{"bbox": [1.0, 2.0, 3.0, 4.0], "category": [1]}] * 2,
        "no categories": [{"bbox": [[1.0, 2.0, 3.0, 4.0]]}] * 2,
        "categories that are null": [right, {"bbox": [[1.0, 2.0, 3.0, 4.0]], "category": [None]}],
        "categories beyond the classes": [right, {"bbox": [[1.0, 2.0, 3.0, 4.0]], "category": [5]}],
        "categories that are fractions": [{"bbox": [[1.0, 2.0, 3.0, 4.0]], "category": [0.5]}] * 2,
        "categories that are texts": [{"bbox": [[1.0, 2.0, 3.0, 4.0]], "category": ["a"]}] * 2,
        "categories without lists": [{"bbox": [[1.0, 2.0, 3.0, 4.0]], "category": 1}] * 2,
        "fewer categories than boxes": [right, {"bbox": [[1.0, 2.0, 3.0, 4.0]] * 2, "category": [1]}],
    }.items():
        data = parquet(image=[image, image], **({} if objects is None else {"objects": objects}))
        yield Case(f"table: {name}", "detection", partial(_table, data), options=("--data-option", "num_classes=5"))
    for name, sides in {"negative": -5, "zero": 0, "others": HEIGHT + 1, "huge": 2**62}.items():
        sizes = {"height": [HEIGHT, sides], "width": [WIDTH, WIDTH]}
        data = parquet(image=[image, image], objects=[right, right], **sizes)
        options = ("--data-option", "num_classes=5")
        yield Case(f"table: heights that are {name}", "detection", partial(_table, data), options=options)


# ---- folders and lists -----------------------------------------------------------------------------------------------


def folders() -> Iterator[Case]:
    """Folders of one folder per class."""
    every = {f"{name}/a.png": png() for name in NAMES}
    hidden = {".hidden/a.png": b"", f"{NAMES[0]}/.a.png": b"", f"{NAMES[0]}/notes.txt": b"x", "notes.txt": b"x"}
    for name, files, harmless in (
        ("empty", {}, ""),
        ("hidden files alone", {".a/a.png": png()}, ""),
        ("images without classes", {"a.png": png()}, ""),
        ("a class without images", {**every, "empty/notes.txt": b""}, ""),
        ("classes and splits", {**every, "train/gnu/a.png": png()}, ""),
        ("six classes of five", {**every, "gnu/a.png": png()}, ""),
        ("text named .png", {**every, "cat/b.png": b"text"}, ""),
        ("one class", {"cat/a.png": png()}, "a part of a data set may hold one class"),
        ("hidden files", {**every, **hidden}, "hidden files and notes are passed over"),
        ("upper case", {f"{name}/A.PNG": png() for name in NAMES}, "the suffix may be written so"),
    ):
        yield Case(f"folder: {name}", "classification", partial(_tree, files), harmless)
    for name in ("imagenet", "nabirds", "nus_wide", "voc", "ade20k", "cityscapes", "masks", "webdataset", "coco"):
        task = "segmentation" if name in ("voc", "ade20k", "cityscapes", "masks") else "classification"
        options = ("--split", "test") if name == "nabirds" else ()
        for what, below in {"an empty folder": "", "no folder": "none", "a file": "x"}.items():
            write = partial(_tree, {"x": b"x"} if below == "x" else {}, reader=name, below=below)
            yield Case(f"{name} of {what}", task, write, options=options)


def _tree(files: dict[str, bytes], root: Path, reader: str = "", below: str = "") -> str:
    for name, data in files.items():
        place(root / name, data)
    return f"{reader}{':' if reader else ''}{root / below}"


_LABELS = str(NAMES)
NUS_WIDE = f'filepath,label,split\na.png,"{_LABELS}",val\n'

BIRDS = {
    "images.txt": "1 a.png\n2 a.png\n",
    "image_class_labels.txt": "1 3\n2 4\n",
    "train_test_split.txt": "1 0\n2 1\n",
    "classes.txt": "3 cat\n4 cow\n",
}
VOC = "ImageSets/Segmentation/val.txt"


def lists() -> Iterator[Case]:
    """Data sets that text files describe, and archives."""
    for name, text in {
        "no header": NUS_WIDE.partition("\n")[2],
        "a name that is not there": NUS_WIDE.replace("a.png", "none.png"),
        "an empty name": NUS_WIDE.replace("a.png", ""),
        "no split": NUS_WIDE.replace("val", "x"),
        "labels that are no list": NUS_WIDE.replace(_LABELS, "cat"),
        "labels nested deep": NUS_WIDE.replace(_LABELS, "[" * 5000 + "]" * 5000),
        "labels that are numbers": NUS_WIDE.replace(_LABELS, "[1]"),
        "a zero": NUS_WIDE.replace("a.png", "a\0.png"),
        "a quote that does not end": NUS_WIDE.replace("a.png", '"a.png'),
        "a cell beyond all bounds": NUS_WIDE.replace("a.png", "a" * 200_000),
        "the header alone": NUS_WIDE.partition("\n")[0],
    }.items():
        files = {"nus_wid_data.csv": text.encode(), "a.png": png()}
        yield Case(f"nus_wide: {name}", "classification", partial(_tree, files, reader="nus_wide"))
    for file in BIRDS:
        for name, data in {"empty": b"", "one value": b"1\n", "letters": b"1 x\n2 y\n", "bytes": b"1 \xff\n"}.items():
            files = {key: text.encode() for key, text in BIRDS.items()} | {file: data, "images/a.png": png()}
            write = partial(_tree, files, reader="nabirds")
            yield Case(f"nabirds: {file}: {name}", "classification", write, options=("--split", "test"))
    for name, data in {"empty": b"", "a name that is not there": b"b\n", "bytes": b"\xff", "a zero": b"a\0\n"}.items():
        files = {VOC: data, "JPEGImages/a.jpg": png(), "SegmentationClass/a.png": png("L")}
        yield Case(f"voc: {name}", "segmentation", partial(_tree, files, reader="voc"))
    for name, data in {"empty": b"", "text": b"x" * 2000, "zeros": bytes(2000)}.items():
        yield Case(f"webdataset: {name}", "classification", partial(_tree, {"x.tar": data}, reader="webdataset"))
    yield Case("webdataset: a pipe", "classification", _archive_pipe)


def _archive_pipe(root: Path) -> str:
    os.mkfifo(root / "x.tar")
    return f"webdataset:{root}/x.tar"
