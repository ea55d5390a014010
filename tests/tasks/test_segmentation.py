"""A class for every pixel."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassJaccardIndex

import golden_files
from dense_files import mask, photo
from image_files import encoded
from vitrim.data import DataError, ImageDataset, SegmentationDataset
from vitrim.errors import VitrimError
from vitrim.tasks import make_task
from vitrim.tasks.options import DenseAugment, Loss, Mix, Protocol
from vitrim.tasks.segmentation import Segmentation, SegmentationScores, patch_grid

LOSS = Loss(name="pixel_cross_entropy")


def scene(classes: int = 5, size: tuple[int, int] = (12, 16), batch: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randn(batch, classes, *size, generator=generator)
    labels = torch.randint(classes, (batch, *size), generator=generator)
    labels[:, :3] = 255
    return logits, labels


# ---- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [False, True])
def test_scores_are_those_of_the_library_and_of_a_loop(absent: bool) -> None:
    logits, labels = scene()
    if absent:  # in truth and in prediction
        logits[:, 3] = -100
        labels[labels == 3] = 0
    metrics = make_task("segmentation", 5).metrics()
    for part in range(3):
        metrics.update(logits[part : part + 1], labels[part : part + 1])
    found = metrics.compute()
    assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(
        ("mIoU", "mAcc", "aAcc"), torch.float64
    )
    library = MulticlassJaccardIndex(5, ignore_index=255)(logits, labels)
    assert found["mIoU"].item() == pytest.approx(library.item(), abs=1e-6)
    confusion = np.zeros((5, 5), int)
    for truth, guess in zip(labels.flatten().tolist(), logits.argmax(1).flatten().tolist(), strict=True):
        if truth != 255:
            confusion[truth, guess] += 1
    rows = confusion.sum(1)
    right = [confusion[k, k] / rows[k] for k in range(5) if rows[k]]
    assert found["mAcc"].item() == pytest.approx(np.mean(right), abs=1e-12)
    assert found["aAcc"].item() == pytest.approx(np.trace(confusion) / confusion.sum(), abs=1e-12)
    scores = metrics["scores"]
    assert isinstance(scores, SegmentationScores)
    assert np.array_equal(scores.confusion.numpy(), confusion)
    assert scores.per_class().isnan().tolist() == [False] * 3 + [absent, False]


def test_counts_beyond_those_of_float32() -> None:
    scores = SegmentationScores(2)
    scores.confusion += torch.tensor([[2**24, 0], [0, 0]])
    scores.update(torch.zeros(1, 1, 1, dtype=torch.int64), torch.zeros(1, 1, 1, dtype=torch.int64))
    assert scores.confusion[0, 0].item() == 2**24 + 1


def test_ignored_pixels_count_nowhere() -> None:
    metrics = make_task("segmentation", 3).metrics()
    logits, _ = scene(3)
    metrics.update(logits, torch.full((3, 12, 16), 255))
    assert all(value.isnan() for value in metrics.compute().values())
    labels = logits.argmax(1)
    metrics.update(logits, labels)
    assert {name: value.item() for name, value in metrics.compute().items()} == {"mIoU": 1, "mAcc": 1, "aAcc": 1}


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_mean_over_valid_pixels(smoothing: float) -> None:
    logits, labels = scene()
    criterion = make_task("segmentation", 5).criterion(Loss(name="pixel_cross_entropy", smoothing=smoothing))
    expected = F.cross_entropy(logits, labels, ignore_index=255, label_smoothing=smoothing)
    torch.testing.assert_close(criterion(logits, labels), expected)
    assert criterion(logits.bfloat16(), labels).dtype == torch.float32


def test_crops_that_are_ignored_as_a_whole_have_no_loss() -> None:
    task = make_task("segmentation", 4)
    labels = torch.full((2, 8, 8), 255)
    for criterion, shape in ((task.criterion(LOSS), (2, 4, 8, 8)), (task.auxiliary(LOSS), (2, 16, 4))):
        logits = torch.randn(*shape, requires_grad=True)
        loss = criterion(logits, labels)
        loss.backward()
        assert loss.item() == 0
        assert logits.grad is not None
        assert not logits.grad.any()


@pytest.mark.parametrize("router", [0, 3])
def test_losses_of_routers_are_the_published_ones(router: int) -> None:
    """As far as the stored outputs of the routers go, which are in float32."""
    ref = golden_files.load("cropr/cropr_segm_llf")
    labels = torch.from_numpy(np.random.RandomState(7).randint(0, 7, (2, 64, 64)))
    labels[:, :5] = 255
    logits = golden_files.tensor(ref, f"train/aux_logits/{router}")[0].double()  # (B, K, h, w)
    loss = make_task("segmentation", 7).auxiliary(LOSS)(logits.flatten(2).transpose(1, 2), labels)
    assert loss.item() == pytest.approx(golden_files.tensor(ref, "train/losses")[1 + router].item(), abs=1e-6)


@pytest.mark.parametrize(("patches", "size"), [(64, (64, 64)), (6, (32, 48)), (320, (128, 160)), (1, (9, 9))])
def test_grids_of_square_patches(patches: int, size: tuple[int, int]) -> None:
    rows, columns = patch_grid(patches, size)
    assert (rows * columns, size[0] // rows) == (patches, size[1] // columns)


@pytest.mark.parametrize(("patches", "size"), [(63, (64, 64)), (0, (8, 8)), (12, (32, 48)), (100, (8, 8))])
def test_numbers_that_are_no_grid(patches: int, size: tuple[int, int]) -> None:
    with pytest.raises(VitrimError, match=rf"^{patches} query outputs are no grid of square patches on a crop of"):
        patch_grid(patches, size)


def test_maps_of_another_size() -> None:
    with pytest.raises(VitrimError, match=r"the model gives \(2, 4, 4, 4\) for labels \(2, 8, 8\); expected logits"):
        make_task("segmentation", 4).criterion(LOSS)(torch.zeros(2, 4, 4, 4), torch.zeros(2, 8, 8).long())


# ---- data ------------------------------------------------------------------------------------------------------------


def dataset(*values: object, size: tuple[int, int] = (32, 32)) -> SegmentationDataset:
    images = [encoded(photo(row, size)) for row in range(len(values))]
    return SegmentationDataset(
        images, [encoded(mask(each, size=size)) for each in values], num_classes=3, source="there"
    )


def test_batches() -> None:
    task = Segmentation(3)
    data = dataset([0, 1], [2, 255])
    task.check(data)
    geometry = SimpleNamespace(size=(16, 24), mean=(0.5,) * 3, std=(0.5,) * 3)
    data.transform = task.train_transform(geometry, DenseAugment())
    images, masks = task.collate([data[0], data[1]])
    assert (images.shape, masks.shape, masks.dtype) == ((2, 3, 16, 24), (2, 16, 24), torch.int64)
    data.transform = task.eval_transform(geometry)
    images, masks = task.collate([data[0], data[1]])
    assert (images.shape, masks.shape) == ((2, 3, 32, 32), (2, 32, 32))
    task.check_targets(masks, 2)
    other = dataset(0, size=(20, 32))
    other.transform = data.transform
    with pytest.raises(VitrimError, match=r"^images of 2 sizes \(32 x 20, 32 x 32\) are no batch: evaluate"):
        task.collate([data[0], other[0]])


def test_what_is_refused() -> None:
    task = Segmentation(4)
    with pytest.raises(VitrimError, match=r"^there has 3 classes, but the training data has 4 classes$"):
        task.check(dataset(0))
    with pytest.raises(VitrimError, match=r"^memory has no label for every pixel, which task segmentation learns$"):
        task.check(ImageDataset([b""], [0]))
    with pytest.raises(VitrimError, match=r"^segmentation needs 2 to 255 classes, the data has 1$"):
        Segmentation(1)
    with pytest.raises(VitrimError, match=r"^task segmentation does not mix images"):
        task.mixer(Mix(mixup=0.8))
    with pytest.raises(VitrimError, match="unknown loss of segmentation 'cross_entropy'"):
        task.criterion(Loss())
    for targets, message in (
        (torch.zeros(2, 4, 4), "expected 2 masks of integers, got torch.float32"),
        (torch.zeros(3, 4, 4).long(), r"expected 2 masks of integers, got torch.int64 of \(3, 4, 4\)"),
        (torch.full((2, 4, 4), 4), "label 4 is beyond the model's 4 classes, 0 to 3"),
    ):
        with pytest.raises(DataError, match=message):
            task.check_targets(targets, 2)
    task.check_targets(torch.full((2, 4, 4), 255), 2)


# ---- predictions -----------------------------------------------------------------------------------------------------


class Shallow(nn.Module):
    """A model with a map of the size of its images."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images)
        return logits


def test_predictions_follow_the_protocol() -> None:
    torch.manual_seed(0)
    task, model = Segmentation(4), Shallow().eval().requires_grad_(False)
    images = torch.rand(2, 3, 16, 24)
    torch.testing.assert_close(task.predict(model, images), model(images))
    task.protocol = Protocol(mode="slide", window=8, stride=8)
    slid = task.predict(model, images)
    assert slid.shape == (2, 4, 16, 24)
    torch.testing.assert_close(slid[:, :, :7, :7], model(images)[:, :, :7, :7])  # a border further away
    assert not torch.equal(slid, model(images))


def test_agreement_with_dense() -> None:
    task = Segmentation(5)
    logits, labels = scene()
    dense = logits.clone()
    dense[0, :, 3:, :8] = 0  # half of the valid pixels of one image
    dense[0, 0, 3:, :8] = 1
    logits[0, 1, 3:, :8] = 100
    labels[2] = 255
    assert task.agreement(logits, dense, labels).tolist() == [0.5, 1.0]
    metrics = task.metrics()
    task.update(metrics, dense, labels)
    assert metrics["scores"].confusion.sum() == 2 * 9 * 16
