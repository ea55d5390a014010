"""Measurements of every model in a pass over the data.

A `Probe` starts a `Gauge` per model, which holds the results; here, one class is both. Gauges hold torchmetrics metrics
whose states are sums or lists, so that those of several processes can be joined, and partial ones stored.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from math import fsum, isnan, nan, sqrt
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from vitrim.engines.macs import PARTS, tidy
from vitrim.measure.contestants import Contestant, ModelOutput
from vitrim.measure.records import Batch
from vitrim.tasks.base import Task

State = dict[str, Tensor | list[Tensor]]
"""The content of a gauge: sums and lists of tensors by name."""


class Probe(Protocol):
    """A measurement of every model of a comparison."""

    def start(self, contestant: Contestant) -> Gauge:
        """Return an empty gauge for one model."""
        ...


class Gauge(ABC):
    """The measurement of one model, in metrics whose states are sums or lists of tensors.

    ``counts_macs``: forwards must count MACs; ``against_dense``: columns that compare the model with the dense one.
    """

    counts_macs = False
    against_dense: ClassVar[tuple[str, ...]] = ()

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.metrics = dict(metrics)
        for metric in self.metrics.values():
            metric.distributed_available_fn = lambda: False  # `Measurement.findings` joins states
            # States are replaced without an update, which would leave an old result in the cache.
            metric.compute_with_cache = False

    def start(self, contestant: Contestant) -> Gauge:
        """Return an empty copy for a model."""
        return copy.deepcopy(self)

    @abstractmethod
    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        """Update with the outputs of the model and the dense model for a batch."""

    def result(self) -> Mapping[str, Any]:
        """The columns of a row, JSON-serialisable, with units in names."""
        return {}

    def classes(self, names: Sequence[str]) -> dict[str, dict[str, float | None]]:
        """Scores by score name and class, None for a class that does not occur; empty for probes without them."""
        return {}

    def state(self) -> State:
        found: State = {}
        for name, metric in self.metrics.items():
            for key, value in metric.metric_state.items():
                found[f"{name}.{key}"] = list(value) if isinstance(value, list) else value.detach().clone()
        return found

    def load(self, state: State) -> None:
        """Restore a result of `state`; `KeyError` or `ValueError` if it is not of this gauge."""
        for name, metric in self.metrics.items():
            for key, old in metric.metric_state.items():
                if isinstance(old, Tensor) and f"{name}.{key}" not in state:
                    raise KeyError(f"no {name}.{key} in the state of a gauge")
                value = state.get(f"{name}.{key}", [])  # empty lists are not stored in files
                if _form(value) != _form(old):
                    raise ValueError(f"{name}.{key} is {_form(value)} in the state of a gauge, expected {_form(old)}")
                setattr(metric, key, moved(value, metric.device) if isinstance(old, list) else moved(value, old.device))
            metric._update_count = 1  # otherwise torchmetrics warns about compute before update


def _form(value: Tensor | list[Tensor]) -> str:
    """The form of a state, which must match that of its gauge."""
    return "a list" if isinstance(value, list) else f"{value.dtype} of {tuple(value.shape)}"


def joined(states: Iterable[State]) -> State:
    """The sum of states, as if one gauge had processed the batches of all."""
    whole: dict[str, Any] = {}
    for state in states:
        for name, value in state.items():
            whole[name] = whole[name] + value if name in whole else value  # sums of tensors, and longer lists
    return whole


def moved(value: Tensor | list[Tensor], device: torch.device | str) -> Tensor | list[Tensor]:
    return [one.to(device) for one in value] if isinstance(value, list) else value.to(device)


# ---- the probes ------------------------------------------------------------------------------------------------------


class TaskMetrics(Gauge):
    """The metrics of a task, shares in [0, 1] by name."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.collection = task.metrics()
        super().__init__({str(name): metric for name, metric in self.collection.items(keep_base=True)})

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        self.collection.to(batch.images.device)
        self.task.update(self.collection, output.prediction, batch.targets)

    def result(self) -> Mapping[str, Any]:
        return {name: float(value) for name, value in self.collection.compute().items()}

    def classes(self, names: Sequence[str]) -> dict[str, dict[str, float | None]]:
        return {
            score: {name: None if isnan(value) else value for name, value in zip(names, values, strict=True)}
            for score, values in self.task.by_class(self.collection).items()
        }


def are_logits(output: ModelOutput) -> bool:
    """True if a prediction is one row of logits (B, K) per image, not a map, a list of objects or the feature."""
    found = output.prediction
    return isinstance(found, Tensor) and found.ndim == 2 and found is not output.feature


def divergence(logits: Tensor, dense: Tensor) -> Tensor:
    """(B,) float64: KL(dense || model) of the class probabilities of logits (B, K), in nats.

    Example:
        >>> divergence(torch.zeros(1, 2), torch.tensor([[0.0, 100.0]])).round(decimals=4)  # log 2
        tensor([0.6931], dtype=torch.float64)
    """
    own, other = (one.detach().double().log_softmax(1) for one in (logits, dense))
    return (other.exp() * (other - own)).sum(1)


