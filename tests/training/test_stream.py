"""Runs whose training images are a stream: they are resumed, shared out and refused as all others are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from image_files import plain_images, write_plain
from tiny_training import CLASSES, PER_CLASS, recipe, trainer
from vitrim.data import DataError, load_images, stream_images
from vitrim.errors import VitrimError
from vitrim.training.loop import Trainer

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` sleeps for five seconds after each shuffled pass, against crashes in remote file systems."""
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)


@pytest.fixture(scope="module")
def tables(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images as parquet, those to train on in two files."""
    folder = tmp_path_factory.mktemp("tables")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    for split in PER_CLASS:
        found = load_images(images, split=split)
        rows = [
            {"image": {"bytes": Path(path).read_bytes(), "path": None}, "label": int(label)}
            for path, label in zip(found.images, found.labels, strict=True)
        ]
        table = datasets.Dataset.from_list(rows, features=features)
        parts = 2 if split == "train" else 1
        for part in range(parts):
            table.shard(parts, part).to_parquet(folder / f"{split}-{part}.parquet")
    return folder


def test_a_stream_may_keep_the_order_of_its_table(tables: Path, tmp_path: Path) -> None:
    run = trainer(recipe(stream=True, augment={"crop": "squash", "hflip": 0.0, "shuffle": False}), tables, tmp_path)
    labels = [label for _, targets in run._loader(6) for label in targets.tolist()]
    expected = [index for index in range(len(CLASSES)) for _ in range(PER_CLASS["train"])]
    assert labels == 2 * expected


def test_a_stream_reads_the_columns_that_are_asked_for(images: Path, tmp_path: Path) -> None:
    found = load_images(images, split="train")
    rows = [
        {"image": {"bytes": Path(path).read_bytes(), "path": None}, "fine": 0, "coarse": int(label)}
        for path, label in zip(found.images, found.labels, strict=True)
    ]
    labels = {name: datasets.ClassLabel(names=names) for name, names in (("fine", ["one"]), ("coarse", list(CLASSES)))}
    features = datasets.Features({"image": datasets.Image(), **labels})
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "train-0.parquet")
    options = {"stream": True, "eval_split": None, "data_options": {"label_column": "coarse"}}
    run = trainer(recipe(**options), tmp_path, tmp_path / "run")
    assert {label for _, targets in run._loader(3) for label in targets.tolist()} == set(range(len(CLASSES)))
    with pytest.raises(VitrimError, match="unknown option of stream_images 'ignore'"):
        trainer(recipe(**{**options, "data_options": {"ignore": 255}}), tmp_path, tmp_path / "other")


def test_every_image_comes_once_in_an_epoch_whoever_reads_it(tables: Path, tmp_path: Path) -> None:
    run = trainer(recipe(stream=True, augment={"crop": "squash", "hflip": 0.0}), tables, tmp_path / "run")
    seen = [tuple(image.flatten().tolist()) for images, _ in run._loader(3) for image in images]
    assert len(set(seen)) == len(CLASSES) * PER_CLASS["train"]
    again = [tuple(image.flatten().tolist()) for images, _ in run._loader(6) for image in images][len(seen) :]
    assert (set(again) == set(seen), again == seen) == (True, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"augment": {"repeats": 2}}, "a stream gives every image once"),
        ({"task": "multilabel", "loss": {"name": "bce"}}, "task multilabel"),
    ],
)
def test_what_a_stream_cannot_be_is_refused(
    changes: dict[str, Any], message: str, tables: Path, tmp_path: Path
) -> None:
    with pytest.raises(VitrimError, match=message):
        trainer(recipe(stream=True, **changes), tables, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_labels_without_names_are_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_plain(tmp_path / f"{split}.parquet", image=plain_images(8), label=[0, 1] * 4)
    with pytest.raises(DataError, match="labels without class names"):
        trainer(recipe(stream=True), tmp_path, tmp_path / "run")


def test_evaluations_are_not_streamed(tables: Path, tmp_path: Path) -> None:
    run = trainer(recipe(), tables, tmp_path / "run")
    stream = stream_images(tables, split="test")
    with pytest.raises(VitrimError, match="evaluations need images that can be read in any order"):
        Trainer(run.resolved, run.learner.model, run.train_data, stream, run.accelerator, run.running)


def test_a_stream_of_unknown_length_is_refused(tables: Path, tmp_path: Path) -> None:
    run = trainer(recipe(), tables, tmp_path / "run")
    stream = stream_images(tables, split="train")
    stream.length = None
    with pytest.raises(VitrimError, match="does not say how many images it has"):
        Trainer(run.resolved, run.learner.model, stream, None, run.accelerator, run.running)


def test_a_folder_of_images_is_no_stream(images: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="only tables and Hub datasets can be streamed"):
        trainer(recipe(stream=True), images, tmp_path / "run")
