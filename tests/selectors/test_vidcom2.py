"""VidCom2: the worked example of its specification, twenty plain lines, and what follows from the definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import vitrim
from vitrim.selectors.vidcom2 import frame_counts, similarities, unusual

EXAMPLE = torch.tensor([
    [[9, 0, 1, 2], [0, 8, 2, 1], [5, 5, 1, 1], [1, 9, 2, 2]],
    [[9, 1, 1, 2], [1, 8, 2, 1], [5, 5, 1, 1], [2, 9, 2, 3]],
    [[0, 9, 3, -1], [9, 0, -1, 3], [4, 6, 3, 3], [8, 1, 0, 2]],
], dtype=torch.float64)  # fmt: skip


def video(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(x: Tensor, share: float, count: int | None) -> list[int]:
    """Lists and loops."""
    frames, size, width = x.shape
    variances = x.flatten(0, 1).var(dim=0, correction=0).tolist()
    quiet = sorted(range(width), key=lambda channel: variances[channel])[: width // 2]
    x = torch.nn.functional.normalize(x[:, :, quiet], dim=2)

    def alike(token: Tensor, centre: Tensor) -> float:
        distance = float(((token - centre) ** 2).sum())
        return sum(math.exp(-distance / (2 * width)) for width in (0.125, 0.25, 0.5, 1, 2))

    centre = x.flatten(0, 1).mean(dim=0)
    to_video = [[alike(token, centre) for token in frame] for frame in x]
    both = [
        [own + alike(token, frame.mean(dim=0)) for own, token in zip(row, frame, strict=True)]
        for row, frame in zip(to_video, x, strict=True)
    ]
    strange = [-sum(row) / size for row in to_video]
    powers = [math.exp((own - max(strange)) / 0.01) for own in strange]
    kept = []
    for t in range(frames):
        own = min(1.0, share * (1 + powers[t] / sum(powers) - 1 / frames))
        number = min(max(1, round(round(own * size, 4))), size)  # halves as in float32
        best = sorted(range(size), key=lambda i: both[t][i])[:number]
        kept += [t * size + i for i in best]
    flat = [value for row in both for value in row]
    if count is not None:
        rest = [place for place in range(frames * size) if place not in kept]
        kept = sorted(kept, key=lambda place: flat[place])[:count]
        kept += sorted(rest, key=lambda place: flat[place])[: count - len(kept)]
    return sorted(kept)


def test_the_similarities_of_the_worked_example() -> None:
    to_video, to_frame = similarities(EXAMPLE)
    expected = [
        [4.537414, 3.987874, 4.820254, 4.820254],
        [4.537414, 3.987874, 4.820254, 4.790923],
        [1.776762, 2.112594, 4.820254, 2.974307],
    ]
    torch.testing.assert_close(to_video, torch.tensor(expected).double(), atol=1e-6, rtol=0)
    expected = [
        [8.853932, 8.304392, 9.815156, 9.815156],
        [9.031495, 8.115549, 9.794526, 9.627222],
        [3.477561, 4.750015, 8.843355, 6.412123],
    ]
    torch.testing.assert_close(to_video + to_frame, torch.tensor(expected).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("share", "counts", "released", "served"),
    [
        (0.25, [1, 1, 2], [1, 5, 8, 9], [5, 8, 9]),
        (0.5, [1, 1, 3], [1, 5, 8, 9, 11], [1, 5, 8, 9, 10, 11]),
        (0.75, [2, 2, 4], [0, 1, 4, 5, 8, 9, 10, 11], [0, 1, 4, 5, 7, 8, 9, 10, 11]),
    ],
)
def test_the_choice_of_the_worked_example(
    share: float, counts: list[int], released: list[int], served: list[int]
) -> None:
    assert frame_counts(similarities(EXAMPLE)[0], share) == counts
    features = EXAMPLE.flatten(0, 1)
    own = vitrim.parse_selector(f"vidcom2:keep={share},reconcile=false")
    assert own.mask(features, (3, 2, 2)).nonzero().squeeze(1).tolist() == released
    with pytest.raises(vitrim.VitrimError, match="video by video"):
        own.count((3, 2, 2))
    known = vitrim.parse_selector(f"vidcom2:keep={share}")
    assert known.mask(features, (3, 2, 2)).nonzero().squeeze(1).tolist() == served
    assert known.count((3, 2, 2)) == len(served)
    number = vitrim.parse_selector(f"vidcom2:tokens={len(served)}")
    assert number.mask(features, (3, 2, 2)).nonzero().squeeze(1).tolist() == served


@pytest.mark.parametrize("shape", [(1, 9, 6), (2, 5, 7), (4, 6, 8), (7, 12, 5)])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.6, 1.0])
def test_it_keeps_what_loops_keep(shape: tuple[int, int, int], share: float) -> None:
    total = shape[0] * shape[1]
    for seed in range(3):
        x = video(*shape, seed=seed) + 2 * video(shape[0], 1, shape[2], seed=seed + 9)
        for count in (None, max(shape[0], int(total * share)), total // 2):
            assert unusual(x, share, count).tolist() == plain(x, share, count)


def test_the_order_of_channels_does_not_matter_and_loud_ones_do_not_count() -> None:
    x = video(3, 8, 6)
    kept = unusual(x, 0.3, None).tolist()
    assert unusual(x[:, :, [3, 1, 5, 0, 2, 4]], 0.3, None).tolist() == kept
    loud = torch.cat([x, 100 * video(3, 8, 6, seed=1)], dim=2)
    quiet = torch.cat([x, torch.zeros(3, 8, 6)], dim=2)  # of 12 channels the 6 zeros are quietest
    assert unusual(loud, 0.3, 7).tolist() != unusual(quiet, 0.3, 7).tolist()
    assert torch.equal(similarities(loud)[0], similarities(torch.cat([x, 7 * loud[:, :, 6:]], dim=2))[0])


def test_equal_frames_keep_equal_numbers() -> None:
    """A share of 10 tokens that ends in a half is the case that rounding errors would decide."""
    x = video(1, 10, 6).float().expand(7, -1, -1)
    assert frame_counts(similarities(x)[0], 0.25) == [2] * 7
    assert frame_counts(similarities(x)[0], 0.35) == [4] * 7


def test_the_number_is_at_least_one_for_each_frame() -> None:
    few = vitrim.parse_selector("vidcom2:keep=0.01")
    assert few.count((8, 4, 4)) == 8
    assert few.count((4, 4)) == 1
    assert few.mask(video(128, 6), (8, 4, 4)).sum() == 8
    assert vitrim.parse_selector("vidcom2:keep=0.29").count((1, 10, 10)) == 29
