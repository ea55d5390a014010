"""Accuracy of reduced models next to the dense one, for any number of methods in one pass over the data.

    rows = evaluate(model, ["tome:r=13", "evit:keep_rate=0.7"], batches(dataset, 32))

`Evaluation` is the same, one batch at a time: what was gathered stays readable whatever goes wrong later.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.core.config import MethodConfig
from vitrim.core.reduce import HANDLE, Reduction, reduce_, saved_method
from vitrim.core.registry import host_of, parse_method
from vitrim.data import DataError
from vitrim.errors import VitrimError
from vitrim.measure.latency import shared_copy
from vitrim.measure.macs import count_macs

__all__ = ["DENSE", "Evaluation", "Output", "Row", "Tally", "evaluate", "measure"]

DENSE = "dense"
"""Name of the row of the untouched model."""


@dataclass(frozen=True)
class Output:
    """The output of one model for a batch.

    Attributes:
        feature: (B, C), what the classifier reads.
        logits: (B, K) over K classes.
        tokens_per_block: tokens after each block, prefix included, summed over the batch.
        tokens_at_end: tokens left after the last block, summed over the batch; more than the last entry of
            ``tokens_per_block`` where the last block computes only what the head reads.
    """

    feature: Tensor
    logits: Tensor
    tokens_per_block: tuple[int, ...]
    tokens_at_end: int


@dataclass(frozen=True)
class Tally:
    """Sums over images. Tallies of different images add up.

    Attributes:
        images: how many.
        top1, topk: how many have their label first, or among the k highest logits.
        agree: how many have the same first class as in the dense model.
        cosine: sum of the cosines of the feature to the dense one.
        tokens_per_block, tokens_at_end: as in `Output`.

    Example:
        >>> (Tally(2, 1, 2, 2, 1.9, (10,), 10) + Tally(1, 1, 1, 0, 0.5, (4,), 4)).top1
        2
    """

    images: int
    top1: int
    topk: int
    agree: int
    cosine: float
    tokens_per_block: tuple[int, ...]
    tokens_at_end: int

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            images=self.images + other.images,
            top1=self.top1 + other.top1,
            topk=self.topk + other.topk,
            agree=self.agree + other.agree,
            cosine=self.cosine + other.cosine,
            tokens_per_block=tuple(map(sum, zip(self.tokens_per_block, other.tokens_per_block, strict=True))),
            tokens_at_end=self.tokens_at_end + other.tokens_at_end,
        )


@dataclass(frozen=True)
class Row:
    """Means over the images seen so far, for one method.

    Attributes:
        method: as on the command line; ``dense`` for the untouched model.
        images: images seen.
        top1: share of images whose label has the highest logit, in [0, 1].
        topk: share of images whose label is among the ``k`` highest logits.
        k: 5, or the number of classes if there are fewer.
        agreement: share of images whose first class is the dense model's.
        cosine: mean cosine, to the dense model's, of the feature the classifier reads: the class token after the last
            norm; the mean of class and distillation token; or the pooled patches of a model that pools them.
        gmacs: 10^9 multiply-accumulates per image, by part (linear, attention, matching, norm); padding counts.
        gmacs_images: how many images ``gmacs`` is the mean of: 1 where it follows from shapes, otherwise all.
        tokens_per_block: tokens after each block, prefix included, padding not.
        tokens_at_end: tokens left after the last block, also where that computes only what the head reads.
    """

    method: str
    images: int
    top1: float
    topk: float
    k: int
    agreement: float
    cosine: float
    gmacs: dict[str, float]
    gmacs_images: int
    tokens_per_block: tuple[float, ...]
    tokens_at_end: float

    def record(self) -> dict[str, Any]:
        """As in the JSON record of ``vitrim eval``; ``topk`` is called by its k, such as ``top5``."""
        return {
            "method": self.method,
            "images": self.images,
            "top1": self.top1,
            f"top{self.k}": self.topk,
            "agreement": self.agreement,
            "cosine": self.cosine,
            "gmacs": self.gmacs,
            "gmacs_images": self.gmacs_images,
            "tokens_per_block": list(self.tokens_per_block),
            "tokens_at_end": self.tokens_at_end,
        }


def measure(output: Output, dense: Output, labels: Tensor, k: int) -> Tally:
    """Compare one batch with its labels (B,) and with what the dense model makes of it.

    Example:
        >>> feature, logits = torch.ones(2, 4), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> output = Output(feature, logits, (10, 10), 10)
        >>> tally = measure(output, output, torch.tensor([0, 1]), k=2)
        >>> tally.top1, tally.topk, tally.agree, tally.cosine
        (1, 2, 2, 2.0)
    """
    ranked = output.logits.topk(k, dim=1).indices
    first, hit = ranked[:, 0], ranked == labels[:, None]
    cosine = torch.cosine_similarity(output.feature.double(), dense.feature.double(), dim=1)
    return Tally(
        images=labels.shape[0],
        top1=int(hit[:, 0].sum()),
        topk=int(hit.sum()),
        agree=int((first == dense.logits.topk(k, dim=1).indices[:, 0]).sum()),
        cosine=float(cosine.sum()),
        tokens_per_block=output.tokens_per_block,
        tokens_at_end=output.tokens_at_end,
    )


@dataclass(frozen=True)
class _Cost:
    """MACs per image as the mean over the images they were counted on."""

    gmacs: dict[str, float]
    images: int

    def __add__(self, other: _Cost) -> _Cost:
        images = self.images + other.images
        total = {part: self.gmacs[part] * self.images + other.gmacs[part] * other.images for part in self.gmacs}
        return _Cost({part: value / images for part, value in total.items()}, images)


class _Forward(nn.Module):
    """The model, and hooked values of its run: logits (B, K), the feature (B, C) behind them, tokens at the end.

    For a private copy of a model: its hooks are never taken off.
    """

    logits: Tensor
    num_tokens: int

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.host = host_of(model)
        self.inputs: list[Tensor] = []
        for classifier in self.host.classifiers(model):
            classifier.register_forward_pre_hook(self._note_input)
        self.host.blocks(model)[-1].register_forward_hook(self._note_tokens)

    def forward(self, images: Tensor) -> None:
        self.inputs.clear()
        self.logits = self.host.logits(self.model(images))

    def feature(self) -> Tensor:
        """(B, C), what the classifier reads; the mean where there are two."""
        return torch.stack(self.inputs).mean(0)

    def _note_input(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.inputs.append(args[0])

    def _note_tokens(self, module: nn.Module, args: object, output: Tensor) -> None:
        self.num_tokens = output.shape[1]


class _Contestant:
    """One model of the comparison and what is known about it so far."""

    def __init__(self, model: nn.Module, reduction: Reduction | None) -> None:
        self.forward = _Forward(model).eval()
        self.reduction = reduction
        self.name = DENSE if reduction is None else reduction.config.describe()
        self.adaptive = reduction is not None and reduction.config.adaptive
        self.num_blocks = len(host_of(model).blocks(model))
        self.tally: Tally | None = None
        self.cost: _Cost | None = None

    def run(self, images: Tensor) -> tuple[Output, _Cost | None]:
        """One forward, and what it adds to the known cost (None: nothing, counts of a static method never change)."""
        cost = None
        if self.adaptive:
            # the same forward is counted and evaluated; a whole batch, as counts may depend on the batch mates
            cost = _Cost(count_macs(self.forward, images).gmacs(), images.shape[0])
        else:
            if self.cost is None:
                cost = _Cost(count_macs(self.forward, images[:1]).gmacs(), 1)
            self.forward(images)
        return self.output(), cost

    def output(self) -> Output:
        """The output of the last forward."""
        logits, feature = self.forward.logits, self.forward.feature()
        if not bool(torch.isfinite(logits).all() & torch.isfinite(feature).all()):
            raise VitrimError(f"{self.name}: the model's outputs are not finite numbers: check its weights and dtype")
        if self.reduction is None:
            everything = logits.shape[0] * self.forward.num_tokens
            return Output(feature, logits, (everything,) * self.num_blocks, everything)
        return Output(feature, logits, *_tokens(self.reduction, logits.shape[0]))

    def add(self, tally: Tally, cost: _Cost | None) -> None:
        self.tally = tally if self.tally is None else self.tally + tally
        if cost is not None:
            self.cost = cost if self.cost is None else self.cost + cost

    def row(self, k: int) -> Row | None:
        if self.tally is None or self.cost is None:
            return None
        total, n = self.tally, self.tally.images
        return Row(
            method=self.name,
            images=n,
            top1=total.top1 / n,
            topk=total.topk / n,
            k=k,
            agreement=total.agree / n,
            cosine=total.cosine / n,
            gmacs=self.cost.gmacs,
            gmacs_images=self.cost.images,
            tokens_per_block=tuple(_tidy(tokens / n) for tokens in total.tokens_per_block),
            tokens_at_end=_tidy(total.tokens_at_end / n),
        )


class Evaluation:
    """The comparison, fed one batch at a time. `rows` can be read after any batch.

    The given model is not touched: it is copied once, and the reduced models share the parameters of that copy, so a
    further method costs no memory for parameters. Copies are in eval mode; autocast is off. A batch counts for every
    method or, if it raises, for none.

    Args:
        model: the dense model, a supported host that is not reduced.
        methods: configs or their text form; each becomes one row after the dense one.
        device: where to compute; None for where the model is.
        dtype: of parameters and images; None for what the model has.
        seed: of methods that draw at random. Every method draws the same whatever other methods there are, and the
            global generators stay as they were.
        learned: folder of a saved reduction (`Reduction.save`), whose parameters the methods of that name get; others
            that learn keep random ones.

    Raises:
        VitrimError: the model is reduced or has no classifier, or a method is unknown or does not fit the model.

    Example:
        >>> import timm
        >>> evaluation = Evaluation(timm.create_model("test_vit", num_classes=10), ["none"])
        >>> evaluation.update(torch.zeros(2, 3, 160, 160), torch.tensor([0, 1]))
        >>> [(row.method, row.images, row.agreement) for row in evaluation.rows()]
        [('dense', 2, 1.0), ('none', 2, 1.0)]
    """

    def __init__(
        self,
        model: nn.Module,
        methods: Sequence[MethodConfig | str],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        learned: Path | None = None,
    ) -> None:
        configs = [parse_method(method) if isinstance(method, str) else method for method in methods]
        if hasattr(model, HANDLE):
            raise VitrimError("evaluation starts from the dense model: call vitrim.restore_(model) first")
        self.num_classes = host_of(model).facts(model).num_classes
        if self.num_classes < 1:
            raise VitrimError(f"this {type(model).__name__} has no classifier (num_classes=0), so it predicts nothing")
        dense = copy.deepcopy(model).to(device=device, dtype=dtype).eval()
        self.contestants = [_Contestant(dense, None)]
        for config in configs:
            reduced = shared_copy(dense)
            reduction = reduce_(reduced, config, record=True)
            if learned is not None and config.name == saved_method(learned):
                reduction.load_parameters(learned)
            self.contestants.append(_Contestant(reduced, reduction))
        self.k = min(5, self.num_classes)
        self.seed = seed
        self.batches = 0
        like = next(dense.parameters())
        self.device, self.dtype = like.device, like.dtype

    @property
    def images(self) -> int:
        """Images seen so far."""
        tally = self.contestants[0].tally
        return 0 if tally is None else tally.images

    @torch.no_grad()
    def update(self, images: Tensor, labels: Tensor) -> None:
        """Run every model on images (B, C, H, W), with labels (B,) integers in [0, K).

        Raises:
            DataError: labels of another shape or kind, or beyond the model's classes.
            VitrimError: a model's outputs are not finite.
        """
        if images.ndim != 4:
            raise DataError(f"expected images (B, C, H, W), got a tensor of {tuple(images.shape)}")
        _check_labels(labels, images.shape[0], self.num_classes)
        images, labels = images.to(self.device, self.dtype), labels.to(self.device)
        measured, dense = [], None
        for contestant in self.contestants:
            with self._alone():
                output, cost = contestant.run(images)
            dense = dense or output
            measured.append((measure(output, dense, labels, self.k), cost))
        for contestant, (tally, cost) in zip(self.contestants, measured, strict=True):
            contestant.add(tally, cost)
        self.batches += 1

    def rows(self) -> list[Row]:
        """The dense row, then one per method in the given order. Empty before the first batch."""
        return [row for contestant in self.contestants if (row := contestant.row(self.k)) is not None]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Draw from fresh generators, and compute in the dtype of the parameters also under a caller's autocast."""
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(cuda), torch.autocast(self.device.type, enabled=False):
            torch.manual_seed(self.seed + self.batches)
            yield


