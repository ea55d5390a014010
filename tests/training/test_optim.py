"""Groups, learning rates and ramps against the reference vectors, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import golden_models as golden
import tiny
import vitrim
from tiny_training import recipe
from vitrim.core.registry import ask, make_method
from vitrim.errors import VitrimError
from vitrim.training.optim import Rates, make_optimizer, parameter_groups, ramp_value, select_trainable
from vitrim.training.recipe import Ramp

SCHEDULES = ("imagenet_w20_e30_spe10", "nabirds_w5_e50_spe4")


@golden.cases([(golden.Part("training/lr_schedule_a", (name,)), name) for name in SCHEDULES], "name")
def test_learning_rates_match_the_reference(ref: golden.Reference, name: str) -> None:
    """Row t: the rates of both groups after t updates. The file goes on for some updates after the last."""
    args = ref["config"]["args"][name]
    schedule = {"warmup_epochs": args["warmup_epochs"], "warmup_lr": args["warmup_lr"], "min_lr": args["min_lr"]}
    options = recipe(epochs=args["epochs"], schedule=schedule).recipe
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr, "frozen_at_first": False} for lr in args["base_lr"]]
    rates = Rates(torch.optim.AdamW(groups), options, args["steps_per_epoch"])
    found = []
    for update in range(args["epochs"] * args["steps_per_epoch"] + 1):
        rates.set(update)
        found.append([group["lr"] for group in rates.optimizer.param_groups])
    ref.check(name, torch.tensor(found, dtype=torch.float64), lambda stored: stored[: len(found)])


METHODS = {
    "deit": make_method("none"),
    "topk": vitrim.TopK(keep_rate=0.5),
    "dpcknn": vitrim.DPCKNN(keep_rate=0.5),
    "sit": vitrim.SiT(keep_rate=0.5),
}


@golden.cases([("training/parameter_groups_a", name) for name in METHODS], "name")
def test_parameter_groups_match_the_reference(ref: golden.Reference, name: str) -> None:
    """Which parameters are new, which are decayed, and at what rates; ours of the reducers have other names."""
    args, published = ref["config"]["args"], ref["groups"][name]
    assert set(ref["groups"]) == set(METHODS)
    model = golden.vit(golden.load(f"haurum/{name}_p64_r{'100' if name == 'deit' else '50'}"))
    if name != "deit":
        vitrim.reduce_(model, METHODS[name])
    optimizer = {"lr": args["lr"], "weight_decay": args["weight_decay"], "backbone_scale": args["backbone_scale"]}
    options = recipe(optimizer={**optimizer, "freeze_epochs": args["freeze_epochs"]}).recipe
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    found = {
        (group["lr"], group["weight_decay"], group["frozen_at_first"]): [names[id(p)] for p in group["params"]]
        for group in parameter_groups(model, options, args["lr"])
    }

    def described(group: dict[str, Any]) -> tuple[tuple[Any, ...], set[str], int]:
        own = {key for key in group["params"] if not key.startswith("cluster_layers")}
        return (group["lr"], group["weight_decay"], group["freeze_epochs"] > 0), own, len(group["params"]) - len(own)

    ours = []
    for (rate, decay, frozen), parameters in found.items():
        own = {key for key in parameters if ".reducer." not in key}
        ours.append(((rate, decay, frozen), own, len(parameters) - len(own)))
    expected = [described(group) for group in published.values()]
    ref.check("groups", sorted(ours, key=str), lambda _: sorted(expected, key=str))


def test_a_frozen_backbone_has_rate_zero_at_first_and_the_rest_has_not() -> None:
    model = timm.create_model("test_vit", num_classes=3)
    options = recipe(optimizer={"lr": 1e-3, "freeze_epochs": 1, "backbone_scale": 0.1}, schedule={"warmup_epochs": 0})
    rates = Rates(make_optimizer(model, options.recipe), options.recipe, updates_per_epoch=4)
    for update, frozen in ((0, True), (3, True), (4, False)):
        rates.set(update)
        for group in rates.optimizer.param_groups:
            assert (group["lr"] == 0.0) == (frozen and group["frozen_at_first"])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_layer_decay_scales_the_schedule_from_the_top(name: str) -> None:
    """At every update a layer has half the rate of the next one; what the method adds has the head's."""
    model = timm.create_model("test_vit", num_classes=3)
    vitrim.reduce_(model, vitrim.Cropr(r=4))
    schedule = {"warmup_epochs": 1, "warmup_lr": 1e-6, "min_lr": 1e-5}
    options = recipe(optimizer={"name": name, "lr": 1e-3, "layer_decay": 0.5}, schedule=schedule, epochs=3).recipe
    optimizer = make_optimizer(model, options)
    rates = Rates(optimizer, options, updates_per_epoch=4)
    layers = len(model.blocks)
    for update, expected in ((0, 1e-6), (6, None), (12, 1e-5)):
        rates.set(update)
        rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        full = rate[id(model.head.weight)]
        assert expected is None or full == pytest.approx(expected)
        for depth, block in enumerate(model.blocks):
            assert rate[id(block.attn.qkv.weight)] == pytest.approx(full * 0.5 ** (layers - depth))
        assert rate[id(model.patch_embed.proj.weight)] == pytest.approx(full * 0.5 ** (layers + 1))
        reducers = [p for key, p in model.named_parameters() if ".reducer." in key]
        assert reducers
        assert {rate[id(p)] for p in reducers} == {full}
    assert len(rate) == len(list(model.parameters()))
    assert len({group["name"] for group in optimizer.param_groups}) == len(optimizer.param_groups)


