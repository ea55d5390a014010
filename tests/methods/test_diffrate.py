from __future__ import annotations

from typing import Any

import pytest
import torch

import golden_learned
import golden_models as golden
import tiny
import vitrim
from vitrim.core.attention import Attention
from vitrim.core.plan import Layer
from vitrim.engines.macs import count_macs
from vitrim.methods.diffrate import KeptShare, learned
from vitrim.tasks.step import Step
from vitrim.training.objectives import found
from vitrim.training.objectives import losses as losses_of
from vitrim.training.objectives.diffrate import block_macs, objective


@golden.cases(["merging/diffrate_r8_merge", "merging/diffrate_prune4_merge4"])
def test_matches_reference(ref: golden.Reference) -> None:
    golden_learned.check_dense(ref)
    args, model = ref["config"]["args"], golden.vit(ref)
    config = vitrim.DiffRate(prune_kept=args["prune_kept"], merge_kept=args["merge_kept"], discount_sizes=True)
    golden_learned.check_outputs(ref, model, vitrim.reduce_(model, config, record=True))
    golden_learned.check_float32(ref, model)


def one_block(x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, vitrim.TokenState]:
    """Tokens ``x`` (1, N, C) after one block whose class token attends the more to a patch the earlier it comes."""
    n = x.shape[1]
    logits = -torch.arange(n, dtype=x.dtype).expand(1, 1, n, n)
    keys = torch.eye(n, dtype=x.dtype).expand(1, 1, n, n)
    reducer = tiny.reducer(vitrim.DiffRate(**options), Layer(0, 1, x.shape[2], 1, 0, 1, True, (1, n - 1)))
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


# ---- learning the amounts --------------------------------------------------------------------------------------------

SHARES = [(30, 27), (36, 30), (20, 36), (18, 9)]
"""Of 36: which share of what is left pruning keeps, and merging of that, in each block."""


def learning(host: str = "vit", shares: list[tuple[int, int]] | None = None, **options: Any) -> Any:
    model = tiny.HOSTS[host]()
    reduction = vitrim.reduce_(model, vitrim.DiffRate(learn=True, **options))
    for block, pair in zip(model.blocks, shares or [], strict=False):
        for module, k in zip((block.reducer.prune, block.reducer.merge), pair, strict=True):
            with torch.no_grad():
                module.logits.copy_(40.0 * torch.nn.functional.one_hot(torch.tensor(k - 1), 36))
    return model, reduction


def test_everything_is_kept_at_first() -> None:
    model, reduction = learning()
    images = tiny.images().double()
    with torch.no_grad():
        logits = model.double()(images)
        dense = tiny.HOSTS["vit"]().double()(images)
    torch.testing.assert_close(logits, dense, atol=1e-4, rtol=1e-5)  # the smoothed softmax
    assert learned(reduction).prune_kept == learned(reduction).merge_kept == (37,) * 4


@pytest.mark.parametrize("host", ["vit", "distilled", "registers"])
@pytest.mark.parametrize("score", ["class_token", "column_mean"])
def test_masks_equal_the_removal_by_the_learned_amounts(host: str, score: str) -> None:
    model, reduction = learning(host, SHARES, score=score)
    images = tiny.images().double()
    with torch.no_grad():
        masked = model.double()(images)
    config = learned(reduction)
    # 36 -> 30 -> 22.5, 23 -> 19.2, 20 -> 11.1, 12 -> 6 -> 1.5: rounded up
    assert config.prune_kept == (31, 24, 13, 7)
    assert config.merge_kept == (24, 21, 13, 3)
    assert config.score == score
    assert [value.tolist() for value in reduction.aux("kept_numbers")] == [[30, 23], [23, 20], [12, 12], [6, 2]]
    assert reduction.state.num_patches == 36
    vitrim.restore_(model)
    vitrim.reduce_(model, config)
    with torch.no_grad():
        removed = model(images)
    torch.testing.assert_close(masked, removed, atol=1e-4, rtol=1e-5)
    assert (masked - removed).abs().max() < 1e-3 * (masked - tiny.HOSTS[host]().double()(images)).abs().max()


