"""Groups of parameters, the optimiser, and amounts over time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

from timm.optim import create_optimizer_v2, list_optimizers, param_groups_layer_decay
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.optim import Optimizer

from vitrim.errors import VitrimError, unknown

if TYPE_CHECKING:
    from vitrim.training.recipe import Ramp, Recipe

HEADS = ("head", "head_dist", "heads", "fc", "classifier", "aux_head", "auxiliary_head")
POSITIONS = ("pos_embed", "pos_embedding", "position_embedding", "position_embeddings")
EMBEDDINGS = ("patch_embed", "embed", "embeds", "embeddings", "conv_proj", "tokens_to_token")
NEW_PARTS = frozenset((*HEADS, *POSITIONS, *EMBEDDINGS))
"""Parts of the names of what a new task trains at the full rate, as the libraries call them; `*.reducer.*` as well."""


def select_trainable(model: nn.Module, patterns: Iterable[str]) -> int:
    """Train only the parameters whose names match one of ``patterns``; the number of them (of values, not tensors).

    What the model itself does not train (a fixed table of positions) stays as it is.

    Raises:
        VitrimError: a pattern that matches none.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> select_trainable(model, ["bias"]), model.weight.requires_grad
        (2, False)
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise VitrimError(f"trainable: no parameter matches '{pattern}'; the first is {names[0]}")
    count = 0
    for name, parameter in model.named_parameters():
        matches = any(fnmatchcase(name, pattern) for pattern in patterns)
        parameter.requires_grad_(parameter.requires_grad and matches)
        count += parameter.numel() if parameter.requires_grad else 0
    return count


def is_new(name: str, backbone: str = "trunk") -> bool:
    """Whether a parameter is of a part that a new task or method brings, and so not of the ``backbone``.

    Args:
        name: of the parameter.
        backbone: ``trunk``: head, positions, patch embedding and reducers are new; ``host``: only reducers are.

    Example:
        >>> is_new("head.weight"), is_new("blocks.0.reducer.router.query"), is_new("blocks.0.attn.qkv.weight")
        (True, True, False)
        >>> is_new("vit.embeddings.position_embeddings"), is_new("vit.embeddings.cls_token")
        (True, False)
        >>> is_new("head.weight", "host"), is_new("blocks.0.reducer.router.query", "host")
        (False, True)
    """
    parts = name.split(".")
    if "reducer" in parts:
        return True
    return backbone == "trunk" and not name.endswith("_token") and not NEW_PARTS.isdisjoint(parts)


def parameter_groups(model: nn.Module, recipe: Recipe, lr: float) -> list[dict[str, Any]]:
    """Parameters by what their learning rate and weight decay are (comparative study, supplement A).

    A group has ``lr``, ``weight_decay``, ``name`` and whether it is ``frozen_at_first``. Biases, norms and other
    vectors, positions and class tokens are not decayed, unless the recipe decays all.

    Args:
        model: the model, reduced or not.
        recipe: its ``optimizer`` section is read.
        lr: the scaled learning rate.

    Example:
        >>> from vitrim.training.recipe import Recipe
        >>> groups = parameter_groups(nn.Linear(3, 2), Recipe(model="m", epochs=1), 0.1)
        >>> [(group["weight_decay"], len(group["params"])) for group in groups]
        [(0.05, 1), (0.0, 1)]
    """
    options = recipe.optimizer
    skip = cast(Any, model).no_weight_decay() if hasattr(model, "no_weight_decay") else set()
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # without a scale all parameters are alike, and so they stay in one group
        backbone = options.backbone_scale != 1 or options.freeze_epochs > 0
        backbone = backbone and not is_new(name, options.backbone)
        position = not set(POSITIONS).isdisjoint(name.split("."))
        plain = parameter.ndim <= 1 or position or name in skip or name.endswith((".bias", "_token"))
        decay = 0.0 if plain and not options.decay_all else options.weight_decay
        label = f"{'backbone' if backbone else 'new'}, {'decayed' if decay else 'not decayed'}"
        group = groups.setdefault(
            label,
            {
                "name": label,
                "lr": lr * options.backbone_scale if backbone else lr,
                "weight_decay": decay,
                "frozen_at_first": backbone,
                "params": [],
            },
        )
        group["params"].append(parameter)
    return list(groups.values())


def check_optimizer(name: str) -> None:
    """Refuse a name that timm has no optimiser of.

    Raises:
        VitrimError: with the names there are.

    Example:
        >>> check_optimizer("adamw")
    """
    known = cast("list[str]", list_optimizers())
    if name not in known:
        raise unknown("optimizer", name, known)


