"""A config is laid out over a model once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
import vitrim
from vitrim.core.block import Idle
from vitrim.core.checks import check_blocks
from vitrim.core.plan import plan
from vitrim.core.registry import host_of, make_method, make_reducer, methods
from vitrim.core.schedule import BringBack, Remove
from vitrim.errors import VitrimError

CONFIGS = tiny.configs()


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods whose amounts were evaluated, once for every time."""
    found: list[str] = []

    def counted(kind: type[vitrim.MethodConfig]) -> Any:
        own = kind.amounts

        def amounts(self: vitrim.MethodConfig, num_layers: int) -> Any:
            if type(self) is kind:  # not what a class asks of the one it inherits from
                found.append(self.name)
            return own(self, num_layers)

        return amounts

    for kind in methods().values():
        monkeypatch.setattr(kind, "amounts", counted(kind))
    return found


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.describe())
def test_amounts_are_evaluated_once(config: vitrim.MethodConfig, evaluations: list[str]) -> None:
    reduction = vitrim.reduce_(tiny.HOSTS["vit"](), config)
    assert evaluations == [config.name]
    if config.runtime:
        option = sorted(config.runtime & config.model_fields_set or config.runtime)[0]
        reduction.set(**{option: getattr(config, option)})
        assert evaluations == [config.name] * 2


def test_set_gives_every_reducer_its_layer_of_the_new_plan() -> None:
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, "tome:r=[4,3,2,1]")
    reducers = [block.reducer for block in model.blocks]
    assert [reducer.layer.amount for reducer in reducers] == [Remove(4), Remove(3), Remove(2), Remove(1)]
    reduction.set(r=5)
    assert [block.reducer for block in model.blocks] == reducers  # the same ones
    assert [reducer.layer.amount for reducer in reducers] == [Remove(5)] * 4
    assert all(reducer.config.r == 5 for reducer in reducers)


def test_layers_say_where_they_stand() -> None:
    model = tiny.HOSTS["registers"]()
    layers = plan(vitrim.Cropr(r=2), host_of(model).facts(model), 4)
    assert [layer.depth for layer in layers] == [0, 1, 2, 3]
    assert [layer.is_last for layer in layers] == [False, False, False, True]
    assert [layer.amount for layer in layers] == [None, Remove(3), Remove(2), BringBack()]
    assert {(layer.num_layers, layer.num_prefix, layer.initial_patches) for layer in layers} == {(4, 4, 36)}


def test_a_method_without_a_reducer_is_told_how_to_name_one() -> None:
    class Forgotten(vitrim.MethodConfig):
        name = "test_forgotten"

    model = tiny.HOSTS["vit"]()
    message = r"'test_forgotten' has no reducer: register one with @reduces\(Forgotten\)"
    with pytest.raises(VitrimError, match=message):
        vitrim.reduce_(model, Forgotten())
    model(tiny.images())  # as it was


def test_two_reducers_of_one_method_are_refused() -> None:
    with pytest.raises(ValueError, match="the reducer of 'tome' is registered twice"):
        vitrim.reduces(vitrim.ToMe)(Idle)


# ---- counts that matrix units like -----------------------------------------------------------------------------------


UNROUNDED = {"none", "bat", "cubist_merge", "evo_vit", "l1", "l2", "linf", "zero_tprune"}
"""Methods with fixed counts of tokens that no option rounds."""

ROUNDED = [
    name
    for name, kind in sorted(methods().items())
    if name not in UNROUNDED and kind.kind != "soft" and not make_method(name).is_adaptive()
]
BY_IMAGE = {"atm", "ia_red2", "saint"}
"""Methods that round the counts of every image."""


@pytest.mark.parametrize("name", sorted(set(methods()) - set(ROUNDED) - BY_IMAGE))
def test_methods_without_counts_to_round_say_so(name: str) -> None:
    with pytest.raises(vitrim.VitrimError, match="align=8 rounds counts of tokens, and this method has none"):
        make_method(name, align=8)


@pytest.mark.parametrize("multiple", [2, 8])
@pytest.mark.parametrize("prefix", [1, 5])
@pytest.mark.parametrize("name", ROUNDED)
def test_counts_are_multiples_and_follow_the_schedule(name: str, prefix: int, multiple: int) -> None:
    """Never less than the schedule keeps, never a multiple more, however little a block removes."""
    configs = make_method(name, align=multiple), make_method(name)
    counts, asked = (config.counts(196, 12, (14, 14), prefix) or [] for config in configs)
    before = 196
    for count, plain in zip(counts, asked, strict=True):
        if plain < 196:  # all come back in the last block of some
            assert plain <= count < plain + multiple
            assert count == before or (count + prefix) % multiple == 0
        before = count
    assert make_method(name, align=1).counts(196, 12, (14, 14), prefix) == asked


