"""The demo's digits: a fixed split, and a shipped model that is as good as its header says."""

import hashlib
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from timm.models import VisionTransformer

from vitrim.app import digits

HELD_OUT_SHA256 = "734d18c36923bcd2e179d7cb77d2f5fcee2d479055cfbfd0877eec844fda26c3"
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def split() -> digits.Split:
    return digits.load_split()


@pytest.fixture(scope="module")
def metadata() -> dict[str, str]:
    with safe_open(digits.CHECKPOINT, framework="pt") as checkpoint:
        return checkpoint.metadata()


def test_digits_split_shapes_and_ranges(split: digits.Split) -> None:
    assert split.train_images.shape == (1347, 1, 8, 8)
    assert split.test_images.shape == (450, 1, 8, 8)
    assert split.train_labels.shape == (1347,)
    assert split.test_labels.shape == (450,)
    for images in (split.train_images, split.test_images):
        assert images.dtype == torch.float32
        assert images.min().item() == pytest.approx(-digits.PIXEL_MEAN / digits.PIXEL_STD)
        assert images.max().item() == pytest.approx((16 - digits.PIXEL_MEAN) / digits.PIXEL_STD)
    for labels in (split.train_labels, split.test_labels):
        assert labels.dtype == torch.int64


def test_digits_are_normalised_by_their_training_part(split: digits.Split) -> None:
    assert split.train_images.mean().item() == pytest.approx(0, abs=2e-3)
    assert split.train_images.std().item() == pytest.approx(1, abs=2e-3)


def test_digits_split_is_fixed() -> None:
    from sklearn.datasets import load_digits

    labels = load_digits().target.astype(np.int64)
    held_out = digits.held_out_indices(labels, digits.TEST_IMAGES_PER_CLASS, digits.SPLIT_SEED)
    assert len(np.unique(held_out)) == 450
    assert hashlib.sha256(held_out.astype("<i8").tobytes()).hexdigest() == HELD_OUT_SHA256


def test_digits_split_is_stratified(split: digits.Split) -> None:
    assert split.test_labels.bincount().tolist() == [45] * 10
    assert split.train_labels.bincount().tolist() == [133, 137, 132, 138, 136, 137, 136, 134, 129, 135]


def test_digits_split_is_disjoint_and_complete(split: digits.Split) -> None:
    from sklearn.datasets import load_digits

    # no two of the scans are the same, so their number after removing repeats tells whether any was lost or shared
    images = torch.cat([split.train_images, split.test_images]).flatten(1)
    assert len(np.unique(load_digits().data, axis=0)) == 1797
    assert len(images.unique(dim=0)) == len(images) == 1797


def test_digits_labels_stay_with_their_images(split: digits.Split) -> None:
    # every scan's nearest neighbour nearly always shows the same digit; shuffled labels would agree one time in ten
    distances = torch.cdist(split.test_images.flatten(1), split.train_images.flatten(1))
    neighbours = split.train_labels[distances.argmin(dim=1)]
    assert (neighbours == split.test_labels).double().mean() > 0.98


def test_held_out_indices_refuses_rare_classes() -> None:
    with pytest.raises(ValueError, match="rarest class has 1"):
        digits.held_out_indices(np.array([0, 0, 1]), per_class=2, seed=0)


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"^the demo needs the package 'sklearn': pip install '.\[demo\]'$"):
        digits.load_split()


def test_digits_vit_is_a_plain_timm_model() -> None:
    model = digits.create_digits_vit()
    assert type(model) is VisionTransformer
    assert model.global_pool == "token"
    assert model.num_prefix_tokens == 1
    assert model.patch_embed.num_patches == 64
    assert len(model.blocks) == digits.DEPTH
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_digits_vit_is_ready_to_classify() -> None:
    model = digits.load_digits_vit()
    assert not any(module.training for module in model.modules())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.slow
def test_digits_vit_reaches_its_stated_accuracy(split: digits.Split, metadata: dict[str, str]) -> None:
    with torch.inference_mode():
        predictions = digits.load_digits_vit()(split.test_images).argmax(dim=1)
    measured = (predictions == split.test_labels).double().mean().item()
    # another processor's rounding may turn a near tie: one image of slack
    assert measured == pytest.approx(float(metadata["accuracy"]), abs=1.01 / len(predictions))
    assert measured >= 0.975


def test_digits_vit_metadata(metadata: dict[str, str]) -> None:
    assert metadata["data"] == "sklearn.datasets.load_digits"
    assert metadata["split_seed"] == str(digits.SPLIT_SEED)
    assert int(metadata["seed"]) == 0
    assert int(metadata["epochs"]) == 100
    for package in ("torch", "timm", "numpy", "scikit-learn"):
        assert metadata[f"{package}_version"]


def test_digits_vit_file_is_small_and_in_half_precision() -> None:
    assert digits.CHECKPOINT.stat().st_size <= 2.5 * MEGABYTE
    with safe_open(digits.CHECKPOINT, framework="pt") as checkpoint:
        assert {checkpoint.get_tensor(name).dtype for name in checkpoint.keys()} == {torch.float16}  # noqa: SIM118
