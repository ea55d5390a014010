from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tiny
import vitrim
from vitrim.core.assignment import Hard
from vitrim.core.attention import Attention
from vitrim.core.matching import alternate_split, unit
from vitrim.core.plan import Layer

LOW = {"alpha": 0.9, "beta": 0.2, "theta_min": 0.1}


def test_thresholds_of_the_paper() -> None:
    first = vitrim.ATM(alpha=0.985, beta=0.045, theta_min=0.88).thresholds(12)
    assert first[:3] == pytest.approx([0.985, 0.93897, 0.89083], abs=1e-5)
    assert first[3:] == [0.88] * 9
    second = vitrim.ATM(alpha=1.0, beta=0.015, theta_min=0.8).thresholds(12)
    assert second[:4] == pytest.approx([1.0, 0.98489, 0.96955, 0.95397], abs=1e-5)
    assert second[-1] == pytest.approx(1 - (math.exp(0.015 * 11) - 1))


def keys_of(model: torch.nn.Module, depth: int, images: Tensor) -> list[Tensor]:
    """Mean keys (B, N, d) that block ``depth`` compares, caught on the way."""
    caught: list[Tensor] = []
    reducer = model.blocks[depth].reducer
    reducer.register_forward_hook(lambda module, args, out: caught.append(args[1].mean_keys()))
    with torch.no_grad():
        model(images)
    return caught


def test_a_batch_of_one_is_the_exact_threshold_rule() -> None:
    model = tiny.HOSTS["vit"]().double()
    reduction = vitrim.reduce_(model, vitrim.ATM(**LOW), record=True)
    images = tiny.images(1).double()
    (keys,) = keys_of(model, 0, images)
    patches = torch.nn.functional.normalize(keys[0, 1:], dim=-1)
    sources, destinations = alternate_split(1)
    best = (patches[sources] @ patches[destinations].T).max(1).values
    expected = int((best > 0.9).sum())
    assert 0 < expected < len(best)  # the threshold does decide here
    assert 37 - reduction.states[1].num_tokens == expected


def test_batch_granularity_depends_on_batch_mates_and_image_granularity_does_not() -> None:
    images = tiny.images(4).double()
    results = {}
    for granularity in ("batch", "image"):
        model = tiny.HOSTS["vit"]().double()
        vitrim.reduce_(model, vitrim.ATM(**LOW, granularity=granularity))
        with torch.no_grad():
            together = model(images)
            alone = torch.cat([model(image[None]) for image in images])
        results[granularity] = (together, alone)
    torch.testing.assert_close(results["batch"][1], results["image"][1])  # alone, both are the threshold rule
    torch.testing.assert_close(*results["image"], atol=1e-10, rtol=1e-10)
    assert (results["batch"][0] - results["batch"][1]).abs().max() > 1e-4


def test_image_granularity_keeps_different_counts_and_accounts_for_every_token() -> None:
    model = tiny.HOSTS["vit"]().double()
    reduction = vitrim.reduce_(model, vitrim.ATM(**LOW, granularity="image"))
    with torch.no_grad():
        model(tiny.images(6).double())
    state = reduction.state
    assert state.mask is not None
    counts = state.mask.sum(1)
    assert len(set(counts.tolist())) > 1
    assert ((state.size * state.mask).sum(1) == 37).all()
    for image in range(6):
        used = state.source[image].unique()
        assert len(used) == counts[image]
        assert state.mask[image, used].all()


@pytest.mark.parametrize("capacity", [None, (8,) * 12])
def test_an_image_that_merges_nothing_keeps_its_order_beside_one_that_does(capacity: tuple[int, ...] | None) -> None:
    config = vitrim.ATM(alpha=0.9, granularity="image", capacity=capacity)
    reducer = tiny.reducer(config, Layer(0, 12, 4, 1, 0, 1, True, (2, 4)))
    different, alike = torch.eye(9), torch.ones(9, 9)
    keys = torch.stack([different, alike]).unsqueeze(1)
    x = torch.randn(2, 9, 4)
    state = vitrim.TokenState.start(x, num_prefix=1)
    hard = reducer(x, Attention(keys, keys, None, 1.0), state)
    tokens, after = hard.apply(x, state)
    assert after.position[0].tolist() == list(range(9))
    torch.testing.assert_close(tokens[0], x[0])
    assert int(after.mask[1].sum()) == 5  # the other one merges all four sources


