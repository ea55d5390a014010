"""The damage of a setting, image by image: the distance of a reduced model from the dense model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset

from vitrim.core.method import MethodConfig
from vitrim.data import spread
from vitrim.errors import VitrimError
from vitrim.measure.contestants import Contestant, ModelOutput, contestants
from vitrim.measure.probes import Gauge, Values, are_logits, divergence
from vitrim.measure.records import Batch, Processes, read
from vitrim.measure.run import Measurement
from vitrim.tasks.base import Task
from vitrim.tuning.space import quiet

Proxy = Literal["feature", "kl", "cosine", "agree"]
"""The damage to minimise. ``feature``: distance of the head's input to the dense model's, relative to the length of the
latter; ``kl``: divergence of the class probabilities; ``cosine``: 1 minus the cosine of the head's inputs; ``agree``: 1
minus the agreement of the predictions."""

Third = Literal["search", "selection", "check"]
PARTS: tuple[Third, ...] = get_args(Third)

Scores = Mapping[str, NDArray[np.float32]]
"""The damage of every image by proxy, (N,) float32."""


# ---- images ----------------------------------------------------------------------------------------------------------


class DatasetImages:
    """Images of a dataset in three interleaved parts, read from the dataset in every pass.

    Args:
        dataset: map-style; items are pairs of image and target.
        each: most images per part.
        workers: processes that decode images, 0 for this one.
        collate: makes images and targets from B items.

    Raises:
        VitrimError: fewer than two images per part.
    """

    def __init__(self, dataset: Any, each: int, batch_size: int, *, workers: int = 0, collate: Any = None) -> None:
        places = spread(len(dataset), len(PARTS) * each)
        if len(places) < 2 * len(PARTS):
            given = len(places) // len(PARTS)
            raise VitrimError(f"too few images: searching, selecting and checking need 2 each, and get {given}")
        self.places = {part: places[number :: len(PARTS)].tolist() for number, part in enumerate(PARTS)}
        self.dataset, self.batch_size, self.workers, self.collate = dataset, batch_size, workers, collate

    def count(self, part: Third) -> int:
        return len(self.places[part])

    def batches(self, part: Third, start: int, stop: int, processes: Processes | None = None) -> Iterator[Batch]:
        """Read the images ``start``, a multiple of the batch size, to ``stop`` of a part; with several processes, this
        one's batches."""
        some = Subset(self.dataset, self.places[part][start:stop])
        return read(some, self.batch_size, workers=self.workers, processes=processes, collate=self.collate)

    def sample(self, part: Third, count: int) -> Iterator[Batch]:
        """Read at most ``count`` images of a part, spread evenly over it: data may be sorted by class."""
        places = self.places[part]
        some = Subset(self.dataset, [places[each] for each in spread(len(places), count)])
        return read(some, self.batch_size, workers=self.workers, collate=self.collate)


# ---- scores ----------------------------------------------------------------------------------------------------------


CACHED_BYTES = 2**30
"""Most bytes of the dense model's outputs that a search caches."""