def evaluate(
    model: nn.Module,
    methods: Sequence[MethodConfig | str],
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> list[Row]:
    """Compare ``methods`` with the dense ``model`` in one pass over ``batches`` of images (B, C, H, W) and labels (B,).

    Every model runs once per batch. To keep what was gathered when reading fails half-way, use `Evaluation`.

    Args:
        model, methods, device, dtype, seed: as for `Evaluation`; the model is left as it was.
        batches: read once.
        on_progress: called after every batch with the number of images seen.

    Returns:
        One `Row` per model, the dense one first.

    Raises:
        VitrimError: as `Evaluation` and its ``update``; or there are no images.

    Example:
        >>> import timm
        >>> model = timm.create_model("test_vit", num_classes=3)
        >>> batches = [(torch.zeros(2, 3, 160, 160), torch.tensor([0, 2]))]
        >>> [(row.method, row.k, row.tokens_per_block[0]) for row in evaluate(model, ["tome:r=8"], batches)]
        [('dense', 3, 101), ('tome:r=8', 3, 93)]
    """
    evaluation = Evaluation(model, methods, device=device, dtype=dtype, seed=seed)
    for images, labels in batches:
        evaluation.update(images, labels)
        if on_progress is not None:
            on_progress(evaluation.images)
    if not evaluation.images:
        raise DataError("there are no images to evaluate on")
    return evaluation.rows()


def _tokens(reduction: Reduction, batch: int) -> tuple[tuple[int, ...], int]:
    """Tokens after every block of the last forward, and those left at the end, summed over the batch."""
    counts = tuple(round(batch * count) for count in reduction.mean_tokens_per_block)
    return counts, round(batch * reduction.state.mean_tokens())


def _tidy(count: float) -> float:
    return int(count) if count.is_integer() else count


def _check_labels(labels: Tensor, count: int, num_classes: int) -> None:
    if labels.shape != (count,) or labels.is_floating_point():
        raise DataError(f"expected {count} integer labels, one per image, got {labels.dtype} of {tuple(labels.shape)}")
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    if len(wrong):
        raise DataError(f"label {int(wrong[0])} is beyond the model's {num_classes} classes, 0 to {num_classes - 1}")
