"""DynamicViT against its reference vectors: evaluation, training with recorded noise, losses and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim
from vitrim.core.scoring import masked_softmax
from vitrim.methods.dynamicvit import Predictor
from vitrim.tasks.step import Step
from vitrim.training.objectives import losses as losses_of
from vitrim.training.objectives.dynamicvit import objective

RENAME = {"in_conv": "predictor.in_conv", "out_conv": "predictor.out_conv"}
PREFIX = "score_predictor.{}."
STUDY = {"keep_rate": 0.5, "blocks": (1, 3, 5), "global_epsilon": 1e-6}
CASES = [
    ("pruning/dynamicvit_eval_rho0.7", vitrim.DynamicViT(blocks=(1, 3, 4))),
    ("pruning/dynamicvit_eval_rho0.7_img112", vitrim.DynamicViT(blocks=(1, 3, 4))),
    ("haurum/dyvit_p64_r50", vitrim.DynamicViT(**STUDY)),
    ("haurum/dyvit_p196_r70", vitrim.DynamicViT(global_epsilon=1e-6)),
]


@golden.cases(CASES, "config")
def test_reference(ref: golden.Reference, config: vitrim.MethodConfig) -> None:
    model, reduction = learned.reduced(ref, config, RENAME, PREFIX)
    scores: dict[int, Tensor] = {}
    for block in ref["config"]["args"]["blocks"]:
        model.blocks[block].reducer.predictor.register_forward_hook(
            lambda m, args, out, block=block: scores.__setitem__(block, out[..., 0])
        )
    learned.check_outputs(ref, model, reduction)
    learned.check_kept(ref, reduction)
    for block, score in scores.items():
        ref.check(f"log_keep/{block}", score)
    learned.check_float32(ref, model)


def prepared(ref: golden.Reference, **options: Any) -> tuple[nn.Module, vitrim.Reduction, nn.Module]:
    """Model in training mode with the reference's noise, handle, teacher."""
    model, reduction = learned.reduced(ref, vitrim.DynamicViT(**options, epsilon_from_start=True), RENAME, PREFIX)
    for stage, block in enumerate(ref["config"]["args"]["blocks"]):
        noise = golden.tensor(ref, "gumbel_noise")[stage] if "gumbel_noise" in ref else torch.zeros(())
        model.blocks[block].reducer.noise = lambda like, noise=noise: noise.to(like)
    teacher = golden.vit({**ref, "params": [[n.removeprefix("teacher."), s] for n, s in ref["teacher_params"]]})
    state = golden.weights.state(ref, "teacher_params", "teacher.")
    teacher.load_state_dict({key: torch.from_numpy(value) for key, value in state.items()})
    return model.train(), reduction, teacher


def trained(ref: golden.Reference, **options: Any) -> tuple[nn.Module, vitrim.Reduction, dict[str, Tensor]]:
    """A forward in training mode with the reference's noise, and what `objective` needs of student and teacher.

    Compares both forwards, and that of the student in float32.
    """
    model, reduction, teacher = prepared(ref, **options)
    with torch.no_grad():
        learned.check_float32(ref, model)
    model, reduction, teacher = prepared(ref, **options)
    blocks = [model.blocks[block] for block in ref["config"]["args"]["blocks"]]
    predicted: list[Tensor] = []
    for block in blocks:
        block.reducer.predictor.register_forward_hook(lambda m, args, out: predicted.append(out))
    images = golden.images(ref)
    with torch.no_grad():
        taught = teacher.forward_features(images)
        teacher_logits = teacher.forward_head(taught)
    features = model.forward_features(images)
    logits = model.forward_head(features)
    stride = ref["config"]["feature_stride"]
    ref.check("logits", logits)
    ref.check("teacher_logits", teacher_logits)
    ref.check("features", features[:, 1::stride])
    ref.check("teacher_tokens", taught[:, 1::stride])
    ref.check("decisions", torch.stack(reduction.aux("decision")))
    ref.check("log_keep", torch.stack(predicted)[..., 0])
    ref.check("log_drop", torch.stack(predicted)[..., 1])
    assert reduction.tokens_per_block == [65] * len(reduction.tokens_per_block)  # nothing is removed
    parts = {
        "logits": logits,
        "features": features[:, 1:],
        "teacher_logits": teacher_logits,
        "teacher_features": taught[:, 1:],
    }
    return model, reduction, parts


def asymmetric(logits: Tensor, targets: Tensor) -> Tensor:
    """The study's loss for several labels: gamma 0 and 4, clip 0.05, summed."""
    p = logits.sigmoid()
    q = (1 - p + 0.05).clamp(max=1)
    likelihood = targets * p.clamp(min=1e-8).log() + (1 - targets) * q.clamp(min=1e-8).log()
    certainty = p * targets + q * (1 - targets)
    return -(likelihood * (1 - certainty) ** (4 * (1 - targets))).sum()


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return -(targets * logits.log_softmax(-1)).sum(-1).mean()