@pytest.mark.parametrize("granularity", ["batch", "image"])
def test_alpha_1_merges_nothing_in_the_first_layer(granularity: str) -> None:
    model = tiny.HOSTS["vit"]()
    config = vitrim.ATM(alpha=1.0, beta=0.3, theta_min=0.1, granularity=granularity)
    reduction = vitrim.reduce_(model, config, record=True)
    with torch.no_grad():
        model(tiny.images(4))
        assert reduction.states[1].num_tokens == 37
        assert reduction.states[2].num_tokens < 37


@pytest.mark.parametrize("granularity", ["batch", "image"])
@pytest.mark.parametrize("alpha", [1.0, 0.999])
def test_equal_keys_have_cosine_1_and_are_not_above_a_threshold_of_1(granularity: str, alpha: float) -> None:
    """In float32 the product of a unit vector with itself may come out above 1."""
    distinct = torch.randn(2, 1 + 18, 7, generator=torch.Generator().manual_seed(0))
    keys = torch.cat([distinct[:, :1], distinct[:, 1:].repeat_interleave(2, dim=1)], dim=1)  # an odd and an even place
    product = unit(keys).square().sum(-1)
    assert (product > 1).any()
    assert (product < 1).any()
    config = vitrim.ATM(alpha=alpha, beta=0.0, theta_min=0.1, granularity=granularity)
    reducer = tiny.reducer(config, Layer(0, 4, 7, 1, 0, 1, True, (6, 6)))
    state = vitrim.TokenState.start(keys, 1)
    hard = reducer(keys, Attention(keys[:, None], keys[:, None], keys[:, None], 1.0), state)
    if alpha == 1.0:
        assert hard is None
    else:  # every pair is above any lower threshold
        assert hard.advance(keys, state).num_patches == 18


def test_a_cosine_equal_to_the_threshold_does_not_merge() -> None:
    """Eq. 1 asks for more than the threshold: at 0, a pair of cosine 0 stays and one of cosine 1 merges."""
    config = vitrim.ATM(alpha=1.0, beta=10.0, theta_min=0.0)
    assert config.thresholds(4)[1] == 0.0
    reducer = tiny.reducer(config, Layer(1, 4, 4, 1, 0, 1, True, (1, 4)))
    cls, b, c, d = torch.eye(4, dtype=torch.float64)

    def decide(*patches: Tensor) -> Hard | None:
        keys = torch.stack([cls, *patches])[None]
        state = vitrim.TokenState.start(keys, 1)
        return reducer(keys, Attention(keys[:, None], keys[:, None], keys[:, None], 1.0), state)

    assert decide(b, c, d, c) is None  # the first and third receive, and are at right angles to both others
    hard = decide(b, c, d, d)
    assert hard is not None
    assert hard.moved.tolist() == [[4]]  # of the whole sequence


CLASS_TOKENS = ("vit", "distilled", "registers", "layerscale", "qk_norm")


