"""Exported files are moved to their places whole, and what a killed process left is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitrim.engines import exported
from vitrim.engines.exported import staged
from vitrim.errors import VitrimError

pytest.importorskip("fcntl")


def leftover(folder: Path, name: str) -> Path:
    """What an export has written when it is killed: the system released its lock."""
    left = folder / f".{name}.k1ll3d.partial"
    (left / "model").mkdir(parents=True)
    (left / "model" / "weights").write_bytes(b"23 MB")
    return left


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path: Path) -> None:
    own, other = leftover(tmp_path, "m"), leftover(tmp_path, "n")
    (tmp_path / ".m.settings.partial").write_text("a file of the user's")
    (tmp_path / ".m.link.partial").symlink_to(other, target_is_directory=True)
    with staged(tmp_path / "m.onnx") as place:
        assert not own.exists()
        place.write_text("graph")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".m.link.partial", ".m.settings.partial", ".n.k1ll3d.partial", "m.onnx"]
    assert (other / "model" / "weights").exists()


def test_an_export_that_runs_keeps_its_folder(tmp_path: Path) -> None:
    with staged(tmp_path / "m.onnx") as first:
        first.write_text("first")
        with staged(tmp_path / "m.onnx") as second:
            second.write_text("second")
        assert (tmp_path / "m.onnx").read_text() == "second"
        assert first.read_text() == "first"
    assert (tmp_path / "m.onnx").read_text() == "first"
    with pytest.raises(VitrimError, match="wrong"), staged(tmp_path / "m.onnx"):
        raise VitrimError("wrong")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_a_name_with_signs_of_patterns_is_a_name(tmp_path: Path) -> None:
    own, other = leftover(tmp_path, "m[1]*"), leftover(tmp_path, "m1")
    with staged(tmp_path / "m[1]*.onnx") as place:
        place.write_text("graph")
    assert (own.exists(), other.exists()) == (False, True)


def test_a_folder_that_another_export_removed_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, made = exported._locked, []

    def locked(folder: Path) -> int | None:
        made.append(folder)
        if len(made) == 1:
            folder.rmdir()
        return lock(folder)

    monkeypatch.setattr(exported, "_locked", locked)
    with staged(tmp_path / "m.onnx") as place:
        place.write_text("graph")
        assert place.parent == made[1]
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exported, "fcntl", None)
    left = leftover(tmp_path, "m")
    with staged(tmp_path / "m.onnx") as place:
        place.write_text("graph")
    assert left.exists()
    assert (tmp_path / "m.onnx").read_text() == "graph"