def make_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """The optimiser of a recipe, over the parameters that are trained.

    Raises:
        VitrimError: timm knows no such optimiser, it does not take the options, or nothing is trained.

    Example:
        >>> from vitrim.training.recipe import Recipe
        >>> type(make_optimizer(nn.Linear(3, 2), Recipe(model="m", epochs=1))).__name__
        'AdamW'
    """
    options = recipe.optimizer
    check_optimizer(options.name)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise VitrimError("nothing to train: trainable matches no parameter")
    lr = options.lr if options.lr_batch is None else options.lr * recipe.batch_size / options.lr_batch
    given = {"betas": options.betas, "momentum": options.momentum}
    extra: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    grouped = parameter_groups if options.layer_decay is None else _layer_groups
    groups = grouped(model, recipe, lr)
    if "muon" in options.name:  # it orthogonalises matrices of weights; what reads or writes tokens is not one
        groups = [part for group in groups for part in _split_for_muon(model, group)]
    try:
        return create_optimizer_v2(groups, opt=options.name, lr=lr, weight_decay=options.weight_decay, **extra)
    except (TypeError, ValueError) as error:
        raise VitrimError(f"optimizer {options.name} does not take these options: {error}") from None


def _layer_groups(model: nn.Module, recipe: Recipe, lr: float) -> list[dict[str, Any]]:
    """timm's layers, each with its own factor on the whole schedule."""
    if not hasattr(model, "group_matcher"):
        raise VitrimError(f"layer_decay needs a model of timm's kind; {type(model).__name__} does not name its layers")
    options = recipe.optimizer
    skip = cast(Any, model).no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    groups = param_groups_layer_decay(
        model,
        weight_decay=options.weight_decay,
        no_weight_decay_list=() if options.decay_all else skip,
        weight_decay_exclude_1d=not options.decay_all,
        layer_decay=cast(float, options.layer_decay),
    )
    # timm's schedule multiplies all it gives by a group's lr_scale: first and lowest rates are scaled as well
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    scaled: dict[str, dict[str, Any]] = {}
    for group in groups:
        for parameter in group["params"]:
            # what a method adds is new wherever it sits: it has the full rate (Cropr), not that of its block
            scale = 1.0 if is_new(names[id(parameter)], "host") else group["lr_scale"]
            label = f"rate x {scale:.3g}, {'decayed' if group['weight_decay'] else 'not decayed'}"
            options_of = {"name": label, "lr": lr, "lr_scale": scale, "weight_decay": group["weight_decay"]}
            scaled.setdefault(label, {**options_of, "frozen_at_first": False, "params": []})["params"].append(parameter)
    return list(scaled.values())


def _split_for_muon(model: nn.Module, group: dict[str, Any]) -> Iterable[dict[str, Any]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices = [p for p in group["params"] if p.ndim == 2 and not is_new(names[id(p)])]
    others = [p for p in group["params"] if not any(p is matrix for matrix in matrices)]
    for label, params, fallback in (("matrices", matrices, False), ("others", others, True)):
        if params:
            yield {**group, "name": f"{group['name']}, {label}", "params": params, "use_fallback": fallback}


class Rates:
    """The learning rate of every group at every update: linear warm-up, cosine, cool-down, frozen first epochs.

    It has no state: resuming is asking for another update.

    Args:
        optimizer: whose groups have ``lr`` and ``frozen_at_first``.
        recipe: its ``schedule`` section, ``epochs`` and ``optimizer.freeze_epochs`` are read.
        updates_per_epoch: of the data.
    """

    def __init__(self, optimizer: Optimizer, recipe: Recipe, updates_per_epoch: int) -> None:
        options = recipe.schedule
        warmup = round(options.warmup_epochs * updates_per_epoch)
        updates = round(recipe.epochs * updates_per_epoch)
        self.optimizer = optimizer
        self.frozen_until = round(recipe.optimizer.freeze_epochs * updates_per_epoch)
        self.cosine = CosineLRScheduler(
            optimizer,
            t_initial=max(updates - warmup if options.shift else updates, 1),
            lr_min=options.min_lr,
            warmup_t=warmup,
            warmup_lr_init=options.warmup_lr,
            warmup_prefix=options.shift,
            t_in_epochs=False,
        )

    def set(self, update: int) -> None:
        """Give every group its learning rate of ``update``, 0 the first."""
        self.cosine.step_update(update)
        if update < self.frozen_until:
            for group in self.optimizer.param_groups:
                if group["frozen_at_first"]:
                    group["lr"] = 0.0


def ramp_value(ramp: Ramp, epoch: float) -> float | int:
    """What an option is at a point in time, counted in epochs.

    Example:
        >>> from vitrim.training.recipe import Ramp
        >>> ramp = Ramp(option="keep_rate", start=1.0, stop=0.7, begin_epoch=10, end_epoch=100, shape="cosine")
        >>> [round(ramp_value(ramp, epoch), 3) for epoch in (0, 10, 55, 100, 300)]
        [1.0, 1.0, 0.85, 0.7, 0.7]
    """
    done = min(max((epoch - ramp.begin_epoch) / (ramp.end_epoch - ramp.begin_epoch), 0.0), 1.0)
    share = {"linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2, "step": float(done >= 1)}[ramp.shape]
    value = ramp.start + share * (ramp.stop - ramp.start)
    return round(value) if ramp.whole else value
