"""The order of images against the reference vectors, and that all randomness follows from the place in the run."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from timm.data.distributed_sampler import RepeatAugSampler

import golden_files
from vitrim.data import eval_transform
from vitrim.data.transforms import Geometry, geometry_of
from vitrim.errors import VitrimError
from vitrim.training.images import (
    Cutout,
    Seeded,
    TrainOrder,
    TrainTransform,
    epoch_order,
    seed_all,
)
from vitrim.training.recipe import Augment

RGB = Geometry((16, 24), (0.5,) * 3, (0.25,) * 3)


@golden_files.cases(
    [
        (golden_files.Part("training/losses_metrics_a", (f"{key}/*",)), key, shuffle)
        for key, shuffle in (("rasampler", True), ("rasampler_noshuffle", False))
    ],
    "key, shuffle",
)
def test_every_process_takes_what_the_reference_gives_its_rank(
    ref: golden_files.Reference, key: str, shuffle: bool
) -> None:
    """Neighbours, which are changes of one image, go to different processes: every world-th place, not a block."""
    for rank in (0, 1):
        order = TrainOrder(1000, batch_size=128, start=12, stop=18, repeats=3, shuffle=shuffle, rank=rank, world_size=2)
        places = [place for batch in order for place in batch]
        assert {place.epoch for place in places} == {2}
        ref.check(f"{key}/n1000_w2_r{rank}", [place.image for place in places], torch.Tensor.tolist)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_repeats_without_shuffling_are_timms(world: int, repeats: int) -> None:
    """timm has DeiT's sampler; 768 images are three of its rounds, so that nothing is cut off without repeats."""
    for rank in range(world):
        sampler = RepeatAugSampler(range(768), world, rank, shuffle=False, num_repeats=repeats)
        assert epoch_order(768, 4, repeats=repeats, shuffle=False)[rank::world] == list(sampler)


def test_repeats_beyond_the_images_cost_nothing() -> None:
    assert epoch_order(1000, 0, repeats=10**8, shuffle=False) == [0] * 768


@given(count=st.integers(1, 600), epoch=st.integers(0, 5), seed=st.integers(0, 3))
def test_an_epoch_sees_every_image_once(count: int, epoch: int, seed: int) -> None:
    assert sorted(epoch_order(count, epoch, seed=seed)) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(epoch_order(50, epoch, seed=seed)) for epoch in range(3) for seed in range(3)]
    assert len(set(orders)) == 9


@given(
    count=st.integers(8, 60),
    world=st.sampled_from([1, 2, 4]),
    parts=st.sampled_from([1, 2]),
    start=st.integers(0, 12),
    updates=st.integers(0, 12),
)
def test_processes_micro_batches_and_resuming_share_one_order(
    count: int, world: int, parts: int, start: int, updates: int
) -> None:
    """Whatever the split, an update sees the images that one process sees in one batch."""
    common = {"batch_size": 8, "seed": 3}
    whole = list(TrainOrder(count, start=0, stop=start + updates, **common))[start:]
    shared = [
        list(
            TrainOrder(
                count,
                start=start,
                stop=start + updates,
                micro_batch=8 // world // parts,
                rank=rank,
                world_size=world,
                **common,
            )
        )
        for rank in range(world)
    ]
    for update, expected in enumerate(whole):
        mine = [place for rank in shared for part in rank[update * parts : (update + 1) * parts] for place in part]
        assert Counter(mine) == Counter(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 9}, "an epoch has 8 images, fewer than the 9"),
        ({"batch_size": 3, "world_size": 2}, "cannot be shared evenly by 2"),
        ({"batch_size": 8, "micro_batch": 3}, "micro_batch must divide it, not be 3"),
    ],
)
def test_batches_that_cannot_be_shared_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(VitrimError, match=message):
        TrainOrder(8, start=0, stop=1, **options)


def test_an_epoch_that_ends_too_early_is_an_error() -> None:
    order = TrainOrder(8, lambda epoch, start: iter(range(start, 7)), batch_size=4, start=0, stop=2)
    with pytest.raises(VitrimError, match="epoch 0 of the training data ended after 7 images"):
        list(order)


