"""The model, methods and images of an analysis, and observers of its forwards, for families that run the model."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Subset

from vitrim.core.method import MethodConfig
from vitrim.core.plan import HostFacts
from vitrim.core.reduce import Reduction
from vitrim.core.registry import fitting, host_of
from vitrim.data import spread
from vitrim.engines.machine import environment, select_device
from vitrim.errors import VitrimError
from vitrim.loading import ScoredModel
from vitrim.measure.contestants import Contestant, ModelOutput, contestants
from vitrim.measure.evaluation import DTYPES
from vitrim.measure.inputs import ScoredData
from vitrim.measure.probes import Gauge, Probe
from vitrim.measure.records import Batch, read
from vitrim.measure.run import Measurement
from vitrim.measure.task_data import data_facts, open_task
from vitrim.tasks import Task

EXAMPLES = 8
"""Images whose pictures a family keeps."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, the methods to analyse, and the images to show them.

    Attributes:
        model: dense model, in eval mode on its device and in its dtype; never changed.
        dataset: map-style; items are pairs of image and target.
        limit: images of the analysis, None for all. A family may use fewer.
        seed: seed of methods that draw, of shuffles and of t-SNE.
        workers: processes that decode images, 0 for this one.
        learned: folder of a saved reduction, whose parameters the methods of that name load.
        sizes: image sides in pixels to time; empty for the model's own.
        blocks: blocks, from 0, to draw; empty for the families' choice.
        beside: several models are analysed side by side.
        about: facts for the report: model, weights, data, environment.
    """

    model: nn.Module
    methods: Sequence[MethodConfig]
    task: Task
    dataset: Any
    batch_size: int = 32
    limit: int | None = None
    seed: int = 0
    workers: int = 0
    learned: Path | None = None
    sizes: Sequence[int] = ()
    blocks: Sequence[int] = ()
    beside: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def opened(
        cls, spec: ScoredModel, methods: Sequence[MethodConfig], data: ScoredData, seed: int, **drawn: Any
    ) -> Self:
        """The model of a spec with its task and images, with ``sizes`` and ``blocks``. The model of a
        caller is copied.
        """
        where, dtype = select_device(str(spec.device or "cpu")), DTYPES[str(spec.dtype or "fp32")]
        torch.manual_seed(seed)
        loaded = spec.load("cpu")
        task, dataset = open_task(loaded, data, embeddings=True)
        images = data_facts(data, task, dataset)
        about = {
            "environment": environment(device=str(spec.device or "cpu"), dtype=dtype, seed=seed),
            "model": loaded.name,
            "weights": loaded.weights,
            "model_options": loaded.options,
            "task": task.name,
            "data": images,
        }
        model = loaded.model if spec.named else copy.deepcopy(loaded.model)
        # A caller's model was copied above: moving it would change the caller's.
        model = model.to(device=where, dtype=getattr(torch, dtype)).eval()
        subject = cls(
            model, fitting(model, methods), task, dataset, images["batch_size"], data.limit, seed, data.workers,
            loaded.learned, about=about, **drawn,
        )  # fmt: skip
        beyond = next((block for block in subject.blocks if not 0 <= block < subject.num_layers), None)
        if beyond is not None:
            raise VitrimError(f"there is no block {beyond} to draw; valid: 0 to {subject.num_layers - 1}")
        return subject

    @property
    def facts(self) -> HostFacts:
        return host_of(self.model).facts(self.model)

    @property
    def num_layers(self) -> int:
        """L, blocks of the model."""
        return len(host_of(self.model).blocks(self.model))

    def places(self, most: int | None = None) -> NDArray[np.int64]:
        """Indices in the dataset of at most ``most`` images, spread evenly."""
        found = spread(len(self.dataset), self.limit)
        some: NDArray[np.int64] = found[spread(len(found), most)]
        return some

    def batches(
        self, most: int | None = None, *, batch_size: int | None = None, order: NDArray[np.int64] | None = None
    ) -> Iterator[Batch]:
        """Read at most ``most`` images (all for None), B at a time, in the ``order`` (I,) of a permutation,
        if given.
        """
        places = self.places(most)
        chosen = Subset(self.dataset, (places if order is None else places[order]).tolist())
        return read(chosen, batch_size or self.batch_size, workers=self.workers, collate=self.task.collate)

    def examples(self, most: int) -> NDArray[np.float32]:
        """(E, H, W, C): the first of at most ``most`` images, each scaled to [0, 1]."""
        found = torch.cat([batch.images for batch in self.batches(most)])[:EXAMPLES].movedim(1, -1)
        low, high = found.amin((1, 2, 3), keepdim=True), found.amax((1, 2, 3), keepdim=True)
        scaled: NDArray[np.float32] = ((found - low) / (high - low).clamp_min(1e-12)).float().numpy()
        return scaled

    def measurement(self, methods: Sequence[MethodConfig], probes: Sequence[Probe]) -> Measurement:
        """A new measurement of the dense model and its reductions by ``methods``."""
        models = contestants(self.model, methods, self.task, learned=self.learned)
        return Measurement(models, probes, self.task, seed=self.seed)


class Observer(Gauge):
    """A gauge that records what a reduced model, a private copy, does, for one family; it adds no columns to rows."""

    reduction: Reduction

    def __init__(self, contestant: Contestant) -> None:
        super().__init__({})
        self.name = contestant.name
        self.parts: dict[int, list[tuple[NDArray[Any], ...]]] = defaultdict(list)
        if contestant.reduction is not None:
            self.reduction = contestant.reduction

    @classmethod
    def over(cls, subject: Subject, methods: Sequence[MethodConfig], batches: Iterator[Batch]) -> list[Self]:
        """Run the dense model and its reductions by ``methods`` on ``batches``; one observer per reduction."""
        measurement = subject.measurement(methods, [cls])
        measurement.follow(batches)
        return [gauge for gauges in measurement.gauges for gauge in gauges if isinstance(gauge, cls)]

    @classmethod
    def start(cls, contestant: Contestant) -> Observer:
        """The observer of one model; that of the dense model, which has no reduction, records nothing."""
        return Observer(contestant) if contestant.reduction is None else cls(contestant)

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        """Called after every forward; by default does nothing, for observers that use hooks only."""

    def add(self, block: int, *arrays: NDArray[Any]) -> None:
        """Keep arrays (B, ...) on the images of a batch in one block."""
        self.parts[block].append(arrays)

    def by_block(self) -> dict[int, list[NDArray[Any]]]:
        """The arrays (I, ...) of all images for every block, in ascending order."""
        return {block: list(map(np.concatenate, zip(*self.parts[block], strict=True))) for block in sorted(self.parts)}
