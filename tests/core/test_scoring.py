"""Scores of one's own that are no scores of patches, and methods and hosts that cannot be: each is one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import tiny
import vitrim
from vitrim.core import registry
from vitrim.core.attention import Attention
from vitrim.core.cells import build_reducer
from vitrim.core.method import StagedConfig
from vitrim.core.registry import host_of
from vitrim.core.scoring import Score, ScorerReducer, patch_score, prune_flagged
from vitrim.core.tokens import TokenState
from vitrim.errors import UnsupportedModelError, VitrimError

SHAPES = {
    "with the prefix": (lambda x: x.norm(dim=-1), r"got \(2, 37\); tokens in front of the patches: 1"),
    "of every head": (lambda x: x[:, 1:, :3], r"got \(2, 36, 3\)"),
    "of one image": (lambda x: x[:1, 1:].norm(dim=-1), r"each of 2 images, \(2, 36\), got \(1, 36\)"),
    "of the batch": (lambda x: x[:, 1:].norm(dim=-1).sum(0), r"got \(36,\)"),
}


@pytest.fixture(autouse=True)
def own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_METHODS", dict(registry.methods()))
    monkeypatch.setattr(registry, "_REDUCERS", dict(registry._REDUCERS))


def method(**body: Any) -> StagedConfig:
    """A registered method of a score."""

    class Own(StagedConfig):
        name = "test_own"

    vitrim.register_method(Own)
    vitrim.reduces(Own)(type("OwnReducer", (ScorerReducer,), {"site": "before", **body}))
    return Own(keep_rate=0.5)


@pytest.mark.parametrize("case", SHAPES)
def test_scores_that_are_not_one_number_per_patch_are_refused(case: str) -> None:
    score, message = SHAPES[case]

    def own(self: Any, x: Tensor, attention: Any, state: Any) -> Tensor:
        return score(x)

    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, method(score=own))
    with pytest.raises(VitrimError, match=rf"OwnReducer.score must give one number .* 36 patches .*{message}"):
        model(tiny.images())


def test_a_scorer_without_a_score_says_what_to_define() -> None:
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, method())
    with pytest.raises(VitrimError, match=r"OwnReducer does not say .*define score\(x, attention, state\)"):
        model(tiny.images())


@pytest.mark.parametrize(
    ("body", "message"),
    [({}, "Own has no name"), ({"name": "test_own", "kind": "banana"}, "unknown kind 'banana' of Own; valid: none, ")],
)
def test_methods_that_do_not_say_what_they_are_are_not_registered(body: dict[str, str], message: str) -> None:
    before = registry.methods()
    with pytest.raises(VitrimError, match=message):
        vitrim.register_method(type("Own", (StagedConfig,), {"__module__": __name__, **body}))
    assert registry.methods() == before


def test_a_class_token_has_a_place_in_front_of_the_patches() -> None:
    model = tiny.HOSTS["vit"]()
    facts = host_of(model).facts(model)
    with pytest.raises(VitrimError, match="has_class_token=True and num_prefix=0"):
        replace(facts, num_prefix=0)


def test_a_method_that_remembers_is_refused_where_cells_are_reduced() -> None:
    """What it remembers is of patches, and its decision would be about cells."""
    config = method(score=lambda self, x, seen, state: seen, remember=lambda self, attention, state: None)
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, config)
    facts = replace(host_of(model).facts(model), cell=2)
    with pytest.raises(UnsupportedModelError, match="test_own does more than to choose"):
        build_reducer(config, model.blocks[1].reducer.layer, model.blocks[1], facts)


def test_scores_of_each_kind_by_plain_sums() -> None:
    q, k = (torch.randn(2, 3, 7, 4, generator=torch.Generator().manual_seed(seed)).double() for seed in (1, 2))
    attention, state = Attention(q, k, k, scale=0.5), TokenState.start(torch.zeros(2, 7, 12).double(), num_prefix=3)
    found = {kind: patch_score(attention, state, kind) for kind in get_args(Score)}
    for image in range(2):
        maps = [(q[image, head] @ k[image, head].T * 0.5).softmax(-1) for head in range(3)]
        rows = {"class_token": [0], "prefix_mean": [0, 1, 2], "column_mean": range(7)}
        for kind, queries in rows.items():
            by_hand = [sum(own[row, patch] for own in maps for row in queries) / (3 * len(queries)) for patch in (3, 6)]
            torch.testing.assert_close(found[kind][image, [0, 3]], torch.stack(by_hand))


def test_flagged_patches_stay_in_order_and_padding_is_told() -> None:
    x = torch.randn(3, 6, 4)
    state = TokenState.start(x, num_prefix=1)
    flags = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [1, 0, 0, 0, 1]], dtype=torch.bool)
    kept, after = prune_flagged(state, flags, most=5).apply(x, state)
    assert kept.shape == (3, 6, 4)
    assert after.mask.sum(1).tolist() == [6, 3, 3]
    assert after.position[1, :3].tolist() == [0, 2, 4]
    assert prune_flagged(state, torch.ones_like(flags), most=5) is None
    _, same = prune_flagged(state, flags[1:2].expand(3, -1), most=5).apply(x, state)
    assert same.mask is None
    assert same.num_tokens == 3
