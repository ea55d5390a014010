"""The damage of a setting: its parts of the images, its numbers, and what is computed once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from timm.models import VisionTransformer
from torch.utils.data import TensorDataset

import vitrim
from vitrim.measure.contestants import ModelOutput
from vitrim.measure.records import Batch, Processes
from vitrim.tasks import make_task
from vitrim.tuning.proxy import PARTS, BatchImages, Damage, DatasetImages, ModelScorer, _in_order

IMAGES = torch.randn(48, 3, 32, 32, generator=torch.Generator().manual_seed(0))
DATASET = TensorDataset(IMAGES, torch.zeros(48, dtype=torch.int64))


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=5).eval()


def images(each: int = 16) -> DatasetImages:
    return DatasetImages(DATASET, each, 4)


class Apart(Processes):
    """A process that is told nothing of the others."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


def test_the_shares_of_two_processes_are_the_scores_of_one(model: VisionTransformer) -> None:
    """Three batches: two for the first, one for the second."""
    asked: tuple[Any, ...] = ([vitrim.ToMe(r=4)], "check", 4, 16)
    task = make_task("classification", 5)
    whole = ModelScorer(model, task, images())(*asked)[0]
    parts = [ModelScorer(model, task, images(), processes=Apart(index, 2))(*asked) for index in range(2)]
    assert [len(part[0]["kl"]) for part in parts] == [8, 4]
    joined = _in_order(parts, 12, 4)[0]
    assert joined.keys() == whole.keys()
    assert all(np.array_equal(joined[name], whole[name]) for name in whole)


def test_scores_are_those_of_twenty_plain_lines(model: VisionTransformer) -> None:
    source = images()
    scores = ModelScorer(model, make_task("classification", 5), source)([vitrim.ToMe(r=4)], "check", 4, 12)[0]
    pixels = IMAGES[source.places["check"][4:12]]
    with torch.no_grad():
        dense = model(pixels), model.forward_head(model.forward_features(pixels), pre_logits=True)
        vitrim.reduce_(model, "tome:r=4")
        ours = model(pixels), model.forward_head(model.forward_features(pixels), pre_logits=True)
        vitrim.restore_(model)
    kl = torch.nn.functional.kl_div(ours[0].log_softmax(1), dense[0].softmax(1), reduction="none").sum(1)
    assert scores["kl"] == pytest.approx(kl.numpy(), abs=1e-6)
    distance = (ours[1] - dense[1]).norm(dim=1) / dense[1].norm(dim=1)
    assert scores["feature"] == pytest.approx(distance.numpy(), abs=1e-5)
    assert scores["cosine"] == pytest.approx(1 - torch.cosine_similarity(ours[1], dense[1]).numpy(), abs=1e-5)
    assert scores["agree"] == pytest.approx((ours[0].argmax(1) != dense[0].argmax(1)).numpy().astype(float))


def test_the_three_parts_are_disjoint() -> None:
    parts = [set(images().places[part]) for part in PARTS]
    assert [len(part) for part in parts] == [16, 16, 16]
    assert len(set.union(*parts)) == 48
    memory = BatchImages(list(IMAGES.split(4)))
    for part in PARTS:
        assert memory.count(part) == 16
        pieces = [batch.images for batch in memory.batches(part, 4, 16)]
        assert [len(piece) for piece in pieces] == [4, 4, 4]
    every = torch.cat([batch.images for part in PARTS for batch in memory.batches(part, 0, 16)])
    assert len(np.unique(every.numpy(), axis=0)) == 48


