"""What tiny hosts of all families share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tiny_hosts import Create


def seeded(create: Callable[[], nn.Module]) -> Create:
    """``create`` with weights that are the same every time and make every decision and every logit distinct.

    A library's own initialisation gives nearly equal tokens.
    """

    def made() -> nn.Module:
        torch.manual_seed(1)
        model = create().eval()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return model

    return made
