"""Checks before a run begins: each raises a one-line `VitrimError` before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from vitrim.core.method import MethodConfig
from vitrim.core.reduce import Reduction
from vitrim.core.registry import ask, host_of
from vitrim.data.streaming import ImageStream
from vitrim.errors import VitrimError
from vitrim.tasks.base import Task
from vitrim.training.objectives import learned
from vitrim.training.optim import ramp_value
from vitrim.training.recipe import PATCH_DROP, Recipe

MAY_CHANGE = ("eval_every", "notes", "paper", "dataset")
"""Recipe keys that may change when a run is resumed, because they do not affect its numbers."""


def check_model(task: Task, model: nn.Module, config: MethodConfig) -> None:
    """Refuse a model of another task, one that cannot be trained here, crops that split a patch, and a number of
    queries that does not match the targets.
    """
    own = ask(model)
    made_for = own.tasks(model)[0] if own.tasks(model) else ("classification" if task.reads is not None else task.name)
    if made_for != task.name:
        raise VitrimError(f"task {task.name} needs {task.learned_by}; this {type(model).__name__} is for {made_for}")
    if not own.learns:
        kind = type(model).__name__
        raise VitrimError(f"{kind} is trained by its own library; `vitrim eval` evaluates it, dense and reduced")
    size = own.preprocessing(model).size
    if task.reads is not None and size is not None:
        height, width = own.layout(model).patch_size
        if size[0] % height or size[1] % width:  # the library would drop the patch, and the map would not fit
            raise VitrimError(
                f"a training crop of {size[0]} x {size[1]} pixels is no multiple of the patches of {height} x {width}: "
                "give the model another size of images"
            )
    queries = getattr(config, "num_queries", None)
    if queries is not None:
        rows, columns = host_of(model).facts(model).grid_size
        needed = rows * columns if task.query_per_patch else 1
        if queries != needed:
            reason = "one per patch of a training image" if needed > 1 else "one for the whole image"
            raise VitrimError(f"{config.name}: task {task.name} needs num_queries={needed}, {reason}, not {queries}")


def check_sharded(task: Task, recipe: Recipe) -> None:
    """Refuse what a model of which each process has only a part cannot do."""
    if task.reads in ("detection", "instances"):
        raise VitrimError(f"task {task.name} cannot be evaluated on a model that is sharded: train it with DDP")
    if recipe.ema is not None:
        raise VitrimError("averaged weights (ema) are not kept of a model that is sharded: set ema=null")


def check_objective(recipe: Recipe, config: MethodConfig) -> None:
    """Refuse options that the loss of the method does not have."""
    valid = learned(config).options
    for name in recipe.objective:
        if name not in valid:
            can = ", ".join(valid) or "none"
            raise VitrimError(f"objective: the loss of {config.name} has no option '{name}'; it has: {can}")


def check_data(task: Task, train: Any, *others: Any) -> None:
    """Refuse data of another task, streams for evaluations, and other classes than the training data's."""
    for data in others:
        if isinstance(data, ImageStream):
            raise VitrimError(f"{data.source} is a stream: evaluations need images that can be read in any order")
    for data in (train, *others):
        if data is not None:
            task.check(data)
    check_classes(train, *others)


def check_classes(train: Any, *others: Any) -> None:
    """Refuse data whose class names differ from the training data's, or come in another order.

    Text labels are numbered by the classes of their split, so they could silently mean other classes.
    """
    names = getattr(train, "class_names", None)
    for data in others:
        # Pairs in order: names that are the same set in another order would shift labels silently.
        theirs = getattr(data, "class_names", None)
        if names is not None and theirs is not None and list(theirs) != list(names):
            place = next((n for n, pair in enumerate(zip(names, theirs, strict=False)) if pair[0] != pair[1]), None)
            place = min(len(names), len(theirs)) if place is None else place
            one, other = (f"'{each[place]}'" if place < len(each) else "none" for each in (list(theirs), list(names)))
            raise VitrimError(
                f"{data.source} ({data.split}) has other classes than the training data: class {place} is {one} there "
                f"and {other} here; give labels as numbers, or the same names in all splits"
            )


