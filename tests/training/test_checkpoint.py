"""What was damaged after it was written is passed over, and said; a run goes on with the images it was begun with."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tiny_training import recipe, trainer
from vitrim.errors import VitrimError
from vitrim.training import checkpoint
from vitrim.training.loop import Trainer

FILES = ("model.safetensors", "optimizer.safetensors", "ema.safetensors", "state.json", "SHA256SUMS")
SAVED = {"save_minutes": 0, "max_updates": 4}
RECIPE = {"ema": {"decay": 0.9}, "eval_split": None}


class Lines:
    """Signs that keep what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def flip(file: Path) -> None:
    """Two bytes of what a file holds; its length and its header stay."""
    content = bytearray(file.read_bytes())
    for place in (len(content) // 2, len(content) - 3):
        content[place] ^= 1
    file.write_bytes(content)


def resumed(images: Path, out: Path) -> tuple[Trainer, list[str]]:
    """A run that goes on, and what it said."""
    run = trainer(recipe(**RECIPE), images, out, resume=True)
    again = Lines()
    run.signs = again
    run._resume()
    return run, again.lines


@pytest.fixture(scope="module")
def stopped(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with two checkpoints; tests take copies."""
    out = tmp_path_factory.mktemp("stopped")
    trainer(recipe(**RECIPE), images, out, **SAVED).run()
    return out


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    name: str, images: Path, stopped: Path, tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    newest = checkpoint.latest(tmp_path / "checkpoints")
    assert newest.name == "update-00000004"
    flip(newest / name)
    run, said = resumed(images, tmp_path)
    assert run.update == 3
    assert len(said) == 2
    told = name if name != "SHA256SUMS" else ""  # with another digest there the file it is of is told
    assert f"update-00000004 is damaged ({told}" in said[0]
    assert "is not what was written" in said[0]
    assert said[1].endswith("resumed from " + str(newest.with_name("update-00000003")))


def test_a_run_without_an_undamaged_checkpoint_is_neither_resumed_nor_overwritten(
    images: Path, stopped: Path, tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    for path in checkpoint.found(tmp_path / "checkpoints"):
        flip(path / "optimizer.safetensors")
    with pytest.raises(VitrimError, match=r"nothing to resume in .*: .*04 is damaged \(optimizer.*03 is damaged"):
        trainer(recipe(**RECIPE), images, tmp_path, resume=True)
    with pytest.raises(VitrimError, match="has a run already"):
        trainer(recipe(**RECIPE), images, tmp_path)


@pytest.mark.slow
def test_two_undamaged_checkpoints_are_kept_whatever_lies_beside_them(images: Path, tmp_path: Path) -> None:
    trainer(recipe(**RECIPE), images, tmp_path, keep=1, **SAVED).run()
    folder = tmp_path / "checkpoints"
    assert [path.name for path in checkpoint.found(folder)] == ["update-00000003", "update-00000004"]
    flip(folder / "update-00000004" / "model.safetensors")
    trainer(recipe(**RECIPE), images, tmp_path, keep=1, resume=True, max_updates=5).run()  # it saves the fifth only
    whole = [path.name for path in checkpoint.found(folder) if checkpoint.damage(path) is None]
    assert whole == ["update-00000003", "update-00000005"]


def test_digests_are_those_of_sha256sum(images: Path, tmp_path: Path) -> None:
    trainer(recipe(**RECIPE), images, tmp_path, max_updates=1).run()
    folder = checkpoint.latest(tmp_path / "checkpoints")
    lines = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert set(lines) == set(FILES) - {"SHA256SUMS"} == {path.name for path in folder.iterdir()} - {"SHA256SUMS"}
    for name, digest in lines.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_checkpoints_of_another_version_are_refused(images: Path, tmp_path: Path) -> None:
    trainer(recipe(**RECIPE), images, tmp_path, max_updates=2).run()
    folder = checkpoint.latest(tmp_path / "checkpoints")
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "format": 2}))
    with pytest.raises(VitrimError, match="has format 2, this version of vitrim reads 3"):
        trainer(recipe(**RECIPE), images, tmp_path, resume=True)


# ---- other images ----------------------------------------------------------------------------------------------------


def pixels(file: Path) -> None:
    """Another image of the same size in bytes."""
    length = file.stat().st_size
    other = np.random.default_rng(5).integers(0, 128, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(other).save(file, compress_level=9)
    file.write_bytes(file.read_bytes()[:length].ljust(length, b"\0"))


CHANGES = {
    "a size": ("train", lambda root: (root / "train/ant/0.png").write_bytes(b"longer or shorter")),
    "a name": ("train", lambda root: (root / "train/ant/0.png").rename(root / "train/ant/00.png")),
    "a label": ("train", lambda root: (root / "train/ant/0.png").rename(root / "train/bee/00.png")),
    "contents": ("train", lambda root: pixels(root / "train/ant/0.png")),
    "what is watched": ("watch", lambda root: pixels(root / "test/bee/0.png")),
}


@pytest.fixture(scope="module")
def begun(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that is watched; what is refused leaves it as it is."""
    out = tmp_path_factory.mktemp("begun")
    trainer(recipe(), images, out, max_updates=2).run()
    return out


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_is_not_resumed_on_as_many_other_images(change: str, images: Path, begun: Path, tmp_path: Path) -> None:
    other = tmp_path / "moved"
    shutil.copytree(images, other)
    assert trainer(recipe(), other, begun, resume=True).update == 2  # where they lie does not count
    what, edit = CHANGES[change]
    edit(other)
    with pytest.raises(VitrimError, match=f"other data: as many images, but those to .*{what}.* have other"):
        trainer(recipe(), other, begun, resume=True)
