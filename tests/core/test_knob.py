"""Every method says which option moves its amount, and which takes a value per layer; both mean what they say."""

from __future__ import annotations

import pytest

from vitrim.core.method import Knob
from vitrim.core.registry import make_method, methods

PATCHES, LAYERS = 64, 6
WITH_KNOB = [name for name, kind in methods().items() if kind.knob is not None]
WITH_LIST = [name for name, kind in methods().items() if kind.amounts_option is not None]
STATIC_LIST = [name for name in WITH_LIST if not methods()[name].adaptive]


def knob(name: str) -> Knob:
    found = methods()[name].knob
    assert found is not None
    return found


@pytest.mark.parametrize("name", list(methods()))
def test_every_method_that_reduces_has_a_knob_and_its_options_exist(name: str) -> None:
    kind = methods()[name]
    assert (kind.knob is None) == (kind.kind == "none")
    if kind.knob is not None:
        assert {kind.knob.option, *kind.knob.fixed} <= set(kind.model_fields)
    assert kind.amounts_option is None or kind.amounts_option in kind.model_fields
    assert kind.amounts_option is None or kind.knob is not None, "a list has values like those of the knob"


@pytest.mark.parametrize("name", WITH_KNOB)
def test_values_and_strengths_belong_to_each_other_and_are_valid(name: str) -> None:
    one = knob(name)
    for strength in (0.0, 0.25, 0.5, 1.0):
        value = one.value(strength, PATCHES)
        assert make_method(name, **one.fixed, **{one.option: value})
        assert one.strength(value, PATCHES) == pytest.approx(strength, abs=0.02)
    assert one.value(-1.0, PATCHES) == one.mildest
    assert one.value(2.0, PATCHES) == one.end(PATCHES)


@pytest.mark.parametrize("name", [name for name in WITH_KNOB if not methods()[name].adaptive])
def test_more_strength_never_leaves_more_tokens(name: str) -> None:
    one = knob(name)
    left = [
        sum(make_method(name, **{one.option: one.value(strength, PATCHES)}).counts(PATCHES, LAYERS) or ())
        for strength in (0.0, 0.1, 0.3, 0.6, 1.0)
    ]
    assert left == sorted(left, reverse=True)
    assert left[-1] < left[0]


@pytest.mark.parametrize("name", STATIC_LIST)
def test_a_list_of_equal_values_does_as_that_value(name: str) -> None:
    kind, one = methods()[name], knob(name)
    value = one.value(0.3, PATCHES)
    plain = make_method(name, **{one.option: value})
    each = make_method(name, **{str(kind.amounts_option): [value] * len(plain.scheduled(LAYERS))})
    assert each.counts(PATCHES, LAYERS) == plain.counts(PATCHES, LAYERS)


@pytest.mark.parametrize("name", STATIC_LIST)
def test_a_value_of_the_list_acts_in_its_block(name: str) -> None:
    """Only the block of `scheduled` whose value is strong removes more than the mildest list does."""
    kind, one = methods()[name], knob(name)
    blocks = make_method(name).scheduled(LAYERS)
    mild = [one.mildest] * len(blocks) if one.digits else [int(one.mildest)] * len(blocks)

    def counts(values: list[float]) -> list[int]:
        return make_method(name, **{str(kind.amounts_option): values}).counts(PATCHES, LAYERS) or []

    for place, block in enumerate(blocks):
        strong = [*mild[:place], one.value(0.4, PATCHES), *mild[place + 1 :]]
        assert counts(strong)[:block] == counts(mild)[:block]
        # in the last block of a method that brings its patches back, nothing is left to be seen of an amount
        assert block == LAYERS - 1 or counts(strong)[block] < counts(mild)[block]


def test_thresholds_per_layer_are_those_of_one_for_all() -> None:
    alpha = knob("atm")
    plain = make_method("atm", **alpha.fixed, alpha=0.7)
    each = make_method("atm", theta=[0.7] * LAYERS)
    assert plain.thresholds(LAYERS) == each.thresholds(LAYERS)  # type: ignore[attr-defined]
