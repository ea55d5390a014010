from __future__ import annotations

from typing import Any

import pytest
import torch

import golden_models as golden
import tiny
import vitrim
from vitrim.attention import Attention
from vitrim.config import Layer
from vitrim.registry import make_method


@pytest.mark.parametrize("name", ["diffrate_r8_merge", "diffrate_prune4_merge4"])
def test_matches_reference(name: str) -> None:
    ref = golden.load(f"merging/{name}")
    args = ref["config"]["args"]
    model = golden.vit(ref)
    config = vitrim.DiffRate(prune_kept=args["prune_kept"], merge_kept=args["merge_kept"], discount_sizes=True)
    reduction = vitrim.reduce_(model, config, record=True)
    found: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: found.append(out[:, 0]))
    with torch.no_grad():
        logits = model(golden.images(ref))
    torch.testing.assert_close(logits, golden.tensor(ref, "logits"), atol=1e-9, rtol=0)
    assert reduction.tokens_per_block == ref["tokens_per_block"].tolist()
    assert torch.equal(reduction.state.source, golden.tensor(ref, "source").long())
    torch.testing.assert_close(reduction.state.size, golden.tensor(ref, "size"), atol=1e-9, rtol=0)
    for token, expected in zip(found, golden.tensor(ref, "cls_per_block").double(), strict=True):
        torch.testing.assert_close(token, expected, atol=2e-6 * expected.abs().max().item(), rtol=0)
    with torch.no_grad():
        single = model.float()(golden.images(ref).float())
    torch.testing.assert_close(single, golden.tensor(ref, "logits_f32"), atol=5e-5, rtol=0)


def one_block(x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, vitrim.TokenState]:
    """Tokens ``x`` (1, N, C) after one block whose class token attends the more to a patch the earlier it comes."""
    n = x.shape[1]
    logits = -torch.arange(n, dtype=x.dtype).expand(1, 1, n, n)
    keys = torch.eye(n, dtype=x.dtype).expand(1, 1, n, n)
    reducer = vitrim.DiffRate(**options).build(Layer(0, 1, x.shape[2], 1, 0, 1, True, (1, n - 1)))
    attention = Attention(logits, keys, keys, 1.0)
    return reducer.reduce("between", x, attention, vitrim.TokenState.start(x, 1))


def test_the_tail_joins_the_most_similar_of_the_best_and_the_rest_goes() -> None:
    directions = torch.eye(3, dtype=torch.float64)
    # class token, two that stay, two that join (the first joins the second, and conversely), one that is dropped
    x = torch.stack([directions[2], directions[0], directions[1], 3 * directions[1], 5 * directions[0], directions[2]])
    out, state = one_block(x[None], prune_kept=(5,), merge_kept=(3,))
    expected = torch.stack([directions[2], 3 * directions[0], 2 * directions[1]])
    torch.testing.assert_close(out[0], expected)
    assert state.source.tolist() == [[0, 1, 2, 2, 1, -1]]
    assert state.size.tolist() == [[1.0, 2.0, 2.0]]
    assert state.lost


def test_discounted_sizes_stay_positive() -> None:
    x = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.1], [-1.0, 0.2]]])
    _, state = one_block(x, merge_kept=(2,), discount_sizes=True)
    assert (state.size > 0).all()
    assert state.size.log().isfinite().all()
    _, state = one_block(x, merge_kept=(2,))
    assert state.size.tolist() == [[1.0, 4.0]]


def test_amounts() -> None:
    assert vitrim.DiffRate(r=8).counts(196, 12)[-1] == 100
    assert vitrim.DiffRate(prune_kept=(61, 53)).counts(64, 2) == [60, 52]
    assert vitrim.DiffRate(merge_kept=(57, 49)).counts(64, 2) == [56, 48]
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, vitrim.DiffRate(prune_kept=(30, 30, 30, 30)))
    reduction.set(prune_kept=(30, 20, 10, 5))
    with torch.no_grad():
        model(tiny.images())
    assert reduction.state.num_tokens == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": -1}, "greater than or equal to 0"),
        ({"r": 4, "merge_kept": [5, 4]}, "either prune_kept and merge_kept, or r"),
        ({"prune_kept": [5, 4], "merge_kept": [5]}, "prune_kept has 2 values but merge_kept has 1"),
        ({"prune_kept": [5, 4], "merge_kept": [5, 5]}, "must not be larger than prune_kept"),
        ({"merge_kept": [5, 1]}, "smallest value is 2"),
    ],
)
def test_invalid_options_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(vitrim.VitrimError, match=message) as caught:
        make_method("diffrate", **options)
    assert "\n" not in str(caught.value)


def test_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(vitrim.VitrimError, match="2 amounts but the model has 4 blocks"):
        vitrim.reduce_(tiny.HOSTS["vit"](), vitrim.DiffRate(merge_kept=(9, 8)))
    with pytest.raises(vitrim.UnsupportedModelError, match="weigh wrongly"):
        vitrim.reduce_(tiny.HOSTS["avg_fc_norm"](), vitrim.DiffRate())
