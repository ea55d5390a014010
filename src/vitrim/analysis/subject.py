"""The model, methods and images of an analysis, for families that run the model themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Subset

from vitrim.core.method import MethodConfig
from vitrim.core.plan import HostFacts
from vitrim.core.registry import host_of
from vitrim.data import spread
from vitrim.measure.contestants import Contestant, Output, contestants
from vitrim.measure.probes import Gauge, Probe
from vitrim.measure.records import Batch, Row, read
from vitrim.measure.run import Measurement
from vitrim.tasks import Task

__all__ = ["See", "Subject"]

See = Callable[[Batch, Output, Output], None]
"""Takes a batch, what one model made of it, and what the dense model did."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, the methods to look at, and the images to show them.

    Attributes:
        model: the dense model, in eval mode on its device and in its dtype; never changed.
        methods: configs that fit it.
        task: what it predicts.
        dataset: map-style; items are pairs of image and target.
        batch_size: B.
        limit: images of the analysis, None for all. A family may take fewer.
        seed: of methods that draw, of shuffles and of maps.
        workers: processes that decode images, 0 for this one.
        learned: folder of a saved reduction, whose parameters the methods of that name get.
        sizes: pixels a side of the images to time; none for the model's own.

    Example:
        >>> import timm, torch
        >>> from torch.utils.data import TensorDataset
        >>> from vitrim.core.registry import parse_method
        >>> from vitrim.tasks import make_task
        >>> images = TensorDataset(torch.rand(6, 3, 160, 160), torch.arange(6) % 3)
        >>> model = timm.create_model("test_vit", num_classes=3).eval()
        >>> subject = Subject(model, [parse_method("tome:r=8")], make_task("classification", 3), images, batch_size=4)
        >>> [len(batch) for batch in subject.batches()], subject.count(3)
        ([4, 2], 3)
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

    @property
    def facts(self) -> HostFacts:
        """Geometry of the model."""
        return host_of(self.model).facts(self.model)

    @property
    def num_layers(self) -> int:
        """L, blocks of the model."""
        return len(host_of(self.model).blocks(self.model))

    def places(self, most: int | None = None) -> NDArray[np.int64]:
        """The places in the dataset of at most ``most`` of the images, spread evenly."""
        found = spread(len(self.dataset), self.limit)
        some: NDArray[np.int64] = found[spread(len(found), most)]
        return some

    def count(self, most: int | None = None) -> int:
        """The number of `places`."""
        return len(self.places(most))

    def batches(
        self, most: int | None = None, *, batch_size: int | None = None, order: NDArray[np.int64] | None = None
    ) -> Iterator[Batch]:
        """At most ``most`` of the images, B at a time.

        Args:
            most: None for all.
            batch_size: B, if not that of the subject.
            order: (I,), which of these images comes first, second, ...
        """
        places = self.places(most)
        chosen = Subset(self.dataset, (places if order is None else places[order]).tolist())
        return read(chosen, batch_size or self.batch_size, workers=self.workers, collate=self.task.collate)

    def contestants(self, methods: Sequence[MethodConfig]) -> list[Contestant]:
        """Private copies of the dense model and its reductions by ``methods``."""
        return contestants(self.model, methods, self.task, learned=self.learned)

    def rows(self, methods: Sequence[MethodConfig], probes: Sequence[Probe], batches: Iterator[Batch]) -> list[Row]:
        """Measure what ``probes`` ask of the dense model and of ``methods`` on ``batches``, the dense model first."""
        measurement = Measurement(self.contestants(methods), probes, self.task, seed=self.seed)
        measurement.follow(batches)
        return measurement.rows()

    def follow(self, models: Sequence[Contestant], sees: Mapping[int, See], batches: Iterator[Batch]) -> None:
        """Run ``models`` on ``batches``, and after every forward call the one of ``sees`` with the model's place."""
        measurement = Measurement(models, [_Watching(models, sees)], self.task, seed=self.seed)
        measurement.follow(batches)


class _Watching:
    """The probe that only calls."""

    def __init__(self, models: Sequence[Contestant], sees: Mapping[int, See]) -> None:
        self.sees = {models[place]: see for place, see in sees.items()}

    def start(self, contestant: Contestant) -> Gauge:
        return _Called(self.sees.get(contestant))


class _Called(Gauge):
    def __init__(self, see: See | None) -> None:
        super().__init__({})
        self.told = see

    def see(self, batch: Batch, output: Output, dense: Output) -> None:
        if self.told is not None:
            self.told(batch, output, dense)

    def result(self) -> Mapping[str, Any]:
        return {}