@pytest.mark.slow
def test_the_dense_model_runs_once_on_each_image(model: VisionTransformer) -> None:
    """Also where pieces overlap, and where one ends within a batch; the scores stay those of a fresh scorer."""
    scorer, asked = ModelScorer(model, make_task("classification", 5), images()), [vitrim.ToMe(r=4)]
    seen: list[int] = []
    scorer.dense.model.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    pieces: list[tuple[Any, int, int]] = [
        ("search", 0, 4),
        ("search", 4, 12),
        ("search", 0, 12),
        ("search", 8, 10),
        ("check", 0, 4),
        ("check", 0, 4),
    ]
    for piece in pieces:
        expected = ModelScorer(model, make_task("classification", 5), images())(asked, *piece)[0]
        scores = scorer(asked, *piece)[0]
        assert all(np.array_equal(scores[name], expected[name]) for name in expected)
    assert seen == [4, 4, 4, 2, 4]


def test_outputs_beyond_the_room_are_not_kept(model: VisionTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrim.tuning.proxy.CACHED_BYTES", 8 * (5 + model.num_features) * 4)
    scorer, asked = ModelScorer(model, make_task("classification", 5), images()), [vitrim.ToMe(r=4)]
    seen: list[int] = []
    scorer.dense.model.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    first, second = (scorer(asked, "search", 0, 12)[0] for _ in range(2))
    assert seen == [4, 4, 4, 4]  # two of three batches are remembered
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_neighbours_go_to_different_parts() -> None:
    """30 of 30 images, and 9 of 30 spread evenly: every third is for searching, the next for selecting, for checking.

    So parts are alike in a dataset that is sorted by its classes.
    """
    every = DatasetImages(TensorDataset(torch.arange(30), torch.zeros(30)), 10, 4)
    assert [list(every.places[part]) for part in PARTS] == [list(range(start, 30, 3)) for start in range(3)]
    few = DatasetImages(TensorDataset(torch.arange(30), torch.zeros(30)), 3, 4)
    together = sorted(place for part in PARTS for place in few.places[part])
    assert [few.places[part] for part in PARTS] == [together[start::3] for start in range(3)]
    assert len(set(together)) == 9


def test_damage_is_relative_to_the_dense_model() -> None:
    """A feature twice as long is off by one length of the dense one, and one of half the length by half of it."""
    task = make_task("classification", 3)
    gauge, dense = Damage(task), torch.tensor([[3.0, 4.0], [3.0, 4.0], [1.0, 0.0]])
    feature = torch.tensor([[6.0, 8.0], [1.5, 2.0], [0.0, 1.0]])
    logits, like = torch.tensor([[1.0, 2.0, 0.0]] * 3), torch.tensor([[1.0, 2.0, 0.0], [3.0, 2.0, 0.0], [0.0] * 3])
    batch = Batch(torch.zeros(3, 3, 2, 2), torch.zeros(3, dtype=torch.int64), torch.arange(3), 0)
    gauge.see(batch, ModelOutput(logits, feature), ModelOutput(like, dense))
    assert gauge.values["feature"].each().tolist() == pytest.approx([1.0, 0.5, 2**0.5])
    assert gauge.values["cosine"].each().tolist() == pytest.approx([0.0, 0.0, 1.0])
    assert gauge.values["agree"].each().tolist() == [0.0, 1.0, 1.0]
    own, other = logits.double().softmax(1), like.double().softmax(1)
    expected = (other * (other / own).log()).sum(1)
    assert gauge.values["kl"].each().tolist() == pytest.approx(expected.tolist(), abs=1e-12)


def test_a_sample_of_sorted_images_is_spread_over_its_part() -> None:
    """Of 90 images, the search reads every third; of these a sample has the first, the last and those between."""
    images = torch.arange(90.0)[:, None, None, None].expand(90, 3, 2, 2)
    parts = DatasetImages(TensorDataset(images, torch.arange(90)), 30, 4)
    found = torch.cat([batch.images for batch in parts.sample("search", 4)])[:, 0, 0, 0].tolist()
    assert found == [0.0, 30.0, 57.0, 87.0]
    assert sum(len(batch) for batch in parts.sample("search", 99)) == 30
    batches = BatchImages(list(images.split(5)))  # 18 batches, 6 of each part
    found = torch.cat([batch.images for batch in batches.sample("search", 8)])[:, 0, 0, 0].tolist()
    assert found == [*range(5), *range(75, 80)]
