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
from vitrim.engines.exported import Exported
from vitrim.engines.macs import PARTS, count_parts
from vitrim.engines.runnable import Runnable, outputs
from vitrim.errors import ReductionWarning, VitrimError
from vitrim.report import DENSE, at_px
from vitrim.tasks.base import Task

TOO_MUCH = "asks for more than"
"""Part of the warning text of `check_amounts`."""


@dataclass(frozen=True)
class ModelOutput:
    """The output of one model for a batch.

    Attributes:
        prediction: prediction of the task; logits (B, K) for classification.
        feature: what the classifier (B, C) or a dense head (B, P, C) reads; None for a model that is not watched.
        tokens_per_block: tokens after each block, with prefix, without padding, summed over the batch.
        tokens_at_end: the same after the last block, even if it computes only the head's input; 0 without blocks.
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
        model: module to run, or any `Runnable`, such as an exported file, whose tokens and MACs are those of its
            metadata. A ``watched`` module must be a private copy: it keeps hooks.
        reduction: handle of a reduced ``model``, made with ``record=True``; None for the dense model.
        watched: record features and, if ``model`` is a host, tokens.
        name: in rows; by default the method, and the image size if it is not the own.
        img_size: the size of images of a batch that it takes; None for the model's own.
    """

    def __init__(
        self,
        model: nn.Module | Runnable,
        task: Task,
        reduction: Reduction | None = None,
        *,
        watched: bool = False,
        name: str | None = None,
        img_size: int | None = None,
    ) -> None:
        self.model: Any = model
        self.task, self.reduction, self.watched, self.img_size = task, reduction, watched, img_size
        self.name = name or at_px(DENSE if reduction is None else reduction.config.describe(), img_size)
        # Costs that depend on the content: a count of one image would not hold for the others.
        self.adaptive = task.cost_varies or (reduction is not None and reduction.config.is_adaptive())
        self.macs: dict[tuple[int, ...], Mapping[str, int]] = {}
        self.sizes: set[tuple[int, int]] = set()
        self.num_blocks = self.num_tokens = 0
        self.inputs: list[Tensor] = []
        if not isinstance(model, nn.Module):
            if task.embeds and isinstance(model, Exported) and model.num_classes:
                raise VitrimError(f"{model.path} gives logits, and no embedding: export the model without its head")
            self.like = torch.empty(0)
            self.num_blocks = len(model.metadata.get("tokens_per_block") or ())
            return
        self.model, self.library = model.eval(), ask(model)
        self.like = next(model.parameters())
        if watched:
            self._watch(model)

    def _watch(self, model: nn.Module) -> None:
        """Record the input of the head, and the number of tokens."""
        # the model, or its reduced part
        part = model if has_trunk(model) or self.reduction is None else self.reduction.model
        trunks = [part] if has_trunk(part) else [inner for _, inner in supported_parts(part)]
        blocks = host_of(trunks[0]).blocks(trunks[0]) if trunks else []
        self.num_blocks = len(blocks)
        for reader in () if self.task.embeds else self.library.readers(model):
            reader.register_forward_pre_hook(self._note_input)
        if blocks:
            # Of a dense model all blocks have as many tokens; a reduced one tells them by its states.
            blocks[-1].register_forward_hook(self._note_tokens)

    def _note_input(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.inputs.append(args[0])

    def _note_tokens(self, module: nn.Module, args: object, output: Tensor) -> None:
        self.num_tokens = output.shape[1]

    def run(self, images: Tensor, targets: Any = None, *, count: bool = False) -> ModelOutput:
        """Run one forward of images (B, C, H, W); `VitrimError` if the outputs are not finite.

        ``targets`` of the task are used only to find padding; ``count`` counts MACs.
        """
        if not isinstance(self.model, nn.Module):
            prediction = self.task.of_output(outputs(self.model, images))
            self._check_finite(prediction)
            return self._known(prediction, images)
        macs: Mapping[str, int] | None = None
        counted: tuple[int, int] | None = None
        padding = self.library.padding(self.model, images)
        # Adaptive models are counted on this forward, on the entire batch, since counts may depend on the other images;
        # other models on one image per shape.
        if count and (self.adaptive or padding):  # images with different padding take different passes
            whole = _Prediction(self, targets)
            macs, prediction = count_parts(whole, images), whole.prediction
        else:
            if count:
                macs = {part: len(images) * number for part, number in self._macs_of(images).items()}
                counted = (images.shape[2], images.shape[3])
            prediction = self._predict(images, targets)
        feature = self._feature() if self.watched else None
        self._check_finite((feature, prediction))
        tokens: tuple[int, ...] = ()
        left = 0
        if self.watched and self.reduction is None and self.num_blocks:
            left = len(images) * self.num_tokens - padding
            tokens = (left,) * self.num_blocks
        elif self.watched and self.reduction is not None:
            self._check_amounts(self.reduction)
            tokens = tuple(round(len(images) * count) for count in self.reduction.mean_tokens_per_block)
            left = round(len(images) * self.reduction.state.mean_tokens())
        return ModelOutput(prediction, feature, tokens, left, macs, counted)

    def _known(self, prediction: Tensor, images: Tensor) -> ModelOutput:
        """The output of a `Runnable`: its tokens and MACs are those of its metadata."""
        known, many = self.model.metadata, len(images)
        tokens = tuple(round(many * each) for each in known.get("tokens_per_block") or ())
        # A file need not name its parts.
        gmacs = dict.fromkeys(PARTS, 0.0) | (known.get("gmacs_parts") or {})
        macs = {part: round(many * each * 1e9) for part, each in gmacs.items()}
        size = (images.shape[2], images.shape[3])
        return ModelOutput(prediction, None, tokens, tokens[-1] if tokens else 0, macs, size)

    def _predict(self, images: Tensor, targets: Any) -> Any:
        self.inputs.clear()
        if not self.task.embeds:
            return self.task.predict(self.model, images, targets)
        self.inputs.append(self.library.embedding(self.model, images))
        return self.task.of_embedding(self.inputs[0])

    def _feature(self) -> Tensor | None:
        """The input of the head, (B, C) or (B, P, C), or an embedding; None if no module reads it."""
        if not self.inputs:
            return None
        # Several classifiers: the mean of their inputs, or a concatenation if sizes differ.
        alike = len({found.shape for found in self.inputs}) == 1
        if len(self.inputs) == 1:
            feature = self.inputs[0]  # the same object, so that `are_logits` recognises a predicted embedding
        else:
            feature = torch.stack(self.inputs).mean(0) if alike else torch.cat(self.inputs, dim=-1)
        # A dense head may read a map (B, C, H, W): its places become patches.
        return feature.flatten(2).transpose(1, 2) if feature.ndim == 4 else feature

    def _check_finite(self, output: Any) -> None:
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise VitrimError(
                    f"{self.name}: the model's outputs are not finite numbers: check its weights and dtype"
                )

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
                self.macs[shape] = count_parts(_Prediction(self), images[:1])
        return self.macs[shape]


class _Prediction(nn.Module):
    """A contestant's prediction as a forward, whose MACs the counter assigns to the modules of the model."""

    prediction: Any

    def __init__(self, contestant: Contestant, targets: Any = None) -> None:
        super().__init__()
        self.model, self.predict, self.targets = contestant.model, contestant._predict, targets

    def forward(self, images: Tensor) -> None:
        self.prediction = self.predict(images, self.targets)


def contestants(
    model: nn.Module,
    methods: Sequence[MethodConfig | str],
    task: Task,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    learned: Path | None = None,
    img_size: int | None = None,
) -> list[Contestant]:
    """The dense model and its reductions, in the order of ``methods``.

    Args:
        model: not reduced, not changed; a model that cannot be reduced only accepts ``none``, its dense row.
        device, dtype: of the parameters; None for the model's.
        learned: folder of `Reduction.save`, whose parameters the methods of that name load; other learned methods keep
            random parameters.
        img_size: of ``model``, if it is another than that of the images of a batch.
    """
    refuse_reduced(model)
    configs = fitting(model, [parse_method(method) if isinstance(method, str) else method for method in methods])
    # Copied once: the reduced models share the parameters of this copy, so a further method needs no memory for them.
    dense = copy.deepcopy(model).to(device=device, dtype=dtype).eval()
    reduced = []
    for config in configs:
        candidate = shared_copy(dense)
        with warnings.catch_warnings():  # `Contestant.run` warns for the actual image sizes
            warnings.filterwarnings("ignore", f".* {TOO_MUCH} ", ReductionWarning)
            reduction = reduce_(candidate, config, record=True)
        take_learned(reduction, learned)
        reduced.append(Contestant(candidate, task, reduction, watched=True, img_size=img_size))
    return [Contestant(dense, task, watched=True, img_size=img_size), *reduced]
