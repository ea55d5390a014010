"""The learning part of a run: a model under a method, its loss, optimiser, average and amounts; it knows no files."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast
from timm.data import Mixup
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.core.reduce import Reduction, handle_of, reduce_
from vitrim.core.registry import ask, find_host, parse_method
from vitrim.core.saving import REDUCERS_FILE
from vitrim.errors import VitrimError
from vitrim.tasks.base import Task
from vitrim.tasks.step import Criterion, Step
from vitrim.training.checks import check_amounts, check_model, check_objective, check_sharded
from vitrim.training.images import seed_all
from vitrim.training.objectives import losses
from vitrim.training.optim import Rates, make_optimizer, ramp_value, select_trainable
from vitrim.training.recipe import PATCH_DROP, Distil, Recipe
from vitrim.weights import load_checkpoint, weights_file

MODEL = "model."
"""Prefix of the model's parameter names in an `Objective`."""


def distilled(distil: Distil, criterion: Criterion, teacher_logits: Tensor) -> Criterion:
    """The criterion with distillation from a teacher's logits (B, K) of this batch (DeiT).

    loss = (1 - alpha) * criterion + alpha * D, where D is cross entropy with the teacher's prediction for kind "hard",
    and otherwise tau^2 KL(teacher || student) of the logits divided by tau, mean over images.
    """

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        if distil.kind == "hard":
            taught = F.cross_entropy(logits, teacher_logits.argmax(dim=1))
        else:
            student = F.log_softmax(logits / distil.tau, dim=1)
            teacher = F.log_softmax(teacher_logits / distil.tau, dim=1)
            # tau squared keeps the gradient's size as the temperature grows (Hinton et al.).
            taught = F.kl_div(student, teacher, reduction="batchmean", log_target=True) * distil.tau**2
        return (1 - distil.alpha) * criterion(logits, targets) + distil.alpha * taught

    return loss


