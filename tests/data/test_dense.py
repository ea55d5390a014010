"""Images with masks, and images with boxes and outlines."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import tv_tensors

import vitrim.data.objects
from dense_files import SIDE, mask, photo
from image_files import encoded
from vitrim.data import Boxes, DataError, DetectionDataset, SegmentationDataset
from vitrim.data.fingerprint import fingerprint
from vitrim.data.objects import decode_outline

IMAGES = [encoded(photo(0)), encoded(photo(1))]
SQUARE = [4, 6, 12, 10]
OUTLINE = json.dumps([[4, 6, 12, 6, 12, 10, 4, 10]]).encode()


def masks(*values: object, **options: Any) -> SegmentationDataset:
    encoded_masks = [encoded(mask(each, "I;16" if np.max(each) > 255 else "L")) for each in values]
    return SegmentationDataset(IMAGES[: len(values)], encoded_masks, **({"num_classes": 3} | options))


def boxes(given: Any, labels: Any, **options: Any) -> DetectionDataset:
    return DetectionDataset(IMAGES[: len(given)], given, labels, **({"num_classes": 3, "source": "there"} | options))


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["L", "P", "I;16"])
def test_labels_are_the_stored_values(mode: str) -> None:
    image, target = SegmentationDataset(IMAGES[:1], [encoded(mask([0, 2, 255], mode))], num_classes=3)[0]
    assert (image.shape, target.shape, target.dtype) == ((3, SIDE, SIDE), (SIDE, SIDE), torch.uint8)
    assert isinstance(target, tv_tensors.Mask)
    assert target[0].unique(return_counts=True)[0].tolist() == [0, 2, 255]
    assert target[:, 0].unique().tolist() == [0]


def test_values_are_relabelled() -> None:
    data = masks([0, 7, 300], relabel={7: 0, 300: 2}, ignore=0)
    assert data[0][1].unique().tolist() == [0, 2, 255]
    assert masks([0, 11, 12], ignore=[11, 12])[0][1].unique().tolist() == [0, 255]


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([0, 3], {}, r"^mask 1 of memory has a pixel of value 3; valid: 0 to 2, 255$"),
        ([0, 1000], {}, r"^mask 1 of memory has a pixel of value 1000; valid"),
        ([5, 6], {"relabel": {5: 0, 9: 1}}, r"value 6; valid: 5, 9, 255$"),
    ],
)
def test_values_that_are_no_class_are_refused(values: object, options: dict[str, Any], message: str) -> None:
    data = masks([0, 1] if "relabel" not in options else [5, 9], values, **options)
    assert data[0][1].unique().tolist() == [0, 1]
    with pytest.raises(DataError, match=message):
        data[1]


def test_masks_that_are_none() -> None:
    for coloured in (photo(3), photo(3).convert("RGBA")):
        with pytest.raises(DataError, match=r"^mask 0 of memory has colours \(mode RGBA?\), not labels: L or P"):
            SegmentationDataset(IMAGES[:1], [encoded(coloured)], num_classes=3)[0]
    with pytest.raises(DataError, match=r"^image 0 of memory has 32 x 32 pixels, its mask 0 of memory has 16 x 32$"):
        SegmentationDataset(IMAGES[:1], [encoded(mask(0, size=(32, 16)))], num_classes=3)[0]
    with pytest.raises(DataError, match=r"^mask 0 of memory is missing$"):
        SegmentationDataset(IMAGES[:1], [None], num_classes=3)[0]
    with pytest.raises(DataError, match=r"^cannot read mask 0 of memory: not an image"):
        SegmentationDataset(IMAGES[:1], [b"?"], num_classes=3)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": None}, "does not say how many classes it has: give num_classes=K or class_names"),
        ({"class_names": ["a"], "num_classes": 3}, "num_classes=3 and 1 class names"),
        ({"num_classes": 256}, "256 classes; at most 255"),
        ({"relabel": {4: 3}}, "pixel value 4 of memory is relabelled to 3; valid: .* labels 0 to 2 and 255"),
    ],
)
def test_masks_are_refused_beforehand(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        masks(0, **options)


# ---- boxes -----------------------------------------------------------------------------------------------------------


def test_objects_of_an_image() -> None:
    data = boxes([[SQUARE, [0, 0, 32.5, 32]], []], [[2, 0], []], crowd=[[False, True], []], area=[[5.0, 9], []])
    image, target = data[0]
    assert image.shape == (3, SIDE, SIDE)
    assert target["boxes"].tolist() == [SQUARE, [0, 0, 32, 32]]  # half a pixel is cut off
    assert target["boxes"].canvas_size == (SIDE, SIDE)
    found = {name: target[name].tolist() for name in ("labels", "iscrowd", "area")}
    assert found == {"labels": [2, 0], "iscrowd": [0, 1], "area": [5.0, 9.0]}
    none = data[1][1]
    assert (none["boxes"].shape, none["labels"].dtype, none["area"].shape) == ((0, 4), torch.int64, (0,))
    assert boxes([[SQUARE]], [[1]])[0][1]["area"].tolist() == [32.0]


@pytest.mark.parametrize(
    ("box", "label", "problem"),
    [
        ([4, 6, 4, 10], 0, r"is x1, y1, x2, y2 = 4, 6, 4, 10: it has no area"),
        ([4, 6, float("nan"), 10], 0, r"= 4, 6, nan, 10: expected finite numbers"),
        ([4, 6, 12], 0, r"is \[4, 6, 12\]; expected 4 numbers"),
        (SQUARE, 3, "has label 3; valid: 0 to 2"),
        (SQUARE, -1, "has label -1; valid: 0 to 2"),
    ],
)
def test_boxes_are_refused_beforehand(box: list[Any], label: int, problem: str) -> None:
    with pytest.raises(DataError, match=r"^box 1 of image 1 of there .*" + problem):
        boxes([[SQUARE], [SQUARE, box]], [[0], [0, label]])


@pytest.mark.parametrize("box", [[4, 6, 34, 10], [-2, 6, 12, 10], [32.2, 4, 32.9, 8]])
def test_boxes_beyond_the_image(box: list[float]) -> None:
    message = r"^box 0 of image 0 of there is .*: it reaches beyond the image of 32 x 32 pixels$"
    with pytest.raises(DataError, match=message):
        boxes([[box]], [[0]], sizes=[(32, 32)])
    data = boxes([[box]], [[0]])
    with pytest.raises(DataError, match=message):
        data[0]


def test_lists_that_do_not_belong_together() -> None:
    with pytest.raises(DataError, match=r"^there has 1 images, but labels of 2"):
        boxes([[SQUARE]], [[0], [0]])
    with pytest.raises(DataError, match=r"^image 0 of there has 1 boxes, but crowd of 2"):
        boxes([[SQUARE]], [[0]], crowd=[[True, False]])
    with pytest.raises(DataError, match=r"^labels of image 0 of there are not integers but float64"):
        boxes([[SQUARE]], [[0.5]])
    with pytest.raises(DataError, match=r"^image 0 of there has 32 x 32 pixels, its boxes are of one of 32 x 40$"):
        boxes([[SQUARE]], [[0]], sizes=[(40, 32)])[0]


def test_images_that_are_wider_than_tall() -> None:
    wide = encoded(photo(0, (20, SIDE)))
    for sizes in (None, [(20, SIDE), (SIDE, SIDE)]):
        given = [[[-1, -1, SIDE + 1, 21], [25, 2, 30, 8]], [[25, 2, 30, 30]]]
        data = DetectionDataset([wide, IMAGES[1]], given, [[0, 1], [2]], num_classes=3, sizes=sizes)
        assert data[0][1]["boxes"].tolist() == [[0, 0, SIDE, 20], [25, 2, 30, 8]]  # a pixel is cut off
        part = data.part([1])
        assert part[0][1]["boxes"].tolist() == [[25, 2, 30, 30]]
    for box in ([-1.01, 0, 5, 5], [0, -1.01, 5, 5], [0, 0, SIDE + 1.01, 5], [0, 0, 5, 21.01]):
        with pytest.raises(DataError, match=r"it reaches beyond the image of 32 x 20 pixels$"):
            DetectionDataset([wide], [[box]], [[0]], num_classes=3, sizes=[(20, SIDE)])


def test_boxes_of_a_batch_move_together() -> None:
    batch = Boxes([{"labels": torch.tensor([1])}, {"labels": torch.tensor([])}]).to("meta", non_blocking=True)
    assert isinstance(batch, Boxes)
    assert [each["labels"].device.type for each in batch] == ["meta", "meta"]


# ---- outlines --------------------------------------------------------------------------------------------------------


def rle(filled: np.ndarray[Any, Any]) -> list[int]:
    """Runs of zeros and ones, column by column, zeros first: twenty plain lines' worth of oracle."""
    runs, value = [0], 0
    for pixel in filled.T.reshape(-1).tolist():
        if pixel != value:
            runs.append(0)
            value = pixel
        runs[-1] += 1
    return runs


