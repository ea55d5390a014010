"""The measuring engine: models, one pass over batches, any probes, rows; one batch at a time by `Measurement`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.data import DataError
from vitrim.engines.machine import seeded_draws
from vitrim.errors import VitrimError, first_line
from vitrim.files import check_folder, replaced, save_file
from vitrim.measure.contestants import Contestant, contestants
from vitrim.measure.identity import digest_of, first_difference
from vitrim.measure.probes import Gauge, Probe, State, joined, moved
from vitrim.measure.records import Batch, Processes, Row, as_batches
from vitrim.tasks.base import Task


class Findings(NamedTuple):
    """One `Row` per model, the dense model first, and the gauges of each, in the order of the probes."""

    rows: list[Row]
    gauges: list[list[Gauge]]

    def classes(self, dataset: Any, num_classes: int) -> list[dict[str, dict[str, float | None]]]:
        """Scores in [0, 1] for each row, by score name and the class's name, else number; None if it never occurs."""
        names = getattr(dataset, "class_names", None) or ()
        names = [*names, *map(str, range(len(names), num_classes))][:num_classes]
        return [
            {score: found for gauge in gauges for score, found in gauge.classes(names).items()}
            for gauges in self.gauges
        ]


class Measurement:
    """A comparison, updated one batch at a time. `rows` can be read after any batch.

    If a model raises, the batch counts for no model. Random draws of a model do not depend on the other models, and the
    global generators do not change.

    Args:
        processes: this process and its peers; each processes its own batches, and `rows` joins the results.
        precision: context of the forwards; by default autocast is off, also under a caller's.

    Attributes:
        images: images that this process has processed.
        turns: batches that this process has run, including those that do not count.

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
        self.device, self.dtype = models[0].like.device, models[0].like.dtype
        self.precision = precision or partial(torch.autocast, self.device.type, enabled=False)
        self.images = 0
        self.turns = 0

    @torch.no_grad()  # not inference_mode: a sharded model reuses the tensors it gathers
    def update(self, batch: Batch) -> None:
        """Run every model on a batch; an error, such as invalid targets, leaves the results as they were."""
        self.task.check_targets(batch.targets, len(batch))
        batch = batch.to(self.device, self.dtype)
        # Cheap: sums, and lists of tensors that are never changed.
        before = self.state()
        try:
            dense = None
            for model, gauges in zip(self.models, self.gauges, strict=True):
                # random draws depend on the seed and the batch only
                with seeded_draws(self.device, self.seed + batch.index), self.precision():
                    output = model.run(
                        batch.at(model.img_size), batch.targets, count=any(gauge.counts_macs for gauge in gauges)
                    )
                dense = dense or output
                if batch.counts:
                    for gauge in gauges:
                        gauge.see(batch, output, dense)
        except BaseException:  # Ctrl-C too: a batch counts for all models or none
            self.load(before, images=self.images, turns=self.turns)
            raise
        self.turns += 1
        self.images += len(batch) * batch.counts

    def follow(
        self, batches: Iterable[Batch | tuple[Tensor, Any]], on_progress: Callable[[int], None] | None = None
    ) -> None:
        """Update on all ``batches``, `Batch` objects or pairs of images and targets, read once."""
        for batch in as_batches(batches):
            self.update(batch)
            if on_progress is not None:
                on_progress(self.images)

    def findings(self, *, together: bool = True) -> Findings:
        """Rows and gauges of all images so far; empty before the first batch.

        ``together``: join the results of all processes, each of which must call this; otherwise only this process's.
        """
        state = self.state()
        everyone = [(self.images, state)]
        if together and self.processes.count > 1:  # only CPU tensors can be sent
            sent = {place: {name: moved(value, "cpu") for name, value in one.items()} for place, one in state.items()}
            everyone = self.processes.gather((self.images, sent))
        everyone = [one for one in everyone if one[0]]
        if not everyone:
            return Findings([], [])
        images, rows, found = sum(number for number, _ in everyone), [], []
        for place, model in enumerate(self.models):
            # New gauges: joining must not count the images of others in this process's own.
            gauges = [probe.start(model) for probe in self.probes]
            for which, gauge in enumerate(gauges):
                gauge.load(joined(states[f"{place}.{which}"] for _, states in everyone))
            numbers = {name: value for gauge in gauges for name, value in gauge.result().items()}
            rows.append(Row(model.name, {"images": images, **numbers}))
            found.append(gauges)
        return Findings(rows, found)

    def rows(self) -> list[Row]:
        return self.findings().rows

    def state(self) -> dict[str, State]:
        """The states of all gauges of this process, by model and probe; see `load`."""
        return {
            f"{place}.{which}": gauge.state()
            for place, gauges in enumerate(self.gauges)
            for which, gauge in enumerate(gauges)
        }

    def load(self, state: dict[str, State], *, images: int, turns: int) -> None:
        """Continue from a `state` of the same models and probes."""
        for place, gauges in enumerate(self.gauges):
            for which, gauge in enumerate(gauges):
                gauge.load(state.get(f"{place}.{which}", {}))
        self.images, self.turns = images, turns


def run(
    model: nn.Module,
    methods: Sequence[MethodConfig | str],
    batches: Iterable[Batch | tuple[Tensor, Any]],
    probes: Sequence[Probe],
    *,
    task: Task,
    seed: int = 0,
) -> list[Row]:
    """Measure the dense ``model`` and every method on the same batches, in one pass over the data.

    ``batches`` are pairs of images (B, C, H, W) and targets, or `Batch` objects; read once.

    Example:
        >>> import timm
        >>> from vitrim.measure.probes import TaskMetrics
        >>> from vitrim.tasks import make_task
        >>> task, batches = make_task("classification", 3), [(torch.zeros(2, 3, 160, 160), torch.tensor([0, 2]))]
        >>> rows = run(timm.create_model("test_vit", num_classes=3), ["none"], batches, [TaskMetrics(task)], task=task)
        >>> [(row.method, 0 <= row["top1"] <= 1) for row in rows]
        [('dense', True), ('none', True)]
    """
    measurement = Measurement(contestants(model, methods, task), probes, task, seed=seed)
    measurement.follow(batches)
    rows = measurement.rows()
    if not rows:
        raise DataError("there are no images to evaluate on")
    return rows


FORMAT = 2
SECONDS_BETWEEN = 30.0


class Partial:
    """The folder of a resumable measurement: one file per process, each written atomically.

    Args:
        settings: everything that the numbers depend on; a folder with other settings is refused, and nothing written.
        resume: continue the measurement in the folder; otherwise the folder must not hold one.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], processes: Processes, *, resume: bool = False) -> None:
        check_folder(folder)
        self.folder, self.processes = folder, processes
        self.settings: dict[str, Any] = json.loads(json.dumps({**settings, "processes": processes.count}))
        self.written = time.monotonic()
        self.file = folder / f"part-{processes.index}.safetensors"
        if (folder / "part-0.safetensors").is_file():  # file of the first process
            if not resume:
                raise VitrimError(f"{folder} holds an evaluation: resume it, or name another folder")
            self._check_settings(_header(folder / "part-0.safetensors"))

    def _check_settings(self, header: dict[str, Any]) -> None:
        other = first_difference(header["settings"], self.settings)
        if other is not None:
            name, theirs, ours = other
            raise VitrimError(
                f"{self.folder} holds an evaluation with {name}={theirs}, this one has {ours}: "
                "resume with the same settings, or name another folder"
            )

    def restore(self, measurement: Measurement) -> int:
        """Load the stored results of this process, and return its number of finished batches."""
        if not self.file.is_file():
            return 0
        header = _header(self.file)
        self._check_settings(header)
        states: dict[str, State] = {}
        try:
            # A stranger may have changed the file: names, shapes and the digest are checked, nothing is unpickled.
            with safe_open(self.file, "pt") as parts:
                tensors = {name: parts.get_tensor(name) for name in sorted(parts.keys())}
            # Tensors by name in order, as `keep` wrote the digest.
            if header["digest"] != digest_of(tensors):
                raise ValueError("its content has changed since")
            for name, value in tensors.items():
                gauge, key, *number = name.split("/", 2)
                state = states.setdefault(gauge, {})
                if not number:
                    state[key] = value
                    continue
                entries = state.setdefault(key, [])  # entries of a list are numbered and sorted
                if not isinstance(entries, list):
                    raise ValueError(f"{key} is a tensor and a list")
                entries.append(value)
            measurement.load(states, images=header["images"], turns=header["turns"])
        except (OSError, SafetensorError) as error:
            raise VitrimError(f"cannot read {self.file}: {first_line(error)}") from error
        except (KeyError, ValueError) as error:
            raise VitrimError(f"{self.file} is damaged ({first_line(error)}): name another folder") from error
        return int(header["turns"])

    def keep(self, measurement: Measurement, *, now: bool = False) -> None:
        """Write the results of this process, unless they were written recently and ``now`` is false."""
        if not now and time.monotonic() - self.written < SECONDS_BETWEEN:
            return
        tensors: dict[str, Tensor] = {}  # clones: a file refuses shared tensors, and gauges may share some
        for gauge, state in measurement.state().items():
            for key, value in state.items():
                if isinstance(value, list):
                    tensors |= {f"{gauge}/{key}/{place:08d}": one.clone() for place, one in enumerate(value)}
                else:
                    tensors[f"{gauge}/{key}"] = value.clone()
        header = {
            "format": FORMAT,
            "settings": self.settings,
            "images": measurement.images,
            "turns": measurement.turns,
            "digest": digest_of(dict(sorted(tensors.items()))),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replaced(self.file) as beside:
                save_file(tensors, beside, {"vitrim": json.dumps(header)})
        except (OSError, SafetensorError) as error:
            raise VitrimError(f"cannot write {self.file}: {first_line(error)}") from error
        self.written = time.monotonic()


def _header(file: Path) -> dict[str, Any]:
    try:
        with safe_open(file, "pt") as parts:
            header = json.loads((parts.metadata() or {})["vitrim"])
        if header["format"] != FORMAT:
            raise VitrimError(f"{file} has format {header['format']}, this vitrim reads {FORMAT}: name another folder")
        if not isinstance(header["settings"], dict):
            raise ValueError("no settings")
        if not all(type(header[name]) is int and header[name] >= 0 for name in ("images", "turns")):
            raise ValueError("no numbers of images and batches")
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise VitrimError(f"{file} is no partial evaluation, or is damaged: name another folder") from error
    return dict(header)
