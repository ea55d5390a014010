"""The models of a comparison: the dense model and a reduced copy per method, which share their parameters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from vitrim.core.block import ReducedBlock
from vitrim.core.checks import check_amounts
from vitrim.core.method import MethodConfig
from vitrim.core.reduce import Reduction, reduce_, refuse_reduced
from vitrim.core.registry import ask, fitting, has_trunk, host_of, parse_method, supported_parts
from vitrim.engines.copies import shared_copy, take_learned
from vitrim.engines.macs import count_parts
from vitrim.errors import ReductionWarning, VitrimError
from vitrim.report import DENSE
from vitrim.tasks.base import Task

TOO_MUCH = "asks for more than"
"""Part of the warning text of `check_amounts`."""


@dataclass(frozen=True)
class ModelOutput:
    """The output of one model for a batch.

    Attributes:
        prediction: prediction of the task; logits (B, K) for classification.
        feature: (B, C), the classifier's input, the mean over several classifiers; (B, P, C), a dense head's input;
            None for a model that is not watched.
        tokens_per_block: tokens after each block, with prefix, without padding, summed over the batch.
        tokens_at_end: tokens after the last block, summed over the batch; more than the last entry of
            ``tokens_per_block`` if the last block computes only the head's input. 0 for a model without blocks.
        macs: MACs by part, summed over the batch, if they were requested.
        counted: (H, W) of the images if ``macs`` follow from shapes; None if all images were counted.
    """

    prediction: Any
    feature: Tensor | None = None
    tokens_per_block: tuple[int, ...] = ()
    tokens_at_end: int = 0
    macs: Mapping[str, int] | None = None
    counted: tuple[int, int] | None = None


class Contestant:
    """One model of a comparison.

    Args:
        model: model to run. A ``watched`` model must be a private copy: it keeps hooks.
        reduction: handle of a reduced ``model``, made with ``record=True``; None for the dense model.
        watched: record features and, if ``model`` is a host, tokens.
    """

    def __init__(
        self, model: nn.Module, task: Task, reduction: Reduction | None = None, *, watched: bool = False
    ) -> None:
        # the model, or its reduced part
        part = model if has_trunk(model) or reduction is None else reduction.model
        self.forward = _Forward(model, task, part, watched).eval()
        self.reduction = reduction
        self.name = DENSE if reduction is None else reduction.config.describe()
        self.adaptive = task.cost_varies or (reduction is not None and reduction.config.is_adaptive())
        self.macs: dict[tuple[int, ...], Mapping[str, int]] = {}
        self.watched = watched
        self.sizes: set[tuple[int, int]] = set()

    def run(self, images: Tensor, targets: Any = None, *, count: bool = False) -> ModelOutput:
        """Run one forward of images (B, C, H, W).

        Args:
            images: on the device of the model.
            targets: targets of the task; used only to find padding.
            count: count MACs. Adaptive models are counted on this forward, on the entire batch, since counts may depend
                on the other images; other models on one image per shape.

        Raises:
            VitrimError: the outputs are not finite.
        """
        macs: Mapping[str, int] | None = None
        counted: tuple[int, int] | None = None
        self.forward.targets = targets
        padding = ask(self.forward.model).padding(self.forward.model, images)
        if count and (self.adaptive or padding):  # images with different padding take different passes
            macs = count_parts(self.forward, images)
        else:
            if count:
                macs = {part: len(images) * number for part, number in self._macs_of(images).items()}
                counted = (images.shape[2], images.shape[3])
            self.forward(images)
        feature = self.forward.feature() if self.watched else None
        for value in (feature, *tree_leaves(self.forward.prediction)):
            if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise VitrimError(
                    f"{self.name}: the model's outputs are not finite numbers: check its weights and dtype"
                )
        tokens: tuple[int, ...] = ()
        left = 0
        if self.watched and self.reduction is None and self.forward.num_blocks:
            left = len(images) * self.forward.num_tokens - padding
            tokens = (left,) * self.forward.num_blocks
        elif self.watched and self.reduction is not None:
            self._check_amounts(self.reduction)
            tokens = tuple(round(len(images) * count) for count in self.reduction.mean_tokens_per_block)
            left = round(len(images) * self.reduction.state.mean_tokens())
        return ModelOutput(self.forward.prediction, feature, tokens, left, macs, counted)

    def _check_amounts(self, reduction: Reduction) -> None:
        """Warn once per size, or raise if the method is strict, if the images have too few patches for the method."""
        reducer = next(one.reducer for one in reduction.model.modules() if isinstance(one, ReducedBlock))
        for grid in reduction.units:
            if grid not in self.sizes:
                self.sizes.add(grid)
                check_amounts(reduction.config, [replace(reducer.layer, grid_size=grid)])

    def _macs_of(self, images: Tensor) -> Mapping[str, int]:
        """MACs of one image of this shape, cached."""
        shape = tuple(images.shape[1:])
        if shape not in self.macs:
            # the counted forward must not change the random draws of the next one
            with torch.random.fork_rng([images.device] if images.device.type == "cuda" else []):
                targets, self.forward.targets = self.forward.targets, None
                self.macs[shape] = count_parts(self.forward, images[:1])
                self.forward.targets = targets
        return self.macs[shape]


class _Forward(nn.Module):
    """The model as a module that records its prediction, the input of its head and its number of tokens."""

    prediction: Any
    num_tokens: int

    def __init__(self, model: nn.Module, task: Task, part: nn.Module, watched: bool) -> None:
        super().__init__()
        self.targets: Any = None
        self.model = model
        self.task = task
        self.inputs: list[Tensor] = []
        if watched:
            trunks = [part] if has_trunk(part) else [inner for _, inner in supported_parts(part)]
            blocks = host_of(trunks[0]).blocks(trunks[0]) if trunks else []
            self.num_blocks = len(blocks)
            for reader in () if task.embeds else ask(model).readers(model):
                reader.register_forward_pre_hook(self._note_input)
            if blocks:
                blocks[-1].register_forward_hook(self._note_tokens)

    def forward(self, images: Tensor) -> None:
        self.inputs.clear()
        if self.task.embeds:
            self.inputs.append(ask(self.model).embedding(self.model, images))
            self.prediction = self.task.of_embedding(self.inputs[0])
        else:
            self.prediction = self.task.predict(self.model, images, self.targets)

    def feature(self) -> Tensor | None:
        """(B, C), the classifier's input: for several classifiers the mean, or a concatenation if sizes differ;
        (B, P, C) for a dense head; an embedding; None if no module reads it."""
        if not self.inputs:
            return None
        alike = len({found.shape for found in self.inputs}) == 1
        if len(self.inputs) == 1:
            feature = self.inputs[0]  # the same object, so that `are_logits` recognises a predicted embedding
        else:
            feature = torch.stack(self.inputs).mean(0) if alike else torch.cat(self.inputs, dim=-1)
        return feature.flatten(2).transpose(1, 2) if feature.ndim == 4 else feature

    def _note_input(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.inputs.append(args[0])

    def _note_tokens(self, module: nn.Module, args: object, output: Tensor) -> None:
        self.num_tokens = output.shape[1]


def contestants(
    model: nn.Module,
    methods: Sequence[MethodConfig | str],
    task: Task,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    learned: Path | None = None,
) -> list[Contestant]:
    """The dense model and its reductions, in the order of ``methods``.

    ``model`` is copied once, and the reduced models share the parameters of that copy, so an additional method needs no
    memory for parameters. All are in eval mode.

    Args:
        model: not reduced, not changed; a model that cannot be reduced only accepts ``none``, its dense row.
        device: None for the model's device.
        dtype: dtype of the parameters; None for the model's.
        learned: folder of a saved reduction (`Reduction.save`), whose parameters the methods of that name load; other
            learned methods keep random parameters.

    Raises:
        VitrimError: the model is reduced, or a method is unknown or does not fit the model.
    """
    refuse_reduced(model)
    configs = fitting(model, [parse_method(method) if isinstance(method, str) else method for method in methods])
    dense = copy.deepcopy(model).to(device=device, dtype=dtype).eval()
    reduced = []
    for config in configs:
        candidate = shared_copy(dense)
        with warnings.catch_warnings():  # `Contestant.run` warns for the actual image sizes
            warnings.filterwarnings("ignore", f".* {TOO_MUCH} ", ReductionWarning)
            reduction = reduce_(candidate, config, record=True)
        take_learned(reduction, learned)
        reduced.append(Contestant(candidate, task, reduction, watched=True))
    return [Contestant(dense, task, watched=True), *reduced]
