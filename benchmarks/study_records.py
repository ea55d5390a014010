"""Records of a study: gathered some settings at a time into a folder, so that a part that was stopped goes on.

A record is a file ``record_METHOD_RATE.npz``, as `vitrim analyze` writes it, of one model under one setting on the same
images. A folder holds records of one model, one data set and one number of images; others are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from vitrim.analysis.collect import Collect, collect
from vitrim.analysis.record import Record
from vitrim.core.method import MethodConfig
from vitrim.core.registry import host_of, make_method, methods
from vitrim.core.schedule import quarter_blocks
from vitrim.data import ImageDataset, batches, eval_transform, load_data
from vitrim.data.readers import TASKS
from vitrim.errors import VitrimError
from vitrim.files import json_text, write_text
from vitrim.measure.identity import weights_fingerprint

RATES = (0.25, 0.5, 0.7, 0.9)
SCHEDULED = {"keep_rate", "blocks", "rule"}
SETTINGS = "settings.json"
DENSE = "dense"
MASKS = 255
"""Classes that masks of 8 bits can have, for data that does not say: masks are not read."""
TOGETHER = 13
"""Settings in one pass, beside the dense model: so many records are in memory at once, and lost when it is stopped."""


def names_of(only: Sequence[str] | None) -> list[str]:
    """The methods that need no training and can follow the study's schedule, or those asked for.

    Raises:
        VitrimError: one that is none of them.
    """
    free = [name for name, config in methods().items() if config.training_free and set(config.model_fields) > SCHEDULED]
    wrong = next((name for name in only or () if name not in free), None)
    if wrong is not None:
        raise VitrimError(f"'{wrong}' does not follow the study's schedule; these do: {', '.join(free)}")
    return [name for name in free if not only or name in only]


def scheduled(model: nn.Module, name: str, rate: float) -> MethodConfig:
    """A method that keeps floor(P rate^s) patches at stage s, the stages a quarter of the depth apart."""
    blocks = quarter_blocks(len(host_of(model).blocks(model)))
    return make_method(name, keep_rate=rate, blocks=blocks, rule="floor_initial_power")


def images_of(source: str, task: str | None, split: str | None) -> ImageDataset:
    """The images of a data set. With a dense ``task`` its masks or boxes are left out, and every label is 0.

    Raises:
        VitrimError: there are no such images, or no such task.
    """
    if task is not None and task not in TASKS:
        raise VitrimError(f"no task '{task}' of data; valid: {', '.join(TASKS)}")
    options = {"num_classes": MASKS} if task == "segmentation" else {}
    found = load_data(source, task=task, split=split, **options)
    if isinstance(found, ImageDataset):
        return found
    return ImageDataset(found.images, [0] * len(found), source=source, split=found.split)


@dataclass(frozen=True)
class Shelf:
    """A folder of records of one model on one set of images.

    Attributes:
        folder: made where it is not there.
        header: entries of all records: ``model`` and ``data``.
        dataset: the images.
        limit: so many of them, spread evenly; all for None.
        batch_size: of the passes.
        labelled: whether labels mean classes of the model.
    """

    folder: Path
    header: Mapping[str, Any]
    dataset: ImageDataset
    limit: int | None
    batch_size: int
    labelled: bool = True

    def gather(self, model: nn.Module, names: Sequence[str], rates: Sequence[float]) -> list[Record]:
        """The records of every method at every rate, the dense model's first; those that are not there are made.

        Raises:
            VitrimError: the folder holds records of something else.
        """
        self._check(model)
        self.dataset.transform = eval_transform(model)
        wanted = [(name, rate) for name in names for rate in rates]
        missing = [setting for setting in wanted if not self._file(*setting).is_file()]
        for start in range(0, len(missing), TOGETHER):
            self._make(model, missing[start : start + TOGETHER])
        return [self._dense(model), *(Record.load(self._file(*setting)) for setting in wanted)]

    def _make(self, model: nn.Module, settings: Sequence[tuple[str, float]]) -> None:
        configs = [scheduled(model, *setting) for setting in settings]
        made = self._pass(model, configs)
        if not self._file(DENSE).is_file():
            made[DENSE].save(self._file(DENSE))
        for (name, rate), config in zip(settings, configs, strict=True):
            record = made[config.describe()]
            header = {**record.header, "method": f"{name}:{rate}", "setting": record.method, "rate": rate}
            replace(record, header=header).save(self._file(name, rate))
        print(f"{self.header['data']}: {', '.join(f'{name} {rate}' for name, rate in settings)}", flush=True)

    def _dense(self, model: nn.Module) -> Record:
        if not self._file(DENSE).is_file():
            self._pass(model, [])[DENSE].save(self._file(DENSE))
        return Record.load(self._file(DENSE))

    def _pass(self, model: nn.Module, configs: Sequence[MethodConfig]) -> dict[str, Record]:
        read = batches(self.dataset, self.batch_size, limit=self.limit)
        found = collect(model, configs, read, Collect(num_images=self._count()), header=self.header)
        if self.labelled:
            return found
        return {name: replace(one, arrays=_without(one.arrays, "targets")) for name, one in found.items()}

    def _count(self) -> int:
        return len(self.dataset) if self.limit is None else min(self.limit, len(self.dataset))

    def _file(self, name: str, rate: float | None = None) -> Path:
        return self.folder / (f"record_{name}.npz" if rate is None else f"record_{name}_{rate}.npz")

    def _check(self, model: nn.Module) -> None:
        """Write what the records are of beside them; refuse a folder that says something else."""
        images = {"source": str(self.dataset.source), "split": self.dataset.split, "images": self._count()}
        read = {**images, "batch_size": self.batch_size, "parameters": weights_fingerprint(model)}
        own, file = {**self.header, **read}, self.folder / SETTINGS
        if file.is_file():
            stored = json.loads(file.read_text(encoding="utf-8"))
            if stored != own:
                raise VitrimError(f"{self.folder} holds records of {stored}, not of {own}: name another --out")
        else:
            write_text(file, json_text(own) + "\n")


def _without(arrays: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: array for key, array in arrays.items() if key != name}