@golden.cases(["haurum/dyvit_train_p64_r50"])
def test_losses_and_gradients_of_the_study(ref: golden.Reference) -> None:
    model, reduction, parts = trained(ref, **STUDY)
    soft, hard, multi = (golden.tensor(ref, f"target_{kind}") for kind in ("soft", "hard", "multi"))
    criteria = {
        "soft": (soft_cross_entropy, soft.double()),
        "smooth": (nn.CrossEntropyLoss(label_smoothing=0.1), hard.long()),
        "asl": (asymmetric, multi.double()),
    }
    alone = {name: part for name, part in parts.items() if name != "teacher_features"}
    assert set(objective(reduction, targets=hard.long(), **alone)) == {"total", "base", "ratio", "class"}
    for kind, (criterion, targets) in criteria.items():
        for token_loss in ("mse", "kl"):
            losses = objective(reduction, targets=targets, criterion=criterion, token_loss=token_loss, **parts)
            expected = {"base": "base", "ratio": "ratio", "class": "class_kl", "token": f"token_{token_loss}"}
            for own, key in expected.items():
                ref.check(f"loss/{kind}/{key}", losses[own])
            if token_loss == "mse":
                ref.check(f"loss/{kind}/total", losses["total"])
    objective(reduction, targets=soft.double(), criterion=soft_cross_entropy, **parts)["total"].backward()
    learned.check_gradients(ref, model, renamed((1, 3, 5)))


@golden.cases(["pruning/dynamicvit_train_nogumbel"])
def test_losses_and_gradients_of_the_release(ref: golden.Reference) -> None:
    """Its hard argmax has no gradient of its own; the straight-through gradient is that of the soft decision."""
    model, reduction, parts = trained(ref, keep_rate=0.7, blocks=(1, 3, 4))
    targets = torch.tensor(ref["config"]["targets"])
    for token_loss in ("kl", "mse"):
        losses = objective(reduction, targets=targets, token_loss=token_loss, **parts)
        # the release reports the sum of the stages
        found = torch.stack([losses["base"], losses["ratio"] * 3, losses["class"], losses["token"]])
        ref.check(f"loss/parts_{token_loss}", found)
        ref.check(f"loss/total_{token_loss}", losses["total"])
    losses["total"].backward()
    learned.check_gradients(ref, model, renamed((1, 3, 4)))


def test_a_step_has_the_losses_and_gradients_of_the_study() -> None:
    ref = golden.load("haurum/dyvit_train_p64_r50")
    model, reduction, teacher = prepared(ref, **STUDY)
    targets = golden.tensor(ref, "target_soft").double()
    step = Step(model, reduction, golden.images(ref), targets, soft_cross_entropy, teacher)
    losses = losses_of(step)
    expected = {"base": "base", "ratio": "ratio", "class": "class_kl", "token": "token_mse", "total": "total"}
    assert set(losses) == set(expected)
    for own, key in expected.items():
        ref.check(f"loss/soft/{key}", losses[own])
    losses["total"].backward()
    learned.check_gradients(ref, model, renamed((1, 3, 5)))
    assert all(parameter.grad is None for parameter in teacher.parameters())
    other = losses_of(step, token_loss="kl", weights=[1, 0, 0, 3])
    ref.check("loss/soft/token_kl", other["token"])
    torch.testing.assert_close(other["total"], other["base"] + 3 * other["token"])


def test_a_step_without_a_teacher_has_two_terms_on_every_host() -> None:
    for host in ("vit", "hf_vit"):
        model = tiny.HOSTS[host]().train()
        reduction = vitrim.reduce_(model, vitrim.DynamicViT())
        step = Step(model, reduction, tiny.images(), torch.tensor([1, 2]), nn.functional.cross_entropy)
        losses = losses_of(step, weights=(1.0, 7.0, 0.0, 0.0))
        assert set(losses) == {"base", "ratio", "total"}
        torch.testing.assert_close(losses["total"], losses["base"] + 7 * losses["ratio"])
        losses["total"].backward()
        predictors = [p for name, p in model.named_parameters() if ".predictor." in name]
        assert predictors
        assert all(p.grad is not None and p.grad.isfinite().all() for p in predictors)


