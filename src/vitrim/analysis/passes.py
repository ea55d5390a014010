"""The pass of an analysis over the images, one model after another, and the records that it gathers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vitrim.analysis.collect import Collect, records_of
from vitrim.analysis.record import Record
from vitrim.analysis.subject import Subject
from vitrim.analysis.summary import milliseconds, scores
from vitrim.core.method import MethodConfig
from vitrim.core.registry import fitting
from vitrim.engines.machine import environment, select_device
from vitrim.errors import VitrimError
from vitrim.loading import ModelSpec
from vitrim.measure.evaluation import DTYPES, paired_probes, standard_probes
from vitrim.measure.inputs import ScoredData
from vitrim.measure.records import read
from vitrim.measure.run import Measurement
from vitrim.measure.task_data import data_facts, open_task


@dataclass(frozen=True)
class Pass:
    """One model on its pass over the images.

    Attributes:
        found: facts for the summary of the report.
    """

    measurement: Measurement
    subject: Subject
    found: dict[str, Any]

    @property
    def images(self) -> int:
        """Images of the complete pass."""
        return int(self.found["data"]["images"])

    def records(self, *, complete: bool) -> list[Record]:
        """The records of the images seen so far, the dense model's first; times only if all passes are complete."""
        findings, task = self.measurement.findings(), self.subject.task
        data = self.found["data"]
        header = {
            **{key: self.found[key] for key in ("model", "weights", "environment")},
            "data": data["source"],
            **{key: data[key] for key in ("split", "batch_size")},
            "seed": self.measurement.seed,
        }
        own = records_of(findings, header)
        times = milliseconds(self.subject, self.subject.methods) if own and complete else {}
        for row in findings.rows:
            known = {"gmacs": sum(row["gmacs"].values()), **({"ms": times[row.method]} if times else {})}
            if task.selects_by != "top1":  # top-1 follows from the records
                known |= scores(row, findings.rows[0], task.selects_by)
            own[row.method] = replace(own[row.method], header={**own[row.method].header, **known})
        return list(own.values())


@dataclass(frozen=True)
class Setting:
    """The methods, images and machine that the passes of all models share."""

    methods: Sequence[MethodConfig]
    data: ScoredData
    device: str
    dtype: str
    seed: int
    sizes: Sequence[int]
    blocks: Sequence[int]

    def opened(self, spec: ModelSpec) -> Pass:
        """The pass of a model, before its first batch. The model of a caller is copied."""
        where, data, dtype = select_device(self.device), self.data, DTYPES[self.dtype]
        torch.manual_seed(self.seed)
        loaded = spec.load("cpu")
        task, dataset = open_task(loaded, data, embeddings=True)
        size = task.eval_batch(data.batch_size)
        found: dict[str, Any] = {
            "environment": environment(device=self.device, dtype=dtype, seed=self.seed),
            "model": loaded.name,
            "weights": loaded.weights,
            "model_options": loaded.options,
            "task": task.name,
            "data": data_facts(dataset, data.name(dataset), data.limit, size),
        }
        model = loaded.model if spec.named else copy.deepcopy(loaded.model)
        model = model.to(device=where, dtype=getattr(torch, dtype)).eval()
        methods, limits = fitting(model, self.methods), (data.limit, self.seed, data.workers)
        subject = Subject(model, methods, task, dataset, size, *limits, loaded.learned, self.sizes, self.blocks)
        beyond = next((block for block in self.blocks if not 0 <= block < subject.num_layers), None)
        if beyond is not None:
            raise VitrimError(f"there is no block {beyond} to draw; valid: 0 to {subject.num_layers - 1}")
        probes = [Collect(num_images=found["data"]["images"]), *standard_probes(task), *paired_probes(task)]
        return Pass(subject.measurement(methods, probes), subject, found)


def read_all(passes: Sequence[Pass], on_progress: Callable[[int, int], None] | None) -> None:
    """Run the passes; ``on_progress`` is called after every batch with the images processed and the total."""
    seen, images = 0, sum(one.images for one in passes)
    for one in passes:
        subject = one.subject
        how: dict[str, Any] = {"limit": subject.limit, "workers": subject.workers, "collate": subject.task.collate}
        for batch in read(subject.dataset, subject.batch_size, **how):
            one.measurement.update(batch)
            if on_progress is not None:
                on_progress(seen + one.measurement.images, images)
        seen += one.measurement.images


def complete(passes: Sequence[Pass]) -> bool:
    """True if all images were seen."""
    return all(one.measurement.images == one.images for one in passes)


def subjects(passes: Sequence[Pass]) -> dict[str, Subject]:
    """The subjects of all passes by model name; ``beside`` is set if there are several."""
    return {str(one.found["model"]): replace(one.subject, beside=len(passes) > 1) for one in passes}