class Agreement(Gauge):
    """Agreement with the dense model.

    * ``agreement``: in [0, 1], see `Task.agreement`; the share of images with the same predicted class.
    * ``cosine``: mean cosine of the classifier's input to the dense model's (class token after the last norm, mean of
      class and distillation token, or pooled patches), of a dense head over the patches; nan if it reads merged tokens.
    """

    against_dense = ("agreement", "cosine")

    def __init__(self, task: Task) -> None:
        self.task = task
        self.agreement, self.cosine = Values(), Values()
        super().__init__({"agreement": self.agreement, "cosine": self.cosine})

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        self.agreement.update(self.task.agreement(output.prediction, dense.prediction, batch.targets))
        feature, other = output.feature, dense.feature
        if feature is not None and other is not None and feature.shape == other.shape:
            cosines = torch.cosine_similarity(feature.double(), other.double(), dim=-1)
            self.cosine.update(cosines.flatten(1).mean(1) if cosines.ndim > 1 else cosines)

    def result(self) -> Mapping[str, Any]:
        return {name: metric.compute().item() for name, metric in self.metrics.items()}


class Values(Metric):
    """The mean of values in float64, independent of their order; nan without any."""

    full_state_update = False
    values: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", default=[], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.values.append(values.detach().double().cpu().flatten())

    def each(self) -> Tensor:
        """All values (N,) float64, in order of arrival."""
        return dim_zero_cat(self.values) if self.values else torch.zeros(0, dtype=torch.float64)

    def compute(self) -> Tensor:
        # A sum without rounding does not depend on the order in which processes were joined.
        values = self.each().tolist()
        return torch.tensor(fsum(values) / len(values) if values else torch.nan, dtype=torch.float64)