def acts_after_the_last_block(config: vitrim.MethodConfig) -> bool:
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, config.model_copy(update={"last_block": "full"}))
    return model.blocks[-1].reducer.site == "after"


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("host", "config"), tiny.matrix(tiny.configs(), CLASS_TOKENS, ["vit"], full=CLASS_TOKENS))
def test_last_block_on_the_class_token_equals_the_full_computation(host: str, config: vitrim.MethodConfig) -> None:
    if config.name == "random":
        config = vitrim.L2()
    if acts_after_the_last_block(config):
        with pytest.raises(vitrim.UnsupportedModelError, match="acts after the last block"):
            vitrim.reduce_(tiny.HOSTS[host](), config.model_copy(update={"last_block": "class_token"}))
        return
    outputs = []
    for last_block in ("full", "class_token"):
        # a merge in the last block changes nothing for the class token either: attention came before it
        model = tiny.HOSTS[host]().double()
        reduction = vitrim.reduce_(model, config.model_copy(update={"last_block": last_block}), record=True)
        with torch.no_grad():
            outputs.append(model(tiny.images().double()))
        rows = reduction.tokens_per_block[-1]
    assert rows == (2 if host == "distilled" else 1)
    torch.testing.assert_close(*outputs, atol=1e-12, rtol=1e-12)


def test_last_block_leaves_source_and_size_as_they_were() -> None:
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, vitrim.ATM(**LOW), record=True)
    with torch.no_grad():
        model(tiny.images())
    assert reduction.states[-1].num_tokens == reduction.states[-2].num_tokens > 1
    assert torch.equal(reduction.states[-1].source, reduction.states[-2].source)


def test_late_layers_tell_that_the_prefix_fills_the_smaller_half() -> None:
    model = tiny.HOSTS["registers"]()  # four tokens in front of 36 patches
    config = vitrim.ATM(r=(0, 0, 0, 17), last_block="full")
    with pytest.warns(vitrim.ReductionWarning, match="16 in all"):
        reduction = vitrim.reduce_(model, config)
    model(tiny.images())
    assert reduction.state.num_patches == 36 - 16 == config.counts(36, 4, num_prefix=4)[-1]


def test_late_layers_never_merge_two_of_the_larger_half() -> None:
    """Size-distinctive matching: in a late layer every source is at most as large as any destination."""
    model = tiny.HOSTS["vit"]().double()
    reduction = vitrim.reduce_(model, vitrim.ATM(**LOW, splitting_layer=1, last_block="full"), record=True)
    with torch.no_grad():
        model(tiny.images(1).double())
    for before, after in zip(reduction.states[1:-1], reduction.states[2:], strict=True):
        size = before.size[0, 1:].sort().values
        half = before.num_tokens // 2 - 1
        joined = after.size[0, 1:] > 0
        assert joined.all()
        merged = before.num_tokens - after.num_tokens
        assert merged <= half
        # no group can weigh more than its destination plus all sources of the smaller half
        assert after.size[0, 1:].max() <= size[-1] + size[:half].sum()


def test_the_last_layer_of_a_host_that_reads_patches_merges_too() -> None:
    model = tiny.HOSTS["avg_fc_norm"]()
    reduction = vitrim.reduce_(model, vitrim.ATM(**LOW), record=True)
    with torch.no_grad():
        model(tiny.images())
    assert reduction.tokens_per_block[-1] < reduction.tokens_per_block[-2]


def test_thresholds_may_change_between_forwards() -> None:
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, vitrim.ATM(alpha=1.0, beta=0.0, theta_min=1.0))
    with torch.no_grad():
        model(tiny.images())
        assert reduction.state.num_tokens == 37
        reduction.set(**LOW)
        model(tiny.images())
        assert reduction.state.num_tokens < 37
    with pytest.raises(vitrim.VitrimError, match="cannot change granularity at run time; it can: alpha"):
        reduction.set(granularity="image")


@given(seed=st.integers(0, 10_000), batch=st.integers(2, 5), prefix=st.sampled_from(["vit", "map", "registers"]))
def test_image_granularity_equals_single_images(seed: int, batch: int, prefix: str) -> None:
    model = tiny.HOSTS[prefix]().double()
    vitrim.reduce_(model, vitrim.ATM(alpha=0.8, beta=0.3, theta_min=0.0, granularity="image", splitting_layer=2))
    images = tiny.images(batch, seed=seed).double()
    with torch.no_grad():
        torch.testing.assert_close(
            model(images), torch.cat([model(image[None]) for image in images]), atol=1e-9, rtol=1e-9
        )
