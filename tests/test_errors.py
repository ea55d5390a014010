"""Messages are one line that can be read, whatever was given."""

from __future__ import annotations

import copy
import pickle

import pytest

from vitrim.data import DataError
from vitrim.errors import LONGEST_LINE, MissingPackageError, UnsupportedModelError, VitrimError, one_line

KINDS = [VitrimError, UnsupportedModelError, MissingPackageError, DataError]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no folder 'a'", "no folder 'a'"),
        ("two\n  lines\r\nhere", "two lines here"),
        ("a\x00b\x1b[31m", "a\\x00b\\x1b[31m"),
        ("Größe zu groß: 模型", "Größe zu groß: 模型"),
        ("see " + "/long" * 30, "see " + "/long" * 30),
    ],
    ids=["plain", "lines", "control", "letters", "path"],
)
def test_messages(kind: type[VitrimError], text: str, shown: str) -> None:
    error = kind(text)
    assert str(error) == shown
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(other), str(other)) == (kind, shown)


def test_long_lines_are_cut_in_the_middle() -> None:
    text = one_line("start " + "word " * 1000 + "end")
    assert text.startswith("start word")
    assert text.endswith("word end")
    assert len(text) <= LONGEST_LINE
    assert one_line(text) == text
