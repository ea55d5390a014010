"""Reference vectors of two-stream models: weights by the authors' names, and gradients back under those names."""

from __future__ import annotations

import csv
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import golden_models
from golden_models import published

EXACT = 1e-9
STORED_AS_FLOAT32 = 2e-6

Filter = Callable[[dict[str, Tensor], Any], dict[str, Tensor]]


def load(name: str) -> dict[str, Any]:
    """The reference file ``name``, e.g. ``eq_lin``."""
    return golden_models.load(f"vittm/vittm_{name}")


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


def check_gradients(ref: dict[str, Any], model: nn.Module, rename: Filter) -> dict[str, Tensor]:
    """`published_gradients`, after the norm of each was compared with the stored one."""
    gradients = published_gradients(ref, model, rename)
    assert sorted(gradients) == sorted(ref["train/gradnorm_names"])
    norms = torch.stack([gradients[name].norm() for name in ref["train/gradnorm_names"]])
    assert largest_difference(norms, ref["train/gradnorm"]) < EXACT
    return gradients


def largest_difference(found: Tensor, expected: Any) -> float:
    """The largest absolute difference; shapes must be equal."""
    expected = torch.as_tensor(expected)
    assert found.shape == expected.shape
    return (found.double() - expected.double()).abs().max().item()
