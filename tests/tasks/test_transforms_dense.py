"""Images change together with their masks and boxes."""

from __future__ import annotations

import colorsys
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from dense_files import photo
from vitrim.tasks.options import DenseAugment
from vitrim.tasks.transforms_dense import (
    CropUnderShare,
    DenseEvalTransform,
    DenseTrainTransform,
    PhotometricDistort,
    ResizeRange,
    distorted,
)


class Geometry(NamedTuple):
    size: tuple[int, int] = (32, 32)
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)


def objects(size: tuple[int, int], boxes: list[list[float]], crowd: list[int] | None = None) -> dict[str, Any]:
    masks = torch.zeros(len(boxes), *size, dtype=torch.uint8)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes, strict=True):
        mask[int(y1) : int(y2), int(x1) : int(x2)] = 1
    given = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return {
        "boxes": tv_tensors.BoundingBoxes(given, format="XYXY", canvas_size=size),
        "labels": torch.arange(len(boxes)),
        "iscrowd": torch.tensor(crowd or [0] * len(boxes)),
        "area": torch.ones(len(boxes)),
        "masks": tv_tensors.Mask(masks),
    }


def painted(size: tuple[int, int]) -> tuple[Image.Image, tv_tensors.Mask]:
    """An image whose red is its mask: quarters of 10, 60, 110 and 160."""
    labels = np.full(size, 10, np.uint8)
    labels[size[0] // 2 :] += 50
    labels[:, size[1] // 2 :] += 100
    return Image.fromarray(np.repeat(labels[:, :, None], 3, axis=2)), tv_tensors.Mask(torch.from_numpy(labels))


@pytest.mark.parametrize("crop", ["scaled", "jitter"])
@pytest.mark.parametrize("size", [(60, 40), (20, 90), (32, 32)])
def test_masks_follow_their_image(crop: str, size: tuple[int, int]) -> None:
    geometry = Geometry((32, 48), (0.0,) * 3, (1.0,) * 3)
    transform = DenseTrainTransform(geometry, DenseAugment(crop=crop, vflip=0.5, range=(0.4, 2.0)))
    for seed in range(8):
        torch.manual_seed(seed)
        image, mask = transform(*painted(size))
        assert (image.shape, mask.shape, mask.dtype, type(mask)) == ((3, 32, 48), (32, 48), torch.int64, torch.Tensor)
        inside = mask != 255
        assert (image[0][~inside] == 0).all()
        same = (255 * image[0] - mask).abs()[inside] < 1
        assert same.float().mean() > 0.4  # the image is mixed between the quarters, of which small ones are thin


@pytest.mark.parametrize("crop", ["scaled", "jitter"])
def test_boxes_and_outlines_follow_their_image(crop: str) -> None:
    geometry = Geometry((64, 96))
    transform = DenseTrainTransform(geometry, DenseAugment(crop=crop, vflip=0.5, range=(0.5, 2.0)))
    counts = set()
    for seed in range(12):
        torch.manual_seed(seed)
        given = objects((60, 80), [[0, 0, 14, 16], [66, 42, 80, 60], [0, 0, 80, 60]], crowd=[0, 0, 1])
        image, target = transform(photo(seed, (60, 80)), given)
        counts.add(len(target["labels"]))
        assert image.shape == (3, 64, 96)
        assert set(target) == {"boxes", "labels", "masks", "size"}
        assert 2 not in target["labels"]  # a crowd
        height, width = target["size"].tolist()
        assert (image[:, height:] == 0).all()
        assert (image[:, :, width:] == 0).all()
        for box, mask in zip(target["boxes"], target["masks"], strict=True):
            rows, columns = mask.any(dim=1).nonzero(), mask.any(dim=0).nonzero()
            around = torch.tensor([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
            assert (around - box).abs().max() <= 1.5
            assert (box[2:] <= torch.tensor([width, height])).all()
    assert len(counts) > 1  # some windows miss one of them


def test_no_box_at_all() -> None:
    transform = DenseTrainTransform(Geometry(), DenseAugment(crop="jitter"))
    image, target = transform(photo(0), objects((32, 32), []))
    assert (image.shape, target["boxes"].shape, target["labels"].shape) == ((3, 32, 32), (0, 4), (0,))
    assert target["masks"].shape == (0, 32, 32)


def test_everything_is_drawn_from_the_stream_of_torch() -> None:
    transform = DenseTrainTransform(Geometry(), DenseAugment(photometric=True, vflip=0.5))
    transform = pickle.loads(pickle.dumps(transform))  # as a worker gets it

    def drawn(seed: int) -> Any:
        torch.manual_seed(seed)
        return transform(*painted((60, 50)))

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_grey_images() -> None:
    transform = DenseTrainTransform(Geometry(mean=(0.5,), std=(0.5,)), DenseAugment(photometric=True))
    for seed in range(4):
        torch.manual_seed(seed)
        assert transform(*painted((40, 40)))[0].shape == (1, 32, 32)


@pytest.mark.parametrize("side", ["long", "short"])
def test_a_side_is_drawn_from_the_range(side: str) -> None:
    resize = ResizeRange(side, 20, 40)  # type: ignore[arg-type]
    drawn = []
    for seed in range(20):
        torch.manual_seed(seed)
        height, width = resize(tv_tensors.Mask(torch.zeros(30, 45))).shape
        drawn.append(width if side == "long" else height)
        assert abs(width - 1.5 * height) <= 1
    assert 20 <= min(drawn) < 25
    assert 35 < max(drawn) <= 40


@pytest.mark.parametrize(
    ("side", "size", "expected"),
    [
        ("short", (10, 40), (20, 80)),  # four times the short side, as far as it may be
        ("short", (10, 90), (9, 80)),
        ("short", (90, 10), (80, 9)),
        ("long", (10, 90), (2, 20)),
    ],
)
def test_the_long_side_is_at_most_four_times_what_is_drawn_for_the_short_one(
    side: Any, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    """By hand: 2,048 of 512 pixels in the published recipes."""
    assert ResizeRange(side, 20, 20)(tv_tensors.Mask(torch.zeros(size))).shape == expected


@pytest.mark.parametrize(
    ("given", "drawn"),
    [
        ({"side": "long"}, (24, 96)),  # from half of the model's long side to twice
        ({"side": "short"}, (16, 64)),
        ({"side": "long", "range": (0.25, 1.0)}, (12, 48)),
        ({"side": "short", "range": (0.25, 1.0)}, (8, 32)),
    ],
)
def test_sizes_are_drawn_as_shares_of_the_model_s_own_side(given: dict[str, Any], drawn: tuple[int, int]) -> None:
    """By hand, for a model of 32 x 48 pixels."""
    transform = DenseTrainTransform(Geometry((32, 48)), DenseAugment(**given))
    resize = transform.change.transforms[0]
    assert (resize.side, resize.low, resize.high) == (given["side"], *drawn)


def test_jitter_begins_at_a_tenth_unless_a_recipe_says_otherwise() -> None:
    for given, factors in (({}, (0.1, 2.0)), ({"range": (0.5, 1.5)}, (0.5, 1.5))):
        jitter = DenseTrainTransform(Geometry((32, 48)), DenseAugment(crop="jitter", **given)).change.transforms[0]
        assert (jitter.size, jitter.low, jitter.high) == ((32, 48), *factors)


@pytest.mark.parametrize("share", [0.75, 0.5, 1.0])
def test_the_share_of_one_class_is_the_recipe_s(share: float) -> None:
    """Two thirds of the pixels of every window are of one class: too much for a half, and not for three quarters."""
    transform = DenseTrainTransform(Geometry((8, 6)), DenseAugment(cat_max_share=share, range=(1.0, 1.0), hflip=0.0))
    windows = 0

    def counted(*given: Any) -> Any:
        nonlocal windows
        windows += 1
        return randint(*given)

    randint = torch.randint
    labels = torch.zeros(8, 6, dtype=torch.uint8)
    labels[:, 4:] = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", counted)
        transform(Image.new("RGB", (6, 8)), tv_tensors.Mask(labels))
    assert windows == 2 * (1 + (10 if share == 0.5 else 0))  # of each window top and left


def test_no_class_fills_the_window() -> None:
    mask = torch.zeros(40, 40, dtype=torch.uint8)
    mask[:, 30:] = 1
    mask[:4] = 255
    shares = {share: [] for share in (0.75, 1.0)}  # type: ignore[var-annotated]
    for share, found in shares.items():
        for seed in range(40):
            torch.manual_seed(seed)
            window = CropUnderShare((20, 20), share)(tv_tensors.Mask(mask))
            valid = window[window != 255]
            found.append(torch.bincount(valid.long()).max().item() / len(valid))
    assert sum(share > 0.75 for share in shares[1.0]) > 20
    assert sum(share > 0.75 for share in shares[0.75]) < 5


@pytest.mark.parametrize(("name", "value"), [("saturation", 0.5), ("saturation", 1.5), ("hue", 0.05), ("hue", -0.05)])
def test_colours_change_as_in_hsv(name: str, value: float) -> None:
    pixels = torch.rand(3, 40, generator=torch.Generator().manual_seed(0))
    pixels[:, 0] = 0
    changed = distorted(pixels[:, None].clone(), name, value)[:, 0]
    for before, after in zip(pixels.T.tolist(), changed.T.tolist(), strict=True):
        hue, saturation, level = colorsys.rgb_to_hsv(*before)
        if name == "hue":
            expected = colorsys.hsv_to_rgb((hue + value) % 1, saturation, level)
        else:
            expected = colorsys.hsv_to_rgb(hue, min(1.0, saturation * value), level)
        assert after == pytest.approx(expected, abs=1e-5)


def test_each_distortion_comes_half_the_time() -> None:
    seen, last = dict.fromkeys(("brightness", "contrast", "saturation", "hue"), 0), 0
    for seed in range(400):
        torch.manual_seed(seed)
        changes = PhotometricDistort().make_params([])["changes"]
        last += len(changes) > 1 and changes[-1][0] == "contrast"
        limits = {"brightness": (-32 / 255, 32 / 255), "hue": (-0.05, 0.05)}
        for name, value in changes:
            seen[name] += 1
            low, high = limits.get(name, (0.5, 1.5))
            assert low <= value <= high
    assert all(150 < count < 250 for count in seen.values())
    assert 50 < last < 150
    assert distorted(torch.tensor([0.2, 0.9]), "brightness", 0.125).tolist() == pytest.approx([0.325, 1.0])
    assert distorted(torch.tensor([0.2, 0.9]), "contrast", 1.5).tolist() == pytest.approx([0.3, 1.0])


def test_masks_are_evaluated_at_the_size_they_have() -> None:
    image, mask = DenseEvalTransform(Geometry())(*painted((50, 70)))
    assert (image.shape, mask.shape, mask.dtype) == ((3, 50, 70), (50, 70), torch.int64)
    assert torch.equal(((image[0] * 0.5 + 0.5) * 255).round().long(), mask)


def test_boxes_are_evaluated_in_the_stored_pixels() -> None:
    given = objects((60, 80), [[4, 6, 30, 40]], crowd=[1])
    image, target = DenseEvalTransform(Geometry((32, 48)))(photo(0, (60, 80)), given)
    assert image.shape == (3, 32, 48)
    assert (image[:, :, 43:] == 0).all()
    assert (image[:, :, 42] != 0).any()
    found = {name: target[name].tolist() for name in ("boxes", "iscrowd", "size", "original")}
    assert found == {"boxes": [[4, 6, 30, 40]], "iscrowd": [1], "size": [32, 43], "original": [60, 80]}
    assert target["masks"].shape == (1, 60, 80)


@pytest.mark.parametrize(
    ("model", "image", "expected"),
    [
        ((32, 48), (60, 80), (32, 43)),
        ((32, 48), (80, 60), (43, 32)),  # upright: within 48 x 32
        ((48, 32), (60, 80), (32, 43)),
        ((48, 32), (80, 60), (43, 32)),
        ((32, 32), (80, 60), (32, 24)),
    ],
)
def test_a_model_without_padding_sees_upright_images_upright(
    model: tuple[int, int], image: tuple[int, int], expected: tuple[int, int]
) -> None:
    """By hand: the largest size of the same ratio within the model's, turned as the image is."""
    transform = DenseEvalTransform(Geometry(model), padded=False)
    pixels, target = transform(photo(0, image), objects(image, [[4, 6, 30, 40]]))
    assert pixels.shape == (3, *expected)
    assert (target["size"].tolist(), target["original"].tolist()) == (list(expected), list(image))


def test_the_size_is_that_of_the_image_without_padding() -> None:
    """A white image is 1 after it is normalised, and padding is 0."""
    transform = DenseTrainTransform(Geometry((64, 96)), DenseAugment(crop="jitter", hflip=0.0, range=(0.3, 0.9)))
    for seed in range(4):
        torch.manual_seed(seed)
        white = Image.new("RGB", (60, 40), (255, 255, 255))
        image, target = transform(white, objects((40, 60), [[0, 0, 60, 40]]))
        inside = (image[0] == 1).nonzero().amax(dim=0) + 1
        assert target["size"].tolist() == inside.tolist()
        assert inside.tolist() != [64, 96]


@pytest.mark.parametrize(
    ("labels", "varied"),
    [
        ([0, 0, 0, 1], False),  # 3 of 4: not under the share
        ([0, 0, 0, 1, 255, 255, 255, 255], False),  # ignored pixels are not counted
        ([0, 0, 1, 1], True),
        ([0, 0, 0, 1, 2], True),  # 3 of 5
        ([0, 255, 255, 255], False),  # one class
        ([255, 255], False),
    ],
)
def test_a_window_is_varied_by_what_is_not_ignored(
    labels: list[int], varied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not is drawn again, as often as it may be."""
    drawn: list[int] = []
    randint = torch.randint
    monkeypatch.setattr(torch, "randint", lambda most, size: (drawn.append(most), randint(most, size))[1])
    mask = tv_tensors.Mask(torch.tensor([labels], dtype=torch.uint8))
    CropUnderShare((1, len(labels)), share=0.75, tries=3)(mask)
    assert len(drawn) == (2 if varied else 8)  # of each window top and left
