"""What tiny hosts of all families share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from tiny_hosts import Create


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
        return copy.deepcopy(model)

    return made
