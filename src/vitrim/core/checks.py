"""Checks that a method fits a model: `fit` makes those of `reduce_`, in the order of this file; then that of `set`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vitrim.core.attention import HIDDEN
from vitrim.core.block import Reducer, sharded
from vitrim.core.cells import build_reducer
from vitrim.core.host import Host, VisionLanguage
from vitrim.core.method import MethodConfig, Restore
from vitrim.core.plan import Head, HostFacts, Layer, plan
from vitrim.core.registry import ask
from vitrim.core.schedule import Pattern
from vitrim.core.selection import Selector
from vitrim.errors import ReductionWarning, UnsupportedModelError, VitrimError

OuterModel = tuple[nn.Module, type[VisionLanguage]]
"""A vision-language model, whose tower is reduced, and its family."""


@dataclass(frozen=True)
class FittedMethod:
    """A method that fits a model.

    Attributes:
        head_rows: rows that the last block computes; None if it computes all.
        restore: how pruned patches return; None if nobody reads their places.
    """

    facts: HostFacts
    head_rows: int | None
    restore: Restore | None
    reducers: list[Reducer[Any]]


def fit(
    config: MethodConfig,
    host: type[Host],
    model: nn.Module,
    holder: nn.Module | None,
    within: OuterModel | None,
    selector: Selector | None,
) -> FittedMethod:
    """Check that the method fits ``model`` and what reads its tokens, and plan every block. Nothing is changed.

    ``within`` is the vision-language model that gets fewer tokens, ``selector`` that of its image tokens; ``holder``:
    see `facts_for_reader`.
    """
    own, blocks = host.facts(model), host.blocks(model)
    facts = facts_for_reader(config, host, model, holder, _cell(within, selector, own))
    check_origin(config, host, model)
    check_proportional(config, model)
    check_head(config, facts, within=facts.dense and not own.dense)
    head_rows, restore = at_the_end(config, facts, len(blocks))
    check_images(config, host, model)

    layers = plan(config, facts, len(blocks))
    check_amounts(config, layers, stacklevel=5)
    with torch.inference_mode(False):  # inference tensors could never be trained
        reducers = [build_reducer(config, layer, block, facts) for layer, block in zip(layers, blocks, strict=True)]
    check_reducers(config, blocks, reducers, head_rows)
    return FittedMethod(facts, head_rows, restore, reducers)


def _cell(within: OuterModel | None, selector: Selector | None, tower: HostFacts) -> int | None:
    """The side of the squares that the connector of a vision-language model joins, after a check of that model."""
    if within is None:
        return None
    outer, family = within
    family.check(outer)
    if selector is not None:
        family.check_selector(outer, selector, tower)
    return family.cell(outer)


def facts_for_reader(
    config: MethodConfig, host: type[Host], tower: nn.Module, holder: nn.Module | None, cell: int | None
) -> HostFacts:
    """The facts of a ``tower`` as they apply to whatever reads its tokens.

    Args:
        holder: the model around the tower. Its projector or decoder may count the tokens or lay them out as a map, so
            it gets all of them; a wrapper without parameters of its own reads none.
        cell: only where a language model gets fewer tokens: the side in patches of the squares that the connector joins
            into one token, 1 for none. Nothing then reads tokens at their places.
    """
    facts = host.facts(tower)
    if cell is None:
        own = {id(parameter) for parameter in tower.parameters()}
        reads = holder is not None and any(id(parameter) not in own for parameter in holder.parameters())
        return replace(facts, dense=True) if reads and host.hands_out_tokens(tower) else facts
    if config.kind == "soft":
        raise UnsupportedModelError(
            f"{config.name} mixes patches into tokens that belong to no place, and those of a prompt stand in the "
            "order of their places; use compact=False"
        )
    if config.restore not in (None, "zeros"):
        raise VitrimError(
            f"{config.name}: restore={config.restore} hands out all patches, and compact=True those that are left; "
            "give one of them"
        )
    return replace(facts, dense=False, takes_maximum=True, cell=max(cell, facts.cell))


def described(host: type[Host], model: nn.Module) -> dict[str, Any]:
    """The architecture and geometry of ``model`` that a setting found for it depends on."""
    facts = host.facts(model)
    rows, columns = facts.grid_size
    return {
        "model": ask(model).architecture(model),
        "blocks": len(host.blocks(model)),
        "patches": rows * columns,
        "channels": facts.dim,
    }


def check_origin(config: MethodConfig, host: type[Host], model: nn.Module) -> None:
    """Warn if ``config`` is from a file made for another model than ``model``, and refuse another number of blocks."""
    if config.made_for is None:
        return
    here = described(host, model)
    other = [
        f"{key} {config.made_for.get(key)}, not {here[key]}" for key in here if config.made_for.get(key) != here[key]
    ]
    if other:
        message = f"{config.describe()} was found for another model ({'; '.join(other)})"
        if config.made_for.get("blocks") != here["blocks"]:
            raise VitrimError(f"{message}: its amounts do not fit these blocks")
        warnings.warn(f"{message}: search anew for this one", ReductionWarning, stacklevel=5)


def check_proportional(config: MethodConfig, model: nn.Module) -> None:
    """Warn where sizes would weigh the attention of a masked autoencoder, unless ``proportional`` was given."""
    # ToMe, ATM and PPT were published without it for MAE. Only what the library records can be seen: a fine-tuned MAE
    # that pools its patches looks like any other model.
    if config.proportional and "proportional" not in config.model_fields_set and ask(model).masked_autoencoder(model):
        warnings.warn(
            f"{config.describe()} adds log(size) to the attention of a masked autoencoder (MAE), which the papers "
            "leave out: give proportional=false, or proportional=true to have it so",
            ReductionWarning,
            stacklevel=5,
        )


def misfit(config: MethodConfig, head: Head) -> str | None:
    """The reason why models with such a head cannot carry ``config``; None if they can."""
    if config.needs().class_token and head == "no class token":
        substitute = "; use score=column_mean" if "score" in type(config).model_fields else ""
        return f"scores tokens by the attention of a class token, and this model has none{substitute}"
    ragged = config.kind == "prune" and config.is_adaptive()
    if head == "grid":
        if ragged:
            return "keeps another number of patches in every image, and a dense head reads every patch at its place"
        if config.unplaced() is not None:
            return f"{config.unplaced()}, and a dense head reads every patch at its place"
        return None
    if head != "class token" and (config.kind == "mixed" or ragged):
        return (
            "leaves tokens that the head of this model, which averages patches, would weigh wrongly; use it on a model "
            "whose head reads the class token"
        )
    return None


def check_head(config: MethodConfig, facts: HostFacts, within: bool = False) -> None:
    """Refuse a head that cannot carry ``config`` (see `misfit`); ``within`` another model, it may count its tokens."""
    problem = misfit(config, facts.head)
    if problem is not None and within:
        problem += ": so may what follows this tower; use a merging method, or reduce the tower itself"
    needs = config.needs()
    # A dense head reads the grid, and the scores still need the class token of the tower.
    if problem is None and needs.class_token and not facts.has_class_token:  # of dense heads
        problem = misfit(config, "no class token")
    if problem is None and needs.prefix and facts.num_prefix == 0:
        problem = "needs tokens in front of the patches, and this model has none"
        if "score" in type(config).model_fields:
            problem += "; use score=column_mean"
    if facts.across_windows and needs.attention_map:
        problem = "reads the attention map of a window, and some blocks of this model attend across windows"
    if problem is None and facts.own_attention and needs.reads_attention:
        problem = f"reads attention probabilities, and {HIDDEN}"
    if problem is not None:
        raise UnsupportedModelError(f"{config.name} {problem}")


def at_the_end(config: MethodConfig, facts: HostFacts, num_layers: int) -> tuple[int | None, Restore | None]:
    """The rows that the last block computes, and how pruned patches return.

    The former is None if all are computed, the latter if nobody reads their places.
    """
    if config.last_block == "class_token" and facts.head_rows is None:
        raise UnsupportedModelError(
            f"{config.name}: last_block=class_token needs a head that reads the class token only, but this model's "
            "head reads its patch tokens; use last_block=full or auto"
        )
    asked = config.restore not in (None, "zeros")  # the options themselves ask for pruned patches
    rows = None if config.last_block == "full" or asked else facts.head_rows
    if not facts.dense and not asked:
        return rows, None
    restore = config.restoring()
    if restore == "last_block" and num_layers == 1:
        raise UnsupportedModelError(
            f"{config.name}: restore=last_block needs a block before the last one, and this model has one block; use "
            "restore=end"
        )
    if asked and config.last_block == "class_token":
        raise VitrimError(
            f"{config.name}: restore={config.restore} hands out all patches, and last_block=class_token only what the "
            "head reads; give one of them"
        )
    return rows, restore


def check_images(config: MethodConfig, host: type[Host], model: nn.Module) -> None:
    """Refuse models that do not show the grid or the pixels of every forward, if ``config`` needs these."""
    needs = config.needs()
    if needs.grid and host.patch_maker(model) is None:
        what = "pixels" if needs.pixels else "rows and columns"
        raise UnsupportedModelError(
            f"{config.name} needs the {what} of the patches, and this {type(model).__name__} has no patch embedding "
            "that shows them"
        )
    facts = host.facts(model)
    if needs.pixels and any(side % number for side, number in zip(facts.input_size[1:], facts.grid_size, strict=True)):
        grid, size = (" x ".join(map(str, sides)) for sides in (facts.grid_size, facts.input_size[1:]))
        raise UnsupportedModelError(
            f"{config.name} needs patches that lie side by side, and {grid} patches of this {type(model).__name__} do "
            f"not fill {size} pixels evenly: they overlap"
        )
    pixel_std(config, host, model)


def pixel_std(config: MethodConfig, host: type[Host], model: nn.Module) -> tuple[float, ...] | None:
    """The deviations that bring pixels to the scale of [0, 1], if ``config`` needs them (`Needs.pixel_std`)."""
    wanted = config.needs().pixel_std
    if wanted is False:
        return None
    std = ask(model).preprocessing(model).std if wanted is True else wanted
    if std is None:
        raise UnsupportedModelError(
            f"{config.describe()} compares pixels in the scale of [0, 1], and this {type(model).__name__} does not say "
            "what deviations its images are divided by" + ("; give std=" if "std" in type(config).model_fields else "")
        )
    channels = host.facts(model).input_size[0]
    if len(std) not in (1, channels):
        raise VitrimError(f"{config.describe()}: std has {len(std)} numbers, and the images {channels} channels")
    return std


def check_amounts(config: MethodConfig, layers: Sequence[Layer], stacklevel: int = 4) -> None:
    """Warn, or refuse under ``strict``, where layers cannot remove as much as asked at the model's own image size."""
    initial = current = layers[0].initial_patches
    amounts, grid = layers[0].amounts, layers[0].grid_size
    if config.is_adaptive():
        return
    counts = config.counts_of(amounts, initial, grid)
    effective, short = [], False
    for amount, after in zip(amounts, counts, strict=True):
        if isinstance(amount, Pattern):
            short = short or not amount.reaches(grid)
        else:
            wanted = current if amount is None else amount.keep(initial, current)
            short = short or after - config.added_tokens() > wanted
        effective.append(current - after)
        current = after
    if not short:
        return
    message = (
        f"{config.describe()} asks for more than {initial} patch tokens allow; the blocks remove "
        f"{effective}, {initial - current} in all"
    )
    if min(effective) < 0:
        message += "; a negative number is of tokens that come back"
    if config.strict:
        raise VitrimError(f"{message} (refused because strict=true)")
    warnings.warn(message, ReductionWarning, stacklevel=stacklevel)


