"""The training loop: any host, any method, any task, on one device or many.

Random draws of an update follow from (seed, update, process), and those of an image from its position in the epoch. So
a checkpoint needs no generator states, and a resumed run repeats the interrupted one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

from vitrim.data.fingerprint import fingerprint
from vitrim.data.readers import AnyDataset
from vitrim.data.streaming import ImageStream
from vitrim.data.transforms import Geometry, geometry_of
from vitrim.errors import VitrimError
from vitrim.files import write_text
from vitrim.measure.contestants import Contestant
from vitrim.measure.probes import TaskMetrics
from vitrim.measure.records import Processes, read
from vitrim.measure.run import Measurement
from vitrim.models.references import source_of
from vitrim.progress import Signs
from vitrim.tasks import make_task
from vitrim.tasks.base import Task
from vitrim.training import checkpoint
from vitrim.training.checks import beyond, check_data, check_same
from vitrim.training.images import Seeded, TrainOrder, TrainTransform, updates_per_epoch
from vitrim.training.learner import Learner
from vitrim.training.log import Log, start_trackers
from vitrim.training.optim import updates_of
from vitrim.training.recipe import Recipe, Resolved, recipe_text
from vitrim.training.run_folder import RunFolder, together
from vitrim.training.running import Running
from vitrim.weights import RECIPE


class Trainer:
    """One training run. Everything is checked here, before anything is written.

    Args:
        model: unreduced host with its starting weights; gets the head of the task and is then reduced.
        train_data: a data set of `vitrim.data`, or a stream, which every process reads in full, decoding only its
            share.
        eval_data: for evaluations, with the model's own transform; or None.
        test_data: like ``eval_data``: scored once, after the last update; or None.
        start: file or folder of the model's weights. Of the folder of a run, the parameters that its method learned are
            loaded, too.
        notes: notes on the data, before those on parts of the recipe that do not fit in the run.
    """

    def __init__(
        self,
        resolved: Resolved,
        model: nn.Module,
        train_data: AnyDataset | ImageStream,
        eval_data: AnyDataset | None,
        accelerator: Accelerator,
        running: Running,
        signs: Signs | None = None,
        *,
        start: Path | None = None,
        test_data: AnyDataset | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.resolved, self.recipe, self.running = resolved, resolved.recipe, running
        self.accelerator, self.start = accelerator, start
        self.signs = signs if accelerator.is_main_process else None
        self.folder = RunFolder(running.out, resume=running.resume)
        self.train_data, self.eval_data, self.test_data = train_data, eval_data, test_data
        recipe = self.recipe

        self.task = make_task(recipe.task, train_data.num_classes)
        self.task.follow(recipe.protocol)
        check_data(self.task, train_data, eval_data, test_data)

        # the length of the run, which learning rates depend on
        self.images = count_images(train_data)
        self.updates_per_epoch = updates_per_epoch(self.images, recipe.batch_size, recipe.augment.repeats)
        self.updates_per_unit = recipe.updates_per_unit(self.updates_per_epoch)
        self.updates = updates_of(recipe, self.updates_per_unit)
        if self.updates < 1:
            raise VitrimError(
                f"epochs={recipe.epochs:g} is less than one update: an epoch has {self.updates_per_epoch}"
            )

        set_transforms(self.task, geometry_of(model), recipe, train_data, eval_data, test_data)
        self.learner = Learner(recipe, model, self.task, accelerator, self.updates_per_unit, start)
        self.notes = [*notes, *beyond(recipe, self.updates)]
        for text in self.notes:
            self._say(f"note: {text}")
        self.begun, self.seconds_before = time.monotonic(), 0.0
        self.update = 0
        self.stopping = False
        self.best: dict[str, Any] | None = None
        self.last_evaluation: dict[str, Any] | None = None
        if running.resume:
            self._resume()
        else:
            self.folder.check_new()

    def _say(self, text: str) -> None:
        if self.signs is not None:
            self.signs.say(text)

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end, evaluate, and write the weights.

        Returns:
            The last evaluation, the best one, updates, seconds over all parts of an interrupted run, and the source of
                the starting weights.

        Raises:
            KeyboardInterrupt: after `request_stop`; the run is saved.
            VitrimError: a loss that is not finite, an image that cannot be read, a checkpoint that cannot be written;
                the message names the last good checkpoint. Or another run uses ``out``; nothing is changed then.
        """
        with self.folder.alone(self.accelerator):
            # Seconds of earlier parts count, as if the run had begun that much earlier.
            self.begun = time.monotonic() - self.seconds_before
            most = self.running.max_updates
            log = Log(self.running.out if self.accelerator.is_main_process else None, from_update=self.update)
            with closing(log):
                if self.accelerator.is_main_process:
                    values = {name: value for name, value, _ in self.resolved.rows()}
                    write_text(self.running.out / RECIPE, recipe_text(self.recipe))
                    log.trackers = start_trackers(
                        self.running.trackers, self.running.out, from_update=self.update, values=values
                    )
                self._say(f"{self.accelerator.num_processes} process(es), {self.accelerator.device}")
                self._train(self.updates if most is None else min(self.updates, most), log)
            result = {
                "updates": self.update,
                "seconds": round(time.monotonic() - self.begun, 1),
                "start": self._facts["start"],
                "trained_on": source_of(self.train_data),
                "last": self.last_evaluation,
                "best": self.best,
            }
            if self.update == self.updates:
                if self.test_data is not None:
                    result["test"] = self._scores(self.test_data, by_class=True)  # influences no decision
                    self._say(f"test of the {result['test']['weights']}: {_shown(result['test'])}")
                # Ramps end with the run: the saved method has their last amounts.
                self.learner.set_amounts(self.update)  # necessary after resuming a run at its end
                self.folder.write(self.learner, self.resolved.name, result, self.train_data.class_names)
            return result

    def _train(self, stop: int, log: Log) -> None:
        """Update up to ``stop``, with logs, evaluations and checkpoints when they are due."""
        running, recipe, task = self.running, self.recipe, self.task
        every = None if recipe.eval_every is None else max(round(recipe.eval_every * self.updates_per_unit), 1)
        batches = iter(self._loader(stop))
        total = math.ceil(self.updates / self.updates_per_epoch)  # epochs, the last of which may be a part
        if self.signs is not None:
            self.signs.tell(f"update {self.update + 1} of {self.updates}, reading its images")
        saved = since = time.monotonic()
        logged = self.update
        while self.update < stop:
            losses = self._step(batches, self.update)
            self.update += 1
            epoch = self.update / self.updates_per_epoch
            if self.signs is not None:  # after every update: one of a large model may take a minute
                more = f", epoch {min(math.ceil(epoch), total)}/{total}, loss {losses['total']:.4f}"
                self.signs.move(self.update, self.updates, more=more)

            # losses of the update, and the speed since the last row
            if self.update % running.log_every == 0 or self.update == stop:
                now = time.monotonic()
                speed = (self.update - logged) * recipe.batch_size / max(now - since, 1e-9)
                logged, since = self.update, now
                rates = {f"lr_{index}": group["lr"] for index, group in enumerate(self.learner.optimizer.param_groups)}
                log.update({"update": self.update - 1, "epoch": epoch, **losses, **rates, "images_per_second": speed})

            # evaluate, and record the best scores; the written weights are still the last
            due = self.update == self.updates or (every is not None and self.update % every == 0)
            if self.eval_data is not None and due:
                if self.signs is not None:
                    self.signs.tell(f"evaluating {len(self.eval_data)} images after update {self.update}")
                row = self.last_evaluation = self._scores(self.eval_data)
                # a score may be nan, e.g. for a detector without detections: any number is better
                best = math.nan if self.best is None else self.best[task.selects_by]
                if self.best is None or math.isnan(best) or row[task.selects_by] > best:
                    self.best = row
                log.evaluation(row)
                self._say(f"evaluation of the {row['weights']}: {_shown(row)}")
                logged, since = self.update, time.monotonic()

            # save regularly, and before a requested stop
            # A decision of the first process's clock: all take part in saving, or it would wait for ever.
            if together(self.accelerator, time.monotonic() - saved >= 60 * running.save_minutes):
                self._save()
                saved = time.monotonic()
            if together(self.accelerator, self.stopping):
                self._save()
                raise KeyboardInterrupt
        self._save()

    def request_stop(self) -> None:
        """Save and stop after the current update; within an update, weights and counter would disagree."""
        self.stopping = True

    def dry_run(self) -> dict[str, Any]:
        """Run two updates without writing anything: shapes, parameters, memory, and the time of the second."""
        batches = iter(self._loader(self.update + 2))
        # The first also sets up kernels, workers and the optimiser's state, which takes several times longer.
        losses = self._step(batches, self.update)
        begun = time.monotonic()
        self._step(batches, self.update)
        seconds = time.monotonic() - begun
        images = self.recipe.batch_size
        memory = torch.cuda.max_memory_allocated() / 2**20 if self.accelerator.device.type == "cuda" else None
        return {
            "losses": losses,
            "parameters": sum(p.numel() for p in self.learner.model.parameters()),
            "trained_parameters": sum(p.numel() for p in self.learner.model.parameters() if p.requires_grad),
            "train_images": self.images,
            "eval_images": 0 if self.eval_data is None else len(self.eval_data),
            "test_images": 0 if self.test_data is None else len(self.test_data),
            "classes": self.task.num_classes,
            "updates_per_epoch": self.updates_per_epoch,
            "updates": self.updates,
            "update_seconds": seconds,
            "images_per_second": images / seconds,
            "hours": self.updates * seconds / 3600,
            "peak_memory_mib": memory,
        }

    def _loader(self, stop: int) -> DataLoader[Any]:
        """Micro-batches of images (B, C, H, W) and targets, from this update to ``stop``."""
        recipe, accelerator = self.recipe, self.accelerator
        data, shuffle = self.train_data, recipe.augment.shuffle
        if isinstance(data, ImageStream) and shuffle:
            data = data.shuffled(recipe.seed)
        order = TrainOrder(
            self.images,
            data.encoded if isinstance(data, ImageStream) else None,
            batch_size=recipe.batch_size,
            start=self.update,
            stop=stop,
            micro_batch=recipe.micro_batch,
            seed=recipe.seed,
            repeats=recipe.augment.repeats,
            shuffle=shuffle,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
        )
        return DataLoader(
            Seeded(data, recipe.seed),
            batch_sampler=cast(Any, order),
            num_workers=self.running.workers,
            # a separate generator, because the loader would draw a seed from the global one
            generator=torch.Generator().manual_seed(recipe.seed),
            pin_memory=accelerator.device.type == "cuda",
            collate_fn=self.task.collate,
        )

    def _step(self, batches: Iterator[Any], update: int) -> dict[str, float]:
        """Make one update; return the mean losses over all its images."""
        losses = self.learner.backward(batches, update)
        # before the parameters change: a checkpoint never holds what a loss of nan made
        if not math.isfinite(losses["total"]):
            good = checkpoint.latest(self.folder.checkpoints)
            left = "no checkpoint was written" if good is None else f"the last good checkpoint is {good}"
            terms = ", ".join(f"{name} {value:g}" for name, value in losses.items())
            raise VitrimError(
                f"the loss is not finite at update {update} ({terms}); try a lower optimizer.lr, optimizer.clip or "
                f"precision=fp32; {left}"
            )
        self.learner.apply(update)
        return losses

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def _scores(self, data: Dataset[Any], *, by_class: bool = False) -> dict[str, Any]:
        """The metrics of the average, or of the model without one, with the current amounts."""
        size, workers = self.running.eval_batch, self.running.workers
        model = self.learner.evaluated(self.update)
        return {
            "update": self.update,
            "epoch": self.update / self.updates_per_epoch,
            "weights": "model" if self.learner.ema is None else "average",
            **evaluate(model, self.task, data, self.accelerator, batch_size=size, workers=workers, by_class=by_class),
        }

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """The facts that must not change when the run is resumed."""
        parts = {"train": self.train_data, "eval": self.eval_data, "test": self.test_data}
        marks = {name: fingerprint(data) for name, data in parts.items() if data is not None}
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "data": {"images": self.images, "classes": self.task.num_classes, "fingerprints": marks},
            "start": None if self.start is None else str(self.start),
        }

    def _save(self) -> None:
        values = {
            "update": self.update,
            **self._facts,
            "seconds": time.monotonic() - self.begun,
            "best": self.best,
            "last_evaluation": self.last_evaluation,
        }
        snapshot = checkpoint.take(self.learner, values)
        if self.accelerator.is_main_process:
            checkpoint.save(self.folder.checkpoints, snapshot, keep=self.running.keep)
        self.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        path, damaged = self.folder.newest()
        snapshot = checkpoint.load(path)
        check_same(snapshot.values, self._facts, path)
        checkpoint.put_back(snapshot, self.learner)
        self.update = snapshot.values["update"]
        self.seconds_before = snapshot.values["seconds"]
        self.best, self.last_evaluation = snapshot.values["best"], snapshot.values["last_evaluation"]
        for text in (*damaged, f"resumed from {path}"):
            self._say(text)