@pytest.mark.parametrize("host", tiny.PLAIN)
def test_the_backbone_is_blocks_class_token_and_last_norm(host: str) -> None:
    """Whatever a library calls what is around them; positions are never decayed."""
    if not tiny.is_classifier(host):
        pytest.skip("this one gives features")
    model = tiny.HOSTS[host]()
    vitrim.reduce_(model, "cropr:r=1,first_extra=0")
    options = recipe(optimizer={"lr": 1.0, "weight_decay": 0.5, "backbone_scale": 0.1}).recipe
    groups = {id(p): group for group in parameter_groups(model, options, 1.0) for p in group["params"]}
    inside = {id(p): key for block in tiny.blocks(model) for key, p in block.named_parameters()}
    heads = {id(p) for module in ask(model).classifiers(model) for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        embedding = "embed" in name or "conv_proj" in name or "tokens_to_token" in name
        new = ".reducer." in name or id(parameter) in heads
        new = new or not {"head", "aux_head"}.isdisjoint(name.split("."))  # SigLIP's pool, LV-ViT's second classifier
        new = new or (id(parameter) not in inside and embedding and not name.endswith("_token"))
        assert (groups[id(parameter)]["lr"] == 1.0) == new, name
        if "pos_embed" in name or "position_embedding" in name:
            assert groups[id(parameter)]["weight_decay"] == 0, name


def test_what_the_model_does_not_train_is_not_trained() -> None:
    model = tiny.HOSTS["t2t_vit"]()
    fixed = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert "pos_embed" in fixed
    select_trainable(model, ["*"])
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == fixed


def test_the_learning_rate_follows_the_batch() -> None:
    options = recipe(optimizer={"lr": 1e-3, "lr_batch": 512}, batch_size=128).recipe
    assert {group["lr"] for group in make_optimizer(nn.Linear(3, 2), options).param_groups} == {2.5e-4}


def test_only_what_matches_is_trained() -> None:
    model = timm.create_model("test_vit", num_classes=3)
    vitrim.reduce_(model, vitrim.DynamicViT(keep_rate=0.7))
    select_trainable(model, ["*.reducer.*"])
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".reducer." in name for name in trained)
    optimizer = make_optimizer(model, recipe().recipe)
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"name": "addam"}, "unknown optimizer 'addam'"),
        ({"layer_decay": 0.5}, "needs a model that names its layers"),
    ],
)
def test_what_does_not_fit_is_refused(optimizer: dict[str, Any], message: str) -> None:
    with pytest.raises(VitrimError, match=message):
        make_optimizer(nn.Linear(3, 2), recipe(optimizer=optimizer).recipe)


@given(
    start=st.floats(0, 100),
    stop=st.floats(0, 100),
    begin=st.floats(0, 50),
    length=st.floats(0.1, 50),
    shape=st.sampled_from(["linear", "cosine", "step"]),
    epoch=st.floats(0, 200),
)
def test_a_ramp_stays_between_its_ends(
    start: float, stop: float, begin: float, length: float, shape: str, epoch: float
) -> None:
    end = begin + length
    if end <= begin:
        return
    ramp = Ramp(option="r", start=start, stop=stop, begin_epoch=begin, end_epoch=end, shape=shape)
    assert min(start, stop) - 1e-9 <= ramp_value(ramp, epoch) <= max(start, stop) + 1e-9
    assert ramp_value(ramp, begin) == pytest.approx(start)
    assert ramp_value(ramp, end) == pytest.approx(stop)


def rates_of(epochs: int, per_epoch: int, optimizer: dict[str, Any] | None = None, **schedule: Any) -> list[float]:
    """The rate of the only group at every update of a run of a trunk's matrices."""
    options = recipe(epochs=epochs, optimizer={"lr": 1.0, "lr_batch": None, **(optimizer or {})}, schedule=schedule)
    model = tiny.HOSTS["vit"]()
    select_trainable(model, ["blocks.0.mlp.fc1.weight"])
    rates = Rates(make_optimizer(model, options.recipe), options.recipe, per_epoch)
    found = []
    for update in range(epochs * per_epoch):
        rates.set(update)
        found.append(rates.optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("shift", [False, True])
def test_a_milestone_is_the_first_update_of_its_epoch(shift: bool) -> None:
    found = rates_of(4, 10, shape="steps", milestones=(2, 3), warmup_epochs=1, shift=shift)
    assert found[10:20] == pytest.approx([1.0] * 10)
    assert found[20:30] == pytest.approx([0.1] * 10)
    assert found[30:] == pytest.approx([0.01] * 10)


def test_a_backbone_of_scale_zero_stays_as_it_is() -> None:
    assert rates_of(2, 5, {"backbone_scale": 0.0}, warmup_epochs=1) == [0.0] * 10
    assert rates_of(2, 5, {"backbone_scale": 0.1}, warmup_epochs=1)[5] > 0
