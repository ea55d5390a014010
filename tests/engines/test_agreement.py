"""What is said of a file without making one: its metadata, and how far its outputs agree with the model's."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from test_following import images
from torch import Tensor, nn

import tiny
import vitrim
from made_files import file
from vitrim.core.method import Traits
from vitrim.engines import Exported, check, writing
from vitrim.engines.exported import size_of, staged
from vitrim.engines.formats.onnx import ONNX
from vitrim.engines.macs import count_macs
from vitrim.engines.parity import Parity
from vitrim.engines.program import trace
from vitrim.engines.writing import FileSpec
from vitrim.loading import ModelSpec
from vitrim.measure import export as exporting

pytestmark = pytest.mark.xdist_group("onnx")  # its libraries, which take seconds to import, in one process


# ---- metadata --------------------------------------------------------------------------------------------------------


def test_numbers_of_a_file_that_follows_its_images_are_means_over_all_of_them() -> None:
    """Each image counted alone, by a model of its own."""
    model = tiny.HOSTS["vit"]()
    tiny.drop_last_block(model)
    vitrim.reduce_(model, "atm:alpha=0.9,beta=0.2,theta_min=0.1")
    draft = writing.Draft.of(ModelSpec(model).load(), FileSpec(batch=1), ONNX)
    some = images()[5:]  # of noise, of one value, and of both
    known = writing._describe(draft, some, True)
    other = tiny.HOSTS["vit"]()
    tiny.drop_last_block(other)
    reduction = vitrim.reduce_(other, "atm:alpha=0.9,beta=0.2,theta_min=0.1", record=True)
    left, macs = [], []
    for image in some.split(1):
        macs.append(count_macs(other, image))
        with torch.no_grad():
            other(image)
        left.append(list(reduction.tokens_per_block))
    totals = [each.total / 1e9 for each in macs]
    assert len(set(totals)) == 3
    assert known["gmacs"] == pytest.approx(np.mean(totals), rel=1e-12)
    assert known["gmacs_deviation"] == pytest.approx(np.std(totals), rel=1e-9)
    for part, mean in known["gmacs_parts"].items():
        assert mean == pytest.approx(np.mean([getattr(each, part) for each in macs]) / 1e9, rel=1e-12)
    assert sum(known["gmacs_parts"].values()) == pytest.approx(known["gmacs"])
    assert known["tokens_per_block"] == pytest.approx(np.mean(left, axis=0))
    assert known["counts_deviation"] == pytest.approx(np.std(left, axis=0))
    assert known["counted_on"] == "3 images"


def test_sides_are_height_and_width() -> None:
    small = {"img_size": 32, "patch_size": 8, "depth": 1, "num_classes": 3}
    model = timm.create_model("test_vit", **small, dynamic_img_size=True)
    assert writing._shape(model, (24, 32)) == (3, 24, 32)
    assert writing._shape(model, 32) == (3, 32, 32)
    draft = writing.Draft.of(ModelSpec(model).load(), FileSpec(size=(24, 32), preprocess=True), ONNX)
    assert (draft.layout, draft.preprocessing.size) == ((24, 32, 3), (24, 32))


# ---- agreement -------------------------------------------------------------------------------------------------------


def test_features_are_compared_image_by_image() -> None:
    """Three of four maps change by less than a fifth of their length, though the fourth outweighs them."""
    like = np.ones((4, 2, 3), np.float32) * np.array([1, 1, 1, 100], np.float32)[:, None, None]
    ones = like * np.array([1.19, 0.81, 1.0, 1.5], np.float32)[:, None, None]
    alike, words = writing._same(ones, like, False)
    assert (alike.tolist(), words) == ([True, True, True, False], "within 20 %")
    assert writing._same(like[:3] * 1.3, like[:3], False)[0].tolist() == [False] * 3


def test_embeddings_that_point_elsewhere_do_not_agree() -> None:
    like = np.array([[1, 0], [1, 0], [1, 0], [1, 0]], np.float32)
    ones = np.array([[9, 0], [1, 0.9], [0, 1], [1, 0.1]], np.float32)
    assert writing._same(ones, like, False)[0].tolist() == [True, False, False, True]
    assert writing._same(ones, like, True)[0].tolist() == [True, True, False, True]


@pytest.mark.parametrize("batch", [None, 3])
def test_a_file_made_of_another_is_compared_with_that(
    batch: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight images, two get another class in the coarser file; of batches of three only six are seen."""
    compared = torch.arange(8.0)[:, None, None, None].expand(8, 3, 2, 2).contiguous()
    shape = (batch or "batch", 3, 2, 2)
    one = np.eye(8, dtype=np.float32)

    def classes(given: Any) -> Any:
        return one[given[:, 0, 0, 0].astype(int)]

    def coarser(given: Any) -> Any:
        assert batch is None or len(given) == batch
        return one[np.array([0, 2, 2, 3, 4, 5, 6, 0])[given[:, 0, 0, 0].astype(int)]]

    def in_precision(written: Exported, precision: str, path: Path, given: list[Any]) -> Exported:
        assert [each.mean() for each in given] == [20.0]  # whole batches alone
        return file(coarser, shape, path, precision=precision)

    monkeypatch.setattr(Exported, "in_precision", in_precision)
    written = file(classes, shape, tmp_path / "m.onnx")
    calibration = torch.full((batch or 1, 3, 2, 2), 20.0)
    made = writing._made(written, tmp_path / "m.onnx", "int8", calibration, compared, strict=False)
    assert made.path == tmp_path / "m.onnx"
    assert made.metadata["agreement"] == pytest.approx(6 / 8 if batch is None else 5 / 6)


