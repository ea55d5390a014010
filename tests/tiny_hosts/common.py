"""What tiny hosts of all families share."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from tiny_hosts import Create

Model = TypeVar("Model", bound=nn.Module)


def seeded(create: Callable[[], nn.Module]) -> Create:
    """``create`` with weights that are the same every time and make every decision and every logit distinct.

    A library's own initialisation gives nearly equal tokens. It takes longer than a copy, and so it is done once.
    """

    @cache
    def first() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(1)
        with torch.device("cpu"):  # a test may be within another one
            model = create().eval()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return model, torch.get_rng_state()

    def made() -> nn.Module:
        model, drawn = first()
        torch.set_rng_state(drawn)  # tests draw on as if it had been made for each
        return copied(model)

    return made


CONSTANT = frozenset({bool, int, float, str, type(None)})
EMPTIED = frozenset({dict, OrderedDict, set})


def copied(model: Model) -> Model:
    """`copy.deepcopy` of a model, in a third of the time: it copies a dozen empty dictionaries per layer."""
    memo: dict[int, Any] = {}

    def one(module: nn.Module | None) -> nn.Module | None:
        if module is None or id(module) in memo:
            return memo.get(id(module))
        twin: nn.Module = type(module).__new__(type(module))
        memo[id(module)] = twin
        state = {}
        for name, value in vars(module).items():
            kind = type(value)
            if kind in CONSTANT:
                state[name] = value
            elif kind in EMPTIED and not value:
                state[name] = kind()
            elif name == "_modules":
                state[name] = {key: one(child) for key, child in value.items()}
            else:
                state[name] = copy.deepcopy(value, memo)
        twin.__setstate__(state)
        return twin

    return cast("Model", one(model))
