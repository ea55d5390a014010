"""A tiny model and images for the families of an analysis that run the model."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vitrim
from vitrim.analysis.subject import Subject
from vitrim.core.registry import parse_method
from vitrim.tasks import make_task

IMAGES, PATCHES, LAYERS = 40, 36, 4


def subject(model: nn.Module, data: TensorDataset, *methods: str, **options: Any) -> Subject:
    given = {"batch_size": 16, **options}
    return Subject(model, [parse_method(method) for method in methods], make_task("classification", 5), data, **given)


def reduced(model: nn.Module, method: str | vitrim.MethodConfig) -> vitrim.Reduction:
    return vitrim.reduce_(copy.deepcopy(model), method, record=True)


def class_row(model: nn.Module, x: Tensor, size: Tensor | None = None) -> Tensor:
    """(B, N) of the class token in block 1, mean over heads, as timm computes it."""
    block = model.blocks[1]
    q, k, _ = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
    logits = q[:, :, :1] @ k.transpose(-2, -1) * block.attn.scale
    return (logits if size is None else logits + size.log()[:, None, None]).softmax(-1).mean(1)[:, 0]