@pytest.mark.parametrize(
    "options",
    [
        {"crop": "resized"},
        {"crop": "padded", "padding": 3},
        {"crop": "squash", "hflip": 0.0},
        {"auto": "rand-m9-mstd0.5-inc1", "erase": 1.0},
        {"auto": "augmix-m3-w3"},
        {"auto": "original"},
        {"color_jitter": 0.4, "cutout": 1.0},
        {"crop": "resized", "interpolation": "random"},
    ],
)
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_an_image_is_changed_alike_at_the_same_place_only(options: dict[str, Any], mode: str) -> None:
    seed_all(5)
    image = Image.fromarray(np.random.randint(0, 256, (40, 30, 3), dtype=np.uint8)).convert(mode)
    transform = TrainTransform(RGB, Augment(**options))

    class Data(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> torch.Tensor:
            return transform(image)

    data = Seeded(Data(), seed=1)
    first = data[(place := TrainOrder(1, batch_size=1, start=0, stop=1).__iter__().__next__()[0])]
    random.random(), torch.rand(1), np.random.rand()
    assert first.shape == (3, 16, 24)
    assert first.dtype == torch.float32
    assert torch.equal(data[place], first)
    others = [data[place._replace(position=position)] for position in range(1, 5)]
    deterministic = options == {"crop": "squash", "hflip": 0.0}
    assert all(torch.equal(other, first) for other in others) == deterministic


def test_a_margin_wider_than_the_image_is_refused() -> None:
    """A reflection of 100,000 pixels would ask for gigabytes per image."""
    with pytest.raises(VitrimError, match=r"augment\.padding=100000 .* 16 x 24 pixels: at most 15"):
        TrainTransform(RGB, Augment(crop="padded", padding=100_000))
    assert TrainTransform(RGB, Augment(crop="padded", padding=15))(Image.new("RGB", (24, 16))).shape == (3, 16, 24)


OVERLAYS = [
    ({"std": [0, 0, 0]}, r"std is 3 numbers above 0, one per channel, not \[0, 0, 0\]"),
    ({"mean": [0]}, r"mean is 3 numbers, one per channel, not \[0\]"),
    ({"mean": [0, 0, float("nan")]}, "mean is 3 numbers"),
    ({"interpolation": "bicubik"}, "unknown interpolation 'bicubik'; valid: bicubic"),
]


@pytest.mark.parametrize(("overlay", "said"), OVERLAYS)
def test_how_images_are_prepared_is_checked_where_it_is_written(overlay: dict[str, Any], said: str) -> None:
    model = timm.create_model("test_vit", pretrained_cfg_overlay=overlay)
    for prepare in (geometry_of, eval_transform):
        with pytest.raises(VitrimError, match=said):
            prepare(model)


def test_a_grey_model_may_say_one_number_or_three() -> None:
    for mean, std in (([0.5], [0.25]), ([0.25, 0.5, 0.75], [0.25] * 3)):
        overlay = {"mean": mean, "std": std}
        model = timm.create_model("test_vit", in_chans=1, img_size=32, pretrained_cfg_overlay=overlay)
        assert geometry_of(model) == Geometry((32, 32), (0.5,), (0.25,))
        assert eval_transform(model)(Image.new("L", (32, 32), 255)).mean() == pytest.approx(2.0)


def test_grey_models_get_grey_images() -> None:
    geometry = geometry_of(timm.create_model("test_vit", in_chans=1, img_size=32))
    assert geometry.size == (32, 32)
    assert TrainTransform(geometry, Augment())(Image.new("RGB", (40, 40))).shape == (1, 32, 32)


def test_a_class_that_is_called_directly_says_what_its_images_are() -> None:
    """Only timm's create_model gives a model its pretrained_cfg."""
    model = timm.models.VisionTransformer(img_size=32, patch_size=4, embed_dim=8, depth=1, num_heads=2)
    assert geometry_of(model).size == (32, 32)


def test_other_libraries_are_normalised_as_in_evaluation() -> None:
    """A model whose own transform says mean and standard deviation, as torchvision's do."""

    class Own(torch.nn.Module):
        image_size = 24

        class eval_transform:
            mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)

    assert geometry_of(Own()) == Geometry((24, 24), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["rand-m10-inc1", "rand-m0", "augmix-m0", "v0-mstd9"])
def test_policies_run_at_every_magnitude(policy: str) -> None:
    """Pillow refuses to posterize to no bit at all, which timm asks for at the ends of the scale."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    transform = TrainTransform(Geometry((16, 16), (0.5,) * 3, (0.5,) * 3), Augment(auto=policy))
    for seed in range(120):
        seed_all(seed)
        assert transform(image).isfinite().all()


def test_policies_interpolate_as_the_recipe_says() -> None:
    def resampling(interpolation: str) -> object:
        augment = Augment(auto="rand-m9-mstd0.5-inc1", interpolation=interpolation)
        steps = TrainTransform(Geometry((16, 16), (0.5,) * 3, (0.5,) * 3), augment).transform.transforms
        ops = next(step for step in steps if hasattr(step, "ops")).ops
        return {op.kwargs["resample"] for op in ops}

    assert resampling("bicubic") == {Image.Resampling.BICUBIC}
    assert resampling("bilinear") == {Image.Resampling.BILINEAR}
    assert resampling("random") == {(Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)}


def test_cutout_fills_a_rectangle_of_at_most_half_the_sides() -> None:
    """The published one: half of the width and half of the height, less where it hangs over an edge."""
    image = Image.new("RGB", (20, 12))
    areas = []
    for seed in range(200):
        random.seed(seed)
        changed = np.asarray(Cutout(1.0)(image)).any(axis=2)
        rows, columns = np.nonzero(changed)
        if rows.size:  # a black rectangle on a black image cannot be seen
            assert np.ptp(rows) < 6
            assert np.ptp(columns) < 10
            areas.append(int(changed.sum()))
    assert max(areas) == 60
    assert min(areas) >= 15
    assert Cutout(0.0)(image) is image
