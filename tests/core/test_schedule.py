from __future__ import annotations

import math
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
import vitrim
from vitrim.core.method import StagedConfig
from vitrim.core.registry import make_method, methods
from vitrim.core.schedule import (
    KEEP_RULES,
    Amount,
    Keep,
    KeepRule,
    Remove,
    check_blocks,
    effective_keep,
    filled_up,
    keep_rate,
    linear,
    per_layer,
    quarter_blocks,
)

amounts = st.one_of(
    st.builds(Remove, st.integers(0, 1000)),
    st.builds(Keep, st.floats(0.01, 1.0), st.integers(1, 6), st.sampled_from(sorted(KEEP_RULES))),
)


def counts(schedule: list[Amount | None]) -> list[int]:
    assert all(isinstance(amount, Remove) for amount in schedule)
    return [amount.count for amount in schedule if isinstance(amount, Remove)]


@pytest.mark.parametrize(
    ("rule", "rate", "stage", "initial", "current", "kept"),
    [
        ("ceil_current", 0.7, 1, 196, 196, 138),
        ("ceil_current", 0.7, 2, 196, 139, 98),  # 97.3
        ("floor_current", 0.7, 2, 196, 139, 97),
        ("floor_initial", 0.7, 3, 196, 50, 137),
        ("floor_initial_power", 0.7, 2, 196, 137, 96),
        ("floor_initial_power", 0.7, 2, 100, 70, 49),  # 0.7**2 * 100 is 48.99999999999999
        ("floor_initial", 0.29, 1, 100, 100, 29),  # 28.999999999999996
        ("ceil_current", 0.07, 1, 100, 100, 7),  # 7.000000000000001
        ("floor_current", 0.57, 1, 100, 100, 57),  # 56.99999999999999
        ("ceil_current_class_token", 0.9, 1, 64, 64, 58),
        ("ceil_current_class_token", 0.9, 1, 64, 59, 53),  # of 60 tokens 54 stay; ceil_current keeps 54 patches
        ("floor_initial_power_steps", 0.25, 1, 196, 196, 49),
        ("floor_initial_power_steps", 0.25, 2, 196, 98, 61),  # 49 - 12 fewer
    ],
)
def test_rules(rule: str, rate: float, stage: int, initial: int, current: int, kept: int) -> None:
    assert Keep(rate, stage, rule).keep(initial, current) == kept


@given(percent=st.integers(1, 100), initial=st.integers(1, 1024))
def test_rules_round_the_exact_product_not_its_last_bits(percent: int, initial: int) -> None:
    rate = percent / 100
    assert Keep(rate, 1, "floor_initial").keep(initial, initial) == percent * initial // 100
    assert Keep(rate, 1, "ceil_current").keep(initial, initial) == -(-percent * initial // 100)
    assert Keep(rate, 2, "floor_initial_power").keep(initial, initial) == percent**2 * initial // 100**2


@given(r=st.integers(0, 60), inflect=st.floats(-1.0, 1.0), num_layers=st.integers(2, 40))
def test_linear_removes_r_on_average_less_what_truncation_takes(r: int, inflect: float, num_layers: int) -> None:
    removed = counts(linear(r, inflect, num_layers))
    assert len(removed) == num_layers
    assert min(removed) >= 0
    assert r * num_layers - num_layers < sum(removed) <= r * num_layers
    assert removed == sorted(removed, reverse=inflect < 0)


def test_linear_end_points() -> None:
    assert counts(linear(8, -1.0, 6)) == [16, 12, 9, 6, 3, 0]
    assert counts(linear(8, 1.0, 5)) == [0, 4, 8, 12, 16]
    assert counts(linear(8, 0.0, 5)) == [8] * 5 == counts(per_layer(8, 5))
    assert counts(linear(8, -1.0, 1)) == [8]


def test_per_layer_takes_one_amount_for_each_block() -> None:
    assert counts(per_layer([3, 1], 2)) == [3, 1]
    for count in (0, 3, 5):
        with pytest.raises(vitrim.VitrimError, match=f"the list has {count} amounts but the model has 4 blocks: give"):
            per_layer([1] * count, 4)


def test_a_list_that_ends_early_is_filled_up_and_a_long_one_stays() -> None:
    assert [filled_up(some, 3) for some in ([], [3, 1], [1] * 4, 2)] == [(0, 0, 0), (3, 1, 0), (1, 1, 1, 1), 2]


def test_keep_rate_counts_its_stages_in_order_of_depth() -> None:
    schedule = keep_rate(0.5, (4, 1), "floor_initial_power", 6)
    assert schedule == [
        None,
        Keep(0.5, 1, "floor_initial_power"),
        None,
        None,
        Keep(0.5, 2, "floor_initial_power"),
        None,
    ]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((3, 12), r"blocks \[12\] do not exist: the model has blocks 0 to 11"),
        ((-1,), r"blocks \[-1\] do not exist"),
        ((), "no blocks are given: the model has blocks 0 to 11"),
        ((3, 6, 3), r"blocks \[3, 6, 3\] name a block twice"),
    ],
)
def test_blocks_that_cannot_be_meant_are_refused(blocks: tuple[int, ...], message: str) -> None:
    with pytest.raises(vitrim.VitrimError, match=message):
        check_blocks(blocks, 12)
    with pytest.raises(vitrim.VitrimError, match=message):
        keep_rate(0.7, blocks, "ceil_current", 12)


