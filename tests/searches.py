"""A search on images in memory, as `vitrim.tune` makes one of a source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vitrim.core.registry import parse_methods
from vitrim.loading import ModelSpec
from vitrim.measure.task_data import num_classes
from vitrim.tasks import make_task
from vitrim.tuning.proxy import DatasetImages
from vitrim.tuning.result import Result, Target
from vitrim.tuning.search import Searches
from vitrim.tuning.space import quiet


def thirds(images: Tensor, batch_size: int) -> DatasetImages:
    """Images (N, C, H, W), every third of them for one of the three uses."""
    dataset = TensorDataset(images, torch.zeros(len(images), dtype=torch.int64))
    return DatasetImages(dataset, len(images) // 3, batch_size)


def searches(
    model: nn.Module, methods: str | Sequence[str], images: DatasetImages, *targets: str, **options: Any
) -> Searches:
    task = make_task("classification", num_classes(ModelSpec(model).load()))
    return Searches(model, parse_methods(methods), task, images, [Target.parse(one) for one in targets], options)  # type: ignore[arg-type]


def search(
    model: nn.Module, methods: str | Sequence[str], images: DatasetImages, *, target: str, **options: Any
) -> Result:
    with quiet():
        return searches(model, methods, images, target, **options).run()[0]
