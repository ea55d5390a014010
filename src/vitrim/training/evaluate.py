"""The metrics of a task over a dataset, by all processes of a run together."""

from __future__ import annotations

from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from vitrim.core.ask import ask
from vitrim.tasks.base import Task


@torch.no_grad()  # not inference_mode: a sharded model keeps what it gathers
def evaluate(
    model: nn.Module,
    task: Task,
    data: Dataset[Any],
    accelerator: Accelerator,
    *,
    batch_size: int = 64,
    workers: int = 0,
) -> dict[str, float]:
    """The task's metrics of a model on a dataset, in percent.

    Every process takes its share of the images; the numbers are over all of them. All processes run equally many
    batches, for parts of a sharded model must run together: where shares differ the last image is run once more, and
    not counted.

    Args:
        model: from images (B, C, H, W) to logits (B, K), or to an output with them.
        task: reads batches and has the metrics.
        data: map-style, with the model's own transform.
        accelerator: processes, device and precision.
        batch_size: images at once in each process.
        workers: processes that read images, 0 for this one.
    """
    training = model.training
    model.eval()
    metrics = task.metrics().to(accelerator.device)
    count, rank, processes = len(cast(Any, data)), accelerator.process_index, accelerator.num_processes
    share = -(-count // processes)
    mine = Subset(data, [min(rank + index * processes, count - 1) for index in range(share)])
    left = len(range(rank, count, processes))
    loader = DataLoader(mine, batch_size, num_workers=workers, generator=torch.Generator().manual_seed(0))
    for batch in loader:
        images, targets = task.read(batch)
        with accelerator.autocast():
            logits = ask(model).logits(model(images.to(accelerator.device)))
        if left:
            metrics.update(logits[:left].float(), targets[:left].to(accelerator.device))
        left = max(left - len(images), 0)
    model.train(training)
    return {name: float(value) for name, value in metrics.compute().items()}
