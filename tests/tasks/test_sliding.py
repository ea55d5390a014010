"""Protocols: whole images and windows, several sizes, mirrored."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from vitrim.errors import VitrimError
from vitrim.tasks.options import Protocol
from vitrim.tasks.sliding import predict, window_places

SIDES = st.integers(5, 40)


def images(height: int, width: int) -> Tensor:
    return torch.rand(3, height, width, generator=torch.Generator().manual_seed(height * 50 + width))


@pytest.fixture(scope="module")
def blur() -> nn.Module:
    """A model that sees further than a pixel, and left and right differently."""
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 5, padding=2).eval().requires_grad_(False)


@given(st.integers(1, 60), st.integers(1, 30), st.data())
def test_windows_cover_everything(length: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window))
    places = window_places(length, window, stride)
    assert places == sorted(set(places))
    assert {pixel for place in places for pixel in range(place, min(place + window, length))} == set(range(length))
    assert places[-1] == max(length - window, 0)


@pytest.mark.parametrize("average", ["logits", "probabilities"])
@pytest.mark.parametrize("flip", [False, True])
def test_one_window_is_the_whole(blur: nn.Module, average: str, flip: bool) -> None:
    image = images(24, 24)
    options = {"average": average, "flip": flip}
    slide = predict(blur, image, Protocol(mode="slide", window=24, stride=7, **options))
    torch.testing.assert_close(slide, predict(blur, image, Protocol(**options)), rtol=0, atol=0)
    if not flip:
        expected = blur(image[None])[0]
        torch.testing.assert_close(slide, expected if average == "logits" else expected.softmax(dim=0))


@given(SIDES, SIDES, st.sampled_from([(1.0,), (0.5, 1.0, 1.75)]))
def test_flipping_twice_changes_nothing(blur: nn.Module, height: int, width: int, scales: tuple[float, ...]) -> None:
    """Of whole images: windows lie at other pixels of a mirrored one."""
    protocol, image = Protocol(size=20, scales=scales, flip=True), images(height, width)
    found = predict(blur, image, protocol)
    assert found.shape == (4, height, width)
    torch.testing.assert_close(predict(blur, image.flip(-1), protocol), found.flip(-1), rtol=1e-4, atol=1e-5)


@given(SIDES, SIDES, st.integers(4, 20))
def test_windows_of_what_sees_one_pixel_change_nothing(height: int, width: int, window: int) -> None:
    image = images(height, width)
    protocol = Protocol(mode="slide", window=window, stride=max(1, window // 2))
    if min(height, width) >= window:
        torch.testing.assert_close(predict(lambda batch: 2 * batch, image, protocol), 2 * image)
    else:
        assert predict(lambda batch: batch, image, protocol).shape == image.shape


def test_windows_are_averaged_where_they_overlap() -> None:
    numbers = iter([1.0, 2.0, 3.0, 4.0])

    def count(batch: Tensor) -> Tensor:
        assert batch.shape == (4, 3, 4, 4)  # all windows at once
        return torch.stack([torch.full((1, 4, 4), next(numbers)) for _ in batch])

    found = predict(count, images(6, 6), Protocol(mode="slide", window=4, stride=2))[0]
    row = torch.tensor([1, 1, 1.5, 1.5, 2, 2])
    assert torch.equal(found, torch.stack([row, row, row + 1, row + 1, row + 2, row + 2]))


def test_windows_in_parts(blur: nn.Module) -> None:
    protocol, calls = Protocol(mode="slide", window=8, stride=6), []

    def model(batch: Tensor) -> Tensor:
        calls.append(len(batch))
        return blur(batch)

    torch.testing.assert_close(
        predict(model, images(20, 14), protocol, most=4), predict(blur, images(20, 14), protocol)
    )
    assert calls == [4, 2]


def test_sizes_that_the_model_sees() -> None:
    seen: list[tuple[int, ...]] = []

    def model(batch: Tensor) -> Tensor:
        seen.append(tuple(batch.shape[-2:]))
        return batch

    for protocol, sizes in (
        (Protocol(), [(20, 30)]),
        (Protocol(size=60, side="long"), [(40, 60)]),
        (Protocol(size=10), [(10, 15)]),
        (Protocol(size=24, side="long", window=32), [(32, 32)]),  # padded to a square
        (Protocol(scales=(0.5, 2.0), flip=True), [(10, 15)] * 2 + [(40, 60)] * 2),
        (Protocol(mode="slide", window=40), [(40, 40)]),  # enlarged until its short side fills a window
    ):
        seen.clear()
        assert predict(model, images(20, 30), protocol).shape == (3, 20, 30)
        assert seen == sizes


def test_padding_is_cut_off() -> None:
    image = images(10, 14)
    torch.testing.assert_close(predict(lambda batch: batch, image, Protocol(window=32)), image, rtol=0, atol=0)


def test_probabilities_are_averaged(blur: nn.Module) -> None:
    image = images(12, 16)
    found = predict(blur, image, Protocol(flip=True, average="probabilities"))
    straight, mirrored = blur(image[None])[0], blur(image.flip(-1)[None])[0].flip(-1)
    torch.testing.assert_close(found, (F.softmax(straight, 0) + F.softmax(mirrored, 0)) / 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "slide"}, "mode slide needs a window"),
        ({"mode": "slide", "window": 8, "stride": 9}, "stride 9 leaves gaps between windows of 8"),
        ({"scales": (1.0, 0.0)}, "scales are factors above 0"),
    ],
)
def test_protocols_that_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Protocol(**options)  # type: ignore[arg-type]


def test_maps_and_memory_that_do_not_fit() -> None:
    with pytest.raises(
        VitrimError, match=r"^the model gives a map of shape \(1, 3, 5, 5\); expected \(B, K, 10, 10\)$"
    ):
        predict(lambda batch: batch[..., ::2, ::2], images(10, 10), Protocol())

    def hungry(batch: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(VitrimError, match=r"^4 images of 8 x 8 pixels do not fit .* protocol.window \(now 8\)"):
        predict(hungry, images(12, 12), Protocol(mode="slide", window=8))


@pytest.mark.parametrize(("sides", "windows"), [((30, 60), [(0, 0), (0, 40)]), ((60, 30), [(0, 0), (40, 0)])])
def test_a_narrow_image_is_enlarged_until_every_window_is_whole(
    sides: tuple[int, int], windows: list[tuple[int, int]]
) -> None:
    """One side fills a window, the other does not: it becomes 40 x 80, in two windows of 40 x 40."""
    image, seen = images(*sides), []

    def model(batch: Tensor) -> Tensor:
        seen.extend(batch)
        return batch

    assert predict(model, image, Protocol(mode="slide", window=40)).shape == image.shape
    enlarged = F.interpolate(image[None], scale_factor=4 / 3, mode="bilinear", antialias=True)[0]
    assert len(seen) == len(windows)
    for found, (y, x) in zip(seen, windows, strict=True):
        torch.testing.assert_close(found, enlarged[:, y : y + 40, x : x + 40], rtol=0, atol=1e-5)


def test_probabilities_are_those_of_the_enlarged_logits(blur: nn.Module) -> None:
    """The softmax comes after the logits are as large as the image."""
    image = images(24, 36)
    found = predict(lambda batch: 9 * blur(batch), image, Protocol(size=12, average="probabilities"))
    small = F.interpolate(image[None], size=(12, 18), mode="bilinear", antialias=True)
    expected = F.interpolate(9 * blur(small), size=(24, 36), mode="bilinear")[0].softmax(dim=0)
    torch.testing.assert_close(found, expected)


def test_windows_begin_every_stride() -> None:
    """Each window says where it begins: at 0, 2 and 4 of twelve pixels, where windows are of eight."""
    seen: list[Tensor] = []

    def model(batch: Tensor) -> Tensor:
        seen.extend(batch[:, 0, 0, 0])
        return batch

    image = torch.arange(12.0).expand(3, 8, 12)
    predict(model, image, Protocol(mode="slide", window=8, stride=2))
    assert [int(first) for first in seen] == [0, 2, 4]
