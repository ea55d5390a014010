"""``vitrim tune --check``: dense, constant and searched settings on images that the search did not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrim.cli import common
from vitrim.cli.measuring import task_and_data
from vitrim.cli.setup import Data, Model, Record

if TYPE_CHECKING:
    from torch import nn

    from vitrim.measure.records import Row
    from vitrim.tasks import Task
    from vitrim.tuning import Result

FILE = "check.json"
"""The file of the rows, beside the results."""


@dataclass(frozen=True)
class HeldOut:
    """Images to score what a search returns on.

    Attributes:
        task: of the model.
        dataset: the images, with their labels.
        source: where they come from.
        same: whether the search read them too.
    """

    task: Task
    dataset: Any
    source: str
    same: bool

    @classmethod
    def open(cls, text: str, dense: nn.Module, model: Model, data: Data, searched: Any) -> HeldOut:
        """Open ``SOURCE`` or ``SOURCE:SPLIT``; ``data`` says how the labels are read, ``searched`` what was read."""
        source, _, split = text.rpartition(":")
        if not source or "/" in split or "\\" in split:  # the colon of a path, or none
            source, split = text, ""
        task, dataset = task_and_data(dense, model, dataclasses.replace(data, source=source, split=split or None), None)
        same = Path(source).resolve() == Path(data.source).resolve() and dataset.split == searched.split
        return cls(task, dataset, text, same)

    def score(self, dense: nn.Module, results: Sequence[Result], batch_size: int, workers: int, seed: int) -> list[Row]:
        """A row for the dense model, and one for the constant and the searched setting of every result."""
        from vitrim.measure.evaluation import standard_probes
        from vitrim.measure.records import read
        from vitrim.measure.run import run

        trials = [trial for result in results for trial in (result.outcome.constant, result.outcome.searched)]
        configs = list({trial.config.describe(): trial.config for trial in trials}.values())
        size = self.task.eval_batch(batch_size)
        batches = read(self.dataset, size, workers=workers, collate=self.task.collate)
        return run(dense, configs, batches, standard_probes(self.task), task=self.task, seed=seed)

    def show(self, rows: Sequence[Row], results: Sequence[Result], out: Path, record: Record) -> None:
        """Print the rows, say which are returned, and write them to ``out``."""
        from rich.markup import escape

        returned = {result.config.describe() for result in results}
        names = [name for name, value in rows[0].items() if isinstance(value, float) and "gmacs" not in name]
        cells = [
            [escape(row.method), "yes" if row.method in returned else "", *(f"{100 * row[name]:.2f}" for name in names)]
            for row in rows
        ]
        console = record.console()
        common.print_table(console, "", ["method", "returned", *names], cells, text_columns=2)
        notes = [f"in %, on {rows[0]['images']} images of {self.source}"]
        if self.same:
            notes.append("the search read images of the same split: these numbers are optimistic")
        for note in notes:
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        common.write_json(
            str(out / FILE), {"images": self.source, "same": self.same, "rows": [dict(row) for row in rows]}
        )
