"""Tiny dense models around the tiny hosts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import tiny
from vitrim.core.registry import ask
from vitrim.models.segmenter import LinearDecoder, MaskTransformer, Segmenter
from vitrim.models.vitdet import Detector

CLASSES = 5


def segmenter(
    host: str = "vit", decoder: str = "linear", dtype: torch.dtype = torch.float32, **options: Any
) -> Segmenter:
    """A `Segmenter` in evaluation mode around a tiny host, with decoder weights that are the same every time."""
    backbone = headless(tiny.HOSTS[host]())
    dim = ask(backbone).layout(backbone).dim
    torch.manual_seed(4)
    head = LinearDecoder(dim, CLASSES) if decoder == "linear" else MaskTransformer(dim, CLASSES, heads=2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return Segmenter(backbone, head, CLASSES, **options).to(dtype).eval()


def detector(host: str = "vit", **options: Any) -> Detector:
    """A small `Detector` in evaluation mode around a tiny host, with weights that are the same every time."""
    backbone = headless(tiny.HOSTS[host]())
    torch.manual_seed(4)
    small = {"channels": 8, "hidden": 8, "rpn_layers": 1, "box_layers": 1, "samples": 16}
    return Detector(backbone, CLASSES, **{**small, **options}).eval()


def headless(model: nn.Module) -> nn.Module:
    """A host as the backbone of a dense model."""
    return ask(model).without_head(model)
