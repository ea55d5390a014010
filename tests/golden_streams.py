"""Reference vectors of two-stream models: weights by the authors' names, and gradients back under those names."""

from __future__ import annotations

import csv
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import golden_models
from golden_models import published

Filter = Callable[[dict[str, Tensor], Any], dict[str, Tensor]]


def table_8() -> dict[str, dict[str, str]]:
    """The rows of ViTTM's Table 8 by the name of the model."""
    with (golden_models.GOLDEN / "tables" / "vittm_table8.csv").open() as file:
        return {row["model"]: row for row in csv.DictReader(file)}


def with_random_heads(model: nn.Module) -> Any:
    """Classifiers start at zero, which would hide any mistake before them."""
    for head in (model.head, model.auxiliary_head):
        nn.init.normal_(head.weight)
    return model


def loaded(ref: dict[str, Any], model: nn.Module, rename: Filter) -> Any:
    """``model`` with those weights under its own names; none may be missing or left over. float64, eval mode."""
    model.load_state_dict(rename(published(ref), model), strict=True)
    return model.double().eval()


def published_gradients(ref: dict[str, Any], model: nn.Module, rename: Filter) -> dict[str, Tensor]:
    """Gradients of ``model`` under the authors' names, of those that are used.

    Every entry of the authors' parameters gets a number, and the numbers go through the same renaming as the weights.
    """
    numbers: dict[str, Tensor] = {}
    total = 0
    for name, shape in ref["params"]:
        size = int(torch.tensor(shape).prod())
        numbers[name] = torch.arange(total, total + size, dtype=torch.float64).reshape(shape)
        total += size
    flat = torch.full((total,), float("nan"), dtype=torch.float64)
    places = rename(numbers, model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        flat[places[name].long()] = parameter.grad
    gradients = {name: flat[number.long()] for name, number in numbers.items()}
    return {name: gradient for name, gradient in gradients.items() if not gradient.isnan().any()}


def check_gradients(ref: golden_models.Reference, model: nn.Module, rename: Filter) -> None:
    """Norms of all gradients, the stored ones, and which parameters of the authors have none."""
    gradients = published_gradients(ref, model, rename)
    names = ref["train/gradnorm_names"]
    assert sorted(gradients) == sorted(names)
    ref.check("train/gradnorm", torch.stack([gradients[name].norm() for name in names]))
    for key in ref:
        if key.startswith("train/grad/"):
            ref.check(key, gradients[key.removeprefix("train/grad/")])
    ref.check("train/params_without_grad", [name for name, _ in ref["params"] if name not in gradients])
