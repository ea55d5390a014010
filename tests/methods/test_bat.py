"""BAT: the stored reading of the paper (not official), and the method around it."""

from __future__ import annotations

import pytest
import torch

import golden_models as golden
import tiny
import vitrim
from vitrim.core.attention import Attention
from vitrim.core.matching import density_peaks, distances, nearest_centre, separations
from vitrim.core.plan import Layer
from vitrim.methods.bat import log_densities, match_attentive


def attention_of(score: torch.Tensor) -> Attention:
    """One head whose class token attends to the tokens (B, N) with probabilities proportional to ``score``."""
    logits = score.log().clamp_min(-1e4)[:, None, None, :].expand(-1, 1, score.shape[1], -1)
    keys = torch.eye(score.shape[1], dtype=score.dtype).expand(score.shape[0], 1, -1, -1)
    return Attention(logits, keys, keys, 1.0)


def one_block(x: torch.Tensor, score: torch.Tensor, **options: object) -> tuple[torch.Tensor, vitrim.TokenState]:
    """Tokens ``x`` (B, N, C) after one block whose class token attends as ``score`` (B, N) says."""
    config = vitrim.BAT(blocks=(0,), **options)
    reducer = tiny.reducer(config, Layer(0, 1, x.shape[2], 1, 0, 1, True, (1, x.shape[1] - 1)))
    return reducer.reduce("between", x, attention_of(score), vitrim.TokenState.start(x, 1))


@golden.cases(["interpretation/bat_units"])
def test_units(ref: golden.Reference) -> None:
    tokens, clusters = golden.tensor(ref, "tokens").double(), ref["config"]["args"]["clusters"]
    distance = distances(tokens)
    log_density = log_densities(distance, tokens.shape[-1])
    ref.check("rho", log_density.exp())
    farthest = distance.amax(dim=2, keepdim=True)
    ref.check("delta", separations(distance, log_density, farthest))
    centres = density_peaks(distance, log_density, farthest, clusters)
    ref.check("centers", centres)
    ref.check("assign", nearest_centre(distance, centres))
    # in a block: the twelve stored tokens are inattentive, behind one attentive patch
    first = torch.full((2, 2, tokens.shape[2]), 5.0, dtype=torch.float64)
    weights = golden.tensor(ref, "weights").double()
    score = torch.cat([weights.new_full((2, 2), 10 * weights.max().item()), weights], dim=1)
    out, state = one_block(torch.cat([first, tokens], 1), score, keep_rate=0.05, pairs=0, clusters=clusters)
    assert torch.equal(out[:, :2], first)
    # patches come in order of attention, and so do equal peaks: the order of the clusters is that of the peaks
    ref.check("merged", out[:, 2:])
    ref.check("assign", state.source[:, 2:] - 2)
    assert not state.lost


def test_attentive_patches_merge_with_their_most_similar() -> None:
    a, b, c = torch.eye(3, dtype=torch.float64)
    # ranks 0, 2 receive, ranks 1, 3 may merge: 3 is the more alike to its partner (rank 0)
    patches = torch.stack([a, b, c, 2 * a + 0.1 * b, b + c])
    kept, moved, into = match_attentive(patches[None], 1)
    assert kept.tolist() == [[0, 1, 2, 4]]
    assert (moved.tolist(), into.tolist()) == ([[3]], [[0]])
    x = torch.cat([c[None], patches, patches[-1:]])[None]
    score = torch.tensor([[0.3, 0.2, 0.18, 0.12, 0.1, 0.08, 0.02]], dtype=torch.float64)
    out, state = one_block(x, score, keep_rate=0.8, pairs=1, clusters=1)
    mean = (0.2 * patches[0] + 0.1 * patches[3]) / 0.3
    torch.testing.assert_close(out[0], torch.stack([c, mean, b, c, b + c, b + c]))
    assert state.size.tolist() == [[1.0, 2.0, 1.0, 1.0, 1.0, 1.0]]


def test_patches_without_attention_are_averaged() -> None:
    x = torch.randn(1, 6, 4, dtype=torch.float64)
    score = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    out, _ = one_block(x, score, keep_rate=0.5, pairs=0, clusters=1)
    torch.testing.assert_close(out[0, -1], x[0, 4:].mean(0))


def test_counts() -> None:
    assert vitrim.BAT(keep_rate=0.7).counts(196, 12)[3:10:3] == [138, 97, 68]
    assert vitrim.BAT(keep_rate=0.5, pairs=2, clusters=5).counts(196, 12)[3] == 98 - 2 + 5
    # few patches: at most half of the attentive ones merge, and no more clusters than patches
    assert vitrim.BAT(keep_rate=0.3, pairs=9, clusters=9, blocks=(0,)).counts(6, 1) == [2 - 1 + 4]
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, vitrim.BAT())
    reduction.set(keep_rate=0.3)
    with torch.no_grad():
        model(tiny.images())
    assert reduction.state.num_patches == vitrim.BAT(keep_rate=0.3).counts(36, 4)[-1]
    assert int(reduction.state.size.sum()) == 2 * 37  # every patch is still in some token


@pytest.mark.parametrize("patches", [5, 6, 7, 50, 197])
def test_every_number_of_patches(patches: int) -> None:
    x = torch.randn(2, patches + 1, 8)
    out, state = one_block(x, torch.rand(2, patches + 1) + 0.1, keep_rate=0.5)
    count = vitrim.BAT(keep_rate=0.5, blocks=(0,)).counts(patches, 1)[0]
    assert out.shape[1] == count + 1
    assert state.size.sum(1).tolist() == [patches + 1] * 2
    expanded = state.size.gather(1, state.source)
    assert torch.equal((1 / expanded).sum(1).round().long(), torch.full((2,), count + 1))