def check_reducers(
    config: MethodConfig, blocks: list[nn.Module], reducers: list[Reducer[Any]], rows: int | None
) -> None:
    """Refuse reducers that the ``blocks`` cannot carry; the last block computes ``rows``, None for all."""
    if rows is not None and reducers[-1].needs_full_last_block:
        raise UnsupportedModelError(
            f"{config.name} acts after the last block and needs all of its tokens; use last_block=full"
        )
    learned = any(parameter.requires_grad for reducer in reducers for parameter in reducer.parameters())
    if learned and any(map(sharded, blocks)):
        raise UnsupportedModelError(
            f"{config.name} learns parameters, and those added after fully_shard would be neither sharded nor kept "
            "equal among processes: call vitrim.reduce_ first, then fully_shard"
        )


def check_blocks(config: MethodConfig, layers: Sequence[Layer], reducers: Sequence[Reducer[Any]]) -> None:
    """Raise `VitrimError` if ``config`` acts in other blocks than those that ``reducers`` were made for."""

    def acting(options: MethodConfig, plan: Sequence[Layer]) -> list[int]:
        if options.is_adaptive():  # it has no amounts
            return list(options.stages(len(plan)))
        return [layer.depth for layer in plan if layer.amount is not None]

    before, after = acting(reducers[0].config, [reducer.layer for reducer in reducers]), acting(config, layers)
    if before != after and not all(reducer.everywhere for reducer in reducers):
        raise VitrimError(
            f"{config.describe()} acts in blocks {after} and the model was reduced for {before}: which blocks act "
            "cannot change at run time; call vitrim.restore_ and vitrim.reduce_"
        )
