"""Points and settings belong to each other, for every method that has something to move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vitrim
from vitrim.core.registry import make_method, methods
from vitrim.errors import VitrimError
from vitrim.loading import create_model
from vitrim.tuning.cost import Cost, within
from vitrim.tuning.space import Space, normal, training_free

TUNABLE = [name for name, kind in methods().items() if kind.tunable is not None]
WITH_LIST = [name for name in TUNABLE if getattr(methods()[name].tunable, "per_layer", None) is not None]

MODEL = create_model("test_vit", options={"img_size": 64, "patch_size": 8, "depth": 6})


def space(name: str, **options: object) -> Space:
    return Space(make_method(name, **options), num_layers=6, grid=(8, 8), num_prefix=1)


@pytest.mark.parametrize("name", TUNABLE)
def test_a_setting_has_a_value_for_all_blocks_or_one_for_each(name: str) -> None:
    one = space(name)
    constant = one.constant(0.3)
    assert not isinstance(getattr(constant, one.tunable.option), tuple)
    stages = one.base.stages(6)
    if one.placing:
        assert one.blocks == tuple(range(one.tunable.first_place, 6))
        assert one.point(constant) == tuple(float(block in stages) for block in one.blocks)
    else:
        assert one.size == (1 if one.tunable.per_layer is None else len(stages))
        assert one.point(constant) == (1.0,) * one.size
    if one.size == 1:
        assert one.config((1.0,), 0.3) == constant
        assert one.starts() == []


@pytest.mark.parametrize("name", WITH_LIST)
def test_points_come_back_from_settings(name: str) -> None:
    one, random = space(name), np.random.default_rng(0)
    for _ in range(5):
        point = normal((0.13 + random.random(one.size)).tolist())  # below 0.125 a block is left out
        config = one.raw(point, scale=0.2)
        # whole tokens, of the 6 that strength 0.2 is
        assert one.point(config) == pytest.approx(point, abs=0.17)
        assert one.config(one.point(config), 0.2)


@pytest.mark.parametrize("name", TUNABLE)
def test_a_setting_that_was_found_may_be_searched_from(name: str) -> None:
    """With all that it says in writing: ATM's one threshold is found with a beta, and a list has no room for one."""
    one = space(name)
    found = [one.constant(0.2), one.config((1.0,) * one.size, 0.2)]
    for config in found:
        again = Space.of(MODEL, config)
        assert again.config((1.0,) * again.size, 0.2).name == name
        assert again.counts(config) == one.counts(config)


def test_counts_are_cut_to_what_there_is() -> None:
    """11 of 64 patches in six blocks: by hand 53, 42, 31, 20, then 10 at most may go, then 5."""
    one = space("tome")
    assert one.counts(vitrim.ToMe(r=11)) == [53, 42, 31, 20, 10, 5]
    strength = one.tunable.strength(11, 64)
    assert one.config((1.0,) * 6, strength) == vitrim.ToMe(r=[11, 11, 11, 11, 10, 5])
    assert one.constant(strength) == vitrim.ToMe(r=11)
    assert one.key(vitrim.ToMe(r=11)) == one.key(vitrim.ToMe(r=[11, 11, 11, 11, 10, 5]))


def test_other_options_stay() -> None:
    one = space("tome", kept_order="similarity", r=3)
    assert one.constant(0.5) == vitrim.ToMe(kept_order="similarity", r=16)
    assert one.config((1.0, 0.0, 0.0, 0.0, 0.0, 0.0), 0.5) == vitrim.ToMe(
        kept_order="similarity", r=[16, 0, 0, 0, 0, 0]
    )


def test_what_leaves_nothing_to_move_is_refused() -> None:
    with pytest.raises(VitrimError, match="none has no option that says how much it removes"):
        space("none").constant(0.5)
    with pytest.raises(VitrimError, match="either r"):
        space("tome", keep_rate=0.5).constant(0.5)


def test_where_a_method_acts_is_searched_unless_it_is_said() -> None:
    one = space("topk")
    assert one.placing
    config = one.config((0.0, 1.0, 0.5, 0.1, 0.0, 0.0), 0.4)
    assert config == vitrim.TopK(blocks=(1, 2), keep_rate=(0.62, 0.81))
    assert one.point(config) == pytest.approx((0.0, 1.0, 0.5, 0.0, 0.0, 0.0))
    assert one.constant(0.4) == vitrim.TopK(keep_rate=0.62)
    assert one.config((0.0,) * 6, 0.4) == one.constant(0.0)
    fixed = space("topk", blocks=(1, 3))
    assert (fixed.placing, fixed.blocks) == (None, (1, 3))
    assert not space("evo_vit").placing, "what it learned belongs to its blocks"
    assert space("kmedoids").blocks == (1, 2, 3, 4, 5)


@given(
    st.sampled_from(["tome", "topk", "mctf", "gtp"]),
    st.lists(st.floats(0.0, 1.0), min_size=6, max_size=6),
    st.floats(0.3, 1.0),
)
def test_a_limit_is_never_exceeded(name: str, weights: list[float], limit: float) -> None:
    """Whatever the weights are."""
    one = space(name)

    class Tokens(Cost):
        unit = "macs"

        def share(self, config: vitrim.MethodConfig) -> float:
            return sum(one.counts(config) or ()) / (64 * 6)

    point = normal(weights[: one.size])
    config = within(one, point, Tokens(), limit)
    assert config is None or Tokens().share(config) <= limit


def test_a_method_whose_stages_a_model_has_no_room_for_is_not_among_all_that_fit() -> None:
    """kmedoids' default stages of three blocks start at the first one, which has no attention before it."""
    shallow = create_model("test_vit", options={"img_size": 32, "patch_size": 8, "depth": 3, "num_classes": 2})
    names, deeper = ({config.name for config in training_free(model)} for model in (shallow, MODEL))
    assert deeper - names == {"kmedoids"}