# ---- near ties -------------------------------------------------------------------------------------------------------


class Sums(nn.Module):
    """Logits (B, 2): the sum of an image times ``gain``, and the other sign of it if ``tied``, else 1."""

    def __init__(self, gain: float, tied: bool = False) -> None:
        super().__init__()
        self.gain, self.tied = nn.Parameter(torch.tensor(gain)), tied

    def forward(self, images: Tensor) -> Tensor:
        total = images.sum((1, 2, 3)) * self.gain
        return torch.stack([total, -total if self.tied else torch.ones_like(total)], dim=1)


def given(model: nn.Module, pictures: Tensor, change: Callable[[Any], Any]) -> Exported:
    """A file that gives the model's outputs, but ``change`` of that of the first image."""
    with torch.no_grad():
        outputs = model(pictures).numpy()
    outputs[0] = change(outputs[0])
    rest = iter(outputs)
    return file(lambda images: np.stack([next(rest) for _ in images]), ("batch", 3, 4, 4))


def test_a_difference_that_rounding_does_not_make_is_no_near_tie() -> None:
    """The file is 1.3 tolerances off. Perturbed, the model comes within one of it and stays within one of itself.

    48 pixels of a deviation of 1e-5 each move it by 0.2 at a time.
    """
    pictures = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    model = Sums(0.2e-4 / (48**0.5 * 1e-5))
    found = check(given(model, pictures, lambda logits: logits + np.array([1.3e-4, 0], np.float32)), model, pictures)
    assert (found.beyond, found.near_ties, found.holds) == (1, 0, False)
    model = Sums(4e-4 / (48**0.5 * 1e-5))  # where rounding moves it by four tolerances, it may be a tie
    found = check(given(model, pictures, lambda logits: logits + np.array([1.3e-4, 0], np.float32)), model, pictures)
    assert (found.near_ties, found.holds) == (1, True)


def test_two_classes_that_rounding_decides_between_are_a_near_tie() -> None:
    pictures = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    pictures[0] -= pictures[0].mean() - 1e-7
    tied = Sums(0.1, tied=True)  # rounding moves it by less than the tolerance
    found = check(given(tied, pictures, lambda logits: logits[::-1]), tied, pictures)
    assert (found.beyond, found.same_top1, found.near_ties, found.holds) == (0, 3, 1, True)
    pictures[0] += 0.01  # nothing that rounding changes
    found = check(given(tied, pictures, lambda logits: logits[::-1]), tied, pictures, atol=9.0)
    assert (found.beyond, found.same_top1, found.near_ties, found.holds) == (0, 3, 0, False)


class Ordered(nn.Module):
    """Logits (B, 2) of which the first one is always larger, by half a tolerance."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(4e-4 / (48**0.5 * 1e-5)))

    def forward(self, images: Tensor) -> Tensor:
        total = images.sum((1, 2, 3)) * self.gain
        return torch.stack([total, total - 5e-5], dim=1)


def test_a_class_that_the_model_never_gives_is_no_near_tie() -> None:
    """The logits are within the tolerance of those of a perturbed image, and the first class is the other one."""
    pictures = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    model = Ordered()

    def beside(logits: Any) -> Any:
        return (logits[0] + np.array([1.2e-4, 1.2e-4])).astype(np.float32)

    def swapped(logits: Any) -> Any:
        return (logits[0] + np.array([1.2e-4, 1.6e-4])).astype(np.float32)

    for change, ties in ((beside, 1), (swapped, 0)):
        found = check(given(model, pictures, change), model, pictures)
        assert (found.beyond, found.near_ties, found.holds) == (1, ties, bool(ties))


@pytest.mark.parametrize(
    ("images", "ties", "wrong", "holds"),
    [(20, 2, 0, True), (20, 3, 0, False), (20, 1, 1, False), (5, 1, 0, True), (5, 2, 0, False), (64, 6, 0, True)],
)
def test_a_tenth_of_the_images_may_be_near_ties(images: int, ties: int, wrong: int, holds: bool) -> None:
    found = Parity(images, (images,), 1.0, ties + wrong, images, 1e-4, ties + wrong, near_ties=ties)
    assert found.holds is holds


class Together(nn.Module):
    """Logits (B, 2) that depend on the sum of the whole batch where the second pixel says so."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.vitrim_reduction = SimpleNamespace(config=SimpleNamespace(traits=Traits(batch_dependent=True)))

    def forward(self, images: Tensor) -> Tensor:
        own = images.flatten(1)[:, :2] * self.gain
        decided = (images[:, :, 2:].sum() > 0).float() * images.flatten(1)[:, 1:2].round()
        return own + decided * torch.tensor([1.0, 0.0])


