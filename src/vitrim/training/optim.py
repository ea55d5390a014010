"""Parameter groups, the optimiser, and amounts over time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.optim import Optimizer

from vitrim.core.plan import Role
from vitrim.core.registry import ask
from vitrim.errors import VitrimError, check_known

if TYPE_CHECKING:
    from vitrim.training.recipe import Ramp, Recipe


def select_trainable(model: nn.Module, patterns: Iterable[str]) -> None:
    """Train only parameters whose names match one of ``patterns``; `VitrimError` for a pattern without a match.

    Parameters that the model itself does not train, such as fixed positions, stay frozen.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> select_trainable(model, ["bias"])
        >>> model.bias.requires_grad, model.weight.requires_grad
        (True, False)
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise VitrimError(f"trainable: no parameter matches '{pattern}'; the first is {names[0]}")
    for name, parameter in model.named_parameters():
        matches = any(fnmatchcase(name, pattern) for pattern in patterns)
        parameter.requires_grad_(parameter.requires_grad and matches)


def is_new(role: Role, backbone: str = "trunk") -> bool:
    """True if a new task or method adds the parameter's part, so that it is not part of the ``backbone``.

    ``trunk``: head, positions, stem and a method's parts are new; ``host``: only a method's parts are.

    Example:
        >>> is_new(Role("head")), is_new(Role("trunk")), is_new(Role("head"), "host"), is_new(Role("method"), "host")
        (True, False, False, True)
    """
    return role.part == "method" or (backbone == "trunk" and role.part in ("head", "positions", "stem"))


def parameter_groups(model: nn.Module, recipe: Recipe, lr: float) -> list[dict[str, Any]]:
    """Group parameters by learning rate and weight decay (comparative study, supplement A); ``lr`` is the scaled one.

    A group has ``lr``, ``weight_decay``, ``name`` and ``frozen_at_first``. Biases, norms and other vectors, positions
    and class tokens have no weight decay, unless the recipe sets ``decay_all``. With ``layer_decay``, for which the
    model must name its layers, every layer has its own ``lr_scale``, a factor on the entire schedule.
    """
    options = recipe.optimizer
    roles = ask(model).roles(model)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    plain: dict[str, bool] = {}
    for name, parameter in parameters.items():
        role = roles[name]
        alone = parameter.ndim <= 1 or role.part == "positions" or not role.decays
        # With layer decay as in timm's groups of that name: only vectors and what the model itself excludes.
        if options.layer_decay is None:
            alone = alone or name.endswith(".bias") or role.part == "tokens"
        plain[name] = alone and not options.decay_all

    top = max((role.layer for role in roles.values() if role.layer is not None), default=None)
    names = list(parameters)
    if options.layer_decay is not None:
        if top is None:
            raise VitrimError(f"layer_decay needs a model that names its layers; {type(model).__name__} does not")
        # order groups, and parameters within them, by layer: checkpoints rely on this order
        layers: dict[tuple[int, bool], list[str]] = {}
        for name in names:
            layers.setdefault((roles[name].layer or 0, plain[name]), []).append(name)
        names = [name for layer in layers.values() for name in layer]

    # A group is everything with one rate and one decay, in the order of the parameters.
    groups: dict[str, dict[str, Any]] = {}
    for name in names:
        role = roles[name]
        decay = 0.0 if plain[name] else options.weight_decay
        if options.layer_decay is not None and top is not None:
            # timm's schedule multiplies all rates, including min_lr and warmup_lr, by a group's lr_scale. A method's
            # parameters are new in any layer, so they have the full rate (Cropr)
            scale = 1.0 if role.part == "method" else options.layer_decay ** (top - (role.layer or 0))
            label, own = f"rate x {scale:.3g}", {"lr": lr, "lr_scale": scale, "frozen_at_first": False}
        else:
            # without a scale all parameters are in one group
            apart = options.backbone_scale != 1 or options.freeze_epochs > 0
            backbone = apart and not is_new(role, options.backbone)
            label = "backbone" if backbone else "new"
            own = {"lr": lr * options.backbone_scale if backbone else lr, "frozen_at_first": backbone}
        label = f"{label}, {'decayed' if decay else 'not decayed'}"
        group = groups.setdefault(label, {"name": label, **own, "weight_decay": decay, "params": []})
        group["params"].append(parameters[name])
    return list(groups.values())


