"""What libraries answer, and that nobody else need know: a made-up model whose parts are called as in no library."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision.models import resnet18
from transformers import DeiTConfig, DeiTForImageClassificationWithTeacher, ResNetConfig, ResNetForImageClassification

import tiny
from tiny_training import recipe
from vitrim.core import registry
from vitrim.core.host import Host
from vitrim.core.library import Library
from vitrim.core.plan import Layout, Role
from vitrim.core.registry import ask, host_of
from vitrim.data.transforms import geometry_of
from vitrim.errors import VitrimError
from vitrim.tasks import make_task
from vitrim.training.optim import make_optimizer, parameter_groups

CLASSIFIERS = [name for name in tiny.PLAIN if tiny.is_classifier(name)]


class Odd(nn.Module):
    """A small network with a stem, positions, three layers, a last norm and a head, all with unusual names."""

    def __init__(self) -> None:
        super().__init__()
        self.verdict = nn.Linear(8, 3)  # in front of the layers, although it comes last
        self.whereabouts = nn.Parameter(torch.zeros(1, 5, 8))
        self.summary = nn.Parameter(torch.zeros(1, 1, 8))
        self.slicer = nn.Conv2d(3, 8, 4, stride=4)
        self.floors = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.finish = nn.LayerNorm(8)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.slicer(images).flatten(2).mT
        x = torch.cat((self.summary.expand(len(images), -1, -1), patches), dim=1) + self.whereabouts
        for floor in self.floors:
            x = x + floor(x)
        return self.verdict(self.finish(x)[:, 0])  # type: ignore[no-any-return]


class OddHost(Host):
    """Answers for `Odd`: what a host author writes."""

    name = "odd"

    @classmethod
    def blocks(cls, model: Any) -> list[nn.Module]:
        return list(model.floors)

    @classmethod
    def patch_maker(cls, model: Any) -> nn.Module | None:
        return model.slicer  # type: ignore[no-any-return]


class OddLibrary(Library):
    """Answers for `Odd`: what one writes whose model follows no convention."""

    parts: ClassVar = {"tokens": ("summary",), "positions": ("whereabouts",)}

    def classifiers(self, model: Any) -> list[nn.Module]:
        return [model.verdict]


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(registry._HOSTS, "entries", dict(registry._HOSTS.entries))
    monkeypatch.setattr(registry._LIBRARIES, "entries", dict(registry._LIBRARIES.entries))
    registry.register_host(f"{Odd.__module__}.{Odd.__qualname__}")(OddHost)
    registry.register_library(f"{Odd.__module__}.{Odd.__qualname__}")(OddLibrary)
    return Odd()


def rates(model: nn.Module, key: str = "lr", **optimizer: Any) -> dict[str, float]:
    """Of every parameter, by name."""
    groups = make_optimizer(model, recipe(optimizer={"lr": 1.0, "weight_decay": 0.5, **optimizer}).recipe).param_groups
    found = {id(p): group[key] for group in groups for p in group["params"]}
    return {name: found[id(p)] for name, p in model.named_parameters()}


NEW = {"verdict.weight", "verdict.bias", "whereabouts", "slicer.weight", "slicer.bias"}


def test_a_host_with_unusual_names_trains_at_the_right_rates(odd: nn.Module) -> None:
    """What is new has the full rate and moves at once; the backbone has its share and is frozen at first."""
    found = rates(odd, backbone_scale=0.25)
    assert found == {name: 1.0 if name in NEW else 0.25 for name in found}
    frozen = rates(odd, "frozen_at_first", freeze_epochs=1)
    assert {name for name, is_frozen in frozen.items() if not is_frozen} == NEW


def test_a_host_with_unusual_names_has_its_positions_and_tokens_not_decayed(odd: nn.Module) -> None:
    matrices = {"verdict.weight", "slicer.weight", *(f"floors.{depth}.weight" for depth in range(3))}
    for options in ({}, {"backbone_scale": 0.25}):
        decays = rates(odd, "weight_decay", **options)
        assert {name for name, decay in decays.items() if decay} == matrices
    assert rates(odd, "weight_decay", layer_decay=0.5)["whereabouts"] == 0


def test_a_host_with_unusual_names_has_layers_of_its_own(odd: nn.Module) -> None:
    """0.5 to the power of the layers above: the head none, the last block and the norm behind it one."""
    found = rates(odd, "lr_scale", layer_decay=0.5)
    above = {"verdict": 0, "finish": 1, "whereabouts": 4, "summary": 4, "slicer": 4}
    for name, scale in found.items():
        first, _, rest = name.partition(".")
        assert scale == 0.5 ** (3 - int(rest[0]) if first == "floors" else above[first]), name


def test_a_name_of_another_library_means_nothing() -> None:
    """MobileViT's convolutions inside of blocks are called as torchvision's stem, and are no stem."""
    with torch.device("meta"):
        model = timm.create_model("mobilevit_xxs")
    found = ask(model).roles(model)
    assert {role.part for name, role in found.items() if "conv_proj" in name} == {"trunk"}


def classifier_of(model: nn.Module) -> set[str]:
    """The names of parameters with a row per class."""
    return {name for name, p in model.named_parameters() if p.shape[0] == 7}


@pytest.mark.parametrize(
    "create",
    [
        lambda: timm.create_model("inception_resnet_v2", num_classes=7),
        lambda: timm.create_model("efficientvim_m1", num_classes=7),
        lambda: resnet18(num_classes=7),
        lambda: ResNetForImageClassification(ResNetConfig(num_labels=7)),
        lambda: DeiTForImageClassificationWithTeacher(DeiTConfig(num_hidden_layers=1, num_labels=7)),
    ],
    ids=["timm", "timm several", "torchvision", "transformers", "transformers several"],
)
def test_the_head_of_any_model_of_a_library_is_new(create: Any) -> None:
    """Whatever it is called: also of models that cannot be reduced."""
    with torch.device("meta"):
        model = create()
    heads = classifier_of(model)
    assert heads
    options = recipe(optimizer={"lr": 1.0, "backbone_scale": 0.1}).recipe
    groups = {id(p): group["lr"] for group in parameter_groups(model, options, 1.0) for p in group["params"]}
    named = dict(model.named_parameters())
    assert {groups[id(named[name])] for name in heads} == {1.0}
    assert 0.1 in groups.values()


@pytest.mark.parametrize("name", list(tiny.HOSTS))
def test_every_parameter_of_every_host_has_a_role(name: str) -> None:
    model = tiny.HOSTS[name]()
    roles = ask(model).roles(model)
    assert roles.keys() == dict(model.named_parameters()).keys()
    depth = len(ask(model).trunk_layers(model))
    inside = {id(p): index for index, block in enumerate(host_of(model).blocks(model), 1) for p in block.parameters()}
    for key, parameter in model.named_parameters():
        assert roles[key].layer == inside[id(parameter)] if id(parameter) in inside else roles[key].part != "method"
        assert roles[key].layer in range(depth + 2)
    found = {role.part for role in roles.values()}
    assert {"stem", "trunk"} <= found
    assert "head" in found or not tiny.is_classifier(name)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_head_is_replaced_and_nothing_else(name: str) -> None:
    model = tiny.HOSTS[name]()
    before = copy.deepcopy(model.state_dict())
    library = ask(model)
    assert library.num_classes(model) == tiny.GEOMETRY["num_classes"]
    make_task("classification", tiny.GEOMETRY["num_classes"]).fit_head(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    make_task("classification", 7).fit_head(model)
    assert (library.num_classes(model), host_of(model).facts(model).num_classes) == (7, 7)
    output = model(tiny.images())
    assert library.logits(output).shape == (2, 7)
    heads = {key for key, role in library.roles(model).items() if role.part == "head"}
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in after.items() if key not in heads)
    where = library.class_layers(model)
    assert all(f"{layer}.weight" in after for layer in where)


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_images_are_what_the_host_says(name: str) -> None:
    model = tiny.HOSTS[name]()
    told = ask(model).preprocessing(model)
    assert told.channels == 3
    if told.size is not None and not hasattr(model, "dynamic_feat_size"):
        assert geometry_of(model).size == told.size
    channels, height, width = ask(model).input_size(model) or (0, 0, 0)
    assert (channels, height, width) == host_of(model).facts(model).input_size


def test_a_model_of_no_library_is_answered_for() -> None:
    """Nothing is known of it but what it says in timm's way."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    library = ask(model)
    assert set(library.roles(model).values()) == {Role("trunk")}
    assert (library.preprocessing(model).channels, library.preprocessing(model).size) == (1, None)
    assert library.logits({"logits": torch.ones(1)}) == library.logits(torch.ones(1))
    for refused in (
        lambda: library.reset_head(model, 3),
        lambda: library.checkpoint_gradients(model),
        lambda: library.features_and_logits(model, torch.zeros(1, 1, 4, 4)),
        lambda: geometry_of(model),
    ):
        with pytest.raises(VitrimError, match="Sequential"):
            refused()


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_gradients_are_checkpointed_or_refused(name: str) -> None:
    model = tiny.HOSTS[name]()
    library = ask(model)
    if name.startswith("torchvision") or name in tiny.OWN_HEAD:
        with pytest.raises(VitrimError, match="cannot checkpoint gradients"):
            library.checkpoint_gradients(model)
        return
    for on in (True, False):
        library.checkpoint_gradients(model, on)
        switches = [vars(m)[key] for m in model.modules() for key in vars(m) if key.endswith("checkpointing")]
        assert on in switches


@pytest.mark.parametrize(
    ("maker", "expected"),
    [
        (nn.Conv2d(3, 8, 7, stride=4, padding=3), (4, 4)),  # patches overlap
        (nn.Conv2d(3, 8, (8, 4), stride=(8, 4)), (8, 4)),
        (nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)), (4, 4)),
        (None, (4, 4)),
    ],
)
def test_patches_are_as_far_apart_as_the_stride_of_one_convolution_or_else_as_the_grid_has_it(
    maker: nn.Module | None, expected: tuple[int, int]
) -> None:
    rows = 32 // expected[0]

    class Made(Host):
        @classmethod
        def facts(cls, model: Any) -> Any:
            return SimpleNamespace(dim=8, num_prefix=1, grid_size=(rows, 8), input_size=(3, 35, 34))

        @classmethod
        def patch_maker(cls, model: Any) -> nn.Module | None:
            return maker

    assert Library(Made).layout(nn.Identity()) == Layout(8, 1, expected)