def count_images(train_data: AnyDataset | ImageStream) -> int:
    """The number of images to train on; `VitrimError` for a stream that does not know it."""
    images = train_data.length if isinstance(train_data, ImageStream) else len(train_data)
    if images is None:
        source = train_data.source
        raise VitrimError(f"{source} does not say how many images it has: it cannot be trained on as a stream")
    return images


def set_transforms(
    task: Task, geometry: Geometry, recipe: Recipe, train_data: AnyDataset | ImageStream, *watched: AnyDataset | None
) -> None:
    """Give data sets the transforms of the task; without one for evaluations, images keep their own."""
    own = task.train_transform(geometry, recipe.dense_augment)
    train_data.transform = own or TrainTransform(geometry, recipe.augment)
    evaluation = task.eval_transform(geometry)
    for data in watched:
        if data is not None and evaluation is not None:
            data.transform = evaluation


def _shown(row: Mapping[str, Any]) -> str:
    return "  ".join(
        f"{name} {value:.2f}" for name, value in row.items() if name not in ("update", "weights", "classes")
    )


def evaluate(
    model: nn.Module,
    task: Task,
    data: Dataset[Any],
    accelerator: Accelerator,
    *,
    batch_size: int = 64,
    workers: int = 0,
    by_class: bool = False,
) -> dict[str, Any]:
    """The task's metrics of a model on a dataset, in percent, over the images of all processes.

    With ``by_class``, scores by class are added under ``classes``, if the task has them.
    """
    training = model.training
    processes = Processes(accelerator.process_index, accelerator.num_processes)
    measurement = Measurement(
        [Contestant(model, task)], [TaskMetrics(task)], task, processes=processes, precision=accelerator.autocast
    )
    size, collate = task.eval_batch(batch_size), task.collate
    measurement.follow(read(data, size, workers=workers, processes=processes, collate=collate))
    model.train(training)
    findings = measurement.findings()
    (row,) = findings.rows
    scores = {name: 100 * value for name, value in row.items() if name not in ("method", "images")}
    (classes,) = findings.classes(data, task.num_classes) if by_class else ({},)
    if not classes:
        return scores
    percent = {
        score: {name: None if value is None else 100 * value for name, value in values.items()}
        for score, values in classes.items()
    }
    return {**scores, "classes": percent}