def beyond(recipe: Recipe, updates: int) -> Iterator[str]:
    """Yield warnings about parts of a recipe that do not fit in a run of ``updates`` updates."""
    schedule, ema, epochs = recipe.schedule, recipe.ema, recipe.epochs
    if schedule.warmup_epochs >= epochs:
        yield (
            f"the warm-up of {schedule.warmup_epochs:g} epochs does not end in a run of {epochs:g}, and no update has "
            f"the full learning rate: for a short run set schedule.warmup_epochs={epochs / 10:g}"
        )
    if ema is not None and not ema.warmup and ema.decay**updates > 0.5:
        yield (
            f"the average with decay {ema.decay:g} keeps {ema.decay**updates:.0%} of the weights that it starts from "
            f"after {updates} updates: for a short run set ema.warmup=true, and its decay starts small"
        )
    if 0 < recipe.optimizer.freeze_epochs >= epochs:
        yield f"the backbone is frozen for the whole run: optimizer.freeze_epochs is {recipe.optimizer.freeze_epochs:g}"
    for ramp in recipe.ramps:
        if ramp.end_epoch > epochs + schedule.cooldown_epochs:
            last = ramp_value(ramp, epochs + schedule.cooldown_epochs)
            yield f"the ramp of {ramp.option} ends at epoch {ramp.end_epoch:g}, after the run, which comes to {last:g}"
    for switch in recipe.switches:
        if switch.epoch > epochs + schedule.cooldown_epochs:
            yield f"the switch of {switch.option} is at epoch {switch.epoch:g}, after the run"


def check_amounts(recipe: Recipe, model: nn.Module, reduction: Reduction | None) -> None:
    """Check amounts of later epochs now, instead of failing after days."""
    coming: list[tuple[str, Any]] = []
    for ramp in recipe.ramps:
        # Ends may be whole numbers by luck, so a value in between is tried, too.
        between = ramp.begin_epoch + (ramp.end_epoch - ramp.begin_epoch) / 3.7  # where the value is rarely an integer
        epochs = (ramp.begin_epoch, ramp.end_epoch, between)
        coming += [(ramp.option, ramp_value(ramp, epoch)) for epoch in epochs]
    coming += [(switch.option, switch.value) for switch in recipe.switches]
    for option, value in coming:
        if option == PATCH_DROP:
            if ask(model).patch_dropout(model) is None:
                raise VitrimError("a ramp of patch_drop needs model_options.patch_drop_rate above 0")
            if not 0 <= value < 1:
                raise VitrimError(
                    f"a ramp of patch_drop goes to {value:g}; shares of patches are at least 0 and below 1"
                )
        elif reduction is None:
            raise VitrimError(f"none cannot change '{option}' at run time; it can: nothing")
        else:
            reduction.config_with(**{option: value})


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Refuse to resume a run with another recipe, data or start; ``before`` are the facts in the checkpoint."""
    fault = next(_differences(before, now), None)
    if fault is not None:
        raise VitrimError(f"{path} is of {fault}")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """The differences between the run of a checkpoint and this one, in words."""
    keys = [key for key in now["recipe"] if key not in MAY_CHANGE and before["recipe"].get(key) != now["recipe"][key]]
    if keys:
        yield f"another recipe, which differs in {', '.join(keys)}: resume with the values in recipe.yaml"
    then, today = (f"{each['data']['images']} images of {each['data']['classes']} classes" for each in (before, now))
    if then != today:
        yield f"other data: {then}, and this has {today}"
    marks, words = before["data"]["fingerprints"], {"train": "to train on", "eval": "to watch", "test": "to test on"}
    other = [words[name] for name, mark in marks.items() if now["data"]["fingerprints"].get(name) != mark]
    if other:
        yield f"other data: as many images, but those {' and '.join(other)} have other names, sizes, labels or contents"
    if before["start"] != now["start"]:
        then, today = (
            f"the weights of {each['start']}" if each["start"] else "the recipe's own weights" for each in (before, now)
        )
        yield f"a run that began from {then}, not from {today}"
