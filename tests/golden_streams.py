"""Reference vectors of two-stream models: weights by the authors' names, and gradients back under those names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from golden_models import weights

Filter = Callable[[dict[str, Tensor], Any], dict[str, Tensor]]


def published(ref: dict[str, Any]) -> dict[str, Tensor]:
    """The authors' state dict behind a reference file."""
    return {name: torch.from_numpy(value) for name, value in weights.state(ref).items()}


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


def largest_difference(found: Tensor, expected: Any) -> float:
    """The largest absolute difference; shapes must be equal."""
    expected = torch.as_tensor(expected)
    assert found.shape == expected.shape
    return (found.double() - expected.double()).abs().max().item()
