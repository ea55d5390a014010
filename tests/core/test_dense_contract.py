"""The contract of `test_contract.py` for whole dense models: methods on `segmenter:` and `vitdet:` of the tiny hosts.

A detector's heads choose boxes by their values, so what is traced and differentiated is what is in front of them.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tiny
import vitrim
from dense_models import detector, headless, segmenter
from full_matrix import cells
from vitrim.core.registry import ask, make_method, methods
from vitrim.measure.timing import Front

Create = Callable[[str], nn.Module]
KINDS: dict[str, Create] = {"segmenter": segmenter, "vitdet": detector}
CONFIGS = {config.describe(): config for config in tiny.static_configs() if config.kind != "soft"}
"""Soft tokens belong to no place: refused on a head that reads every patch."""
TOPK = next(text for text in CONFIGS if text.partition(":")[0] == "topk")
SHORT = [
    *(f"segmenter-vit-{text}" for text in (TOPK, "tome:r=4", "evit:keep_rate=0.6", "cropr", "mctf:r=4")),
    *(f"segmenter-{host}-tome:r=4" for host in tiny.LIBRARIES),
    *(f"vitdet-vit-{text}" for text in ("tome:r=4", TOPK)),
]
"""Merged patches, pruned ones that come back, a fused token beside them, a bank of the method's own, fresh values; and
every library."""
DIAGONAL = [
    (kind, host, text)
    for kind, hosts in (("segmenter", tiny.BACKBONES), ("vitdet", tiny.LIBRARIES))
    for host, text in tiny.diagonal(hosts, list(CONFIGS))
]
"""A detector's pyramid reads what a segmenter's head reads: on one host of each library."""
TABLE = ((kind, host, text) for kind in KINDS for host in tiny.BACKBONES for text in CONFIGS)
every_cell = pytest.mark.parametrize(
    "cell", cells(["-".join(cell) for cell in TABLE if "-".join(cell) in SHORT or cell in DIAGONAL], SHORT)
)
traced_cell = pytest.mark.parametrize(
    "cell", [f"segmenter-{host}-{text}" for host, text in tiny.diagonal(tiny.LIBRARIES, list(CONFIGS))]
)


def reduced(cell: str) -> nn.Module:
    kind, host, method = cell.split("-", 2)
    model = KINDS[kind](host)
    vitrim.reduce_(model, tiny.fits(CONFIGS[method], model))
    return model


def front(model: nn.Module, images: Tensor) -> Tensor:
    """Logits of a segmenter, the maps of a detector's pyramid in one row."""
    torch.manual_seed(5)
    found: Any = model(images)
    return found if isinstance(found, Tensor) else torch.cat([one.flatten(1) for one in tree_leaves(found)], dim=1)


def part(model: nn.Module) -> nn.Module:
    return model if "segmentation" in ask(model).tasks(model) else Front(model)


def everything(model: nn.Module, images: Tensor) -> list[Tensor]:
    torch.manual_seed(5)
    with torch.no_grad():
        return tree_leaves(model(images))


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def few(kind: Any) -> list[Any]:
    """The values of an option that has a few, none of another."""
    if kind is bool:
        return [True, False]
    parts = get_args(kind)
    return [*parts] if get_origin(kind) is Literal else [value for part in parts for value in few(part)]


def refusal(model: nn.Module, name: str, options: dict[str, Any]) -> str:
    """The reason these options do not go together, or not with the ``model``; nothing if it is reduced."""
    try:
        vitrim.reduce_(model, make_method(name, **options))
    except vitrim.VitrimError as error:
        return str(error)
    return ""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", methods())
def test_whatever_the_options_every_patch_has_a_value_or_the_model_is_refused(name: str) -> None:
    """One option at a time has each of its values, besides those that make the method act."""
    model = segmenter("vit")
    shape = front(model, tiny.images()).shape
    settings = tiny.SETTINGS.get(name, [{}])
    fields = methods()[name].model_fields
    varied = [{**settings[0], option: value} for option in fields for value in few(fields[option].annotation)]
    for options in (*settings, *varied):
        refused = refusal(model, name, options)
        if not refused:
            found = front(model, tiny.images())
            assert found.shape == shape, options
            assert found.isfinite().all(), options
            vitrim.restore_(model)


@pytest.mark.sampled(4)
@every_cell
def test_copies_are_independent_and_restoring_gives_the_dense_model_back(cell: str) -> None:
    kind, host, _ = cell.split("-", 2)
    images, dense = tiny.images(), KINDS[kind](host)
    model = reduced(cell)
    reduction, expected = vitrim.get_reduction(model), everything(model, images)
    copies = {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "ema": ModelEmaV3(model, decay=0.5).module,
    }
    for name, twin in copies.items():
        assert equal(everything(twin, images), expected), name
        assert vitrim.get_reduction(twin).state is not reduction.state, name
        everything(twin, tiny.images(seed=9))
        vitrim.restore_(twin)
        assert equal(everything(model, images), expected), name
    vitrim.restore_(model)
    assert list(model.state_dict()) == list(dense.state_dict())
    assert equal(everything(model, images), everything(dense, images))


@pytest.mark.sampled(4)
@every_cell
def test_gradient_checkpointing_equals_plain(cell: str) -> None:
    model = reduced(cell).double().train()
    given = tiny.images().double()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        front(part(model), given).square().sum().backward()
        return [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in model.parameters()]

    plain = gradients()
    tiny.checkpoints(model.backbone)  # skips a host that has none
    ask(model).checkpoint_gradients(model)
    for one, other in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.slow  # `test_contract.py` compiles the blocks
@traced_cell
def test_compile_fullgraph(cell: str) -> None:
    model = part(reduced(cell))
    torch.compiler.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        given = tiny.images(3)
        torch.testing.assert_close(front(compiled, given), front(model, given), atol=1e-5, rtol=1e-5)


@pytest.mark.slow  # `test_contract.py` exports the blocks
@traced_cell
def test_export_with_what_was_pruned_back_in_its_place(cell: str) -> None:
    _, host, method = cell.split("-", 2)
    backbone = headless(tiny.traceable(host, CONFIGS[method]))
    model = segmenter(host)
    model.backbone = backbone
    config = tiny.fits(CONFIGS[method], model)
    if config.kind in ("prune", "mixed") and "fusion" not in type(config).model_fields:
        config = config.model_copy(update={"restore": "end"})
    vitrim.reduce_(model, config)
    batch = torch.export.Dim("batch", min=2, max=64)
    with torch.no_grad():
        exported = torch.export.export(model, (tiny.images(3),), dynamic_shapes=({0: batch},), strict=False).module()
        given = tiny.images(5, seed=5)
        torch.testing.assert_close(front(exported, given), front(model, given), atol=1e-5, rtol=1e-5)
