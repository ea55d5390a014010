"""Tiny dense models around the tiny hosts."""

from __future__ import annotations

from typing import Any

import torch

import tiny
from vitrim.core.ask import ask
from vitrim.models.segmenter import LinearDecoder, MaskTransformer, Segmenter

CLASSES = 5


def segmenter(
    host: str = "vit", decoder: str = "linear", dtype: torch.dtype = torch.float32, **options: Any
) -> Segmenter:
    """A `Segmenter` in evaluation mode around a tiny host, with decoder weights that are the same every time."""
    model = tiny.HOSTS[host]()
    backbone = ask(model).without_head(model)
    dim = ask(backbone).layout(backbone).dim
    torch.manual_seed(4)
    head = LinearDecoder(dim, CLASSES) if decoder == "linear" else MaskTransformer(dim, CLASSES, heads=2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return Segmenter(backbone, head, CLASSES, **options).to(dtype).eval()