class CachedDense(Contestant):
    """The dense model of a search, which caches its outputs, because a search reads the same images many times.

    Args:
        model: a private copy.

    Attributes:
        place: key of the next batch; equal keys must mean equal images.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__(model, task, watched=True)
        self.place: tuple[str, int] = ("", 0)
        self.room = CACHED_BYTES
        self._outputs: dict[tuple[str, int, int], ModelOutput] = {}

    def run(self, images: Tensor, targets: Any = None, *, count: bool = False) -> ModelOutput:
        """The output for a batch, see `Contestant.run`; cached while there is room."""
        key = (*self.place, len(images))  # the length too: a piece may end within a batch
        if key in self._outputs and not count:
            return self._outputs[key]
        output = super().run(images, targets, count=count)
        kept = [one for one in tree_leaves((output.prediction, output.feature)) if isinstance(one, Tensor)]
        size = sum(one.nbytes for one in kept)
        if size <= self.room:
            self.room -= size
            self._outputs[key] = output
        return output


class ModelScorer:
    """Scores settings by running the dense model and its reductions in one pass of the measuring engine.

    Args:
        model: the dense model; not changed.
        images: images in three parts.
        processes: this process and its peers, which share the batches; each gets all scores.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        images: DatasetImages,
        *,
        seed: int = 0,
        processes: Processes | None = None,
    ) -> None:
        self.model, self.task, self.source, self.seed = copy.deepcopy(model).eval(), task, images, seed
        self.dense = CachedDense(copy.deepcopy(self.model), task)
        self.processes = processes or Processes()

    @property
    def batch_size(self) -> int:
        return self.source.batch_size

    def images(self, part: Third) -> int:
        return self.source.count(part)

    def __call__(
        self,
        configs: Sequence[MethodConfig],
        part: Third,
        start: int,
        stop: int,
        seen: Callable[[int], None] | None = None,
    ) -> list[Scores]:
        """Score all settings in one pass over the images; ``seen`` is called with the number done."""
        with quiet():
            reduced = contestants(self.model, configs, self.task)[1:]
        measurement = Measurement([self.dense, *reduced], [Damage(self.task)], self.task, seed=self.seed)

        def placed() -> Iterator[Batch]:
            for number, batch in enumerate(self.source.batches(part, start, stop, self.processes)):
                self.dense.place = (part, start + number * self.batch_size * self.processes.count)
                yield batch

        with quiet():
            measurement.follow(placed(), seen)
        own: list[Scores] = []
        for gauge, *_ in measurement.gauges[1:]:
            each = {name: metric.each() for name, metric in gauge.metrics.items() if isinstance(metric, Values)}
            every = {name: values for name, values in each.items() if len(values) == measurement.images}
            own.append({name: values.numpy().astype(np.float32) for name, values in every.items()})
        return _in_order(self.processes.gather(own), stop - start, self.batch_size)


def _in_order(everyone: Sequence[list[Scores]], images: int, batch_size: int) -> list[Scores]:
    """The scores of several processes, whose batches alternate, in the order of one process.

    Example:
        >>> one, other = {"kl": np.array([1.0, 2.0, 5.0])}, {"kl": np.array([3.0, 4.0])}
        >>> _in_order([[one], [other]], images=5, batch_size=2)[0]["kl"].tolist()
        [1.0, 2.0, 3.0, 4.0, 5.0]
    """
    if len(everyone) == 1:
        return everyone[0]
    process = np.arange(images) // batch_size % len(everyone)
    order = np.argsort(np.argsort(process, kind="stable"))  # places of the images among those of all processes
    found: list[Scores] = []
    for each in zip(*everyone, strict=True):
        every = {name: np.concatenate([one[name] for one in each if name in one]) for name in each[0]}
        found.append({name: values[order] for name, values in every.items() if len(values) == images})
    return found


class Damage(Gauge):
    """The proxies as a probe: ``feature``, ``cosine``, ``kl`` and ``agree``, as far as the model supports them."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.values = {name: Values() for name in get_args(Proxy)}
        super().__init__(self.values)

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        found = {"agree": 1.0 - self.task.agreement(output.prediction, dense.prediction, batch.targets).double()}
        one, other = output.feature, dense.feature
        if one is not None and other is not None and one.shape == other.shape:
            one, other = one.double().flatten(1), other.double().flatten(1)
            found["feature"] = (one - other).norm(dim=1) / other.norm(dim=1).clamp_min(1e-12)
            found["cosine"] = 1.0 - torch.cosine_similarity(one, other, dim=1)
        if are_logits(output):
            found["kl"] = divergence(output.prediction, dense.prediction)
        for name, values in found.items():
            if values.shape == (len(batch),):  # paired comparisons need one value per image
                self.values[name].update(values)

    def result(self) -> Mapping[str, Any]:
        return {name: values.compute().item() for name, values in self.values.items()}
