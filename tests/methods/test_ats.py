"""ATS: reference vectors of the authors' code and of "Which Tokens to Use?", and what neither offers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim
from vitrim.methods import ats
from vitrim.methods.ats import ATS, nearest, sample_sorted, sample_study, significance, study_arange

STUDY = {"variant": "study", "rule": "floor_initial_power"}
P64 = {**STUDY, "keep_rate": 0.5, "blocks": (1, 3, 5)}
P196 = {**STUDY, "keep_rate": 0.7, "blocks": (3, 6, 9)}
BLOCKS = (2, 3, 4, 5)
STUDY_CASES = [
    ("haurum/ats_p64_r50", ATS(**P64)),
    ("haurum/ats_p196_r70", ATS(**P196)),
    ("haurum/ats_p64_r50", ATS(**P64, padding="bound")),
]
PUBLISHED_CASES = [
    ("pruning/ats_blocks2345_drop", ATS(variant="published", blocks=BLOCKS)),
    ("pruning/ats_blocks2345_mask", ATS(variant="published", blocks=BLOCKS, padding="bound")),
]


class Sampled:
    """What the reducers of a model looked at: scores (B, P) by block; distributions (B, P) and heights (B, M)."""

    def __init__(self, model: torch.nn.Module, blocks: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.scores: dict[int, torch.Tensor] = {}
        self.searched: list[tuple[torch.Tensor, torch.Tensor]] = []
        own = ats.nearest

        def spy(cdf: torch.Tensor, height: torch.Tensor) -> torch.Tensor:
            self.searched.append((cdf, height))
            return own(cdf, height)

        monkeypatch.setattr(ats, "nearest", spy)
        for block in blocks:
            reducer = model.blocks[block].reducer

            def sample(score, real, points, block=block, own=reducer.sample):
                self.scores[block] = score
                return own(score, real, points)

            reducer.sample = sample


@golden.cases(STUDY_CASES, "config")
def test_reference_of_the_study(ref: golden.Reference, config: ATS, monkeypatch: pytest.MonkeyPatch) -> None:
    model, blocks = golden.vit(ref), ref["config"]["args"]["blocks"]
    reduction = vitrim.reduce_(model, config, record=True)
    sampled = Sampled(model, blocks, monkeypatch)
    learned.check_outputs(ref, model, reduction, lengths=config.padding == "auto")
    if config.padding == "bound":
        ref.check("tokens_per_block", to_longest(reduction), torch.Tensor.tolist)
    learned.check_kept(ref, reduction)
    for block, (cdf, height) in zip(blocks, sampled.searched[-len(blocks) :], strict=True):
        real = ats.real_patches(reduction.states[block])
        width = ref[f"cdf/{block}"].shape[1]
        real = real[:, :width]
        ref.check(f"cdf/{block}", cdf[:, :width][real], lambda stored, real=real: stored[real])
        ref.check(f"sample_points/{block}", height[0])
    learned.check_float32(ref, model)


def to_longest(reduction: vitrim.Reduction) -> list[int]:
    """The lengths that are left where padding to the bound is not counted."""
    return [1 + max(map(len, learned.rows(state))) for state in reduction.states[1:]]


@golden.cases(PUBLISHED_CASES, "config")
def test_reference_of_the_release(ref: golden.Reference, config: ATS, monkeypatch: pytest.MonkeyPatch) -> None:
    model = golden.vit(ref)
    reduction = vitrim.reduce_(model, config, record=True)
    sampled = Sampled(model, BLOCKS, monkeypatch)
    learned.check_outputs(ref, model, reduction)
    valid = [[1 + len(row) for row in learned.rows(reduction.states[block + 1])] for block in BLOCKS]
    ref.check("tokens_valid", valid, Tensor.tolist)
    for block in BLOCKS:
        ref.check(f"kept/{block}", [set(row) for row in learned.rows(reduction.states[block + 1])], learned.as_sets)
        # the same tokens in another order: published ascending, and padding has score 0
        score = sampled.scores[block] * ats.real_patches(reduction.states[block])
        score = (score / score.sum(1, keepdim=True)).sort(1).values
        ref.check(f"scores/{block}", score, lambda stored: stored.sort(1).values)
    with torch.no_grad():
        ref.check("logits_batch1", torch.cat([model(image[None]) for image in golden.images(ref)]))
    learned.check_float32(ref, model)


@golden.cases(["haurum/grads_ats_p64_r50"])
def test_gradients(ref: golden.Reference) -> None:
    model = golden.vit(ref)
    vitrim.reduce_(model, ATS(**P64))
    learned.cross_entropy_backward(ref, model)
    learned.check_gradients(ref, model, {})
    learned.check_float32(ref, model)


def test_default_takes_the_published_decisions_of_single_images_whatever_the_batch() -> None:
    ref = golden.load("pruning/ats_blocks2345_drop")
    images = golden.images(ref)
    model = golden.vit(ref)
    reduction = vitrim.reduce_(model, ATS(blocks=BLOCKS), record=True)
    with torch.no_grad():
        together = model(images)
        sets = [kept(state) for state in reduction.states[3:]]
        alone, published = [], []
        for image in images:
            alone.append(model(image[None]))
            published.append([kept(state)[0] for state in reduction.states[3:]])
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-12, rtol=0)
    assert [[stage[i] for stage in sets] for i in range(3)] == published
    # the smoothed softmax of the published code is all that is left between the two
    torch.testing.assert_close(together, golden.tensor(ref, "logits_batch1"), atol=1e-5, rtol=0)
    assert (together - golden.tensor(ref, "logits")).abs().max() > 0.1  # what its batch mates cost


@pytest.mark.parametrize("variant", ["ats", "study"])
def test_padding_to_the_bound_changes_no_prediction(variant: str) -> None:
    model = tiny.HOSTS["vit"]().double()
    images = tiny.images(4).double()
    outputs = []
    with torch.no_grad():
        for padding in ("auto", "bound"):
            reduction = vitrim.reduce_(model, ATS(variant=variant, padding=padding, keep_rate=0.7, blocks=(1, 2)))
            outputs.append(model(images))
            width = reduction.state.num_patches
            vitrim.restore_(model)
    torch.testing.assert_close(*outputs, atol=1e-12, rtol=0)
    assert width == 25


def test_nearest_takes_the_first_of_equal_entries_and_the_lower_at_equal_distance() -> None:
    cdf = torch.tensor([[0.0, 0.25, 0.25, 0.25, 0.75, 1.0]])
    height = torch.tensor([[0.25, 0.3, 0.5, 0.7, 0.9, 1.0, 2.0]])
    expected = (cdf[:, None] - height[..., None]).abs().argmin(-1)
    assert torch.equal(nearest(cdf, height), expected)
    cdf, height = torch.rand(5, 40).sort(1).values, torch.rand(5, 30)
    assert torch.equal(nearest(cdf, height), (cdf[:, None] - height[..., None]).abs().argmin(-1))


@pytest.mark.parametrize("sample", [sample_sorted, sample_study])
def test_padding_is_never_picked_and_changes_no_pick(sample) -> None:
    score = torch.rand(4, 12, dtype=torch.float64)
    real = torch.ones_like(score, dtype=torch.bool)
    real[:, 9:] = False
    assert torch.equal(sample(score, real, 8), sample(score[:, :9], real[:, :9], 8))


@pytest.mark.parametrize("points", [1, 5])
def test_one_token_or_equal_scores_survive(points: int) -> None:
    one = torch.ones(2, 1, dtype=torch.bool)
    assert (sample_sorted(torch.rand(2, 1), one, points) == 0).all()
    zero = sample_sorted(torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool), points)
    assert ((zero >= 0) & (zero < 4)).all()


def test_significance_over_heads() -> None:
    row = torch.tensor([[[0.5, 0.5], [0.25, 0.75]]])
    v = torch.tensor([[[[3.0], [0.0]], [[4.0], [2.0]]]])
    attention = vitrim.Attention(q=v, k=v, v=v, scale=1.0)
    torch.testing.assert_close(significance(row, attention, per_head=False), torch.tensor([[0.75 * 5, 1.25 * 2]]))
    torch.testing.assert_close(significance(row, attention, per_head=True), torch.tensor([[0.5 * 3 + 0.25 * 4, 1.5]]))


def test_published_padding_is_a_zero_token_in_blocks_that_do_not_sample() -> None:
    """Plain lines of the published blocks. Which tokens stay is taken from the run: other tests compare that."""
    model = tiny.HOSTS["vit"]().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # biases, or a zero token would have the value zero
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    images, blocks = 3 * tiny.images(4).double(), (1,)
    reduction = vitrim.reduce_(model, ATS(variant="published", blocks=blocks, keep_rate=0.7), record=True)
    with torch.no_grad():
        found = model(images)
    states = reduction.states
    assert states[2].mask is not None
    assert not states[2].mask.all()
    vitrim.restore_(model)
    with torch.no_grad():
        x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
        policy = torch.ones(x.shape[:2], dtype=x.dtype)[..., None]
        for depth, block in enumerate(model.blocks):
            heads = block.attn.num_heads
            qkv = block.attn.qkv(block.norm1(x)) * (policy if depth in blocks else 1.0)
            q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            logits = q @ k.transpose(2, 3) * block.attn.scale
            e = (logits - logits.amax(-1, keepdim=True)).exp() * policy[:, None, None, :, 0]
            attention = (e + 1e-6 / e.shape[-1]) / (e.sum(-1, keepdim=True) + 1e-6)
            out = block.attn.proj((attention @ v).transpose(1, 2).flatten(2))
            if depth in blocks:  # initial places are the current ones: nothing was removed before
                rows = states[depth + 1].position[..., None]
                x, out = x.take_along_dim(rows, 1), out.take_along_dim(rows, 1)
                policy = states[depth + 1].mask[..., None].double()
            x = (x + out) * policy
            x = (x + block.mlp(block.norm2(x))) * policy
        expected = model.forward_head(model.norm(x))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


TOO_MANY = [3, 7, 12, 14, 19, 27, 34, 35]  # K = M + 1 of the study's code with one height too many, up to 57


def test_study_heights_of_its_float32_arange() -> None:
    ref = golden.load("haurum/ats_p64_r50")
    for block, points in ((1, 32), (3, 16), (5, 8)):
        assert torch.equal(study_arange(points), golden.tensor(ref, f"sample_points/{block}"))
    longer = [points + 1 for points in range(1, 599) if len(study_arange(points)) == points + 1]
    assert longer[:8] == TOO_MANY
    assert 58 in longer
    assert len(longer) == 120
    assert all(len(study_arange(points)) in (points, points + 1) for points in range(1, 599))


@pytest.mark.parametrize("padding", ["auto", "bound"])
def test_one_height_too_many_is_one_more_token_at_most(padding: str) -> None:
    """Scores all alike, one patch too many: 64 patches at 0.9 have 57 heights, and 58 in the study's code."""
    state = vitrim.TokenState.start(torch.zeros(1, 65, 1), num_prefix=1)
    q = torch.zeros(1, 1, 65, 1, dtype=torch.float64)
    attention = vitrim.Attention(q=q, k=q, v=q + 1, scale=1.0)
    for float32_heights, count in ((False, 57), (True, 58)):
        config = ATS(**{**P64, "keep_rate": 0.9, "padding": padding, "float32_heights": float32_heights})
        reducer = tiny.reducer(config, vitrim.Layer(1, 7, 1, 1, 0, 1, True, (8, 8)))
        after = reducer(q[0], attention, state).advance(q[0], state)
        assert after.num_patches == count
        assert after.mask is None or after.mask.all()


def kept(state: vitrim.TokenState) -> list[set[int]]:
    """The original patches each image still has."""
    position = state.position[:, 1:] - 1
    real = torch.ones_like(position, dtype=torch.bool) if state.mask is None else state.mask[:, 1:]
    return [set(row[flag].tolist()) for row, flag in zip(position, real, strict=True)]


def as_sets(table: torch.Tensor) -> list[set[int]]:
    return [{entry for entry in row if entry >= 0} for row in table.tolist()]
