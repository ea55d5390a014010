"""What the results of a run say about the images that it learned from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from vitrim.models.references import source_of, trained_on
from vitrim.weights import RESULT


@pytest.mark.parametrize(
    ("source", "split", "known"),
    [
        ("images", "train", True),
        ("images", "val", False),
        ("others", "train", False),
        ("imagenet:images", "train", False),
    ],
)
def test_a_run_knows_the_images_that_it_learned_from(
    source: str, split: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    learned = source_of(SimpleNamespace(source=tmp_path / "images", split="train"))  # absolute, unlike below
    (tmp_path / RESULT).write_text(json.dumps({"trained_on": learned}))
    given = SimpleNamespace(source=source, split=split)
    assert bool(trained_on(f"run:{tmp_path}", given)) is known
    assert not trained_on("vit_tiny_patch16_224", given)


@pytest.mark.parametrize(("source", "split"), [("images/train", None), ("images", "train")])
def test_a_split_that_is_a_folder_is_known_by_either_name(source: str, split: str | None, tmp_path: Path) -> None:
    (tmp_path / "images" / "train").mkdir(parents=True)
    learned = source_of(SimpleNamespace(source=tmp_path / "images", split="train"))
    (tmp_path / RESULT).write_text(json.dumps({"trained_on": learned}))
    assert trained_on(f"run:{tmp_path}", SimpleNamespace(source=tmp_path / source, split=split))


def test_results_of_runs_without_a_source_say_nothing(tmp_path: Path) -> None:
    (tmp_path / RESULT).write_text(json.dumps({"classes": ["a"]}))
    assert trained_on(f"run:{tmp_path}", SimpleNamespace(source="images", split=None)) == []
