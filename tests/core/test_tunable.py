"""Every method says which option moves its amount, and which takes a value per layer; both mean what they say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tiny
import vitrim
from vitrim.core.registry import make_method, methods, parse_method

PATCHES, LAYERS = 64, 6
TUNABLES = {name: kind.tunable for name, kind in methods().items() if kind.tunable is not None}
WITH_LIST = {name: one.per_layer for name, one in TUNABLES.items() if one.per_layer is not None}
STATIC_LIST = [name for name in WITH_LIST if not make_method(name).is_adaptive()]


@pytest.mark.parametrize("name", list(methods()))
def test_every_method_that_reduces_can_be_tuned_and_its_options_exist(name: str) -> None:
    kind, one = methods()[name], TUNABLES.get(name)
    assert (one is None) == (kind.kind == "none")
    if one is not None:
        named = {one.option, one.per_layer, one.places, *one.fixed, *one.others}
        assert named - {None} <= set(kind.model_fields)


@pytest.mark.parametrize("name", TUNABLES)
def test_values_and_strengths_belong_to_each_other_and_are_valid(name: str) -> None:
    one = TUNABLES[name]
    for strength in (0.0, 0.25, 0.5, 1.0):
        value = one.value(strength, PATCHES)
        assert make_method(name, **one.fixed, **{one.option: value})
        assert one.strength(value, PATCHES) == pytest.approx(strength, abs=0.02)
    assert one.value(-1.0, PATCHES) == one.mildest
    assert one.value(2.0, PATCHES) == one.end(PATCHES)


@pytest.mark.parametrize("name", [name for name in TUNABLES if not make_method(name).is_adaptive()])
def test_more_strength_never_leaves_more_tokens(name: str) -> None:
    one = TUNABLES[name]
    left = [
        sum(make_method(name, **{one.option: one.value(strength, PATCHES)}).counts(PATCHES, LAYERS) or ())
        for strength in (0.0, 0.1, 0.3, 0.6, 1.0)
    ]
    assert left == sorted(left, reverse=True)
    assert left[-1] < left[0]


@pytest.mark.parametrize("name", STATIC_LIST)
def test_a_list_of_equal_values_does_as_that_value(name: str) -> None:
    one = TUNABLES[name]
    value = one.value(0.3, PATCHES)
    plain = make_method(name, **{one.option: value})
    each = make_method(name, **{WITH_LIST[name]: [value] * len(plain.stages(LAYERS))})
    assert each.counts(PATCHES, LAYERS) == plain.counts(PATCHES, LAYERS)


@pytest.mark.parametrize("name", STATIC_LIST)
def test_a_value_of_the_list_acts_in_its_block(name: str) -> None:
    """Only the block of `stages` whose value is strong removes more than the mildest list does."""
    one = TUNABLES[name]
    blocks = make_method(name).stages(LAYERS)
    mild = [one.mildest] * len(blocks) if one.digits else [int(one.mildest)] * len(blocks)

    def counts(values: list[float]) -> list[int]:
        return make_method(name, **{WITH_LIST[name]: values}).counts(PATCHES, LAYERS) or []

    for place, block in enumerate(blocks):
        strong = [*mild[:place], one.value(0.4, PATCHES), *mild[place + 1 :]]
        assert counts(strong)[:block] == counts(mild)[:block]
        # in the last block of a method that brings its patches back, nothing is left to be seen of an amount
        assert block == LAYERS - 1 or counts(strong)[block] < counts(mild)[block]


def outcome(model: nn.Module, config: vitrim.MethodConfig, **changes: object) -> Tensor | None:
    """Logits of ``model`` reduced by ``config``, changed at run time; None if that is refused."""
    torch.manual_seed(1)  # of what the method may learn
    reduction = vitrim.reduce_(model, config)
    try:
        reduction.set(**changes)
    except vitrim.VitrimError:
        return None
    else:
        with torch.no_grad():
            return tiny.run(model, tiny.images())
    finally:
        vitrim.restore_(model)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name, option in WITH_LIST.items() if option in methods()[name].runtime])
def test_a_list_at_run_time_does_as_from_the_start_or_is_refused(name: str) -> None:
    one, model, done = TUNABLES[name], tiny.HOSTS["vit"](), 0
    config = make_method(name, **one.fixed, **{one.option: one.value(0.3, 36)})
    for count in range(1, 5):
        changes = {WITH_LIST[name]: [one.value(0.4, 36)] * count}
        found = outcome(model, config, **changes)
        if found is not None:
            done += 1
            assert torch.equal(found, outcome(model, config.changed(**changes)))
    assert done > 0 or name == "atm"  # whose list does not go with the option


def test_one_block_alone_takes_no_other_amount_along() -> None:
    """What else says how much is removed is left out, or removes nothing."""
    for given, expected in (
        ("tome:r=8,inflect=-1.0,per=64,proportional=false", "tome:r=[0,16,0,0],proportional=false"),
        ("tome:keep_rate=0.5,blocks=[2],rule=floor_current", "tome:r=[0,16,0,0]"),
        ("gtp:num_prop=8,per=1024", "gtp:num_prop=[0,16,0,0]"),
        ("mctf:r=[2,4],blocks=[2,3]", "mctf:r=16,blocks=[1]"),
        ("zero_tprune:num_similar=[3,4,5]", "zero_tprune:num_similar=0,keep_rate=16,blocks=[1]"),
        ("diffrate:merge_kept=[30,20,10,5]", "diffrate:r=[0,16,0,0]"),
        ("cropr:r=4,per=64", "cropr:r=[16,0]"),
    ):
        config = parse_method(given)
        assert config.tunable is not None
        value = 16 if config.tunable.digits == 0 else 0.5
        alone = config.tunable.alone(config, 1, value, num_layers=4)
        assert alone is not None
        assert alone.describe() == expected.replace("keep_rate=16", "keep_rate=0.5")
    cropr = parse_method("cropr")
    assert cropr.tunable is not None
    assert cropr.tunable.alone(cropr, 0, 4, num_layers=4) is None  # no router before block 0