class Objective(nn.Module):
    """A model and its loss in one module, so that wrappers (DDP, FSDP) see all parameters in use.

    Args:
        auxiliary: loss of auxiliary heads; None for ``criterion``.
        teacher: a frozen model; not registered as a submodule, so it is not wrapped, averaged or saved.
        distil: options of distillation from the teacher, which is needed then, or None.
        options: options of the method's loss, see `vitrim.training.objectives`.

    Example:
        >>> import timm
        >>> objective = Objective(timm.create_model("test_vit", num_classes=10), F.cross_entropy)
        >>> sorted(objective(torch.zeros(2, 3, 160, 160), torch.tensor([1, 2])))
        ['total']
    """

    teacher: nn.Module | None

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        *,
        auxiliary: Criterion | None = None,
        reduction: Reduction | None = None,
        teacher: nn.Module | None = None,
        distil: Distil | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion
        self.auxiliary = auxiliary
        self.reduction = reduction
        self.distil = distil
        self.options = dict(options or {})
        self.__dict__["teacher"] = teacher  # an assignment would register it

    @property
    def _no_split_modules(self) -> list[str]:
        """Classes of modules that `accelerate` must not split: the model's blocks, whose class a reduction changes."""
        host = find_host(self.model)
        return [] if host is None else sorted({type(block).__name__ for block in host.blocks(self.model)})

    def forward(self, images: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        """The losses of images (B, C, H, W) and targets by name, scalars; "total" is to be minimised.

        Without targets, only "logits" (B, K), because a sharded model must be evaluated through this module.
        """
        # FSDP gathers parameters in the forward of the outermost module alone: evaluations go through it, too.
        if targets is None:
            return {"logits": ask(self.model).logits(self.model(images))}
        criterion = self.criterion
        if self.distil is not None and self.teacher is not None:
            with torch.no_grad():
                teacher_logits = ask(self.teacher).logits(self.teacher(images))
            criterion = distilled(self.distil, criterion, teacher_logits)
        step = Step(self.model, self.reduction, images, targets, criterion, self.teacher, self.auxiliary)
        return losses(step, **self.options)


def make_mixer(task: Task, recipe: Recipe, num_processes: int) -> Mixup | None:
    """timm's mixing of a recipe; `VitrimError` for an odd number of images at once."""
    mixer = task.mixer(recipe.mix)
    at_once = recipe.micro_batch or recipe.batch_size // num_processes
    if mixer is not None and at_once % 2:  # timm mixes pairs from both ends of the batch
        raise VitrimError(f"mixing needs an even number of images at once, not {at_once}")
    return mixer


def dense_teacher(model: nn.Module, checkpoint: str | None, accelerator: Accelerator) -> nn.Module:
    """A frozen copy of the model, before it is reduced, with the weights of a file if there is one."""
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    if checkpoint is not None:
        load_checkpoint(teacher, weights_file(Path(checkpoint)))
    return teacher.to(accelerator.device)


def reduce_from(model: nn.Module, config: MethodConfig, start: Path | None) -> Reduction:
    """Reduce a model, and give its method the parameters that a run in the folder ``start`` learned."""
    reduction = reduce_(model, config)
    if start is not None and (start / REDUCERS_FILE).is_file():
        reduction.load_parameters(start)
    return reduction


class Learner:
    """A model that learns by a recipe, in all processes of a run.

    Args:
        model: host with its starting weights; gets the head of the task, moves to the device, and is then reduced.
        updates_per_unit: updates in one unit of the recipe's times (`Recipe.updates_per_unit`).

    Attributes:
        ema: moving average of the model, or None; ``average`` is the model with its weights.
        learned: the model to evaluate and write: the average if there is one.
        sharded: each process has only a part of the parameters (FSDP), so the outermost module must run.
        objective: model and loss in one module; ``wrapped`` is its wrapper for several processes.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        task: Task,
        accelerator: Accelerator,
        updates_per_unit: int,
        start: Path | None = None,
    ) -> None:
        self.recipe, self.task, self.accelerator = recipe, task, accelerator
        self.updates_per_unit = updates_per_unit
        self.sharded = accelerator.distributed_type == DistributedType.FSDP

        # refuse what does not fit before the model is changed
        config = parse_method(recipe.method)
        if self.sharded:
            check_sharded(task, recipe)
        check_model(task, model, config)
        check_objective(recipe, config)
        criterion = task.criterion(recipe.loss)
        self.mixer = make_mixer(task, recipe, accelerator.num_processes)

        # the task's head, then a frozen dense copy as the teacher, then the method
        task.fit_head(model)
        teacher = None if recipe.teacher is None else dense_teacher(model, recipe.teacher_checkpoint, accelerator)
        self.model = model.to(accelerator.device)
        self.reduction = None if config.kind == "none" else reduce_from(self.model, config, start)
        if recipe.grad_checkpointing:
            ask(self.model).checkpoint_gradients(self.model)

        # trainable parameters and the loss
        select_trainable(self.model, recipe.trainable)
        check_amounts(recipe, self.model, self.reduction)
        self.objective = Objective(
            self.model.train(),
            criterion,
            auxiliary=task.auxiliary(recipe.loss),
            reduction=self.reduction,
            teacher=teacher,
            distil=recipe.distil,
            options=recipe.objective,
        )

        # the optimiser, the average, and the wrapper
        optimizer = make_optimizer(self.model, recipe)
        self.ema: ModelEmaV3 | None = None
        if recipe.ema is not None:
            self.ema = ModelEmaV3(self.model, decay=recipe.ema.decay, use_warmup=recipe.ema.warmup)
        self.average = None if self.ema is None else cast(nn.Module, self.ema.module)
        self.learned = self.model if self.average is None else self.average
        if accelerator.ddp_handler is not None:
            # look for parameters that the task does not use; impossible with gradient checkpointing
            look = ask(self.model).has_idle_parameters(self.model) and not recipe.grad_checkpointing
            accelerator.ddp_handler.find_unused_parameters = look
        self.wrapped, self.optimizer = accelerator.prepare(self.objective, optimizer)
        self.rates = Rates(self.optimizer.optimizer, recipe, updates_per_unit)

    # ---- updates -----------------------------------------------------------------------------------------------------

    def backward(self, batches: Iterator[Any], update: int) -> dict[str, float]:
        """Accumulate the gradients of an update; return the mean losses over all its images."""
        recipe, accelerator = self.recipe, self.accelerator
        self.rates.set(update)
        self.set_amounts(update)
        self.objective.train()
        share = recipe.batch_size // accelerator.num_processes
        parts = share // (recipe.micro_batch or share)
        sums: dict[str, Tensor] = {}
        for part in range(parts):
            images, targets = next(batches)
            images = images.to(accelerator.device, non_blocking=True)
            targets = targets.to(accelerator.device, non_blocking=True)
            # By update, process and part: a resumed run draws as the uninterrupted one did.
            seed_all(recipe.seed, 1, update, accelerator.process_index, part)
            if self.mixer is not None:
                images, targets = self.mixer(images, targets)
            # Gradients are exchanged once per update, with the last part.
            last = part == parts - 1
            with nullcontext() if last else accelerator.no_sync(self.wrapped):
                losses = self.wrapped(images, targets)
                accelerator.backward(losses["total"] / parts)
            for name, loss in losses.items():
                sums[name] = sums.get(name, 0.0) + loss.detach().float().mean() / parts
        # Shares of one batch: the mean over processes is the mean over all images.
        together = torch.stack([torch.as_tensor(value, device=accelerator.device) for value in sums.values()])
        means = cast(Tensor, accelerator.reduce(together, "mean"))  # one exchange for all losses
        return dict(zip(sums, means.tolist(), strict=True))

    def apply(self, update: int) -> None:
        """Update the parameters with the accumulated gradients."""
        if self.recipe.optimizer.clip is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None:
            # without warm-up, step=None: timm would copy the model at the first two steps
            self.ema.update(self.model, step=update if self.ema.use_warmup else None)

    def set_amounts(self, update: int) -> None:
        """Set the method's amounts for this update, in the model and in its average."""
        epoch = update / self.updates_per_unit
        amounts: list[tuple[str, Any]] = [(ramp.option, ramp_value(ramp, epoch)) for ramp in self.recipe.ramps]
        amounts += [(switch.option, switch.value) for switch in self.recipe.switches if epoch >= switch.epoch]
        for option, value in amounts:
            if option == PATCH_DROP:
                cast(Any, ask(self.model).patch_dropout(self.model)).prob = value
                continue
            # Set only what changed: every change plans the reduction anew.
            wanted = list(value) if isinstance(value, list | tuple) else value  # configs have tuples, YAML has lists
            for model in (self.model, self.learned):
                reduction = handle_of(model)
                now = getattr(reduction.config, option)
                if (list(now) if isinstance(now, list | tuple) else now) != wanted:
                    reduction.set(**{option: value})

    def evaluated(self, update: int) -> nn.Module:
        """The module to evaluate, with the amounts of ``update``. All processes must call this."""
        self.set_amounts(update)
        model = self.wrapped if self.sharded else self.learned
        # use the first process's running statistics (BatchNorm), which are the ones written
        if self.accelerator.num_processes > 1:
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    broadcast(buffer, from_process=0)
        return cast(nn.Module, model)
