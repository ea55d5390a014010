from __future__ import annotations

import pytest
import torch

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim
from vitrim.core.assignment import prune
from vitrim.core.attention import Attention
from vitrim.core.matching import unit_mean_keys
from vitrim.core.plan import Layer
from vitrim.methods.ppt import variance


@golden.cases(
    [
        ("new/ppt_r8", vitrim.PPT(r=8, blocks=(1, 3, 4), threshold=9e-4)),
        ("new/ppt_p49_list", vitrim.PPT(r=(7, 5, 6), blocks=(1, 2, 3), threshold=5e-4)),
    ],
    "config",
)
def test_vectors(ref: golden.Reference, config: vitrim.PPT) -> None:
    learned.check_dense(ref)
    model = golden.vit(ref)
    reduction = vitrim.reduce_(model, config, record=True)
    variances = learned.caught(
        model, config.blocks, lambda m, x, attention, state: variance(m.scores(attention, state))
    )
    places = learned.caught(model, config.blocks, lambda m, x, attention, state: state.num_tokens)
    for block in config.blocks:
        model.blocks[block].reducer.register_forward_hook(
            lambda m, args, out, block=block: places.__setitem__(block, out.target(places[block]))
        )
    learned.check_outputs(ref, model, reduction)
    for block, key in learned.keys(ref, "variance").items():
        ref.check(key, variances[block][:, 0])
    for block, key in learned.keys(ref, "place").items():
        ref.check(key, places[block])
    learned.check_float32(ref, model)


def tokens(seed: int = 0, batch: int = 3, patches: int = 9) -> tuple[torch.Tensor, Attention, vitrim.TokenState]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 1 + patches, 4, generator=generator, dtype=torch.float64)
    q, k, v = torch.randn(3, batch, 2, 1 + patches, 3, generator=generator, dtype=torch.float64)
    return x, Attention(q, k, v, 3**-0.5), vitrim.TokenState.start(x, num_prefix=1)


def plain(x: torch.Tensor, attention: Attention, image: int, r: int, threshold: float) -> torch.Tensor:
    """What becomes of one image, in plain lines."""
    q, k, v = (part[image] for part in (attention.q, attention.k, attention.v))
    row = (q[:, 0] * attention.scale).unsqueeze(1) @ k.mT
    score = row.softmax(-1).sum((0, 1))[1:] * torch.cat(list(v), dim=-1)[1:].norm(dim=-1)
    score = score / score.sum()
    if score.var() >= threshold - 1e-15:
        best = sorted(range(len(score)), key=lambda j: -score[j].item())[: len(score) - r]
        return torch.stack([x[image, 0], *(x[image, 1 + j] for j in best)])
    keys = torch.nn.functional.normalize(k.mean(0), dim=-1)
    even, odd = list(range(2, len(keys), 2)), list(range(1, len(keys), 2))
    best = {i: max(odd, key=lambda j: (keys[i] @ keys[j]).item()) for i in even}
    moved = sorted(even, key=lambda i: -(keys[i] @ keys[best[i]]).item())[:r]
    group = {j: [j, *(i for i in moved if best[i] == j)] for j in odd}
    return torch.stack(
        [x[image, 0], *(x[image, i] for i in even if i not in moved), *(x[image, group[j]].mean(0) for j in odd)]
    )


@pytest.mark.parametrize("r", [1, 3])
def test_each_image_of_a_batch_does_as_its_own_scores_say(r: int) -> None:
    x, attention, state = tokens()
    reducer = tiny.reducer(vitrim.PPT(r=r, blocks=[0]), Layer(0, 2, 4, 2, 0, 1, True, (3, 3)))
    variances = variance(reducer.scores(attention, state))[:, 0]
    threshold = variances.sort().values[1].item()  # one below, one at it, one above
    reducer = tiny.reducer(vitrim.PPT(r=r, blocks=[0], threshold=threshold), reducer.layer)
    found, after = reducer(x, attention, state).apply(x, state)
    for image in range(3):
        torch.testing.assert_close(found[image], plain(x, attention, image, r, threshold))
    pooled = variances < threshold
    assert pooled.sum() == 1
    assert after.size.sum(1).tolist() == [10.0 if one else 10.0 - r for one in pooled]
    assert ((after.source < 0).sum(1) == torch.where(pooled, 0, r)).all()
    assert after.lost


def test_without_a_threshold_it_is_pruning_and_with_a_large_one_tome() -> None:
    images = tiny.images(3).double()
    found = {}
    for method in ("ppt:r=4,blocks=[1,2],threshold=1000", "tome:r=[0,4,4]", "ppt:r=4,blocks=[1,2],threshold=0"):
        model = tiny.HOSTS["vit"]().double()
        reduction = vitrim.reduce_(model, method)
        with torch.no_grad():
            found[method] = model(images), reduction.state
    (pooled, _), (tome, _), (pruned, state) = found.values()
    torch.testing.assert_close(pooled, tome, atol=1e-12, rtol=1e-12)
    assert ((state.source < 0).sum(1) == 8).all()
    assert state.uniform
    assert not torch.allclose(pruned, tome)


