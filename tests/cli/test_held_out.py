"""Whether the images of ``vitrim tune --check`` are those that the search read: a report must say so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vitrim.cli import held_out
from vitrim.cli.held_out import HeldOut
from vitrim.cli.setup import Data


@pytest.mark.parametrize(
    ("given", "split", "same"),
    [
        ("images", "train", True),
        ("./images", "train", True),
        ("ABSOLUTE/images", "train", True),
        ("link", "train", True),
        ("images:train", "train", True),
        ("images:test", "train", False),
        ("images:test", "test", True),
        ("others", "train", False),
        ("others:train", "train", False),
        ("images/below", "train", False),
    ],
)
def test_the_same_images_are_told(
    given: str, split: str, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("images")
    opened: list[tuple[str, str | None]] = []

    def task_and_data(dense: object, model: object, data: Data, limit: object) -> tuple[None, Any]:
        opened.append((str(data.source), data.split))
        return None, SimpleNamespace(split=data.split or "train")  # a folder's own split

    monkeypatch.setattr(held_out, "task_and_data", task_and_data)
    given = given.replace("ABSOLUTE", str(tmp_path))
    data: Any = Data(source="images", split=split)
    found = HeldOut.open(given, None, None, data, SimpleNamespace(split=split))  # type: ignore[arg-type]
    assert found.same is same
    assert found.source == given
    source, _, wanted = given.partition(":")
    assert opened == [(source, wanted or None)]


@pytest.mark.parametrize("given", ["a:b/images", "a:b\\images"])
def test_a_colon_of_a_path_is_no_split(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, str | None]] = []

    def task_and_data(dense: object, model: object, data: Data, limit: object) -> tuple[None, Any]:
        opened.append((str(data.source), data.split))
        return None, SimpleNamespace(split="train")

    monkeypatch.setattr(held_out, "task_and_data", task_and_data)
    data: Any = Data(source=given, split="train")
    assert HeldOut.open(given, None, None, data, SimpleNamespace(split="train")).same  # type: ignore[arg-type]
    assert opened == [(given, None)]