def test_near_ties_of_a_method_that_counts_on_its_batch_are_looked_for_in_the_whole_batch() -> None:
    """The sum of two images decides over the second one, and is nearly 0: with other images beside it, it is not."""
    pictures = torch.zeros(3, 3, 4, 4)
    pictures[1, :, 2:], pictures[2, :, 2:] = -1.0, 1.0 + 1e-7
    pictures[2, 0, 0, 1] = 1.0
    model = Together()
    with torch.no_grad():
        outputs = torch.cat([model(pictures[:1]), model(pictures[1:])]).numpy()
    assert outputs[2, 0] == 1.0
    outputs[2, 0] = 0.0
    rest = iter(outputs)
    told = file(lambda images: np.stack([next(rest) for _ in images]), ("batch", 3, 4, 4))
    found = check(told, model, pictures)
    assert (found.beyond, found.near_ties, found.holds) == (1, 1, True)


# ---- programs --------------------------------------------------------------------------------------------------------


def test_a_program_for_any_batch_takes_one_image() -> None:
    from vitrim.engines.program import Program

    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    program = trace(Program(model), torch.zeros(2, 3, 2, 2), dynamic=True)
    (bounds,) = program.range_constraints.values()
    assert bounds.lower <= 1
    assert program.module()(torch.ones(1, 3, 2, 2)).shape == (1, 2)


def test_preprocessing_of_a_model_is_that_of_its_file() -> None:
    """Of all entries, on an image that is not square: through the metadata, and back."""
    from PIL import Image

    from vitrim.data import eval_transform

    pixels = np.random.default_rng(0).integers(0, 256, (44, 60, 3), dtype=np.uint8)
    shown = set()
    for mode in ("center", "squash", "border"):
        model = tiny.HOSTS["vit"]()
        model.pretrained_cfg = {
            **getattr(model, "pretrained_cfg", {}),
            "input_size": (3, 24, 24), "crop_mode": mode, "crop_pct": 0.75, "interpolation": "bilinear",
            "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6),
        }  # fmt: skip
        known = writing._describe(writing.Draft.of(ModelSpec(model).load(), FileSpec(), ONNX), None, False)
        told = file(lambda images: np.zeros((len(images), 5), np.float32), ("batch", 3, 24, 24), **known)
        expected = eval_transform(model)(Image.fromarray(pixels))
        torch.testing.assert_close(eval_transform(told)(Image.fromarray(pixels)), expected, atol=0, rtol=0)
        shown.add(round(float(expected.sum()), 3))
    assert len(shown) == 3  # modes differ here


# ---- files beside files ----------------------------------------------------------------------------------------------


def test_the_dense_file_is_made_as_the_reduced_one_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[FileSpec] = []

    def write(draft: writing.Draft, path: Path) -> Exported:
        asked.append(draft.wanted)
        return file(lambda images: images, (4, 48, 64, 3), path)

    monkeypatch.setattr(exporting, "write", write)
    monkeypatch.setattr(writing, "_shape", lambda *_: (3, 48, 64))
    given = {"dtype": "uint8", "shape": [4, 48, 64, 3]}
    reduced = file(lambda images: images, (4, 48, 64, 3), input=given, weights="fp16", opset=19, method="topk")
    with exporting.dense_file(ModelSpec(nn.Linear(1, 1)).load(), replace(reduced, threads=3)) as dense:
        assert dense.threads == 3
    wanted = FileSpec("onnx", batch=4, opset=19, precision="fp16", preprocess=True, size=(48, 64))
    assert asked == [wanted]
    plain = file(
        lambda images: images,
        ("batch", 3, 48, 64),
        input={"dtype": "float32", "shape": ["batch", 3, 48, 64]},
        method="topk",
    )
    plain.metadata["opset"] = 20  # type: ignore[index]
    with exporting.dense_file(ModelSpec(nn.Linear(1, 1)).load(), plain):
        pass
    assert asked[1] == FileSpec("onnx", opset=20, precision="fp32", size=(48, 64))


def test_weights_beside_a_file_are_part_of_its_size(tmp_path: Path) -> None:
    for name, size in {"m.xml": 3, "m.bin": 40, "m.xml.data": 500, "m.onnx": 7, "m.onnx.data": 60, "n.bin": 9}.items():
        (tmp_path / name).write_bytes(bytes(size))
    assert [size_of(tmp_path / name) for name in ("m.xml", "m.onnx")] == [543, 67]


def test_a_file_comes_after_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stops in between has weights without a file, and no file without weights."""
    moved: list[str] = []
    move = os.replace
    monkeypatch.setattr(os, "replace", lambda one, other: moved.append(Path(other).name) or move(one, other))
    with staged(tmp_path / "m.xml") as place:
        for name in ("m.xml", "m.bin", "a.json", "z.json"):
            place.with_name(name).write_text("text")
    assert sorted(moved) == ["a.json", "m.bin", "m.xml", "z.json"]
    assert moved[-1] == "m.xml"