def test_mask_has_the_gradient_of_the_probability() -> None:
    share = KeptShare(4)
    with torch.no_grad():
        share.logits.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]).log())
    current = torch.tensor(4.0)
    number = share.number(current)
    assert number.item() == 3.0  # the mean is 3
    rank = torch.tensor([[2, 0, 3, 1]])
    assert share.mask(rank, current, number).tolist() == [[1.0, 1.0, 0.0, 1.0]]
    for j, reached in enumerate(([2, 3], [0, 1, 2, 3], [3], [1, 2, 3])):  # kept by k above its rank
        expected = torch.autograd.grad(share.probabilities()[reached].sum(), share.logits)[0]
        found = torch.autograd.grad(share.mask(rank, current, number)[0, j], share.logits)[0]
        torch.testing.assert_close(found, expected)
    mean = (share.probabilities() * torch.arange(1.0, 5.0)).sum()
    expected = torch.autograd.grad(mean, share.logits)[0]
    torch.testing.assert_close(torch.autograd.grad(number, share.logits)[0], expected)
    # of two patches the first is kept by any share, the second by more than a half
    assert share.number(torch.tensor(2.0)).item() == 2.0
    tail = share.mask(torch.tensor([[0, 1]]), torch.tensor(2.0), torch.tensor(2.0))
    expected = torch.autograd.grad(share.probabilities()[2:].sum(), share.logits)[0]
    torch.testing.assert_close(torch.autograd.grad(tail[0, 1], share.logits)[0], expected)


def test_macs_are_those_that_are_counted() -> None:
    _, reduction = learning(shares=SHARES)
    numbers = [
        (torch.tensor(a - 1.0), torch.tensor(b - 1.0)) for a, b in zip((31, 24, 13, 7), (24, 21, 13, 3), strict=True)
    ]
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, learned(reduction))
    macs = count_macs(model, tiny.images())
    outside = 36 * 3 * 16 * 32 + 32 * 5  # patch embedding and head
    assert block_macs(numbers, 36, 1, 32).item() == macs.linear + macs.attention + macs.matching - outside


def test_objective() -> None:
    model, reduction = learning(shares=SHARES)
    logits, targets = model.train()(tiny.images()), torch.tensor([1, 2])
    losses = objective(reduction, logits, targets, target_gmacs=1e-4, weight=2.0)
    gmacs = block_macs([tuple(n) for n in reduction.aux("kept_numbers")], 36, 1, 32) / 1e9
    torch.testing.assert_close(losses["gmacs"], gmacs)
    torch.testing.assert_close(losses["cost"], (gmacs - 1e-4) ** 2)
    base = torch.nn.functional.cross_entropy(logits, targets)
    torch.testing.assert_close(losses["total"], base + 2 * losses["cost"])
    losses["total"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    plain = vitrim.reduce_(tiny.HOSTS["vit"](), vitrim.DiffRate(r=2))
    with pytest.raises(vitrim.VitrimError, match="use diffrate:learn=true"):
        learned(plain)


def test_the_cost_reaches_every_amount_by_the_chain_rule() -> None:
    """By hand: the cost depends on the numbers P_l and M_l that pruning and merging leave in block l, and those on the
    shares s = sum_k p_k k / K as P_l = M_(l-1) s_P and M_l = P_l s_M; of a softmax, ds/dlogit_k = p_k (k/K - s)."""
    model, reduction = learning()
    generator = torch.Generator().manual_seed(0)
    pairs = [(block.reducer.prune, block.reducer.merge) for block in model.blocks]
    with torch.no_grad():
        for share in (share for pair in pairs for share in pair):
            share.logits.copy_(torch.randn(36, generator=generator))
    logits = model.double().train()(tiny.images().double())
    losses = objective(reduction, logits, torch.tensor([1, 2]), target_gmacs=1e-4)
    (losses["gmacs"] * 1e9).backward()
    numbers = [tuple(value.detach().requires_grad_() for value in pair) for pair in reduction.aux("kept_numbers")]
    partial = torch.autograd.grad(block_macs(numbers, 36, 1, 32), [n for pair in numbers for n in pair])
    k = torch.arange(1, 37, dtype=torch.float64) / 36

    def share_of(module: KeptShare) -> tuple[torch.Tensor, torch.Tensor]:
        p = module.logits.detach().softmax(0)
        return (p * k).sum(), p * (k - (p * k).sum())

    later = torch.zeros(())  # what the numbers of all later blocks add to the derivative by M_l
    for depth in (3, 2, 1, 0):
        (prune, merge), (pruned, _) = pairs[depth], numbers[depth]
        (share_p, slope_p), (share_m, slope_m) = share_of(prune), share_of(merge)
        entering = numbers[depth - 1][1].detach() if depth else 36.0
        by_merged = partial[2 * depth + 1] + later
        by_pruned = partial[2 * depth] + by_merged * share_m
        torch.testing.assert_close(merge.logits.grad, by_merged * pruned.detach() * slope_m)
        torch.testing.assert_close(prune.logits.grad, by_pruned * entering * slope_p)
        later = by_pruned * share_p


def test_losses_of_a_step() -> None:
    model, reduction = learning(shares=SHARES)
    targets = torch.tensor([1, 2])
    step = Step(model.train(), reduction, tiny.images(), targets, torch.nn.functional.cross_entropy)
    losses = losses_of(step, target_gmacs=1e-4, weight=3.0, mlp_ratio=2.0)
    expected = objective(reduction, model(step.images), targets, target_gmacs=1e-4, weight=3.0, mlp_ratio=2.0)
    assert set(losses) == {"total", "base", "cost", "gmacs"}
    for term, value in losses.items():
        torch.testing.assert_close(value, expected[term])
    losses["total"].backward()
    own = [p for name, p in model.named_parameters() if ".reducer." in name]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in own)
    with pytest.raises(vitrim.VitrimError, match="learn=true needs target_macs"):
        losses_of(step)


