"""Accuracy of models as engines compute them, in lower precisions than fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.core.reduce import reduce_
from vitrim.engines.copies import take_learned
from vitrim.engines.engine import Engine, compilation
from vitrim.measure.bench import in_dtype
from vitrim.measure.contestants import Contestant
from vitrim.measure.evaluation import paired_probes, standard_probes
from vitrim.measure.inputs import EMBEDDING, ZERO_SHOT
from vitrim.measure.probes import MacsProbe, Tokens
from vitrim.measure.records import Batch, Row
from vitrim.measure.run import Measurement
from vitrim.report import DENSE
from vitrim.tasks import Task

SCORED_ON_ENGINES = ("classification", "multilabel", EMBEDDING, ZERO_SHOT)
"""Tasks that can be scored on the output of a file."""


def score_on_engines(
    model: nn.Module,
    methods: Mapping[str, MethodConfig],
    engines: Sequence[Engine],
    batches: Callable[[], Iterable[Batch]],
    task: Task,
    *,
    calibration: Tensor | None = None,
    learned: Path | None = None,
    seed: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> list[tuple[Row, Engine]]:
    """Score models on their engines: the task's metrics, and agreement with the dense model in fp32.

    Args:
        model: the dense model; not changed.
        methods: configs by name; those that an engine cannot run are left out.
        engines: each in its precision.
        batches: makes an iterator over the batches.
        task: one of `SCORED_ON_ENGINES`.
        calibration: (N, C, H, W) for int8; None for the first batch.
        learned: folder of a saved reduction, whose parameters the methods of that name load.

    Returns:
        A row per model and engine, engine by engine, the dense model first.
    """
    first = next(iter(batches())).images
    size = len(first)
    exact = Contestant(in_dtype(model, torch.float32), task)
    found: list[tuple[Contestant, Engine]] = []
    with TemporaryDirectory() as folder, compilation(any(engine.compiled for engine in engines)):
        for engine in engines:
            for number, config in enumerate((None, *methods.values())):
                # engines run most adaptive methods one image at a time, whatever the size of the batches read
                at = size if config is None or engine.obstacle(config, size) is None else 1
                if config is not None and engine.obstacle(config, at) is not None:
                    continue
                copied = in_dtype(model, engine.dtype)
                if config is not None:
                    take_learned(reduce_(copied, config), learned)
                place = Path(folder) / f"{number}-{engine.dtype}"
                place.mkdir(exist_ok=True)
                runnable = engine.prepare(copied, first[:at], place, calibration)
                name = DENSE if config is None else config.describe()
                found.append((Contestant(runnable, task, name=name), engine))
        models = [exact, *(one for one, _ in found)]
        probes = [one for one in standard_probes(task) if not isinstance(one, MacsProbe | Tokens)]  # in the fp32 rows
        measurement = Measurement(models, [*probes, *paired_probes(task)], task, seed=seed)
        measurement.follow(batches(), on_progress)
        left_out = () if task.embeds else ("cosine",)  # needs the head's input, which engines do not return
    return [
        (Row(row.method, {key: row[key] for key in row if key not in left_out}), engine)
        for row, (_, engine) in zip(measurement.rows()[1:], found, strict=True)
    ]