def test_spread_is_the_threshold_for_any_number_of_patches() -> None:
    assert vitrim.PPT().least_variance(196) == 7e-5  # as published, without training
    config = vitrim.PPT(spread=2.69)
    assert config.least_variance(196) == pytest.approx(7e-5, rel=1e-3)
    assert config.least_variance(49) == 16 * config.least_variance(196)


def test_plain_means_go_with_plain_attention() -> None:
    x, attention, state = tokens()
    sizes = torch.arange(1.0, 11.0, dtype=torch.float64).expand(3, -1)
    state = vitrim.core.tokens.changed(state, size=sizes, uniform=False)
    for proportional in (True, False):
        config = vitrim.PPT(r=1, blocks=[0], threshold=1e9, proportional=proportional)
        reducer = tiny.reducer(config, Layer(0, 2, 4, 2, 0, 1, True, (3, 3)))
        hard = reducer(x, attention, state)
        pair = hard.moved[:, 0], hard.anchor.gather(1, hard.into)[:, 0]
        weight = sizes[0] if proportional else torch.ones(10)
        _, after = hard.apply(x, state)
        assert after.size.sum(1).tolist() == [weight.sum()] * 3
        for image, (a, b) in enumerate(zip(*pair, strict=True)):
            mean = (weight[a] * x[image, a] + weight[b] * x[image, b]) / (weight[a] + weight[b])
            torch.testing.assert_close(hard.apply(x, state)[0][image, hard.into[image, 0]], mean)


def test_at_most_half_of_the_patches_go() -> None:
    assert vitrim.PPT(r=50).counts(196, 12)[-1] == 48
    with pytest.warns(vitrim.ReductionWarning, match="asks for more than 36 patch tokens allow"):
        vitrim.reduce_(tiny.HOSTS["vit"](), "ppt:r=20")


def test_the_pairs_are_those_of_mean_keys() -> None:
    x, attention, state = tokens(seed=4)
    reducer = tiny.reducer(vitrim.PPT(r=1, blocks=[0], threshold=1e9), Layer(0, 2, 4, 2, 0, 1, True, (3, 3)))
    hard = reducer(x, attention, state)
    keys = unit_mean_keys(attention, 1)
    alike = keys[:, 1::2] @ keys[:, ::2].mT
    best = alike.flatten(1).argmax(1)
    assert (hard.moved[:, 0] == 2 + 2 * (best // alike.shape[2])).all()


def test_without_sizes_every_stage_starts_again_from_ones() -> None:
    """As released: sizes are what the last stage merged, whatever its tokens stood for."""
    x, attention, state = tokens()
    sizes = torch.arange(1.0, 11.0, dtype=torch.float64).expand(3, -1)
    state = vitrim.core.tokens.changed(state, size=sizes, uniform=False)
    layer = Layer(0, 2, 4, 2, 0, 1, True, (3, 3))
    config = vitrim.PPT(r=3, blocks=[0], proportional=False)
    variances = variance(tiny.reducer(config, layer).scores(attention, state))[:, 0]
    middle = variances.sort().values[1].item()
    for threshold, pools in ((0.0, 0), (1e-12, 0), (middle, 1), (1e9, 3)):  # none by what it is, or by what is seen
        hard = tiny.reducer(config.changed(threshold=threshold), layer)(x, attention, state)
        _, after = hard.apply(x, state)
        place = hard.target(10)
        assert (place >= 0).all(1).sum() == pools
        counted = torch.zeros(3, 7, dtype=torch.float64).scatter_add(1, place.clamp_min(0), (place >= 0).double())
        assert torch.equal(after.size, counted)
        assert (after.size > 1).any() == (pools > 0)


def test_a_spread_is_of_the_patches_that_there_are_now() -> None:
    """Of 9 patches 5 are left: the variance of their scores lies between spread / 9^2 and spread / 5^2."""
    x, _, state = tokens(batch=1)
    x, state = prune(state, torch.tensor([[0, 2, 4, 5, 8]])).apply(x, state)
    q, k, v = torch.randn(3, 1, 2, 6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    attention = Attention(q, k, v, 3**-0.5)
    row = ((q[0, :, 0] * attention.scale).unsqueeze(1) @ k[0].mT).softmax(-1).sum((0, 1))[1:]
    score = row * torch.cat(list(v[0]), dim=-1)[1:].norm(dim=-1)
    spread = float((score / score.sum()).var()) * 7**2
    layer = Layer(0, 4, 6, 2, 5, 1, True, (3, 3))
    for factor, pools in ((1.0, True), (0.5, False)):  # 49 / 25 > 1, and 49 / 50 < 1
        decided = tiny.reducer(vitrim.PPT(r=1, blocks=(0,), spread=factor * spread), layer)(x, attention, state)
        assert (decided.moved is not None) is pools