class Lists(Metric):
    """A record of tensors (B, ...) by name over all batches, on the CPU."""

    full_state_update = False

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def batches(self, name: str) -> list[Tensor]:
        found: list[Tensor] = getattr(self, name)
        return found

    def update(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            self.batches(name).append(tensor.detach().cpu())

    def each(self) -> dict[str, Tensor]:
        """The concatenated batches, (N, ...), without names that have no tensors."""
        return {name: dim_zero_cat(found) for name in self.names if (found := self.batches(name))}

    def compute(self) -> dict[str, Tensor]:
        """`each`, except that torchmetrics squeezes tensors with one element."""
        return self.each()


class _Sums(Metric):
    """Sums of integers (K,), and the number of images they cover."""

    full_state_update = False
    sums: Tensor
    images: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.add_state("sums", default=torch.zeros(count, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("images", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, sums: Iterable[int], images: int) -> None:
        self.sums = self.sums + torch.tensor(list(sums), dtype=torch.int64)
        self.images = self.images + images

    def compute(self) -> Tensor:
        return self.sums.double() / self.images


class MacsProbe(Gauge):
    """Multiply-accumulates per image.

    * ``gmacs``: 10^9 per image, by part (linear, attention, matching, norm); padding counts.
    * ``gmacs_images``: images counted: one per shape if MACs follow from shapes, otherwise all.
    """

    counts_macs = True

    def __init__(self) -> None:
        self.sums, self.shapes = _Sums(len(PARTS)), Lists("shapes")
        super().__init__({"macs": self.sums, "shapes": self.shapes})

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        assert output.macs is not None
        self.sums.update((output.macs[part] for part in PARTS), len(batch))
        if output.counted is not None and output.counted not in self._shapes():
            self.shapes.update(shapes=torch.tensor(output.counted))

    def result(self) -> Mapping[str, Any]:
        images = int(self.sums.images)
        gmacs = {part: int(macs) / images / 1e9 for part, macs in zip(PARTS, self.sums.sums, strict=True)}
        return {"gmacs": gmacs, "gmacs_images": len(self._shapes()) or images}

    def _shapes(self) -> set[tuple[int, ...]]:
        """The distinct heights and widths that were counted."""
        return {tuple(shape.tolist()) for shape in self.shapes.batches("shapes")}


class Tokens(Gauge):
    """Numbers of tokens, means over the images: ``tokens_per_block`` with prefix, without padding; ``tokens_at_end``,
    left after the last block, even if that only computes the head's input.
    """

    def __init__(self, num_blocks: int = 0) -> None:
        self.sums = _Sums(num_blocks + 1)
        super().__init__({"tokens": self.sums})

    def start(self, contestant: Contestant) -> Gauge:
        return Tokens(contestant.num_blocks)

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        self.sums.update((*output.tokens_per_block, output.tokens_at_end), len(batch))

    def result(self) -> Mapping[str, Any]:
        # torchmetrics squeezes a single number to a scalar
        *per_block, at_end = (tidy(mean) for mean in self.sums.compute().reshape(-1).tolist())
        return {"tokens_per_block": per_block, "tokens_at_end": at_end if per_block else None}


def mean_loss(each: Tensor) -> dict[str, float]:
    """The mean ``loss`` of images (N,) and its standard error, at least one image's share: of few, none may change."""
    error = each.std(unbiased=False).item() / sqrt(len(each))
    return {"loss": each.mean().item(), "loss_error": max(error, 1.0 / len(each))}


class PairedLoss(Gauge):
    """Loss against the dense model, image by image: ``loss``, its standard error ``loss_error``, and the mean ``kl``.

    ``labels``: the loss is of top-1; False: of agreement with the dense model.
    """

    against_dense = ("loss", "loss_error", "kl")

    def __init__(self, task: Task, *, labels: bool) -> None:
        self.task, self.labels = task, labels
        self.loss, self.kl = Values(), Values()
        super().__init__({"loss": self.loss, "kl": self.kl})

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        found, like = output.prediction, dense.prediction
        if self.labels:
            right, wrong = like.argmax(1) == batch.targets, found.argmax(1) == batch.targets
            self.loss.update(right.double() - wrong.double())
        else:
            self.loss.update(1.0 - self.task.agreement(found, like, batch.targets).double())
        self.kl.update(divergence(found, like))

    def result(self) -> Mapping[str, Any]:
        return {**mean_loss(self.loss.each()), "kl": self.kl.compute().item()}


class PairedIoU(Gauge):
    """The standard error ``loss_error`` of the loss of mIoU against the dense model, a share."""

    against_dense = ("loss_error",)

    def __init__(self, task: Task) -> None:
        self.task = task
        self.counts = Lists("right", "union", "dense_right", "dense_union")
        super().__init__({"counts": self.counts})

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        (right, union), (dense_right, dense_union) = (
            _overlaps(one.prediction.argmax(1), batch.targets, self.task.num_classes) for one in (output, dense)
        )
        self.counts.update(right=right, union=union, dense_right=dense_right, dense_union=dense_union)

    def result(self) -> Mapping[str, Any]:
        each = self.counts.each()
        # mIoU is not a mean over images, so its change is linearised: each image moves both scores through the
        # intersections and unions it adds, and the error is that of the sum of these paired moves.
        moves = _moves(each["dense_right"], each["dense_union"]) - _moves(each["right"], each["union"])
        return {"loss_error": sqrt(len(moves)) * moves.std(unbiased=False).item()}


class PairedAP(Gauge):
    """The standard error ``loss_error`` of the loss of average precision against the dense model, a share.

    No column if it is undefined, as for one image. Memory: all detections of both models.
    """

    GROUPS = 20
    against_dense = ("loss_error",)

    def __init__(self, task: Task) -> None:
        self.task = task
        self.pair = [task.metrics(), task.metrics()]  # this model's, the dense model's
        super().__init__(
            dict(zip(("own", "dense"), (metric for own in self.pair for metric in own.values()), strict=True))
        )

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        for metrics, one in zip(self.pair, (output, dense), strict=True):
            metrics.to(batch.images.device)
            self.task.update(metrics, one.prediction, batch.targets)

    def result(self) -> Mapping[str, Any]:
        metrics: list[Any] = list(self.metrics.values())
        # AP ranks the detections of all images together and is not a mean over images, so the error is a jackknife over
        # groups of images: the scores without each of them.
        own, dense = (metric.left_out(self.GROUPS) for metric in metrics)
        # Paired: both models miss the same group of images.
        change = own - dense
        error = sqrt(len(change) - 1) * change.std(unbiased=False).item() if len(change) > 1 else nan
        return {} if isnan(error) else {"loss_error": error}


def _overlaps(classes: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(B, K) int64: pixels of the intersection and the union for every class; ignored labels are in neither."""
    right, union = [], []
    for own, true in zip(classes, labels, strict=True):
        valid = true < count
        own, true = own[valid].flatten().long(), true[valid].flatten().long()
        # Intersection by true class; the union counts pixels of either, and those of both once.
        both = torch.bincount(true[own == true], minlength=count)
        right.append(both)
        union.append(torch.bincount(own, minlength=count) + torch.bincount(true, minlength=count) - both)
    return torch.stack(right).cpu(), torch.stack(union).cpu()


def _moves(right: Tensor, union: Tensor) -> Tensor:
    """(N,) float64: first-order contribution of each image to the mean over classes of right / union."""
    right, union = right.double(), union.double()
    whole = union.sum(0)
    seen = whole > 0
    share = right.sum(0)[seen] / whole[seen]
    # The derivative of right / union: what an image adds to right, less the share of what it adds to union.
    return ((right[:, seen] - share * union[:, seen]) / whole[seen]).mean(1)


class Predictions(Gauge):
    """The predicted class of every image and its probability, for `table`; it adds no columns to rows."""

    def __init__(self) -> None:
        self.found = Lists("ids", "labels", "classes", "probabilities")
        super().__init__({"found": self.found})

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        probabilities, classes = output.prediction.detach().float().softmax(1).max(1)
        self.found.update(ids=batch.ids, labels=batch.targets, classes=classes, probabilities=probabilities)

    def table(self) -> dict[str, list[Any]]:
        """The index, label, predicted class and probability of every image, in the order of the dataset."""
        each = self.found.each()
        order = each["ids"].argsort()
        return {name: values[order].tolist() for name, values in each.items()}
