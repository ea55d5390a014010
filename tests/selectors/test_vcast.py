"""V-CAST: the worked example of its specification, twenty plain lines, and what follows from the definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import vitrim
from vitrim.selectors.vcast import Remainders, curvature, outstanding, shared_out

EXAMPLE = torch.tensor([
    [[2, 0], [1, 1], [2, 1]],
    [[2, 0], [1, 1], [1, 2]],
    [[0, 2], [1, 3], [1, 1]],
    [[0, 2], [0, 3], [1, 1]],
], dtype=torch.float64)  # fmt: skip


def video(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(x: Tensor, count: int, least: int, released: bool) -> list[int]:
    """Lists and loops; what is left over goes one by one."""
    frames, size, _ = x.shape
    means = [frame.mean(dim=0) / frame.mean(dim=0).norm() for frame in x]
    bends = [1.0] * frames
    for t in range(1, frames - 1):
        to, away = means[t] - means[t - 1], means[t + 1] - means[t]
        bends[t] = 1 - float(to @ away / (to.norm() * away.norm()))
    powers = [math.exp(bend / 0.7) for bend in bends]
    raw = [power / sum(powers) * (count - frames * least) for power in powers]
    counts = [least + min(int(own), size - least) for own in raw]
    given = [0] * frames
    while sum(counts) < count:
        free = [t for t in range(frames) if counts[t] < size]
        best = max(free, key=lambda t: (0 if released else -given[t], raw[t] - int(raw[t])))
        counts[best] += 1
        given[best] += 1
    kept = []
    for t, frame in enumerate(x):
        lengths = [float(token.norm()) for token in frame]
        low, high = min(lengths), max(lengths)
        scores = [
            1 - float(token @ means[t]) / length + (length - low) / (high - low + 1e-6)
            for token, length in zip(frame, lengths, strict=True)
        ]
        best_first = sorted(range(size), key=lambda i: -scores[i])
        kept += sorted(t * size + i for i in best_first[: counts[t]])
    return kept


def test_the_worked_example() -> None:
    means = torch.nn.functional.normalize(EXAMPLE.mean(dim=1), dim=1)
    expected = torch.tensor([1, 0.092822, 0.071734, 1], dtype=torch.float64)
    torch.testing.assert_close(curvature(means), expected, atol=1e-6, rtol=0)
    features = EXAMPLE.flatten(0, 1)
    own, released = (vitrim.parse_selector(f"vcast:keep=0.5{more}") for more in ("", ",remainders=released"))
    assert own.count((4, 1, 3)) == released.count((4, 1, 3)) == 6
    assert own.mask(features, (4, 1, 3)).nonzero().squeeze(1).tolist() == [0, 2, 5, 7, 9, 10]
    assert released.mask(features, (4, 1, 3)).nonzero().squeeze(1).tolist() == [0, 1, 2, 5, 7, 10]


@pytest.mark.parametrize("remainders", ["largest", "released"])
@pytest.mark.parametrize("shape", [(2, 5, 7), (3, 4, 3), (5, 6, 8), (7, 3, 4)])
def test_it_keeps_what_loops_keep(shape: tuple[int, int, int], remainders: Remainders) -> None:
    frames, size, _ = shape
    for seed in range(4):
        x = video(*shape, seed=seed) + 0.5
        for least in (0, 1, 2):
            for count in {max(round(frames * size * share), frames * least) for share in (0.1, 0.25, 0.5, 0.9, 1)}:
                found = outstanding(x, count, least, 0.7, remainders).tolist()
                assert found == plain(x, count, least, remainders == "released")
                assert len(found) == count


def test_full_frames_pass_on_what_is_left_over() -> None:
    """By hand: 0.9 of 7 is 6.3, of which a frame of four holds four; three are left over."""
    assert shared_out([0.9, 0.05, 0.05], 7, 4, 0, "largest") == [4, 2, 1]
    assert shared_out([0.9, 0.05, 0.05], 7, 4, 0, "released") == [4, 3, 0]
    assert shared_out([0.9, 0.05, 0.05], 12, 4, 0, "largest") == [4, 4, 4]


def test_equal_frames_keep_equal_numbers() -> None:
    """Steps of no length have no direction: every curvature is 1."""
    x = video(1, 10, 6).float().expand(7, -1, -1)
    kept = outstanding(x, 21, 1, 0.7, "released")
    assert (kept // 10).bincount().tolist() == [3] * 7
    assert len(set((kept % 10).tolist())) == 3


def test_images_stay_complete_and_frames_keep_the_least() -> None:
    selector = vitrim.parse_selector("vcast:keep=0.1,least=3")
    assert selector.count((5, 5)) == 25
    assert selector.mask(video(25, 4), (5, 5)).all()
    assert selector.count((6, 2, 5)) == 18
    assert (selector.mask(video(60, 4), (6, 2, 5)).view(6, 10).sum(dim=1) == 3).all()
    assert selector.count((6, 1, 2)) == 12  # frames of fewer
