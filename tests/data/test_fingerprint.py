"""Datasets that differ have other fingerprints, however they are kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from vitrim.data import DataError, DetectionDataset, ImageDataset, MultiLabelDataset, load_images, stream_images
from vitrim.data import fingerprint as module
from vitrim.data.fingerprint import fingerprint

COUNT = 12


def image(seed: int) -> bytes:
    file = BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(file, "bmp")
    return file.getvalue()  # all of one size


def table(folder: Path, seeds: list[int], labels: list[int], name: str = "train.parquet") -> Path:
    rows = {"image": [{"bytes": image(seed), "path": None} for seed in seeds], "label": labels}
    folder.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / name)
    return folder


def tree(folder: Path, seeds: list[int], labels: list[int]) -> Path:
    for place, (seed, label) in enumerate(zip(seeds, labels, strict=True)):
        (folder / f"class{label}").mkdir(parents=True, exist_ok=True)
        (folder / f"class{label}" / f"{place:03d}.bmp").write_bytes(image(seed))
    return folder


def in_memory(folder: Path, seeds: list[int], labels: list[int]) -> Any:
    return ImageDataset([image(seed) for seed in seeds], labels)


def in_table(folder: Path, seeds: list[int], labels: list[int]) -> Any:
    return load_images(table(folder, seeds, labels))


def in_files(folder: Path, seeds: list[int], labels: list[int]) -> Any:
    return load_images(tree(folder, seeds, labels))


def in_stream(folder: Path, seeds: list[int], labels: list[int]) -> Any:
    return stream_images(table(folder, seeds, labels))


KINDS = {"memory": in_memory, "table": in_table, "files": in_files, "stream": in_stream}
SEEDS, LABELS = list(range(COUNT)), [place % 3 for place in range(COUNT)]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_one_image_or_one_label_is_enough(make: Callable[..., Any], tmp_path: Path) -> None:
    seeds, labels = [*SEEDS[:-1], 99], [*LABELS[:-1], 0]
    made = [
        make(tmp_path / str(n), *args)
        for n, args in enumerate([(SEEDS, LABELS), (SEEDS, LABELS), (seeds, LABELS), (SEEDS, labels)])
    ]
    first, same, *others = map(fingerprint, made)
    assert first == same  # elsewhere
    assert len({first, *others}) == 3


@pytest.mark.parametrize("kind", ["memory", "table", "files"])
def test_the_order_and_a_part_count(kind: str, tmp_path: Path) -> None:
    data = KINDS[kind](tmp_path / "a", SEEDS, LABELS)
    parts = [data.part(range(6)), data.part(range(6, 12)), data.part([1, 0, *range(2, 6)]), data.part(range(6)), data]
    found = [fingerprint(part) for part in parts]
    assert found[0] == found[3]
    assert len(set(found)) == 4


def test_a_large_table_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last image, labels and sizes still count."""
    monkeypatch.setattr(module, "MOST_BYTES", 10)
    monkeypatch.setattr(module, "SAMPLED", 2)
    ways = {"same": SEEDS, "between": [*SEEDS[:5], 99, *SEEDS[6:]], "last": [*SEEDS[:-1], 99]}
    first, *others = (fingerprint(in_table(tmp_path / name, seeds, LABELS)) for name, seeds in ways.items())
    assert [one == first for one in others] == [True, False]


def test_several_labels_count() -> None:
    one, other = (MultiLabelDataset([b"a"], [row]) for row in ([0, 1], [1, 1]))
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one.part([0])).isalnum()


def test_a_part_has_all_classes_and_its_own_images(tmp_path: Path) -> None:
    data = in_files(tmp_path, SEEDS, LABELS)
    part = data.part([11, 0])
    assert (len(part), part.num_classes, part.class_names) == (2, 3, data.class_names)
    assert part.labels.tolist() == [data.labels[11], data.labels[0]]
    assert bool((part[1][0] == data[0][0]).all())
    part.transform = lambda _: None
    assert data[0][0] is not None
    with pytest.raises(DataError, match="no images in this part"):
        data.part([])
    assert ImageDataset([b"a", b"b"], [0, 6]).part([0]).num_classes == 7


@pytest.mark.parametrize("change", ["boxes", "labels", "crowd", "area"])
def test_everything_about_a_box_counts(change: str) -> None:
    given: dict[str, Any] = {"boxes": [[[0, 0, 2, 2]]], "labels": [[0]], "crowd": [[False]], "area": [[3.0]]}
    other = {"boxes": [[[0, 0, 2, 3]]], "labels": [[1]], "crowd": [[True]], "area": [[4.0]]}

    def made(values: dict[str, Any]) -> DetectionDataset:
        rest = {name: value for name, value in values.items() if name not in ("boxes", "labels")}
        return DetectionDataset([image(0)], values["boxes"], values["labels"], num_classes=2, **rest)

    assert fingerprint(made(given)) == fingerprint(made(dict(given)))
    assert fingerprint(made(given)) != fingerprint(made({**given, change: other[change]}))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0.bmp")  # reading it would wait without end
    with pytest.raises(DataError, match=r"^cannot read .*0.bmp: it is no file but a folder, a pipe or a device$"):
        fingerprint(ImageDataset([tmp_path / "0.bmp"], [0]))
