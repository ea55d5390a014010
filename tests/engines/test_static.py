"""Fixed counts for methods that adapt: frozen means, and slots that most images fit into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tiny
import vitrim
from full_matrix import cells
from vitrim.core.tokens import TokenState
from vitrim.engines import bound, static
from vitrim.engines.static import frozen, levelled, patches_per_block

LOW: dict[str, Any] = {"alpha": 0.9, "beta": 0.2, "theta_min": 0.1}
ATM = vitrim.ATM(**LOW)


def run(host: str, method: vitrim.MethodConfig, images: Tensor) -> tuple[Tensor, tuple[TokenState, ...]]:
    model = tiny.HOSTS[host]().double()
    reduction = vitrim.reduce_(model, method, record=True)
    with torch.no_grad():
        return model(images), reduction.states


def counts(states: tuple[TokenState, ...]) -> Tensor:
    """(B, L) patches of every image after every block."""
    return torch.stack([slots(state).sum(1) - state.num_prefix for state in states[1:]], dim=1)


def slots(state: TokenState) -> Tensor:
    return torch.ones_like(state.size, dtype=torch.bool) if state.mask is None else state.mask


# ---- capacity --------------------------------------------------------------------------------------------------------


HOSTS = cells(["vit", "avg_fc_norm", "registers", "no_class_token_avg"], {"vit", "avg_fc_norm"})


@pytest.mark.parametrize("host", HOSTS)
@given(
    capacity=st.lists(st.integers(1, 40), min_size=4, max_size=4),
    seed=st.integers(0, 50),
    theta_min=st.floats(0.05, 0.9),
)
@settings(max_examples=6)
def test_whatever_fits_equals_the_adaptive_model(host: str, capacity: list[int], seed: int, theta_min: float) -> None:
    images = tiny.images(4, seed=seed).double()
    free = vitrim.ATM(alpha=0.95, beta=0.2, theta_min=theta_min, granularity="image")
    expected, states = run(host, free, images)
    bounded = vitrim.ATM(alpha=0.95, beta=0.2, theta_min=theta_min, capacity=tuple(capacity))
    found, held = run(host, bounded, images)
    limits = torch.tensor([state.num_patches for state in held[1:]])
    fits = (counts(states) <= limits).all(1)
    torch.testing.assert_close(found[fits], expected[fits], atol=1e-10, rtol=1e-10)
    assert (counts(held)[fits] == counts(states)[fits]).all()
    # nothing is lost, and an image that does not fit fills the first layer that is too small
    for state in held[1:]:
        total = (state.size * slots(state)).sum(1)
        torch.testing.assert_close(total, torch.full_like(total, state.source.shape[1]))
    for image in (~fits).nonzero()[:, 0].tolist():
        first = int((counts(states)[image] > limits).nonzero()[0, 0])
        assert counts(held)[image, first] == limits[first]


def test_a_layer_keeps_slots_for_its_destinations() -> None:
    _, states = run("vit", vitrim.ATM(**LOW, capacity=(1, 1, 1, 1)), tiny.images(3).double())
    assert [state.num_patches for state in states[1:4]] == [18, 9, 5]


def test_with_a_capacity_no_image_counts_for_another() -> None:
    images = tiny.images(4).double()
    config = vitrim.ATM(**LOW, capacity=(20, 14, 9, 9))
    together, _ = run("vit", config, images)
    alone = torch.cat([run("vit", config, image[None])[0] for image in images])
    torch.testing.assert_close(together, alone, atol=1e-12, rtol=1e-12)


def test_further_pairs_are_the_most_similar_ones() -> None:
    """With thresholds that no pair reaches, a capacity of k makes the first block merge as ToMe does with r = P - k."""
    images = tiny.images(3).double()
    _, states = run("vit", vitrim.ATM(alpha=1.0, beta=0.0, theta_min=1.0, capacity=(30,) * 4), images)
    _, expected = run("vit", vitrim.ToMe(r=6), images)
    assert (states[1].source == expected[1].source).all()


@pytest.mark.parametrize("quantile", [0.5, 1.0])
def test_a_bound_is_the_quantile_of_the_counts_in_eights(quantile: float) -> None:
    images, model = tiny.images(20), tiny.HOSTS["vit"]()
    config = bound(model, ATM, images.split(7), quantile=quantile)
    assert isinstance(config, vitrim.ATM)
    assert config.capacity is not None
    found = patches_per_block(model, ATM, [images])[:, 1:]
    previous = 36
    for slots_, block in zip(config.capacity, found.T, strict=True):
        enough = sorted(block)[round(quantile * len(block)) - 1]
        assert slots_ >= min(enough, previous)
        assert slots_ == previous or (slots_ + 1) % 8 == 0
        previous = slots_
    assert (found <= torch.tensor(config.capacity).numpy()).all() or quantile < 1.0


@pytest.mark.parametrize(
    ("quantile", "counts", "slots"),
    [
        (0.75, [[20, 20, 20, 10], [10, 10, 10, 10]], [23, 15]),  # sorted 10 20 20 20: three of four must fit
        (0.5, [[10, 10, 20, 20], [3, 3, 3, 3]], [23, 7]),  # between two images, the one above
        (1.0, [[5, 16, 3, 1], [7, 8, 1, 1]], [23, 15]),
        (1.0, [[15, 15, 15, 15], [15, 15, 15, 15]], [15, 15]),
        (1.0, [[33, 33, 33, 33], [36, 36, 36, 36]], [36, 36]),  # never more than the block before leaves
    ],
)
def test_slots_by_hand(
    quantile: float, counts: list[list[int]], slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """36 patches and a class token: slots are multiples of 8, less that token, of which 36 never need more."""
    whole = [[36] * 4, *counts, *[counts[-1]] * 2]
    monkeypatch.setattr(static, "patches_per_block", lambda *_: np.array(whole).T)
    config = bound(tiny.HOSTS["vit"](), ATM, [], quantile=quantile)
    assert isinstance(config, vitrim.ATM)
    assert list(config.capacity or ())[:2] == slots


def test_counts_are_of_each_image_alone() -> None:
    """Also of a method that decides by the mean of its batch, and whatever the batches are."""
    images, model = tiny.images(6), tiny.HOSTS["vit"]()
    expected = []
    for image in images.split(1):
        reduced = tiny.HOSTS["vit"]()
        reduced.load_state_dict(model.state_dict())
        reduction = vitrim.reduce_(reduced, ATM, record=True)
        with torch.no_grad():
            reduced(image)
        expected.append([state.num_patches for state in reduction.states])
    assert len({tuple(row) for row in expected}) > 1  # they do differ
    for size in (1, 4, 6):
        assert patches_per_block(model, ATM, images.split(size)).tolist() == expected


# ---- frozen ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["atm:alpha=0.9,beta=0.2,theta_min=0.1", "algm:threshold=0.5", "ia_red2"])
def test_frozen_counts_are_the_means(method: str) -> None:
    torch.manual_seed(0)
    model, images = tiny.HOSTS["vit"](), tiny.images(6)
    found = frozen(model, method, [images])
    assert not found.is_adaptive()
    assert found.obstacle() is None
    assert vitrim.parse_method(found.describe()) == found
    planned = found.counts(36, 4)
    assert planned is not None
    assert min(planned) < 36
    reduction = vitrim.reduce_(model, found, record=True)
    with torch.no_grad():
        model(images)
    assert [state.num_patches for state in reduction.states[1:]] == planned
    if found.name == "atm":  # the interpreters of ia_red2 are drawn anew; algm merges windows of four
        means = patches_per_block(tiny.HOSTS["vit"](), ATM, [images])[:, 1:].mean(0)
        assert abs(torch.tensor(planned) - torch.from_numpy(means)).max() <= 1


@pytest.mark.parametrize(("bias", "dropped"), [(20.0, (0, 0, 0)), (-20.0, (35, 0, 0))])
def test_counts_are_those_of_learned_parameters(bias: float, dropped: tuple[int, ...], tmp_path: Path) -> None:
    """Interpreters that let every patch stay, and others that let only the best one stay."""
    trained, images = tiny.HOSTS["vit"](), tiny.images(3)
    reduction = vitrim.reduce_(trained, "ia_red2")
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if name.endswith("interpreter.bias"):
                parameter.fill_(bias)
    reduction.save(tmp_path)
    model = tiny.HOSTS["vit"]()
    assert frozen(model, "ia_red2", [images], learned=tmp_path) == vitrim.parse_method(f"ia_red2:r={list(dropped)}")
    # they are of that method alone
    assert frozen(model, ATM, [images], learned=tmp_path) == frozen(model, ATM, [images])
    assert bound(model, ATM, [images], learned=tmp_path) == bound(model, ATM, [images])


def test_a_frozen_method_merges_by_the_same_matching() -> None:
    """Frozen at the counts of one image, it does to this image what the adaptive method does."""
    image = tiny.images(1).double()
    expected, states = run("vit", ATM, image)
    fixed = frozen(tiny.HOSTS["vit"]().double(), ATM, [image])
    found, held = run("vit", fixed, image)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert all((one.source == other.source).all() for one, other in zip(held[1:], states[1:], strict=True))


@pytest.mark.parametrize(
    ("text", "patches", "expected"),
    [
        ("tome:r=8", 196, "tome:r=8,align=16"),
        ("topk:keep_rate=0.7", 196, "topk:keep_rate=0.7,align=16"),
        ("tome:r=8,align=8", 196, "tome:r=8,align=8"),  # as asked for
        ("algm:r=[4,4]", 196, "algm:r=[4,4]"),  # it has no way to
        ("tome:r=8", 127, "tome:r=8"),  # of few tokens rounding would take back too much
    ],
)
def test_what_is_levelled(text: str, patches: int, expected: str) -> None:
    assert levelled(vitrim.parse_method(text), patches) == vitrim.parse_method(expected)


@pytest.mark.parametrize(
    ("function", "method", "message"),
    [
        (frozen, "a_vit", "a_vit cannot be frozen: an image is done when its class token halts"),
        (bound, "algm", "algm cannot be given a capacity: how many tokens it keeps depends"),
        (frozen, "tome:r=4", "tome cannot be frozen: its counts are fixed already"),
    ],
)
def test_what_has_no_fixed_form_is_refused(function: Any, method: str, message: str) -> None:
    with pytest.raises(vitrim.VitrimError, match=message):
        function(tiny.HOSTS["vit"](), method, [tiny.images()])


def test_counts_need_images_and_a_share() -> None:
    with pytest.raises(vitrim.VitrimError, match="give some to find them"):
        frozen(tiny.HOSTS["vit"](), ATM, [])
    with pytest.raises(vitrim.VitrimError, match=r"capacity=1\.5 must be above 0 and at most 1"):
        bound(tiny.HOSTS["vit"](), ATM, [tiny.images()], quantile=1.5)


def test_a_seed_makes_random_pruning_the_same_for_all() -> None:
    images = tiny.images(3)
    first, states = run("vit", vitrim.Random(seed=3), images.double())
    second, _ = run("vit", vitrim.Random(seed=3), images.double())
    assert (first == second).all()
    assert (states[-1].position == states[-1].position[:1]).all()
    other, _ = run("vit", vitrim.Random(seed=4), images.double())
    assert not torch.equal(first, other)