def test_prefix_tokens_are_not_compared() -> None:
    model = tiny.HOSTS["registers"]()
    teacher = copy.deepcopy(model).eval()
    reduction = vitrim.reduce_(model.train(), vitrim.DynamicViT())
    with torch.no_grad():
        model.cls_token += 100.0  # far from the teacher's; blocks that hand tokens through keep it in the prefix
        for block in model.blocks:
            block.attn.proj.weight.zero_()
        for block in teacher.blocks:
            block.attn.proj.weight.zero_()
    step = Step(model, reduction, tiny.images(), torch.tensor([1, 2]), nn.functional.cross_entropy, teacher)
    assert losses_of(step)["token"].item() == 0.0


def test_options_that_are_refused() -> None:
    model = tiny.HOSTS["vit"]()
    teacher = copy.deepcopy(model)
    reduction = vitrim.reduce_(model.train(), vitrim.DynamicViT())
    step = Step(model, reduction, tiny.images(), torch.tensor([1, 2]), nn.functional.cross_entropy, teacher)
    with pytest.raises(vitrim.VitrimError, match=r"weights=.*: must have at least 4 entries, not 3"):
        losses_of(step, weights=(1, 2, 3))
    with pytest.raises(vitrim.VitrimError, match="token_loss=l1: must be 'mse' or 'kl'"):
        losses_of(step, token_loss="l1")
    smaller = Step(model, reduction, tiny.images(), step.targets, step.criterion, tiny.vit(embed_dim=16)())
    with pytest.raises(vitrim.VitrimError, match="teacher must be the same model"):
        losses_of(smaller)


def renamed(blocks: tuple[int, ...]) -> dict[str, str]:
    return {f"score_predictor.{stage}.": f"blocks.{block}.reducer.predictor." for stage, block in enumerate(blocks)}


def test_masked_softmax_leaves_out_dropped_tokens_but_not_a_token_itself() -> None:
    logits = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    policy = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.float64)
    found = masked_softmax(logits, policy)
    torch.testing.assert_close(found[1], logits[1].softmax(-1), atol=1e-5, rtol=0)
    allowed = policy[0].bool()[None, :] | torch.eye(5, dtype=torch.bool)
    expected = logits[0].masked_fill(~allowed, -torch.inf).softmax(-1)
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=0)


def test_a_dropped_patch_stays_dropped_and_all_dropped_gives_no_nan() -> None:
    model = tiny.HOSTS["vit"]().train()
    reduction = vitrim.reduce_(model, vitrim.DynamicViT(keep_rate=0.5))
    with torch.no_grad():
        model.blocks[2].reducer.predictor.out_conv[4].bias.copy_(torch.tensor([-50.0, 50.0]))
    out = model(tiny.images())
    first, second, third = reduction.aux("decision")
    assert 0 < first.mean() < 1
    assert (second == 0).all()
    assert (third == 0).all()
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_training_draws_anew_and_evaluation_does_not() -> None:
    model = tiny.HOSTS["vit"]().train()
    reduction = vitrim.reduce_(model, vitrim.DynamicViT())
    draws = []
    for _ in range(2):
        model(tiny.images())
        draws.append(reduction.aux("decision")[0].detach())
    assert not torch.equal(*draws)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(tiny.images()), model(tiny.images()))
    with pytest.raises(vitrim.VitrimError, match="no auxiliary output 'decision'"):
        reduction.aux("decision")


def test_targets_follow_the_rule() -> None:
    assert vitrim.DynamicViT(keep_rate=0.5).targets(3) == [0.5, 0.25, 0.125]
    assert vitrim.DynamicViT(keep_rate=0.5, rule="floor_initial").targets(3) == [0.5, 0.5, 0.5]


class Adapted(nn.Linear):
    """A layer that does more than its weight says, as an adapter does."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


@pytest.mark.parametrize("change", ["none", "adapter", "hook"])
def test_the_predictor_is_the_network_of_the_paper(change: str) -> None:
    predictor = Predictor(16, global_epsilon=0.5).double()
    if change == "adapter":
        adapted = Adapted(16, 8).double()
        adapted.load_state_dict(predictor.out_conv[0].state_dict())
        predictor.out_conv[0] = adapted
    elif change == "hook":
        predictor.out_conv[0].register_forward_hook(lambda module, args, out: out - 3.0)
    patches, kept = torch.randn(2, 9, 16).double(), torch.ones(2, 9).double()
    kept[1, 4:] = 0.0
    hidden = predictor.in_conv(patches)
    mean = (hidden[..., 8:] * kept[..., None]).sum(1, keepdim=True) / kept.sum(1)[:, None, None] + 0.5
    by_hand = predictor.out_conv(torch.cat([hidden[..., :8], mean.expand(-1, 9, -1)], dim=-1)).log_softmax(-1)
    torch.testing.assert_close(predictor(patches, kept), by_hand)
