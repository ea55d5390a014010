"""One batch of training: every method, the models with a loss of their own, distillation, the module around it all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet18

import golden_files
import tiny
import vitrim
import vitrim.models
from vitrim.core.registry import ask, parse_method
from vitrim.errors import VitrimError
from vitrim.tasks.step import Step
from vitrim.training.learner import Objective, distilled
from vitrim.training.recipe import Distil

LEARNED = ("dynamicvit", "mctf:r=4", "cropr", "a_vit", "evo_vit:class_head=true", "diffrate:learn=true", "ia_red2")
"""With a loss of their own."""
CONFIGS = [None, *tiny.configs(), *(parse_method(text) for text in LEARNED if "true" in text)]
OPTIONS: dict[str, dict[str, Any]] = {"diffrate:learn=true": {"target_gmacs": 1e-3}}
"""What a recipe has to give under ``objective``."""
TARGETS = torch.tensor([1, 2, 0, 4])


def describe(config: vitrim.MethodConfig | None) -> str:
    return "dense" if config is None else config.describe()


def objective_of(
    config: vitrim.MethodConfig | str | None,
    model: nn.Module,
    teacher: nn.Module | None = None,
    distil: Distil | None = None,
) -> Objective:
    reduction = None if config is None else vitrim.reduce_(model.train(), config)
    return Objective(
        model.train(),
        F.cross_entropy,
        reduction=reduction,
        teacher=teacher,
        distil=distil,
        options=OPTIONS.get("dense" if reduction is None else reduction.config.describe()),
    )


def update(objective: Objective, targets: Tensor = TARGETS) -> dict[str, Tensor]:
    """One step of SGD; what every loss must be."""
    before = [parameter.detach().clone() for parameter in objective.parameters()]
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
    losses = objective(tiny.images(4), targets)
    assert all(value.shape == () and value.isfinite() for value in losses.values())
    losses["total"].backward()
    optimizer.step()
    assert any(not torch.equal(old, new) for old, new in zip(before, objective.parameters(), strict=True))
    assert all(parameter.isfinite().all() for parameter in objective.parameters())
    return losses


def without_gradient(objective: Objective) -> set[str]:
    return {name for name, parameter in objective.named_parameters() if parameter.grad is None}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", CONFIGS, ids=describe)
def test_one_update_reaches_every_parameter(config: vitrim.MethodConfig | None) -> None:
    model = tiny.HOSTS["vit"]()
    with torch.no_grad():
        chosen = model(tiny.images(4)).argmax(1)  # classes that are often right: where all are wrong IA-RED2 gains none
    objective = objective_of(config, model)
    update(objective, chosen)
    assert without_gradient(objective) == set()
    own = [p for name, p in objective.named_parameters() if ".reducer." in name]
    assert all(parameter.grad.any() for parameter in own if parameter.numel() > 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", LEARNED)
def test_one_update_with_a_teacher(method: str) -> None:
    model = tiny.HOSTS["vit"]()
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    objective = objective_of(method, model, teacher, Distil(alpha=0.3, tau=2.0))
    weights = copy.deepcopy(teacher.state_dict())
    update(objective)
    assert without_gradient(objective) == set()
    assert all(torch.equal(weights[name], value) for name, value in teacher.state_dict().items())
    assert not any("teacher" in name for name, _ in objective.named_parameters())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", [*LEARNED, "tome:r=4", "ats"])
def test_one_update_of_lv_vit(method: str) -> None:
    objective = objective_of(method, tiny.HOSTS["lv_vit"]())
    update(objective)
    assert without_gradient(objective) == set()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("host", ["eva", "torchvision_vit", "hf_vit"])
@pytest.mark.parametrize("method", ["tome:r=4", "cropr", "dynamicvit", "ia_red2"])
def test_one_update_on_every_library(host: str, method: str) -> None:
    objective = objective_of(method, tiny.HOSTS[host]())
    update(objective)
    own = {name for name, _ in objective.named_parameters() if ".reducer." in name}
    assert without_gradient(objective) & own == set()


NO_CLASSES = ("headless", "no_pool")
"""Hosts that give no logits per image."""
TIMM_HOSTS = [
    host
    for family, hosts in tiny.FAMILIES.items()
    for host in hosts
    if family.startswith("timm") and host not in NO_CLASSES
]
LEARNED_CONFIGS = [config for config in CONFIGS if config is not None and not config.traits.training_free]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("host", "config"),
    tiny.matrix(LEARNED_CONFIGS, TIMM_HOSTS, ["vit"], others=["cropr", "dynamicvit"], full=TIMM_HOSTS),
)
def test_one_update_of_what_learns_on_every_timm_variant(host: str, config: vitrim.MethodConfig) -> None:
    model = tiny.HOSTS[host]()
    if getattr(config, "class_head", False) and not tiny.host_of(model).facts(model).has_class_token:
        pytest.skip("refused: a second head needs a class token")
    objective = objective_of(tiny.fits(config, model), model)
    images = tiny.images(4)
    classes = tiny.logits(copy.deepcopy(objective.model).eval()(images)).shape[-1]
    losses = objective(images, TARGETS % classes)
    losses["total"].backward()
    torch.optim.AdamW(objective.parameters(), lr=1e-3).step()
    assert losses["total"].isfinite()
    own = [parameter for name, parameter in objective.named_parameters() if ".reducer." in name]
    assert any(parameter.grad is not None for parameter in own) == bool(own)
    assert all(parameter.isfinite().all() for parameter in objective.parameters())


@pytest.mark.parametrize(("name", "patches"), [("lookupvit_base_3", {"patch_size": 8}), ("vittm_small_28_28", {})])
def test_one_update_of_two_streams(name: str, patches: dict[str, int]) -> None:
    model = timm.create_model(name, img_size=56, embed_dim=32, depth=2, num_heads=2, num_classes=5, **patches)
    objective = Objective(model.train(), F.cross_entropy)
    losses = objective(torch.randn(4, 3, 56, 56), TARGETS)
    assert set(losses) == {"prediction", "auxiliary", "total"}
    losses["total"].backward()
    assert without_gradient(objective) == set()


def test_a_model_without_a_loss_of_its_own_learns_its_task() -> None:
    model = tiny.HOSTS["vit"]().train()
    step = Step(model, None, tiny.images(4), TARGETS, F.cross_entropy)
    losses = step.base_losses()
    assert set(losses) == {"total"}
    assert torch.equal(losses["total"], F.cross_entropy(model(step.images), TARGETS))


def test_a_method_without_a_loss_of_its_own_learns_the_task() -> None:
    model = tiny.HOSTS["vit"]().train()
    reduction = vitrim.reduce_(model, "tome:r=4")
    losses = Objective(model, F.cross_entropy, reduction=reduction)(tiny.images(4), TARGETS)
    assert torch.equal(losses["total"], F.cross_entropy(model(tiny.images(4)), TARGETS))


def test_options_reach_the_method() -> None:
    model = tiny.HOSTS["vit"]().train()
    reduction = vitrim.reduce_(model, "dynamicvit")
    objective = Objective(model, F.cross_entropy, reduction=reduction, options={"weights": [1.0, 0.0, 0.0, 0.0]})
    losses = objective(tiny.images(4), TARGETS)
    torch.testing.assert_close(losses["total"], losses["base"])


def test_the_teacher_is_asked_for_by_name() -> None:
    step = Step(tiny.HOSTS["vit"](), None, tiny.images(), TARGETS[:2], F.cross_entropy)
    with pytest.raises(VitrimError, match="set teacher=dense in the recipe"):
        step.teach()


def test_tokens_and_logits_are_the_two_halves_of_a_forward() -> None:
    model = tiny.HOSTS["registers"]()
    tokens, logits = ask(model).features_and_logits(model, tiny.images())
    assert tokens.shape == (2, 36 + model.num_prefix_tokens, 32)
    assert torch.equal(logits, model(tiny.images()))
    convolutional = resnet18(num_classes=5).eval()
    with pytest.raises(VitrimError, match="compares tokens, and ResNet does not give them"):
        ask(convolutional).features_and_logits(convolutional, tiny.images())


@golden_files.cases(["training/losses_metrics_a"], arrays=("distill/*",))
def test_distillation_is_the_published_one(ref: golden_files.Reference) -> None:
    """Its student has a head for the labels and one for the teacher; ours learns both with one."""
    logits, student, teacher = (
        golden_files.tensor(ref, key).double() for key in ("ce/logits", "distill/kd_logits", "distill/teacher_logits")
    )
    labels = golden_files.tensor(ref, "ce/labels").long()
    for alpha, key in ((0.5, "distill/soft_alpha0.5_tau3"), (0.0, "distill/none_alpha0.5_tau3")):
        criterion = distilled(
            Distil(alpha=alpha, tau=3.0), lambda _, targets: F.cross_entropy(logits, targets), teacher
        )
        ref.check(key, criterion(student, labels))


def test_distillation_by_its_formulas() -> None:
    student, teacher = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    base = F.cross_entropy(student, TARGETS)
    p, q = (teacher / 2).softmax(1), (student / 2).softmax(1)
    soft = 4 * (p * (p.log() - q.log())).sum(1).mean()
    found = distilled(Distil(alpha=0.3, tau=2.0), F.cross_entropy, teacher)(student, TARGETS)
    torch.testing.assert_close(found, 0.7 * base + 0.3 * soft)
    hard = distilled(Distil(kind="hard", alpha=0.3), F.cross_entropy, teacher)(student, TARGETS)
    torch.testing.assert_close(hard, 0.7 * base + 0.3 * F.cross_entropy(student, teacher.argmax(1)))