def test_one_target_is_given() -> None:
    _, reduction = learning()
    reduction.model(tiny.images())
    for wrong, message in (({}, "give one of"), ({"target_macs": 1.5}, "target_macs=1.5: must be below 1")):
        with pytest.raises(vitrim.VitrimError, match=message):
            objective(reduction, torch.zeros(2, 5), torch.tensor([1, 2]), **wrong)
    assert found(vitrim.reduce_(tiny.HOSTS["vit"](), vitrim.DiffRate(r=2))) is None
    assert found(vitrim.reduce_(tiny.HOSTS["vit"](), vitrim.ToMe(r=2))) is None


def test_with_given_amounts_a_step_learns_the_task_alone() -> None:
    model = tiny.HOSTS["vit"]().train()
    reduction = vitrim.reduce_(model, vitrim.DiffRate(r=4))
    targets = torch.tensor([1, 2])
    step = Step(model, reduction, tiny.images(), targets, torch.nn.functional.cross_entropy)
    losses = losses_of(step)
    assert set(losses) == {"total"}
    torch.testing.assert_close(losses["total"], torch.nn.functional.cross_entropy(model(step.images), targets))
    with pytest.raises(vitrim.VitrimError, match="target_gmacs is what learn=true aims at"):
        losses_of(step, target_gmacs=1.0)


def test_the_classification_loss_holds_on_to_patches_it_needs() -> None:
    """Its gradient reaches the amounts through masks and through merged tokens, in all blocks but the last."""
    model, _ = learning(shares=SHARES)
    logits = model(tiny.images())
    torch.nn.functional.cross_entropy(logits, torch.tensor([1, 2])).backward()
    for block in model.blocks[:-1]:
        for module in (block.reducer.prune, block.reducer.merge):
            assert module.logits.grad is not None
    model, _ = learning()
    torch.nn.functional.cross_entropy(model(tiny.images()), torch.tensor([1, 2])).backward()
    assert all(block.reducer.prune.logits.grad.abs().sum() > 0 for block in model.blocks[:-1])
    assert all(block.reducer.merge.logits.grad.abs().sum() > 0 for block in model.blocks[:-1])


def test_learning_keeps_the_contract(tmp_path: Any) -> None:
    model, reduction = learning(shares=SHARES)
    images = tiny.images()
    with torch.no_grad():
        expected = model(images)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(images).isfinite().all()
    reduction.save(tmp_path / "saved")
    twin = tiny.HOSTS["vit"]()
    loaded = vitrim.Reduction.load(twin, tmp_path / "saved")
    assert torch.equal(twin(images), expected)
    assert learned(loaded) == learned(reduction)
    assert reduction.config.counts(36, 4) == [36] * 4
    model.set_grad_checkpointing(True)
    model(images).sum().backward()
    checkpointed = model.blocks[0].reducer.prune.logits.grad.clone()
    model.zero_grad()
    model.set_grad_checkpointing(False)
    model(images).sum().backward()
    torch.testing.assert_close(model.blocks[0].reducer.prune.logits.grad, checkpointed)
    vitrim.restore_(model)
    assert torch.equal(model(images), tiny.HOSTS["vit"]()(images))