@pytest.mark.parametrize("text", ["tome:r=3", "evit:keep_rate=0.7", "mctf:r=2", "diffrate:r=3", "topk:keep_rate=0.6"])
def test_a_model_runs_with_rounded_counts(text: str) -> None:
    """Prefix and fused token included."""
    model = tiny.HOSTS["vit"]()
    prefix = host_of(model).facts(model).num_prefix
    reduction = vitrim.reduce_(model, f"{text},align=4", record=True)
    model(tiny.images())
    changed = [count for count in reduction.tokens_per_block if count < reduction.states[0].num_patches + prefix]
    assert changed
    assert all(count % 4 == 0 for count in changed)


@pytest.mark.parametrize(
    "text",
    [
        "atm:alpha=0.3,beta=0,theta_min=0,last_block=full",
        "atm:alpha=0.3,beta=0,theta_min=0,granularity=image,last_block=full",
        "saint:threshold=0,neighbours=3",
        "saint:threshold=0,neighbours=3,variant=published",
        "ia_red2:threshold=0.5",
    ],
)
@torch.no_grad()
def test_counts_by_image_are_rounded_up(text: str) -> None:
    """In the first block that removes anything, to the next multiple of what that block would leave; behind it too."""
    model, images = tiny.HOSTS["vit"](), tiny.images()[:1]
    counts = []
    for options in (text, f"{text},align=6"):
        torch.manual_seed(0)  # of random interpreters
        with vitrim.reduced(model, options, record=True) as reduction:
            model(images)
            counts.append([reduction.states[0].num_tokens, *(reduction.tokens_per_block or [])])
    plain, rounded = counts
    first = next(block for block, count in enumerate(plain) if count < plain[0])
    assert plain[first] % 6, "the example rounds nothing: choose another threshold"
    assert rounded[first] == min(plain[first] + -plain[first] % 6, plain[0])
    assert all(count % 6 == 0 or count == plain[0] for count in rounded)


@pytest.mark.parametrize(
    "text", ["atm:alpha=0.3,beta=0,theta_min=0,granularity=image", "saint:threshold=0,neighbours=3"]
)
@torch.no_grad()
def test_an_image_in_a_batch_is_rounded_as_it_would_be_alone(text: str) -> None:
    model, images = tiny.HOSTS["vit"](), tiny.images()
    with vitrim.reduced(model, f"{text},align=4") as reduction:
        batch = model(images)
        alone = torch.cat([model(image) for image in images.split(1)])
        assert torch.allclose(batch, alone, atol=1e-5)
        assert reduction.config.align == 4


def test_slots_need_no_rounding() -> None:
    with pytest.raises(vitrim.VitrimError, match="capacity says how many slots there are"):
        make_method("atm", capacity=(16, 8), align=8)


def test_a_block_keeps_by_the_image_it_got_and_not_by_one_before() -> None:
    """Shares of the first patches, by hand: images of two sizes that have equally many tokens left."""
    config = vitrim.parse_method("topk:keep_rate=0.5,blocks=[1],rule=floor_initial")
    model = tiny.HOSTS["vit"]()
    layer = plan(config, host_of(model).facts(model), 4)[1]
    assert [layer.keep(config, initial, 30) for initial in (36, 50, 36, 20)] == [18, 25, 18, 10]


def test_a_plan_for_other_blocks_is_refused_even_if_they_are_as_many() -> None:
    facts = host_of(tiny.HOSTS["vit"]()).facts(tiny.HOSTS["vit"]())
    first, other = (vitrim.parse_method(f"topk:keep_rate=0.5,blocks=[{block}]") for block in (1, 2))
    reducers = [make_reducer(first, layer) for layer in plan(first, facts, 4)]
    check_blocks(first, plan(first, facts, 4), reducers)
    with pytest.raises(VitrimError, match=r"acts in blocks \[2\] and the model was reduced for \[1\]"):
        check_blocks(other, plan(other, facts, 4), reducers)


def test_amounts_that_are_none_are_refused_in_one_line() -> None:
    class Numbers(vitrim.MethodConfig):
        name = "test_numbers"

        def amounts(self, num_layers: int) -> Any:
            return [8] * num_layers

    with pytest.raises(vitrim.VitrimError, match=r"such as vitrim.Remove\(8\) or .*, or None, not \[8, 8"):
        vitrim.reduce_(tiny.HOSTS["vit"](), Numbers())
