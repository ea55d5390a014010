"""IA-RED2: no code was published, so the formulas of the paper are checked by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
import vitrim
from vitrim.methods.ia_red2 import Interpreter
from vitrim.tasks.step import Step
from vitrim.training.objectives import losses as losses_of
from vitrim.training.objectives.ia_red2 import objective, reward


def prepared(host: str = "vit", **options: Any) -> tuple[torch.nn.Module, vitrim.Reduction]:
    model = tiny.HOSTS[host]()
    torch.manual_seed(4)
    return model, vitrim.reduce_(model, vitrim.IARED2(**options), record=True)


def test_score_is_the_mean_of_the_heads() -> None:
    torch.manual_seed(0)
    interpreter = Interpreter(12, 3).double()
    torch.nn.init.normal_(interpreter.bias)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    q, k = interpreter.query(x).view(2, 7, 3, 4), interpreter.key(interpreter.policy).view(3, 4)
    expected = torch.sigmoid((q * k).sum(-1) / 2 + interpreter.bias).mean(-1)
    torch.testing.assert_close(interpreter(x), expected)


def test_evaluation_drops_what_scores_below_the_threshold_for_good() -> None:
    model, reduction = prepared()
    seen = []
    for depth in reduction.config.stages(4):
        model.blocks[depth].reducer.interpreter.register_forward_hook(lambda m, args, out: seen.append(out))
    with torch.no_grad():
        model(tiny.images())
    assert reduction.config.stages(4) == (0, 1, 2)
    before = reduction.states[0]
    for stage, (score, after) in enumerate(zip(seen, reduction.states[1:4], strict=True)):
        for image in range(2):
            real = torch.ones_like(before.size[image], dtype=torch.bool) if before.mask is None else before.mask[image]
            stays = before.position[image][1:][(score[image] >= 0.5) & real[1:]]
            kept = after.position[image] if after.mask is None else after.position[image][after.mask[image]]
            assert torch.equal(kept[1:], stays)
            assert reduction.aux("kept")[stage][image].item() == pytest.approx(len(stays) / 36)
        before = after
    assert 0 < reduction.aux("kept")[-1].max() < 1
    assert (reduction.aux("kept")[0] != reduction.aux("kept")[-1]).all()


def test_one_patch_is_always_left() -> None:
    model, reduction = prepared(threshold=1.0)
    with torch.no_grad():
        logits = model(tiny.images())
    assert reduction.state.num_patches == 1
    assert logits.isfinite().all()
    reduction.set(threshold=0.0)
    with torch.no_grad():
        model(tiny.images())
    assert reduction.state.num_patches == 36


def test_masks_in_training_equal_removal_in_evaluation() -> None:
    """Stage 2 is trained, so stages 0 and 1 decide as in evaluation; its own draws are made certain."""
    model, reduction = prepared(stage=2)
    model.double()
    images = tiny.images(4).double()
    interpreter = model.blocks[2].reducer.interpreter
    with torch.no_grad():
        interpreter.bias.fill_(60.0)
        removed = model(images)
        counts = reduction.aux("kept")
        masked = model.train()(images)
    torch.testing.assert_close(removed, masked, atol=1e-12, rtol=0)
    assert all(torch.equal(a, b) for a, b in zip(counts, reduction.aux("kept"), strict=True))
    assert len(reduction.aux("log_probability")) == 1
    assert counts[0].max() < 1


def test_curriculum() -> None:
    model, reduction = prepared(stage=0)
    model.train()(tiny.images())
    assert len(reduction.aux("kept")) == len(reduction.aux("log_probability")) == 1
    reduction.set(stage=1)
    model(tiny.images())
    assert (len(reduction.aux("kept")), len(reduction.aux("log_probability"))) == (2, 1)
    model(tiny.images())[0, 0].backward()
    reduction.set(stage=None)
    model(tiny.images())
    assert len(reduction.aux("log_probability")) == 3
    with pytest.raises(vitrim.VitrimError, match="groups are 0 to 2"):
        reduction.set(stage=3)
    assert reduction.config.stage is None


def test_draws_and_their_probability() -> None:
    model, reduction = prepared(stage=1, blocks=(0, 2))
    scores = []
    model.blocks[2].reducer.interpreter.register_forward_hook(lambda m, args, out: scores.append(out))
    torch.manual_seed(3)
    model.train()(tiny.images())
    alive, drawn = reduction.states[1].mask[:, 1:], reduction.states[3].mask[:, 1:]
    assert not (drawn & ~alive).any()  # who is gone stays gone, and does not draw
    chance = torch.where(drawn, scores[0], 1 - scores[0]).masked_fill(~alive, 1.0)
    torch.testing.assert_close(reduction.aux("log_probability")[0], chance.log().sum(1))
    torch.testing.assert_close(reduction.aux("kept")[1], drawn.sum(1) / 36)


def test_reward() -> None:
    logits = torch.eye(3)
    kept = [torch.ones(3), torch.tensor([0.5, 0.0, 0.25])]
    assert reward(logits, torch.tensor([0, 1, 1]), kept, tau=0.3).tolist() == pytest.approx([0.75, 1.0, -0.3])


def test_gradients_are_those_of_reinforce_and_do_not_mix() -> None:
    model, reduction = prepared()
    targets, baseline = torch.tensor([1, 2]), torch.tensor([0.3, -0.4])
    logits = model.train()(tiny.images())
    losses = objective(reduction, logits, targets, baseline=baseline)
    share = reduction.aux("kept")[-1]
    right = logits.argmax(1) == targets
    advantage = [(1 - s**2 if r else -0.5) - b for s, r, b in zip(share, right, baseline, strict=True)]
    own = [p for name, p in model.named_parameters() if ".reducer." in name]
    draws = torch.stack(reduction.aux("log_probability")).sum(0)
    scores = [torch.autograd.grad(draw, own, retain_graph=True) for draw in draws]
    losses["total"].backward()
    for parameter, first, second in zip(own, *scores, strict=True):
        # the classification loss adds nothing
        torch.testing.assert_close(parameter.grad, -(advantage[0] * first + advantage[1] * second) / 2)
    torch.testing.assert_close(losses["base"], torch.nn.functional.cross_entropy(logits, targets))
    assert all(p.grad is not None for p in model.parameters())


def step_of(targets: torch.Tensor, **options: Any) -> Step:
    model, reduction = prepared(**options)
    return Step(model.train(), reduction, tiny.images(), targets, torch.nn.functional.cross_entropy)


def test_losses_of_a_step_have_the_evaluation_of_the_same_images_as_baseline() -> None:
    model, reduction = prepared()
    with torch.no_grad():
        targets = model.eval()(tiny.images()).argmax(1)  # right at least there, so that what is saved counts
        step = Step(model.train(), reduction, tiny.images(), targets, torch.nn.functional.cross_entropy)
        baseline = reward(model.eval()(step.images), step.targets, reduction.aux("kept"), tau=0.3)
    torch.manual_seed(7)
    expected = objective(reduction, model.train()(step.images), step.targets, baseline=baseline, tau=0.3)
    torch.manual_seed(7)
    losses = losses_of(step, tau=0.3)
    for term, value in losses.items():
        torch.testing.assert_close(value, expected[term])
    assert losses["policy"].item() != 0
    losses["total"].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_step_leaves_every_module_in_its_mode() -> None:
    step = step_of(torch.tensor([1, 2]))
    step.model.norm.eval()
    modes = [module.training for module in step.model.modules()]
    assert not all(modes)
    losses_of(step)
    assert [module.training for module in step.model.modules()] == modes
    step.model.head.register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        losses_of(step)
    assert [module.training for module in step.model.modules()] == modes


def test_weights_cast_for_the_baseline_still_get_gradients_under_autocast() -> None:
    """Autocast keeps cast weights; older torch kept those of a forward without gradients, too."""
    step = step_of(torch.tensor([1, 2]))
    with torch.autocast("cpu", torch.bfloat16):
        losses = losses_of(step)
    losses["total"].backward()
    missing = [name for name, parameter in step.model.named_parameters() if parameter.grad is None]
    assert missing == []


def test_mixed_labels_have_no_reward() -> None:
    step = step_of(torch.full((2, 5), 0.2))
    with pytest.raises(vitrim.VitrimError, match=r"one class per image: set mix.mixup=0"):
        losses_of(step)


def test_a_refused_change_leaves_the_reducers_as_they_were() -> None:
    reduction = vitrim.reduce_(tiny.HOSTS["vit"](), vitrim.IARED2(blocks=(0, 1, 2)))
    with pytest.raises(vitrim.VitrimError, match="stage=9 does not exist"):
        reduction.set(stage=9, threshold=0.9)
    assert {block.reducer.config.threshold for block in tiny.blocks(reduction.model)[:3]} == {0.5}
