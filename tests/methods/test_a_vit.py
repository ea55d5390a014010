"""A-ViT: reference vectors, real removal of halted tokens, the training loss."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import golden_models as golden
import tiny
import vitrim
from vitrim.methods.a_vit import AViT, distribution_loss, halting_prior, objective
from vitrim.training.step import Step

NAMES = ["pruning/avit_gs1_gc1", "pruning/avit_gs1_gc1_clslong"]
CONFIG = AViT(gate_scale=1.0, gate_center=1.0)
every_file = pytest.mark.parametrize("name", NAMES)


def run(name: str, training: bool, dtype: torch.dtype = torch.float64):
    ref = golden.load(name)
    model = golden.vit(ref).to(dtype).train(training)  # no dropout in this model
    reduction = vitrim.reduce_(model, CONFIG, record=True)
    with torch.no_grad():
        logits = model(golden.images(ref).to(dtype))
    return ref, logits, reduction


@every_file
@pytest.mark.parametrize("training", [True, False], ids=["masked", "removed"])
def test_logits(name: str, training: bool) -> None:
    ref, logits, _ = run(name, training)
    torch.testing.assert_close(logits, golden.tensor(ref, "logits"), atol=1e-9, rtol=0)
    ref, logits, _ = run(name, training, torch.float32)
    torch.testing.assert_close(logits, golden.tensor(ref, "logits_f32"), atol=5e-5, rtol=0)


@every_file
def test_accumulators_and_halting_probabilities(name: str) -> None:
    ref, _, reduction = run(name, training=True)
    torch.testing.assert_close(reduction.aux("ponder")[0], golden.tensor(ref, "rho_token"), atol=1e-9, rtol=0)
    assert torch.equal(reduction.aux("steps")[0].long(), golden.tensor(ref, "counter_token").long())
    alive = golden.tensor(ref, "alive").bool()
    masks = [torch.ones_like(alive[0]), *(state.mask for state in reduction.states[1:6])]
    assert torch.equal(torch.stack(masks), alive)
    for found, expected, living in zip(
        reduction.aux("halting"), golden.tensor(ref, "halting_prob"), alive, strict=True
    ):
        torch.testing.assert_close(found[living], expected[living].double(), atol=2e-6, rtol=0)
        assert (found[~living] == 0).all()


@every_file
def test_halted_tokens_are_really_removed(name: str) -> None:
    ref, _, reduction = run(name, training=False)
    alive = golden.tensor(ref, "alive").bool()
    for block, expected in enumerate(alive[1:]):
        state = reduction.states[block + 1]
        longest = 0
        for image, row in enumerate(expected):
            patches = set(row[1:].nonzero().flatten().tolist()) if row[0] else set()
            position = state.position[image] if state.mask is None else state.position[image][state.mask[image]]
            assert {p - 1 for p in position.tolist()} - {-1} == patches
            longest = max(longest, len(patches))
        assert state.num_tokens == 1 + longest


def test_halting_prior_and_the_published_mean() -> None:
    ref = golden.load(NAMES[0])
    prior = golden.tensor(ref, "distribution_target_12")
    torch.testing.assert_close(halting_prior(12, 8).float(), prior, atol=2e-6, rtol=0)
    published = golden.tensor(ref, "halting_prob").double()[:, 1:].mean((1, 2))  # its slip: without image 0
    torch.testing.assert_close(published, golden.tensor(ref, "halting_score_layer"), atol=1e-6, rtol=0)


@every_file
def test_published_mean_leaves_out_the_first_image(name: str) -> None:
    ref, logits, reduction = run(name, training=True)
    targets = torch.tensor([1, 2, 3])
    losses = objective(reduction, logits, targets, published_mean=True, target_depth=4)
    stored, alive = golden.tensor(ref, "halting_prob").double(), golden.tensor(ref, "alive").bool()
    expected = (stored * alive)[:, 1:].mean((1, 2))  # the published code without what it has for halted tokens
    torch.testing.assert_close(losses["distribution"], distribution_loss(expected, 4), atol=1e-6, rtol=0)
    # before any token halts it is the published number itself
    first = reduction.aux("halting")[0][1:].mean()
    torch.testing.assert_close(first, golden.tensor(ref, "halting_score_layer")[0], atol=1e-9, rtol=0)
    own = objective(reduction, logits, targets, target_depth=4)["distribution"]
    assert (own - losses["distribution"]).abs() > 1e-4


def test_published_mean_of_one_image_is_refused() -> None:
    model = tiny.HOSTS["vit"]().train()
    reduction = vitrim.reduce_(model, CONFIG)
    step = Step(model, reduction, tiny.images(1), torch.tensor([1]), cross_entropy)
    with pytest.raises(vitrim.VitrimError, match="leaves out the first image of a batch, so it needs two"):
        CONFIG.losses(step, published_mean=True)


def test_distribution_loss_is_the_divergence_per_block() -> None:
    mean = torch.rand(12, dtype=torch.float64)
    share = (mean / mean.sum()).clamp(0.01, 0.99)
    expected = torch.nn.KLDivLoss(reduction="batchmean")(share.log(), halting_prior(12, 8))
    torch.testing.assert_close(distribution_loss(mean, 8), expected.clamp_min(0))
    assert distribution_loss(halting_prior(12, 8), 8) < distribution_loss(halting_prior(12, 8).flip(0), 8)


def test_objective_trains_the_gate() -> None:
    model = tiny.HOSTS["vit"]().train()
    reduction = vitrim.reduce_(model, CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ponders = []
    for _ in range(8):
        logits = model(tiny.images())
        parts = objective(reduction, logits, torch.tensor([1, 2]), ponder_scale=1.0, distribution_scale=0.1)
        expected = parts["classification"] + parts["ponder"] + 0.1 * parts["distribution"]
        torch.testing.assert_close(parts["total"], expected)
        optimizer.zero_grad()
        parts["total"].backward()
        optimizer.step()
        ponders.append(parts["ponder"].item())
    assert ponders[-1] < ponders[0]


@pytest.mark.parametrize("host", ["vit", "registers"])
def test_losses_of_a_step(host: str) -> None:
    model = tiny.HOSTS[host]().double().train()
    reduction = vitrim.reduce_(model, CONFIG)
    targets = torch.tensor([1, 2])
    step = Step(model, reduction, tiny.images().double(), targets, lambda *pair: 3 * cross_entropy(*pair))
    losses = CONFIG.losses(step, ponder_scale=0.5, distribution_scale=0.25, target_depth=1)
    halting = [h[:, model.num_prefix_tokens :].mean() for h in reduction.aux("halting")]  # of patches alone
    torch.testing.assert_close(losses["distribution"], distribution_loss(torch.stack(halting), 1))
    torch.testing.assert_close(losses["ponder"], reduction.aux("ponder")[0].mean())
    torch.testing.assert_close(losses["classification"], 3 * cross_entropy(model(step.images), targets))
    expected = losses["classification"] + 0.5 * losses["ponder"] + 0.25 * losses["distribution"]
    torch.testing.assert_close(losses["total"], expected)
    published = CONFIG.losses(step)
    expected = published["classification"] + 5e-4 * published["ponder"] + 1e-3 * published["distribution"]
    torch.testing.assert_close(published["total"], expected)
    torch.testing.assert_close(published["distribution"], distribution_loss(torch.stack(halting), 2))
    losses["ponder"].backward()
    assert model.blocks[0].mlp.fc2.bias.grad[0] != 0  # channel 0 is the gate


@pytest.mark.parametrize("depth", [0, 4, -1])
def test_target_depths_that_are_refused(depth: int) -> None:
    model = tiny.HOSTS["vit"]().train()
    reduction = vitrim.reduce_(model, CONFIG)
    step = Step(model, reduction, tiny.images(), torch.tensor([1, 2]), cross_entropy)
    with pytest.raises(vitrim.VitrimError, match=f"target_depth={depth} must be a block from 1 to 3"):
        CONFIG.losses(step, target_depth=depth)


@pytest.mark.parametrize("host", ["distilled", "registers"])
def test_removal_equals_masking_with_several_prefix_tokens(host: str) -> None:
    model = tiny.HOSTS[host]().double()
    reduction = vitrim.reduce_(model, AViT(gate_scale=2.0, gate_center=0.5), record=True)
    images = tiny.images(4).double()
    with torch.no_grad():
        removed = model(images)
        prefix = reduction.state.mask[:, : model.num_prefix_tokens]
        assert reduction.state.num_tokens < 36
        for block in model.blocks:  # the reducers only: the host's head behaves differently in training
            block.reducer.train()
        masked = model(images)
    assert not prefix.all()  # some prefix token has halted before the last block
    torch.testing.assert_close(removed, masked, atol=1e-12, rtol=0)


def test_auxiliary_outputs_only_in_training() -> None:
    _, _, reduction = run(NAMES[0], training=False)
    assert reduction.state.aux == ()
    with pytest.raises(vitrim.VitrimError, match="last_block=full"):
        vitrim.reduce_(tiny.HOSTS["vit"](), AViT(last_block="class_token"))
