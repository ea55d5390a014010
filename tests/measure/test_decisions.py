"""Files of arrays that are damaged or hostile: refused by what they say of themselves, before an array is read.

And the order of what is recorded.
"""

from __future__ import annotations

import io
import json
import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from vitrim.errors import VitrimError
from vitrim.measure.contestants import contestants
from vitrim.measure.decisions import DecisionsProbe, narrowed, read_arrays, widened, write_arrays
from vitrim.measure.probes import Predictions
from vitrim.measure.records import Batch
from vitrim.measure.run import Measurement
from vitrim.tasks import make_task

HEADER = {"format": 1, "method": "tome"}


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, np.asarray(array))
    return out.getvalue()


def claim(text: str, body: bytes = b"") -> bytes:
    """An array whose header says ``text``."""
    line = text.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line + body


GOOD = {"header.npy": npy(json.dumps(HEADER)), "ids.npy": npy(np.arange(4))}


def packed(path: Path, entries: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytearray:
    with zipfile.ZipFile(path, "w", method) as package:
        for name, content in entries.items():
            package.writestr(name, content)
    return bytearray(path.read_bytes())


CLAIMS = {
    "72 TiB": claim("{'descr': '<f8', 'fortran_order': False, 'shape': (9895604649984,), }", bytes(32)),
    "more than there is": claim("{'descr': '<f8', 'fortran_order': False, 'shape': (5,), }", bytes(32)),
    "less than there is": claim("{'descr': '<f8', 'fortran_order': False, 'shape': (3,), }", bytes(32)),
    "negative": claim("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -4), }", bytes(32)),
    "no bytes each": claim("{'descr': '<U0', 'fortran_order': False, 'shape': (9895604649984,), }"),
    "fields": claim("{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (4,), }", bytes(32)),
    "objects": claim("{'descr': '|O', 'fortran_order': False, 'shape': (4,), }", bytes(32)),
    "text": npy(["a", "b"]),
    "complex": npy([1j]),
    "nested": claim("(" * 4000),
    "nested deeper": claim("[" * 60000),
    "no header": b"\x93NUMPY\x01\x00",
    "no magic": b"no array",
    "a later version": b"\x93NUMPY\x09\x00" + bytes(200),
    "nothing": b"",
}
HEADERS = {
    "no text": npy(1),
    "several": npy(["{}", "{}"]),
    "no JSON": npy("{"),
    "nested JSON": npy("[" * 200_000),
    "half a character": npy(json.dumps({**HEADER, "method": "\ud800"})),
    "no mapping": npy("[]"),
}


def refused(path: Path) -> str:
    """The one line that refuses a file, for which next to nothing was held in memory."""
    tracemalloc.start()
    try:
        with pytest.raises(VitrimError) as caught:
            read_arrays(path, "record", 1)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()
    return str(caught.value)


@pytest.mark.parametrize("claimed", CLAIMS)
def test_arrays_are_what_they_say(claimed: str, tmp_path: Path) -> None:
    packed(tmp_path / "one.npz", {**GOOD, "kl.npy": CLAIMS[claimed]})
    assert "is no record: " in refused(tmp_path / "one.npz")


@pytest.mark.parametrize("kind", HEADERS)
def test_headers_that_are_none(kind: str, tmp_path: Path) -> None:
    packed(tmp_path / "one.npz", {**GOOD, "header.npy": HEADERS[kind]})
    assert "is no record: " in refused(tmp_path / "one.npz")


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    """Of sizes that are true: 2 GiB of zeros take 2 MB. Each array is small enough, all of them are not."""
    part = 2**20
    with zipfile.ZipFile(tmp_path / "one.npz", "w", zipfile.ZIP_DEFLATED) as package:
        for name, content in GOOD.items():
            package.writestr(name, content)
        package.writestr("kl.npy", npy(np.zeros(part)))
    raw = bytearray((tmp_path / "one.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "one.npz") as package:
        size = package.getinfo("kl.npy").file_size
    for count in range(2):  # the directory of the archive says how large an entry is: here, and in front of it
        place = raw.index(size.to_bytes(4, "little"), 0 if count == 0 else place + 4)  # noqa: F821
        raw[place : place + 4] = (2**31 - 200).to_bytes(4, "little")
    (tmp_path / "one.npz").write_bytes(raw)
    assert "its arrays would take more than 2 GiB" in refused(tmp_path / "one.npz")


def edited(change: Callable[[bytearray, int], None]) -> Callable[[Path], None]:
    """Damage the last entry: ``change`` gets the bytes, and where the archive's directory has the entry."""

    def damage(path: Path) -> None:
        raw = packed(path, GOOD)
        change(raw, raw.rindex(b"PK\x01\x02"))
        path.write_bytes(raw)

    return damage


def unknown_compression(raw: bytearray, entry: int) -> None:
    raw[entry + 10 : entry + 12] = (98).to_bytes(2, "little")


def encrypted(raw: bytearray, entry: int) -> None:
    raw[entry + 8] |= 1


def other_data(raw: bytearray, entry: int) -> None:
    raw[entry - 12] ^= 0xFF


def twice(path: Path) -> None:
    packed(path, GOOD)
    with zipfile.ZipFile(path, "a") as package, pytest.warns(UserWarning, match="Duplicate name"):
        package.writestr("ids.npy", GOOD["ids.npy"])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "unknown compression": edited(unknown_compression),
    "encrypted": edited(encrypted),
    "other data": edited(other_data),
    "twice": twice,
    "no header": lambda path: np.savez(path, ids=np.arange(3)),
    "lzma": lambda path: packed(path, GOOD, zipfile.ZIP_LZMA) and None,
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_archives_that_are_damaged(kind: str, tmp_path: Path) -> None:
    DAMAGES[kind](tmp_path / "one.npz")
    assert "one.npz" in refused(tmp_path / "one.npz")


def test_what_is_good_is_read(tmp_path: Path) -> None:
    packed(tmp_path / "one.npz", GOOD, zipfile.ZIP_STORED)
    header, arrays = read_arrays(tmp_path / "one.npz", "record", 1)
    assert header == HEADER
    assert arrays["ids"].tolist() == [0, 1, 2, 3]
    large = {"none": np.zeros((0, 3)), "flags": np.ones(2, bool), "half": np.ones((2, 2), np.float16, order="F")}
    write_arrays(tmp_path / "two.npz", HEADER, large)
    again = read_arrays(tmp_path / "two.npz", "record", 1)[1]
    assert all(np.array_equal(again[name], array) and again[name].dtype == array.dtype for name, array in large.items())


@pytest.mark.parametrize("tokens", [2, 254, 255, 256, 257, 65534, 65535, 65536, 65537])
def test_what_is_narrowed_is_widened_again(tokens: int) -> None:
    """Where the last token and the mark for none would share a number, the next type is taken."""
    source = np.array([[-1, *range(tokens - 1)], [tokens - 1] * tokens], np.int32)
    narrow = narrowed(source)
    assert np.array_equal(widened(narrow, int(np.iinfo(narrow.dtype).max)), source)
    assert narrow.itemsize == (1 if tokens < 256 else 2 if tokens < 65536 else 4) or tokens in (255, 65535)


# ---- the order of records --------------------------------------------------------------------------------------------


def seen(order: list[list[int]]) -> Measurement:
    """Records of a tiny model on six images, in batches of these."""
    task = make_task("classification", 5)
    models = contestants(tiny.HOSTS["vit"](), ["tome:r=4"], task)
    measurement = Measurement(models, [DecisionsProbe(), Predictions()], task)
    images, labels = tiny.images(6), torch.arange(6) % 5
    for index, places in enumerate(order):
        ids = torch.tensor(places)
        measurement.update(Batch(images[ids], labels[ids], 10 * ids, index))
    return measurement


def test_records_are_in_the_order_of_the_dataset_whatever_that_of_the_batches() -> None:
    """Processes read batches in turn, so what they gather is not in order."""
    given, ordered = ([[4, 1], [5, 3], [0, 2]], [[0, 1], [2, 3], [4, 5]])
    (one, other) = (seen(order).findings().gauges[1] for order in (given, ordered))
    found, expected = one[0].decisions(), other[0].decisions()
    assert found.ids.tolist() == [0, 10, 20, 30, 40, 50]
    assert len(np.unique(found.source, axis=0)) == 6  # every image has its own
    assert np.array_equal(found.source, expected.source)
    assert np.array_equal(found.num_tokens, expected.num_tokens)
    table, like = one[1].table(), other[1].table()
    assert table["ids"] == found.ids.tolist()
    assert table["labels"] == [0, 1, 2, 3, 4, 0]
    assert table["classes"] == like["classes"]
    assert table["probabilities"] == pytest.approx(like["probabilities"])
