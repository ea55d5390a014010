"""The training loop: any host, any method, any task, on one device or many.

`Trainer` is one run: it checks everything before the first update, trains, evaluates, logs, saves and resumes. Devices,
processes, precision and sharding are those of `accelerate`, started plainly or with ``accelerate launch``.

Everything random in an update follows from (seed, update, process) and everything random in an image from its place in
the epoch, so that a checkpoint needs no generator's state and a resumed run repeats the one that was stopped.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast
from rich.console import Console
from safetensors import SafetensorError
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from vitrim.core.ask import ask
from vitrim.core.config import MethodConfig
from vitrim.core.reduce import REDUCERS_FILE, Reduction, get_reduction, reduce_
from vitrim.core.registry import parse_method
from vitrim.data.fingerprint import fingerprint
from vitrim.data.streaming import ImageStream
from vitrim.errors import VitrimError
from vitrim.files import check_folder, save_file, write_text
from vitrim.tasks import make_task
from vitrim.training import checkpoint
from vitrim.training.checks import (
    check_amounts,
    check_even,
    check_objective,
    check_same,
    number_of_images,
)
from vitrim.training.evaluate import evaluate
from vitrim.training.images import TrainOrder, TrainTransform, geometry_of, seed_all, train_loader, updates_per_epoch
from vitrim.training.lock import only_run
from vitrim.training.log import Bar, Log, writing
from vitrim.training.optim import Rates, make_optimizer, ramp_value, select_trainable
from vitrim.training.recipe import Resolved
from vitrim.training.runs import RECIPE, RESULT
from vitrim.training.schema import PATCH_DROP, Recipe
from vitrim.training.step import MODEL, Distillation, Objective
from vitrim.weights import WEIGHTS_FILE, load_checkpoint, weights_file


@dataclass(frozen=True)
class Running:
    """Options for running a recipe; none of them changes what is learned.

    Attributes:
        out: where everything is written.
        resume: go on from the last checkpoint in ``out``.
        workers: processes that read images, 0 for this one.
        eval_batch: images at once in evaluations, on one device; methods that decide by a batch decide by these.
        save_minutes: time between checkpoints.
        log_every: updates between rows of the log.
        keep: checkpoints that are kept, at least two: one may turn out to be damaged.
        tensorboard: also write TensorBoard's files.
        max_updates: stop after this many updates, as if interrupted; None: at the end.
    """

    out: Path
    resume: bool = False
    workers: int = 0
    eval_batch: int = 64
    save_minutes: float = 10.0
    log_every: int = 10
    keep: int = 2
    tensorboard: bool = False
    max_updates: int | None = None


class Trainer:
    """One training run.

    Args:
        resolved: the recipe.
        model: the host with its starting weights, not reduced; it is given the head of the task, then reduced.
        train_data: map-style; has ``transform``, ``num_classes`` as `vitrim.data.ImageDataset` has. Or an
            `vitrim.data.ImageStream`, of which every process reads all and decodes its share.
        eval_data: map-style, for evaluations, with the model's own transform; or None.
        accelerator: devices and processes.
        running: how it is run.
        console: where progress is shown, or None.
        test_data: map-style, as ``eval_data``: scored once, after the last update; or None.
        start: the file or folder whose weights the model has. If it is the folder of a run under a method that learned
            parameters, a run under a method starts from those, and it must be the same method.

    Raises:
        VitrimError: data that is not of the task, a method that does not fit the model, options that do not fit each
            other, a checkpoint of another recipe. Nothing has been written then.
    """

    def __init__(
        self,
        resolved: Resolved,
        model: nn.Module,
        train_data: Dataset[Any],
        eval_data: Dataset[Any] | None,
        accelerator: Accelerator,
        running: Running,
        console: Console | None = None,
        *,
        start: Path | None = None,
        test_data: Dataset[Any] | None = None,
    ) -> None:
        self.resolved, self.recipe, self.running = resolved, resolved.recipe, running
        check_folder(running.out)
        self.accelerator = accelerator
        self.console = console if accelerator.is_main_process else None
        recipe = self.recipe
        config = parse_method(recipe.method)
        for data in (eval_data, test_data):
            if isinstance(data, ImageStream):
                raise VitrimError(f"{data.source} is a stream: evaluations need images that can be read in any order")
        self.task = make_task(recipe.task, cast(Any, train_data).num_classes)
        for data in (train_data, eval_data, test_data):
            if data is not None:
                self.task.check(data)
        self.criterion = self.task.criterion(recipe.loss)
        self.mixer = self.task.mixer(recipe.mix)
        self.task.fit_head(model)
        cast(Any, train_data).transform = TrainTransform(geometry_of(model), recipe.augment)
        self.train_data, self.eval_data, self.test_data = train_data, eval_data, test_data
        self.images = number_of_images(train_data)
        self.updates_per_epoch = updates_per_epoch(self.images, recipe.batch_size, recipe.augment.repeats)
        self.updates = round((recipe.epochs + recipe.schedule.cooldown_epochs) * self.updates_per_epoch)
        if self.updates < 1:
            raise VitrimError(
                f"epochs={recipe.epochs:g} is less than one update: an epoch has {self.updates_per_epoch}"
            )
        check_even(recipe, self.mixer is not None, accelerator.num_processes)

        teacher = _teacher(model, recipe)
        if teacher is not None:
            teacher.to(accelerator.device)
        model = model.to(accelerator.device)
        self.reduction = _reduced(model, config)
        if self.reduction is not None and start is not None and (start / REDUCERS_FILE).is_file():
            self.reduction.load_parameters(start)
        if recipe.grad_checkpointing:
            ask(model).checkpoint_gradients(model)
        select_trainable(model, recipe.trainable)
        check_amounts(recipe, model, self.reduction)
        check_objective(recipe, config)
        self.model = model
        self.objective = Objective(
            model.train(),
            self.criterion,
            reduction=self.reduction,
            teacher=teacher,
            distillation=_distillation(recipe),
            options=recipe.objective,
        )
        optimizer = make_optimizer(model, recipe)
        self.ema = self._average()
        self.wrapped, self.optimizer = accelerator.prepare(self.objective, optimizer)
        self.rates = Rates(self.optimizer.optimizer, recipe, self.updates_per_epoch)
        self.checkpoints = running.out / "checkpoints"
        self.start = start
        self.seconds_before, self.begun = 0.0, time.monotonic()
        self.update = 0
        self.stopping = False
        self.best: dict[str, Any] | None = None
        self.last_evaluation: dict[str, Any] | None = None
        self.seen = checkpoint.found(self.checkpoints)
        if running.resume:
            self._resume()
        else:
            self._check_new()

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end, evaluate, and write the weights.

        Returns:
            What was reached: the last evaluation, the best one, updates, seconds over all parts of a run that was
            stopped, and the weights it started from.

        Raises:
            KeyboardInterrupt: `request_stop` was called; the run is saved.
            VitrimError: a loss that is not finite, an image that cannot be read, a checkpoint that cannot be written;
                the message names the last good checkpoint. Or another run is at work in ``out``, or was since this
                one looked; nothing is changed then.
        """
        with self._alone():
            return self._run()

    def _run(self) -> dict[str, Any]:
        self.begun = time.monotonic()
        main = self.accelerator.is_main_process
        stop = self.updates if self.running.max_updates is None else min(self.updates, self.running.max_updates)
        log = Log(self.running.out if main else None, from_update=self.update, tensorboard=self.running.tensorboard)
        if main:
            with writing(self.running.out / RECIPE):
                (self.running.out / RECIPE).write_text(recipe_text(self.recipe))
        if self.console is not None:
            self.console.print(
                f"{self.accelerator.num_processes} process(es), {self.accelerator.device}", highlight=False
            )
        bar = Bar(self.console, self.update, self.updates, self.recipe.batch_size)
        try:
            self._train(stop, log, bar)
        finally:
            bar.close()
            log.close()
        result = {
            "updates": self.update,
            "seconds": round(self._seconds(), 1),
            "start": self._facts()["start"],
            "last": self.last_evaluation,
            "best": self.best,
        }
        if self.update == self.updates:
            if self.test_data is not None:
                result["test"] = self._test()
            self._write_weights(result)
        return result

    def _seconds(self) -> float:
        """The time of the run, over all of its parts."""
        return self.seconds_before + time.monotonic() - self.begun

    def request_stop(self) -> None:
        """Save and stop after the current update: in the middle of one, weights and counter would disagree."""
        self.stopping = True

    def dry_run(self) -> dict[str, Any]:
        """Run two updates without writing anything: shapes, parameters, memory, seconds of the second.

        The first also sets up kernels, workers and the optimizer's state, several times what an update takes.
        """
        batches = iter(self._loader(self.update + 2))
        losses = self._step(batches, self.update)
        begun = time.monotonic()
        self._step(batches, self.update)
        seconds = time.monotonic() - begun
        images = self.recipe.batch_size
        memory = torch.cuda.max_memory_allocated() / 2**20 if self.accelerator.device.type == "cuda" else None
        return {
            "losses": losses,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "trained_parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            "train_images": self.images,
            "eval_images": 0 if self.eval_data is None else len(cast(Any, self.eval_data)),
            "test_images": 0 if self.test_data is None else len(cast(Any, self.test_data)),
            "classes": self.task.num_classes,
            "updates_per_epoch": self.updates_per_epoch,
            "updates": self.updates,
            "update_seconds": seconds,
            "images_per_second": images / seconds,
            "hours": self.updates * seconds / 3600,
            "peak_memory_mib": memory,
        }

    def _train(self, stop: int, log: Log, bar: Bar) -> None:
        batches = iter(self._loader(stop))
        saved = time.monotonic()
        window, since = self.update, time.monotonic()
        while self.update < stop:
            losses = self._step(batches, self.update)
            self.update += 1
            epoch = self.update / self.updates_per_epoch
            if self.update % self.running.log_every == 0 or self.update == stop:
                now = time.monotonic()
                speed = (self.update - window) * self.recipe.batch_size / max(now - since, 1e-9)
                window, since = self.update, now
                rates = {f"lr_{index}": group["lr"] for index, group in enumerate(self.optimizer.param_groups)}
                log.update({"update": self.update - 1, "epoch": epoch, **losses, **rates, "images_per_second": speed})
                bar.advance(self.update, epoch, losses["total"], speed)
            if self._evaluates_now():
                self._evaluate(log, bar)
                window, since = self.update, time.monotonic()
            if self._together(time.monotonic() - saved >= 60 * self.running.save_minutes):
                self._save()
                saved = time.monotonic()
            if self._together(self.stopping):
                self._save()
                raise KeyboardInterrupt
        self._save()

    def _together(self, mine: bool) -> bool:
        """Follow the first process's decision: clocks and signals differ, and all must save at once."""
        if self.accelerator.num_processes == 1:
            return mine
        decision = torch.tensor(float(mine), device=self.accelerator.device)
        return bool(broadcast(decision, from_process=0) > 0)

    def _loader(self, stop: int) -> DataLoader[Any]:
        recipe, accelerator = self.recipe, self.accelerator
        data = self.train_data
        shuffle = recipe.augment.shuffle
        if isinstance(data, ImageStream):
            data = data.shuffled(recipe.seed) if shuffle else data
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
        pin = accelerator.device.type == "cuda"
        return train_loader(data, order, seed=recipe.seed, workers=self.running.workers, pin=pin)

    def _step(self, batches: Iterator[Any], update: int) -> dict[str, float]:
        """Make one update and return the mean losses over all its images."""
        recipe, accelerator = self.recipe, self.accelerator
        self.rates.set(update)
        self._set_amounts(update / self.updates_per_epoch)
        self.objective.train()
        share = recipe.batch_size // accelerator.num_processes
        parts = share // (recipe.micro_batch or share)
        sums: dict[str, Tensor] = {}
        for part in range(parts):
            images, targets = self.task.read(next(batches))
            images = images.to(accelerator.device, non_blocking=True)
            targets = targets.to(accelerator.device, non_blocking=True)
            seed_all(recipe.seed, 1, update, accelerator.process_index, part)
            if self.mixer is not None:
                images, targets = self.mixer(images, targets)
            last = part == parts - 1
            with nullcontext() if last else accelerator.no_sync(self.wrapped):
                losses = self.wrapped(images, targets)
                accelerator.backward(losses["total"] / parts)
            for name, loss in losses.items():
                sums[name] = sums.get(name, 0.0) + loss.detach().float().mean() / parts
        means = self._means(sums)
        self._check_finite(means, update)
        if recipe.optimizer.clip is not None:
            accelerator.clip_grad_norm_(self.model.parameters(), recipe.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update(self.model, step=update)
        return means

    def _means(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """The means over all processes, in one exchange."""
        together = torch.stack([torch.as_tensor(value, device=self.accelerator.device) for value in sums.values()])
        reduced = cast(Tensor, self.accelerator.reduce(together, "mean"))
        return dict(zip(sums, reduced.tolist(), strict=True))

    def _check_finite(self, losses: Mapping[str, float], update: int) -> None:
        if math.isfinite(losses["total"]):
            return
        good = checkpoint.latest(self.checkpoints)
        terms = ", ".join(f"{name} {value:g}" for name, value in losses.items())
        raise VitrimError(
            f"the loss is not finite at update {update} ({terms}); try a lower optimizer.lr, optimizer.clip or "
            f"precision=fp32; {'no checkpoint was written' if good is None else f'the last good checkpoint is {good}'}"
        )

    def _set_amounts(self, epoch: float) -> None:
        """Give the method the amounts of this point in time, in the model and in its average."""
        for ramp in self.recipe.ramps:
            value = ramp_value(ramp, epoch)
            if ramp.option == PATCH_DROP:
                cast(Any, ask(self.model).patch_dropout(self.model)).prob = value
            else:
                self._set(ramp.option, value)
        for switch in self.recipe.switches:
            if epoch >= switch.epoch:
                self._set(switch.option, switch.value)

    def _set(self, option: str, value: Any) -> None:
        models = [self.model] if self.ema is None else [self.model, self.ema.module]
        for reduction in map(get_reduction, models):
            if _plain(getattr(reduction.config, option)) != _plain(value):
                reduction.set(**{option: value})

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def _evaluates_now(self) -> bool:
        if self.eval_data is None:
            return False
        if self.update == self.updates:
            return True
        every = self.recipe.eval_every
        return every is not None and self.update % max(round(every * self.updates_per_epoch), 1) == 0

    def _evaluate(self, log: Log, bar: Bar) -> None:
        """Measure on the watched images, and keep the best weights."""
        row = self._scores(cast(Any, self.eval_data))
        self.last_evaluation = row
        if self.best is None or row[self.task.selects_by] > self.best[self.task.selects_by]:
            self.best = row
        log.evaluation(row)
        bar.say(f"evaluation of the {row['weights']}: {_shown(row)}")

    def _test(self) -> dict[str, Any]:
        """Measure once, at the end, on images that influenced no decision."""
        row = self._scores(cast(Any, self.test_data))
        if self.console is not None:
            self.console.print(f"test of the {row['weights']}: {_shown(row)}", highlight=False)
        return row

    def _scores(self, data: Dataset[Any]) -> dict[str, Any]:
        """The metrics of the averaged weights, or of the model if none are averaged, under the current amounts."""
        self._set_amounts(self.update / self.updates_per_epoch)
        model = self.wrapped if self.sharded else self.model if self.ema is None else self.ema.module
        self._share_buffers(model)
        running = self.running
        scores = evaluate(
            model, self.task, data, self.accelerator, batch_size=running.eval_batch, workers=running.workers
        )
        return {
            "update": self.update,
            "epoch": self.update / self.updates_per_epoch,
            "weights": "model" if self.ema is None else "average",
            **scores,
        }

    def _share_buffers(self, model: nn.Module) -> None:
        """Give all processes the first one's running statistics (BatchNorm), the ones that are written."""
        if self.accelerator.num_processes > 1:
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    broadcast(buffer, from_process=0)

    @property
    def sharded(self) -> bool:
        """Tell whether each process has only a part of the parameters (FSDP): then the outermost module must run."""
        return bool(self.accelerator.distributed_type == DistributedType.FSDP)

    # ---- keeping -----------------------------------------------------------------------------------------------------

    def _average(self) -> ModelEmaV3 | None:
        options = self.recipe.ema
        if options is None:
            return None
        if self.sharded:
            raise VitrimError("averaged weights (ema) are not kept of a model that is sharded: set ema=null")
        return ModelEmaV3(self.model, decay=options.decay, use_warmup=options.warmup)

    def _save(self) -> None:
        ema = None if self.ema is None else self.ema.module
        values = {
            "update": self.update,
            **self._facts(),
            "seconds": self._seconds(),
            "best": self.best,
            "last_evaluation": self.last_evaluation,
            "scaler": None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict(),
        }
        snapshot = checkpoint.take(self.wrapped, self.optimizer.optimizer, ema, values)
        if self.accelerator.is_main_process:
            checkpoint.save(self.checkpoints, snapshot, keep=self.running.keep)
        self.accelerator.wait_for_everyone()

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        """Fingerprints of the images that are trained on, watched and tested on."""
        parts = {"train": self.train_data, "eval": self.eval_data, "test": self.test_data}
        return {name: fingerprint(data) for name, data in parts.items() if data is not None}

    def _facts(self) -> dict[str, Any]:
        """The facts that a run continuing this one must share."""
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "data": {"images": self.images, "classes": self.task.num_classes, "fingerprints": self._fingerprints},
            "start": None if self.start is None else str(self.start),
        }

    def _check_new(self) -> None:
        """Refuse a folder that already has a run: checkpoints, damaged or not, or results."""
        out = self.running.out
        if self.seen:
            raise VitrimError(f"{out} has a run already: continue it with --resume, or give another --out")
        if (out / RESULT).exists():
            raise VitrimError(f"{out} has a finished run: give another --out")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Allow one run in a folder at a time: the first process holds the lock, and all learn of the outcome."""
        with ExitStack() as stack:
            refusal = None
            if self.accelerator.is_main_process:
                try:
                    stack.enter_context(only_run(self.running.out))
                    self._check_unchanged()
                except VitrimError as error:
                    refusal = error
            if self._together(refusal is not None):
                raise refusal or VitrimError(f"{self.running.out} is in use by another run")
            yield

    def _check_unchanged(self) -> None:
        """Refuse a folder in which another run has worked since this one checked it."""
        if checkpoint.found(self.checkpoints) != self.seen:
            raise VitrimError(f"another run has just been at work in {self.running.out}: start this one again")
        if not self.running.resume:
            self._check_new()

    def _resume(self) -> None:
        found = {path: checkpoint.damage(path) for path in self.seen}
        path = next((path for path in reversed(self.seen) if found[path] is None), None)
        damaged = [
            f"{other} is damaged ({what})" for other, what in found.items() if what and (not path or other > path)
        ]
        if path is None:
            why = "; ".join(damaged[::-1]) or f"no complete checkpoint in {self.checkpoints}"
            raise VitrimError(f"nothing to resume in {self.running.out}: {why}")
        snapshot = checkpoint.load(path)
        check_same(snapshot.values, self._facts(), path)
        checkpoint.put_back(
            snapshot, self.wrapped, self.optimizer.optimizer, None if self.ema is None else self.ema.module
        )
        if snapshot.values["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(snapshot.values["scaler"])
        self.update = snapshot.values["update"]
        self.seconds_before = snapshot.values["seconds"]
        self.best, self.last_evaluation = snapshot.values["best"], snapshot.values["last_evaluation"]
        for text in (*damaged, f"resumed from {path}"):
            if self.console is not None:
                self.console.print(text, highlight=False)

    def _write_weights(self, result: Mapping[str, Any]) -> None:
        """Write the host's weights, the reduction beside them, and the results. All processes must call it."""
        self._set_amounts(self.update / self.updates_per_epoch)  # a run may be resumed at its very end
        model = self.model if self.ema is None else self.ema.module
        state = checkpoint.weights_of(self.wrapped, MODEL) if self.ema is None else model.state_dict()
        if not self.accelerator.is_main_process:
            return
        out = self.running.out
        host = {name: checkpoint.storable(value) for name, value in state.items() if ".reducer." not in name}
        try:
            save_file(host, out / WEIGHTS_FILE, metadata={"recipe": self.resolved.name})
            if self.reduction is not None:
                get_reduction(model).save(out, state=state)
            write_text(out / RESULT, json.dumps(dict(result), indent=2) + "\n")
        except (OSError, SafetensorError, VitrimError) as error:
            raise VitrimError(
                f"cannot write the weights to {out}: {checkpoint.reason(error)}; they are in "
                f"{checkpoint.latest(self.checkpoints)}: make room and run again with --resume"
            ) from error


# ---- parts -----------------------------------------------------------------------------------------------------------


def recipe_text(recipe: Recipe) -> str:
    """All values of a recipe as YAML, which `load_recipe` reads back."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)


def _teacher(model: nn.Module, recipe: Recipe) -> nn.Module | None:
    """The frozen dense model of a recipe that has one."""
    if recipe.teacher is None:
        return None
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    if recipe.teacher_checkpoint is not None:
        load_checkpoint(teacher, weights_file(Path(recipe.teacher_checkpoint)))
    return teacher


def _reduced(model: nn.Module, config: MethodConfig) -> Reduction | None:
    """The handle of the model, reduced now; a method that does nothing leaves it as it is."""
    return None if config.kind == "none" else reduce_(model, config)


def _distillation(recipe: Recipe) -> Distillation | None:
    options = recipe.distil
    return None if options is None else Distillation(options.kind == "hard", options.alpha, options.tau)


def _shown(row: Mapping[str, Any]) -> str:
    """The numbers of an evaluation in one line."""
    return "  ".join(f"{name} {value:.2f}" for name, value in row.items() if name not in ("update", "weights"))


def _plain(value: Any) -> Any:
    """Turn a config's tuples into YAML's lists."""
    return list(value) if isinstance(value, list | tuple) else value
