"""The file of a record, and which records can be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitrim.analysis.output import read_analysis, write_records, write_tables
from vitrim.analysis.record import Record, check_comparable, distinct, titled
from vitrim.errors import VitrimError

HEADER = {
    "method": "topk",
    "kind": "prune",
    "soft": False,
    "num_prefix": 1,
    "num_layers": 3,
    "grid": [2, 2],
    "blocks": [1],
    "feature_blocks": [0, 2],
    "model": "tiny",
}


def record(images: int = 5, **header: Any) -> Record:
    generator = np.random.default_rng(images)
    source = np.tile(np.array([0, 1, -1, 2, -1], np.int32), (images, 1, 1))
    arrays = {
        "ids": 300 * np.arange(images),
        "batch": np.arange(images) // 2,
        "targets": generator.integers(0, 10, images),
        "source": source,
        "kept": np.packbits(source[..., 1:] >= 0, axis=-1),
        "num_tokens": np.tile([5, 3, 3], (images, 1)),
        "features": generator.normal(size=(images, 2, 4)).astype(np.float16),
        "logits": generator.normal(size=(images, 10)).astype(np.float16),
    }
    arrays["first"] = arrays["logits"].argmax(1)
    return Record({**HEADER, **header}, arrays)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    one = record()
    one.save(tmp_path / "new" / "one.npz")
    again = Record.load(tmp_path / "new" / "one.npz")
    assert again.header == one.header
    assert again.arrays.keys() == one.arrays.keys()
    for name, array in one.arrays.items():
        assert np.array_equal(again.arrays[name], array), name
    with np.load(tmp_path / "new" / "one.npz", allow_pickle=False) as stored:
        widths = {name: stored[name].dtype for name in ("ids", "source", "targets", "features")}
        assert json.loads(str(stored["header"]))["format"] == 1
    assert widths == {"ids": np.uint16, "source": np.uint8, "targets": np.uint8, "features": np.float16}


def test_more_tokens_than_a_byte_counts(tmp_path: Path) -> None:
    source = np.arange(-1, 299, dtype=np.int32).reshape(1, 1, 300)
    many = Record({**HEADER, "grid": [13, 23]}, {"ids": np.zeros(1, int), "source": source})
    many.save(tmp_path / "many.npz")
    assert np.array_equal(Record.load(tmp_path / "many.npz").arrays["source"], source)


def test_what_a_record_says() -> None:
    one = record()
    assert one.labels()[0, 0].tolist() == [0, -1, 1, -1]
    assert one.kept()[0, 0].tolist() == [True, False, True, False]
    assert np.array_equal(one.feature(2), one.arrays["features"][:, 1])
    assert np.array_equal(one.correct(), one.arrays["logits"].argmax(1) == one.arrays["targets"])
    assert one.name == "topk"
    assert [record.name for record in titled([one, record(model="small")])] == ["topk on tiny", "topk on small"]
    paths = (("data/cifar10.parquet", "data/camvid.parquet"), ("a/test", "b/test"))  # the last parts tell them apart
    named = [[one.name for one in titled([record(data=data) for data in pair])] for pair in paths]
    assert named == [["topk with cifar10", "topk with camvid"], ["topk with a/test", "topk with b/test"]]
    with pytest.raises(VitrimError, match="two records of topk: give one"):
        titled([one, record(4)])
    assert distinct([one, record(), other := record(4)]) == [one, other]
    assert (
        len(distinct([one, record(model="small"), Record(one.header, {**one.arrays, "ids": one.arrays["ids"] + 1})]))
        == 3
    )
    several = Record(one.header, {**one.arrays, "targets": np.ones((5, 3))})
    assert several.correct() is None
    for ask, message in (
        (lambda: one.feature(1), r"no features after block 1; it has \[0, 2\]"),
        (lambda: one.feature(None), "has no features"),
        (lambda: Record(HEADER, {"ids": np.arange(2)}).labels(), "the record of topk has no patterns"),
    ):
        with pytest.raises(VitrimError, match=message):
            ask()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (record(4), "the record of topk was made on 4 other images than that of topk, 5"),
        (record(grid=[1, 4]), r"has grid \[1, 4\] and that of topk has \[2, 2\]"),
        (record(num_layers=12), "has num_layers 12"),
        (record(data="elsewhere"), "has data elsewhere"),
    ],
)
def test_records_that_cannot_be_compared(other: Record, message: str) -> None:
    with pytest.raises(VitrimError, match=message):
        check_comparable([record(), other])


def test_records_that_depend_on_their_batches() -> None:
    first = record(batch_dependent=True)
    other = Record(first.header, {**first.arrays, "batch": np.zeros(5, int)})
    check_comparable([first, first, Record(record().header, other.arrays)])
    with pytest.raises(VitrimError, match="decide by the whole batch"):
        check_comparable([first, other])


def test_files_that_are_no_records(tmp_path: Path) -> None:
    record().save(tmp_path / "good.npz")
    data = (tmp_path / "good.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(data[: len(data) // 2])
    (tmp_path / "empty.npz").write_bytes(b"")
    np.savez(tmp_path / "newer.npz", header=np.array(json.dumps({"format": 9})))
    np.savez(tmp_path / "other.npz", header=np.array(json.dumps({"format": 1})), ids=np.zeros(1))
    (tmp_path / "text.npz").write_text("no record")
    np.savez(tmp_path / "headless.npz", header=np.array("{}"))
    np.savez(tmp_path / "pickled.npz", header=np.array({"format": 1}, dtype=object))
    for name, message in (
        ("cut", "is no record of an analysis"),
        ("empty", "is no record of an analysis"),
        ("newer", "has format 9, this vitrim reads 1"),
        ("other", "it has no blocks, grid, kind, method"),
        ("pickled", "is no record of an analysis"),
        ("text", "is no record of an analysis: it is no .npz file, or was cut short"),
        ("headless", "is no record of an analysis: its header names no format"),
        ("none", "cannot read .*none.npz"),
    ):
        with pytest.raises(VitrimError, match=message):
            Record.load(tmp_path / f"{name}.npz")


DAMAGE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fewer images": ({}, {"source": record(3).arrays["source"]}, r"source has shape \(3, 1, 5\), expected 5, 1, 5"),
    "another grid": ({"grid": [3, 3]}, {}, r"source has shape \(5, 1, 5\), expected 5, 1, 10"),
    "fewer layers": ({"num_layers": 2, "feature_blocks": [0, 1]}, {}, r"num_tokens has shape \(5, 3\), expected 5, 2"),
    "fewer labels": ({}, {"targets": np.zeros(4)}, r"targets has shape \(4,\), expected 5"),
    "other features": ({"feature_blocks": [0]}, {}, r"features has shape \(5, 2, 4\), expected 5, 1"),
    "not a number": ({}, {"logits": np.full((5, 10), np.nan)}, "logits has values that are not finite numbers"),
    "a header of other kinds": ({"grid": 4}, {}, "its header is damaged"),
    "a number that is none": ({"num_layers": "many"}, {}, "its header is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_arrays_that_do_not_belong_together(damage: str, tmp_path: Path) -> None:
    header, arrays, message = DAMAGE[damage]
    good = record()
    Record({**good.header, **header}, {**good.arrays, **arrays}).save(tmp_path / "one.npz")
    with pytest.raises(VitrimError, match=f"is no record of an analysis: {message}"):
        Record.load(tmp_path / "one.npz")


def test_a_folder_holds_the_records_of_one_analysis(tmp_path: Path) -> None:
    write_records(tmp_path, [record(), record(method="tome")])
    write_tables(tmp_path, {}, {"complete": True})
    assert [one.method for one in read_analysis(tmp_path)] == ["tome", "topk"]
    write_records(tmp_path, [record(method="evit")])  # perhaps of other weights
    assert [one.method for one in read_analysis(tmp_path)] == ["evit"]


def test_an_analysis_that_was_stopped_is_not_compared(tmp_path: Path) -> None:
    write_records(tmp_path, [record()])
    write_tables(tmp_path, {}, {"complete": False})
    with pytest.raises(VitrimError, match="was stopped before all images were seen: run it again"):
        read_analysis(tmp_path)


HOSTILE: dict[str, list[Any]] = {
    "method": [None, ["topk"], 1],
    "kind": [None, {}],
    "num_layers": [None, -1, 0, 1.5, True, [], 10**30],
    "num_prefix": [-1, None, "1", False],
    "grid": [None, [2], [2, 2, 1], ["a", "b"], [2.0, 2.0], [4, True], [-2, -2], {}],
    "blocks": [None, ["a"], [3], [-1], [[1]], 1, [True]],
    "feature_blocks": [[0, 3], ["a", 1], "02", None],
    "feature_images": ["5", None, True],
    "model": [["tiny"], {}, 1],
    "split": [[], {}, 5],
    "data": [None, []],
    "bounds": [[1], None, "abc"],
    "thresholds": [[], 1],
    "soft": [None, 0, "no"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in HOSTILE.items() for value in values])
def test_entries_of_other_kinds(name: str, value: Any, tmp_path: Path) -> None:
    Record({**HEADER, name: value}, record().arrays).save(tmp_path / "one.npz")
    with pytest.raises(VitrimError, match=r"is no record of an analysis: (its header is damaged|source has)"):
        Record.load(tmp_path / "one.npz")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("source", lambda array: array + 3),  # one token too many
        ("kept", lambda array: array + np.uint16(300)),
        ("num_tokens", lambda array: array[..., None]),
        ("ids", lambda array: array.astype(float)),
        ("ids", lambda array: array[:, None]),
        ("features", lambda array: np.full(array.shape, 1e300)),  # infinite in the float32 that is computed in
        ("features", lambda array: array[:, :, 0]),
        ("logits", lambda array: array.argmax(1)),
        ("logits", lambda array: array.astype(np.int32)),
    ],
)
def test_arrays_of_other_kinds(name: str, change: Any, tmp_path: Path) -> None:
    good = record()
    Record(good.header, {**good.arrays, name: change(good.arrays[name])}).save(tmp_path / "one.npz")
    with pytest.raises(VitrimError, match="is no record of an analysis: "):
        Record.load(tmp_path / "one.npz")
