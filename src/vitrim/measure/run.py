"""The one measuring engine: models, one pass over batches, any probes, rows.

    rows = run(model, ["tome:r=13", "evit:keep_rate=0.7"], batches, [TaskMetrics(task), Macs()], task=task)

`Measurement` is the same one batch at a time: what was gathered stays readable whatever goes wrong later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.data import DataError
from vitrim.measure.contestants import Contestant, contestants
from vitrim.measure.drawing import drawing
from vitrim.measure.probes import Gauge, Probe, State, joined
from vitrim.measure.processes import Processes
from vitrim.measure.records import Batch, Row, as_batches
from vitrim.tasks.base import Task

__all__ = ["Findings", "Measurement", "run"]


class Findings(NamedTuple):
    """One `Row` per model, the dense one first, and the gauges of each, in the order of the probes."""

    rows: list[Row]
    gauges: list[list[Gauge]]

    def classes(self, dataset: Any, num_classes: int) -> list[dict[str, dict[str, float | None]]]:
        """For each row the scores of every class, by score and by the name that ``dataset`` gives the class.

        Shares in [0, 1], None for a class that does not occur; empty where the task does not tell classes apart.
        """
        names = dataset.class_names or ()
        names = [*names, *map(str, range(len(names), num_classes))][:num_classes]
        return [
            {score: found for gauge in gauges for score, found in gauge.classes(names).items()}
            for gauges in self.gauges
        ]


class Measurement:
    """A comparison, fed one batch at a time. `rows` can be read after any batch.

    A batch counts for every model or, if one raises, for none. Every model draws the same random numbers whatever other
    models there are, and the global generators stay as they were.

    Args:
        models: the contestants, the dense one first.
        probes: what to measure of each.
        task: of the models; checks the targets.
        processes: this process and its like; each sees batches of its own, and `rows` adds all up.
        seed: of methods that draw at random.
        precision: context of the forwards; by default autocast is off, also under a caller's.

    Attributes:
        images: images this process has seen.
        turns: batches this process has run, those that do not count too.

    Example:
        >>> import timm
        >>> from vitrim.measure.probes import TaskMetrics, Tokens
        >>> from vitrim.tasks import make_task
        >>> task = make_task("classification", 10)
        >>> models = contestants(timm.create_model("test_vit", num_classes=10), ["tome:r=8"], task)
        >>> measurement = Measurement(models, [Tokens()], task)
        >>> measurement.follow([(torch.zeros(2, 3, 160, 160), torch.tensor([0, 1]))])
        >>> [(row.method, row["images"], row["tokens_at_end"]) for row in measurement.rows()]
        [('dense', 2, 101), ('tome:r=8', 2, 53)]
    """

    def __init__(
        self,
        models: Sequence[Contestant],
        probes: Sequence[Probe],
        task: Task,
        *,
        processes: Processes | None = None,
        seed: int = 0,
        precision: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.models, self.probes = list(models), list(probes)
        self.gauges: list[list[Gauge]] = [[probe.start(model) for probe in probes] for model in models]
        self.task = task
        self.processes = processes or Processes()
        self.seed = seed
        like = next(self.models[0].forward.parameters())
        self.device, self.dtype = like.device, like.dtype
        self.precision = precision or self._without_autocast
        self.images = 0
        self.turns = 0

    @torch.no_grad()  # not inference_mode: a sharded model keeps what it gathers
    def update(self, batch: Batch) -> None:
        """Run every model on a batch.

        Raises:
            DataError: targets that the task does not know.
            VitrimError: a model's outputs are not finite.
        """
        self.task.check_targets(batch.targets, len(batch))
        batch = batch.to(self.device, self.dtype)
        before = [[gauge.state() for gauge in gauges] for gauges in self.gauges]
        try:
            self._see(batch)
        except BaseException:  # Ctrl-C too: no batch counts for some models only
            for gauges, states in zip(self.gauges, before, strict=True):
                for gauge, state in zip(gauges, states, strict=True):
                    gauge.load(state)
            raise
        self.turns += 1
        self.images += len(batch) * batch.counts

    def follow(
        self, batches: Iterable[Batch | tuple[Tensor, Any]], on_progress: Callable[[int], None] | None = None
    ) -> None:
        """Update on all ``batches``, `Batch` objects or pairs of images and targets.

        Args:
            batches: read once.
            on_progress: called after every batch with the number of images seen.

        Raises:
            VitrimError: as `update`; the batches before count.
        """
        for batch in as_batches(batches):
            self.update(batch)
            if on_progress is not None:
                on_progress(self.images)

    def _see(self, batch: Batch) -> None:
        dense = None
        for model, gauges in zip(self.models, self.gauges, strict=True):
            # drawn by the seed and the batch only
            with drawing(self.device, self.seed + batch.index), self.precision():
                output = model.run(batch.images, batch.targets, count=any(gauge.counts_macs for gauge in gauges))
            dense = dense or output
            if batch.counts:
                for gauge in gauges:
                    gauge.see(batch, output, dense)

    def findings(self, *, together: bool = True) -> Findings:
        """Rows and gauges of all images so far; empty before the first batch.

        Args:
            together: of all processes, each of which must call this; otherwise of what this one has seen.
        """
        seen = (self.images, [[gauge.state() for gauge in gauges] for gauges in self.gauges])
        everyone = self.processes.gather(_on_cpu(seen)) if together and self.processes.count > 1 else [seen]
        everyone = [one for one in everyone if one[0]]
        if not everyone:
            return Findings([], [])
        images, rows, found = sum(number for number, _ in everyone), [], []
        for place, model in enumerate(self.models):
            gauges = [probe.start(model) for probe in self.probes]
            for which, gauge in enumerate(gauges):
                gauge.load(joined(states[place][which] for _, states in everyone))
            numbers = {name: value for gauge in gauges for name, value in gauge.result().items()}
            rows.append(Row(model.name, {"images": images, **numbers}))
            found.append(gauges)
        return Findings(rows, found)

    def rows(self) -> list[Row]:
        """The rows of `findings`, one per model, the dense one first."""
        return self.findings().rows

    def state(self) -> dict[str, State]:
        """The states of all gauges of this process, by model and probe; see `load`."""
        return {
            f"{place}.{which}": gauge.state()
            for place, gauges in enumerate(self.gauges)
            for which, gauge in enumerate(gauges)
        }

    def load(self, state: dict[str, State], *, images: int, turns: int) -> None:
        """Go on from a `state` of the same models and probes."""
        for place, gauges in enumerate(self.gauges):
            for which, gauge in enumerate(gauges):
                gauge.load(state.get(f"{place}.{which}", {}))
        self.images, self.turns = images, turns

    def _without_autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, enabled=False)


def run(
    model: nn.Module,
    methods: Sequence[MethodConfig | str],
    batches: Iterable[Batch | tuple[Tensor, Any]],
    probes: Sequence[Probe],
    *,
    task: Task,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    learned: Path | None = None,
    processes: Processes | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> list[Row]:
    """Measure the dense ``model`` and every method on the same batches, in one pass over the data.

    Args:
        model: a supported host that is not reduced; it is left as it was.
        methods: configs or their text form; each becomes one row after the dense one.
        batches: pairs of images (B, C, H, W) and targets, or `Batch` objects; read once.
        probes: what to measure.
        task: what the model predicts; its targets and metrics.
        device: where to compute; None for where the model is.
        dtype: of parameters and images; None for what the model has.
        seed: of methods that draw at random.
        learned: folder of a saved reduction, whose parameters the methods of that name get.
        processes: this process and its like; each reads batches of its own (`vitrim.measure.reading.read`).
        on_progress: called after every batch with the number of images seen.

    Raises:
        VitrimError: the model or a method does not fit, targets or outputs are wrong, or there are no images.

    Example:
        >>> import timm
        >>> from vitrim.measure.probes import TaskMetrics
        >>> from vitrim.tasks import make_task
        >>> task, batches = make_task("classification", 3), [(torch.zeros(2, 3, 160, 160), torch.tensor([0, 2]))]
        >>> rows = run(timm.create_model("test_vit", num_classes=3), ["none"], batches, [TaskMetrics(task)], task=task)
        >>> [(row.method, row["top3"]) for row in rows]
        [('dense', 1.0), ('none', 1.0)]
    """
    models = contestants(model, methods, task, device=device, dtype=dtype, learned=learned)
    measurement = Measurement(models, probes, task, processes=processes, seed=seed)
    measurement.follow(batches, on_progress)
    rows = measurement.rows()
    if not rows:
        raise DataError("there are no images to evaluate on")
    return rows


def _on_cpu(seen: tuple[int, list[list[State]]]) -> tuple[int, list[list[State]]]:
    """The same in tensors of the CPU, which can be sent to another process."""
    images, states = seen
    return images, [[{name: _cpu(value) for name, value in one.items()} for one in row] for row in states]


def _cpu(value: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    return [one.cpu() for one in value] if isinstance(value, list) else value.cpu()