def make_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """The optimiser of a recipe, over the trainable parameters; `VitrimError` if timm refuses its name or options.

    Example:
        >>> from vitrim.training.recipe import Recipe
        >>> type(make_optimizer(nn.Linear(3, 2), Recipe(model="m", epochs=1))).__name__
        'AdamW'
    """
    options = recipe.optimizer
    check_known("optimizer", options.name, cast("list[str]", list_optimizers()))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise VitrimError("nothing to train: trainable matches no parameter")
    lr = options.lr if options.lr_batch is None else options.lr * recipe.batch_size / options.lr_batch
    given = {"betas": options.betas, "momentum": options.momentum}
    extra: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    groups = parameter_groups(model, recipe, lr)
    if "muon" in options.name:  # it orthogonalises weight matrices; input and output layers are excluded
        roles = ask(model).roles(model)
        trunk = {id(p) for name, p in model.named_parameters() if not is_new(roles[name])}
        parts = []
        for group in groups:
            for label, matrices in (("matrices", True), ("others", False)):
                params = [p for p in group["params"] if (p.ndim == 2 and id(p) in trunk) == matrices]
                if params:
                    named = {"name": f"{group['name']}, {label}", "use_fallback": not matrices}
                    parts.append({**group, **named, "params": params})
        groups = parts
    for group in groups:
        if group["lr"] == 0.0:  # otherwise the schedule's minimum, shared by all groups, would train it
            group["lr_scale"] = 0.0
    try:
        return create_optimizer_v2(groups, opt=options.name, lr=lr, weight_decay=options.weight_decay, **extra)
    except (TypeError, ValueError) as error:
        raise VitrimError(f"optimizer {options.name} does not take these options: {error}") from None


class Rates:
    """The learning rate of every group at every update: linear warm-up, a curve, cool-down, frozen first epochs.

    Stateless, so resuming just sets another update. ``updates_per_epoch`` is 1 for a recipe that counts updates.
    """

    def __init__(self, optimizer: Optimizer, recipe: Recipe, updates_per_epoch: int) -> None:
        self.optimizer = optimizer
        self.frozen_until = round(recipe.optimizer.freeze_epochs * updates_per_epoch)
        options = recipe.schedule
        updates = round(recipe.epochs * updates_per_epoch)
        warmup = round(options.warmup_epochs * updates_per_epoch)
        # A shifted curve begins after the warm-up and has only the rest of the run.
        length = max(updates - warmup if options.shift else updates, 1)
        every: dict[str, Any] = {
            "warmup_t": warmup,
            "warmup_lr_init": options.warmup_lr,
            "warmup_prefix": options.shift,
            "t_in_epochs": False,
        }
        self.curve: Scheduler
        if options.shape == "cosine":
            self.curve = CosineLRScheduler(optimizer, t_initial=length, lr_min=options.min_lr, **every)
        elif options.shape == "poly":
            least, power = options.min_lr, options.power
            self.curve = PolyLRScheduler(optimizer, t_initial=length, power=power, lr_min=least, **every)
        else:
            # timm's milestone m takes effect at update m - 1 of the curve; without milestones the rate is constant
            begin = warmup if options.shift else 0
            places = [round(one * updates_per_epoch) + 1 - begin for one in options.milestones]
            self.curve = MultiStepLRScheduler(optimizer, decay_t=places, decay_rate=options.factor, **every)

    def set(self, update: int) -> None:
        """Set the learning rates of ``update``, from 0."""
        self.curve.step_update(update)
        if update < self.frozen_until:
            for group in self.optimizer.param_groups:
                if group["frozen_at_first"]:
                    group["lr"] = 0.0


def updates_of(recipe: Recipe, updates_per_epoch: int) -> int:
    """The number of updates in a run, including its cool-down."""
    return round((recipe.epochs + recipe.schedule.cooldown_epochs) * updates_per_epoch)


def ramp_value(ramp: Ramp, epoch: float) -> float | int:
    """The value of a ramp at an epoch."""
    done = min(max((epoch - ramp.begin_epoch) / (ramp.end_epoch - ramp.begin_epoch), 0.0), 1.0)
    share = {"linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2, "step": float(done >= 1)}[ramp.shape]
    value = ramp.start + share * (ramp.stop - ramp.start)
    return round(value) if ramp.whole else value
