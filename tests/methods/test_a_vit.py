"""A-ViT: reference vectors, real removal of halted tokens, the training loss."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import golden_models as golden
import tiny
import vitrim
from vitrim.methods.a_vit import AViT
from vitrim.tasks.step import Step
from vitrim.training.objectives import losses as losses_of
from vitrim.training.objectives.a_vit import distribution_loss, halting_prior, objective

NAMES = ["pruning/avit_gs1_gc1", "pruning/avit_gs1_gc1_clslong"]
CONFIG = AViT(gate_scale=1.0, gate_center=1.0)


def run(ref: golden.Reference, training: bool, dtype: torch.dtype = torch.float64):
    """Logits and handle; training masks halted tokens, evaluation removes them."""
    model = golden.vit(ref).to(dtype).train(training)  # no dropout in this model
    reduction = vitrim.reduce_(model, CONFIG, record=True)
    with torch.no_grad():
        logits = model(golden.images(ref).to(dtype))
    return logits, reduction


@golden.cases(NAMES)
def test_reference(ref: golden.Reference) -> None:
    for training in (True, False):
        ref.check("logits_f32", run(ref, training, torch.float32)[0])
        logits, reduction = run(ref, training)
        ref.check("logits", logits)
        alive = torch.stack(living(reduction))
        if training:
            ref.check("alive", alive)
            ref.check("tokens_alive_per_block", alive.sum(2))
        else:  # once the class token has halted nothing can change: its patches go too
            ref.check("alive", alive[..., 1:], lambda stored: stored[..., 1:] * stored[..., :1])
            longest = alive[1:, :, 1:].sum(2).amax(1)
            assert [state.num_patches for state in reduction.states[1:6]] == longest.tolist()
    _, reduction = run(ref, training=True)
    ref.check("rho_token", reduction.aux("ponder")[0])
    ref.check("counter_token", reduction.aux("steps")[0])
    halting, alive = torch.stack(reduction.aux("halting")), torch.stack(living(reduction))
    ref.check("halting_prob", halting[alive], lambda stored: stored[alive])  # published of halted tokens, too
    assert (halting[~alive] == 0).all()
    ref.check("distribution_target_12", halting_prior(12, 8))
    # of the first image's neighbours, before any token halts: a later block's counts halted tokens, too
    ref.check("halting_score_layer", reduction.aux("halting")[0][1:].mean(), lambda stored: stored[0])


def living(reduction: vitrim.Reduction) -> list[torch.Tensor]:
    """(B, 65) which of the original tokens enter each block, be the others masked or removed."""
    found = []
    for state in reduction.states[:6]:
        alive = torch.zeros(3, 65, dtype=torch.bool)
        real = torch.ones_like(state.position, dtype=torch.bool) if state.mask is None else state.mask
        for image, row in enumerate(state.position):
            alive[image, row[real[image]]] = True
        found.append(alive)
    return found


@golden.cases(NAMES, arrays=("halting_score_layer", "halting_prob", "alive"))
def test_published_mean_leaves_out_the_first_image(ref: golden.Reference) -> None:
    logits, reduction = run(ref, training=True)
    targets = torch.tensor([1, 2, 3])
    losses = objective(reduction, logits, targets, published_mean=True, target_depth=4)
    stored, alive = golden.tensor(ref, "halting_prob").double(), golden.tensor(ref, "alive").bool()
    expected = (stored * alive)[:, 1:].mean((1, 2))  # the published code without what it has for halted tokens
    torch.testing.assert_close(losses["distribution"], distribution_loss(expected, 4), atol=1e-6, rtol=0)
    halting = reduction.aux("halting")
    ref.check("halting_prob", torch.stack(halting)[alive], lambda stored: stored[alive])
    ref.check("alive", torch.stack(living(reduction)))
    # before any token halts it is the published number itself; later that counts halted tokens, too
    ref.check("halting_score_layer", halting[0][1:].mean(), lambda stored: stored[0])
    own = objective(reduction, logits, targets, target_depth=4)["distribution"]
    assert (own - losses["distribution"]).abs() > 1e-4


def test_published_mean_of_one_image_is_refused() -> None:
    model = tiny.HOSTS["vit"]().train()
    reduction = vitrim.reduce_(model, CONFIG)
    step = Step(model, reduction, tiny.images(1), torch.tensor([1]), cross_entropy)
    with pytest.raises(vitrim.VitrimError, match="leaves out the first image of a batch, so it needs two"):
        losses_of(step, published_mean=True)


def test_distribution_loss_is_the_divergence_per_block() -> None:
    mean = torch.rand(12, dtype=torch.float64)
    share = (mean / mean.sum()).clamp(0.01, 0.99)
    expected = torch.nn.KLDivLoss(reduction="batchmean")(share.log(), halting_prior(12, 8))
    torch.testing.assert_close(distribution_loss(mean, 8), expected.clamp_min(0))
    assert distribution_loss(halting_prior(12, 8), 8) < distribution_loss(halting_prior(12, 8).flip(0), 8)


@pytest.mark.parametrize("host", ["vit", "registers"])
def test_losses_of_a_step(host: str) -> None:
    model = tiny.HOSTS[host]().double().train()
    reduction = vitrim.reduce_(model, CONFIG)
    targets = torch.tensor([1, 2])
    step = Step(model, reduction, tiny.images().double(), targets, lambda *pair: 3 * cross_entropy(*pair))
    losses = losses_of(step, ponder_scale=0.5, distribution_scale=0.25, target_depth=1)
    halting = [h[:, model.num_prefix_tokens :].mean() for h in reduction.aux("halting")]  # of patches alone
    torch.testing.assert_close(losses["distribution"], distribution_loss(torch.stack(halting), 1))
    torch.testing.assert_close(losses["ponder"], reduction.aux("ponder")[0].mean())
    torch.testing.assert_close(losses["classification"], 3 * cross_entropy(model(step.images), targets))
    expected = losses["classification"] + 0.5 * losses["ponder"] + 0.25 * losses["distribution"]
    torch.testing.assert_close(losses["total"], expected)
    published = losses_of(step)
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
        losses_of(step, target_depth=depth)


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
    _, reduction = run(golden.load(NAMES[0]), training=False)
    assert reduction.state.aux == ()