@pytest.mark.parametrize(
    ("num_layers", "blocks"),
    [(12, (3, 6, 9)), (24, (6, 12, 18)), (6, (1, 3, 4)), (4, (1, 2, 3)), (2, (0, 1)), (1, (0,))],
)
def test_quarter_blocks_exist_and_differ(num_layers: int, blocks: tuple[int, ...]) -> None:
    assert quarter_blocks(num_layers) == blocks
    check_blocks(blocks, num_layers)


@given(amount=amounts, least=st.integers(0, 400), sizes=st.tuples(*[st.integers(1, 700)] * 2))
def test_effective_keep_stays_within_its_bounds(amount: Amount, least: int, sizes: tuple[int, int]) -> None:
    current, initial = sorted(sizes)
    kept = effective_keep(amount, least, initial, current)
    assert min(least, current) <= kept <= current
    asked = amount.keep(initial, current)
    if least <= asked <= current:
        assert kept == asked  # limited only where it must be


@given(r=st.integers(0, 200), initial=st.integers(1, 700), num_layers=st.integers(1, 24))
def test_counts_of_a_merging_method_never_lose_more_than_half(r: int, initial: int, num_layers: int) -> None:
    left = [initial, *(vitrim.ToMe(r=r).counts(initial, num_layers) or [])]
    for before, after in pairwise(left):
        assert after == before - min(r, before // 2)


@given(rate=st.floats(0.01, 1.0), initial=st.integers(1, 700), rule=st.sampled_from(sorted(get_args(KeepRule))))
def test_counts_of_a_pruning_method_fall_and_never_reach_zero(rate: float, initial: int, rule: str) -> None:
    left = vitrim.TopK(keep_rate=rate, rule=rule).counts(initial, 12)
    assert left is not None
    assert left == sorted(left, reverse=True)
    assert 1 <= left[-1] <= left[3] <= math.ceil(rate * initial + 1e-6)


def test_tome_of_the_study_does_not_make_up_for_a_stage_that_fell_short() -> None:
    """ "Which Tokens to Use?": rate 0.25 runs at 98, 61 and 52 patches; rate 0.5 at 98, 49 and 25."""
    for rate, expected in ((0.25, [98, 61, 52]), (0.5, [98, 49, 25]), (0.7, [137, 96, 67]), (0.9, [176, 158, 142])):
        counts = vitrim.ToMe(keep_rate=rate, rule="floor_initial_power_steps").counts(196, 12)
        assert counts is not None
        assert [counts[block] for block in (3, 6, 9)] == expected
    with pytest.raises(vitrim.VitrimError, match="rule=floor_initial_power_steps"):
        vitrim.TopK(rule="floor_initial_power_steps")  # always reaches its target


@given(percent=st.integers(50, 100), patches=st.integers(1, 700))
def test_the_class_token_counts_as_in_the_repository_of_pitome(percent: int, patches: int) -> None:
    tokens = patches + 1
    removed = tokens * (100 - percent) // 100  # floor(N - N rate), N with the class token
    for method in (vitrim.ToMe, vitrim.ToFu, vitrim.PiToMe):
        config = method(keep_rate=percent / 100, blocks=(0,), rule="ceil_current_class_token")
        assert config.counts(patches, 1) == [patches - min(removed, patches // 2)]


def test_one_keep_rate_for_every_block() -> None:
    schedule = keep_rate((0.9, 0.5), (4, 1), "ceil_current", 6)
    assert schedule == [None, Keep(0.9, 1, "ceil_current"), None, None, Keep(0.5, 2, "ceil_current"), None]
    with pytest.raises(vitrim.VitrimError, match="keep_rate has 3 values for 2 blocks"):
        keep_rate((0.9, 0.5, 0.1), (4, 1), "ceil_current", 6)


# ---- an amount per stage, and amounts that follow the image ----------------------------------------------------------


def test_a_list_of_rates_under_a_rule_of_powers_is_a_product() -> None:
    """By hand: 196 x 0.8 = 156.8, x 0.6 = 94.08, x 0.5 = 47.04, rounded down from the unrounded product."""
    assert vitrim.TopK(keep_rate=[0.8, 0.6, 0.5]).counts(196, 12)[3::3] == [156, 94, 47]
    steps = vitrim.ToMe(keep_rate=[0.8, 0.6, 0.5], rule="floor_initial_power_steps").counts(196, 12)
    assert steps[3::3] == [156, 94, 47]
    alike = vitrim.TopK(keep_rate=[0.7, 0.7, 0.7]).counts(196, 12)
    assert alike == vitrim.TopK(keep_rate=0.7).counts(196, 12)


def test_a_list_of_rates_under_the_other_rules() -> None:
    assert vitrim.EViT(keep_rate=[0.8, 0.5, 1.0], fuse_token=False).counts(196, 12)[3::3] == [157, 79, 79]
    assert vitrim.EvoViT(keep_rate=[0.8, 0.5]).counts(196, 12)[4:11:4] == [156, 98]  # of all patches


@pytest.mark.parametrize("name", sorted(name for name, config in methods().items() if issubclass(config, StagedConfig)))
def test_every_staged_method_takes_a_share_per_stage(name: str) -> None:
    config = make_method(name, keep_rate=[0.9, 0.6], blocks=[1, 2])
    counts = config.counts(36, 4)
    assert counts is not None
    assert 36 >= counts[1] > counts[2]
    with pytest.raises(vitrim.VitrimError, match="keep_rate has 1 values for 2 blocks"):
        make_method(name, keep_rate=[0.9], blocks=[1, 2]).counts(36, 4)
    with pytest.raises(vitrim.VitrimError, match="keep_rate"):
        make_method(name, keep_rate=[0.9, 1.5], blocks=[1, 2])


def test_amounts_per_block_of_mctf_and_cropr() -> None:
    assert vitrim.MCTF(r=[20, 10, 0.5], blocks=[1, 3, 4]).counts(196, 6) == [196, 176, 176, 166, 83, 83]
    with pytest.raises(vitrim.VitrimError, match="mctf: r has 2 values for 3 blocks"):
        vitrim.MCTF(r=[20, 10], blocks=[1, 3, 4]).counts(196, 6)
    with pytest.raises(vitrim.VitrimError, match="must be a whole number, or below 1"):
        vitrim.MCTF(r=[20, 1.5])
    assert vitrim.Cropr(r=[3, 2, 1], fusion="none").counts(36, 4) == [36, 32, 30, 29]  # the first removes one more
    with pytest.raises(vitrim.VitrimError, match="cropr: r has 2 values for 3 blocks"):
        vitrim.Cropr(r=[3, 2], fusion="none").counts(36, 4)


def test_thresholds_of_atm_may_be_a_list() -> None:
    assert vitrim.ATM(theta=[0.9, 0.8]).thresholds(2) == [0.9, 0.8]
    model = tiny.HOSTS["vit"]().eval()
    plain = vitrim.ATM(alpha=0.9, beta=0.2, theta_min=0.1)
    outputs = []
    for config in (plain, vitrim.ATM(theta=plain.thresholds(4))):
        reduction = vitrim.reduce_(model, config, record=True)
        outputs.append((model(tiny.images()), reduction.tokens_per_block))
        vitrim.restore_(model)
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert outputs[0][1] == outputs[1][1]
    with pytest.raises(vitrim.VitrimError, match="theta has 2 thresholds but the model has 4 blocks"):
        vitrim.reduce_(model, "atm:theta=[0.9,0.8]")
    with pytest.raises(vitrim.VitrimError, match="give either theta"):
        vitrim.ATM(theta=[0.9], alpha=0.9)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (vitrim.ToMe(r=40, per=1024), {1024: 40, 256: 10, 196: 8, 13: 1, 12: 0}),  # 196 x 40 / 1024 = 7.66; 12: 0.47
        (vitrim.ToMe(r=[40], per=1024), {512: 20}),
        (vitrim.GTP(num_prop=3, per=6), {1: 1, 2: 1, 3: 2, 4: 2}),  # the middle rounds up
        (vitrim.Cropr(r=40, per=1024, first_extra=0), {512: 20}),
    ],
)
def test_amounts_that_follow_the_image(config: vitrim.MethodConfig, expected: dict[int, int]) -> None:
    amount = next(amount for amount in config.amounts(4) if amount is not None)
    for patches, removed in expected.items():
        assert patches - amount.keep(patches, patches) == removed
        assert 100 - amount.keep(patches, 100) == removed  # whatever is left of them


def test_no_warning_of_an_amount_for_larger_images(recwarn: pytest.WarningsRecorder) -> None:
    model = tiny.HOSTS["vit"]().eval()  # 36 patches
    vitrim.reduce_(model, "tome:r=100,per=1024")
    assert not [entry for entry in recwarn if issubclass(entry.category, vitrim.ReductionWarning)]


@pytest.mark.parametrize("initial", [100, 196, 576])
def test_a_product_of_rates_rounds_as_the_exact_one(initial: int) -> None:
    """All pairs of whole percents; 0.7 * 0.7 * 100 is below 49 in floating point."""
    for first in range(1, 101):
        for second in range(1, 101):
            wanted = first * second * initial // 10_000
            exact = Keep(second / 100, stage=2, rule="floor_initial_power", before=first / 100)
            assert exact.keep(initial, initial) == wanted
            steps = Keep(second / 100, stage=2, rule="floor_initial_power_steps", before=first / 100)
            assert steps.keep(initial, initial) == initial + wanted - first * initial // 100