@pytest.mark.parametrize("kind", ["polygon", "list", "text"])
def test_outlines_of_every_form(kind: str) -> None:
    expected = np.zeros((SIDE, SIDE), np.uint8)
    expected[6:10, 4:12] = 1
    encoding: dict[str, Any] = {"counts": rle(expected), "size": [SIDE, SIDE]}
    if kind == "text":
        masks_of = vitrim.data.objects.import_pycocotools()
        encoding["counts"] = masks_of.encode(np.asfortranarray(expected))["counts"].decode()
    outline = OUTLINE if kind == "polygon" else json.dumps(encoding).encode()
    target = boxes([[SQUARE], []], [[1], []], outlines=[[outline], []])[0][1]
    assert isinstance(target["masks"], tv_tensors.Mask)
    assert np.array_equal(target["masks"].numpy(), expected[None])
    assert boxes([[SQUARE], []], [[1], []], outlines=[[outline], []])[1][1]["masks"].shape == (0, SIDE, SIDE)


@pytest.mark.parametrize(
    ("outline", "problem"),
    [
        ([], "has no polygon"),
        ([[1, 2, 3, 4]], "has a polygon of 4 numbers; expected x and y of at least three corners"),
        ({"counts": [992], "size": [32, 31]}, r"is of an image of size \[32, 31\], the image's is \[32, 32\]"),
        (5, "is neither polygons nor"),
    ],
)
def test_outlines_that_are_none(outline: Any, problem: str) -> None:
    with pytest.raises(DataError, match=f"^it {problem}"):
        decode_outline(json.dumps(outline).encode(), (32, 32), "it")


# ---- both ------------------------------------------------------------------------------------------------------------


def test_parts_keep_their_targets() -> None:
    part = masks([0, 1], [2, 2]).part([1])
    assert (len(part), part.num_classes, part[0][1].unique().tolist()) == (1, 3, [2])
    some = boxes([[SQUARE], []], [[1], []], outlines=[[OUTLINE], []], sizes=[(32, 32)] * 2).part([1, 0])
    assert [len(target["labels"]) for _, target in (some[0], some[1])] == [0, 1]
    for data in (part, some):
        with pytest.raises(IndexError):
            data[len(data)]


def test_fingerprints_see_targets() -> None:
    plain = [masks([0, 1]), masks([0, 2]), masks([0, 1], ignore=1)]
    plain += [boxes([[SQUARE]], [[1]]), boxes([[SQUARE]], [[2]]), boxes([[SQUARE]], [[1]], crowd=[[True]])]
    plain += [boxes([[SQUARE]], [[1]], outlines=[[OUTLINE]]), boxes([[SQUARE], []], [[1], []])]
    assert len({fingerprint(data) for data in plain}) == len(plain)
    assert fingerprint(masks([0, 1])) == fingerprint(masks([0, 1]))
