"""The interface between a task and the training loop: head, loss, metric, and batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from timm.data import Mixup
from torch import Tensor, nn
from torch.utils.data import default_collate

from vitrim.core.registry import ask
from vitrim.core.tables import enter
from vitrim.core.versions import require
from vitrim.errors import DataError, VitrimError, check_known
from vitrim.tasks.options import Protocol
from vitrim.tasks.transforms_dense import DenseEvalTransform, DenseTrainTransform

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

    from vitrim.tasks.options import DenseAugment, Loss, Mix
    from vitrim.tasks.step import Criterion

T = TypeVar("T", bound="Task")

TASKS: dict[str, type[Task]] = {}
"""Tasks registered so far; `vitrim.tasks.tasks` returns all."""


class Task(ABC):
    """A kind of problem. To add one, subclass it in a new file of ``tasks/`` under `register_task`.

    Attributes:
        name: value of a recipe's ``task``.
        selects_by: metric that selects a model; higher is better.
        losses: losses it can learn.
        agreement_means: a short description of `agreement`.
        shown: metrics in tables; None: all.
        cost_varies: the cost of a prediction depends on the image's content.
        learned_by: the kind of model that learns it.
        reads: task of `vitrim.data.load_data` for its data; None: any labels of a source.
        other_classes: after `meet`, a model's classes that the data does not have count, too.
        mixes: images are mixed, with their labels.
        several: an image has several labels, (B, K).
        embeds: predictions come from the model's embeddings, by `of_embedding`.
        by_windows: images can be evaluated by a protocol of windows and scales.
        query_per_patch: `auxiliary` needs an output per patch; otherwise one per image.
        protocol, unpadded: how images are evaluated, and if each keeps its own size and shape; may be replaced.
        columns: places of the logits that are read, in the order of the classes; None: all.
        places: after `meet`, the model's class of each of the data's; None: they have the same numbers.
    """

    name: ClassVar[str]
    selects_by: ClassVar[str]
    losses: ClassVar[tuple[str, ...]]
    agreement_means: ClassVar[str]
    shown: ClassVar[tuple[str, ...] | None] = None
    cost_varies: ClassVar[bool] = False
    learned_by: ClassVar[str] = "a classifier"
    reads: ClassVar[str | None] = None
    other_classes: ClassVar[bool] = False
    mixes: ClassVar[bool] = False
    several: ClassVar[bool] = False
    embeds: ClassVar[bool] = False
    by_windows: ClassVar[bool] = False
    query_per_patch: ClassVar[bool] = False

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.places: list[int] | None = None
        self.columns: list[int] | None = None
        self.protocol = Protocol()
        self.unpadded = False

    @abstractmethod
    def check(self, dataset: Any) -> None:
        """Raise `VitrimError` if the data does not suit this task: one line that names the fault."""

    @abstractmethod
    def criterion(self, loss: Loss) -> Criterion:
        """The loss from logits (B, K) and targets."""

    def mixer(self, mix: Mix) -> Mixup | None:
        """timm's mixup and cutmix of a recipe, or None; `VitrimError` if the task does not mix.

        Maps images (B, C, H, W), which it overwrites, with B even, and (B,) class indices, or (B, K), to mixed images
        and (B, K) targets. Draws from numpy's global stream. The criterion smooths labels: mixing and smoothing are
        linear, so their order does not matter.
        """
        if not mix.on:
            return None
        if not self.mixes:
            raise VitrimError(f"task {self.name} does not mix images: set mix.mixup=0 and mix.cutmix=0")
        if self.several:
            require("timm", "1.0.31", "mixing images of several labels")
        return Mixup(
            mixup_alpha=mix.mixup,
            cutmix_alpha=mix.cutmix,
            prob=mix.probability,
            switch_prob=mix.switch,
            label_smoothing=0.0,
            num_classes=self.num_classes,
            **({"multi_label": True} if self.several else {}),
        )

    @abstractmethod
    def metrics(self) -> MetricCollection:
        """Metrics of an evaluation, shares in [0, 1] in float64. Their states are sums or lists of tensors."""

    @abstractmethod
    def check_targets(self, targets: Any, count: int) -> None:
        """Raise `DataError` if these are not the targets of ``count`` images, or exceed the model's classes."""

    @abstractmethod
    def agreement(self, prediction: Any, dense: Any, targets: Any) -> Tensor:
        """Agreement of a prediction with the dense model's: values in [0, 1], reported as their mean."""

    def auxiliary(self, loss: Loss) -> Criterion | None:
        """Loss of an auxiliary head on patches or on a query, from its output and targets; None: that of logits."""
        return None

    def train_transform(self, geometry: Any, augment: DenseAugment) -> Callable[..., Any] | None:
        """Joint transform of a training image and its target; None: the training loop's, of images alone."""
        return None if self.reads is None else DenseTrainTransform(geometry, augment)

    def eval_transform(self, geometry: Any) -> Callable[..., Any] | None:
        """Joint transform of an image and its target for evaluation; None: the model's, of images alone."""
        return None if self.reads is None else DenseEvalTransform(geometry, padded=not self.unpadded)

    def follow(self, protocol: Protocol) -> None:
        """Evaluate by a protocol of windows and scales; `VitrimError` if the task has none."""
        if not protocol.plain and not self.by_windows:
            raise VitrimError(f"task {self.name} sees whole images, once: leave the protocol out")
        self.protocol = protocol

    def meet(self, places: list[int] | None) -> None:
        """Read predictions of a model that may come from elsewhere: the data's classes become the first ones.

        ``places`` has the model's class of each of the data's (`places_of`), None for the same numbers. The model's
        other classes follow or are dropped.
        """
        self.places = places
        if places is not None and self.other_classes:
            # A classifier that answers with a class of its own is wrong: those columns must stay in the race.
            self.columns = [*places, *sorted(set(range(self.num_classes)).difference(places))]
        elif places is not None:
            self.columns, self.num_classes = places, len(places)

    def eval_batch(self, batch_size: int) -> int:
        """Batch size of an evaluation for the requested ``batch_size``: 1 if each image has its own size."""
        return batch_size if self.protocol.plain and not self.unpadded else 1

    def collate(self, items: list[Any]) -> Any:
        return default_collate(items)

    def predict(self, model: nn.Module, images: Tensor, targets: Any = None) -> Any:
        """Predict images (B, C, H, W): logits (B, K). ``targets`` only tell where images are padded; None: nowhere."""
        return self.of_output(ask(model).logits(model(images)))

    def of_output(self, output: Tensor) -> Tensor:
        """Predict from a model's output as one tensor: logits (B, K), or embeddings (B, D) where the task `embeds`."""
        if self.embeds:
            return self.of_embedding(output)
        return output if self.columns is None else output[:, self.columns]

    def of_embedding(self, vectors: Tensor) -> Tensor:
        """Predict from embeddings (B, D), where the task `embeds`; by default returns them."""
        return vectors

    def update(self, metrics: MetricCollection, prediction: Any, targets: Any) -> None:
        metrics.update(prediction.float(), targets)

    def by_class(self, metrics: MetricCollection) -> dict[str, list[float]]:
        """Scores of each of the K classes by name, shares in [0, 1], nan for a missing class; may be empty."""
        return {}

    def fit_head(self, model: nn.Module) -> None:
        """Give the model a head for K classes, unless it has one; `VitrimError` if its head cannot be replaced."""
        library = ask(model)
        # A head of the right size may be trained already.
        if library.num_classes(model) != self.num_classes:
            library.reset_head(model, self.num_classes)

    def check_count(self, targets: Any, count: int) -> None:
        """Raise `DataError` if the targets are not one integer per image."""
        if targets.shape != (count,) or targets.is_floating_point():
            shape = f"{targets.dtype} of {tuple(targets.shape)}"
            raise DataError(f"expected {count} integer labels, one per image, got {shape}")

    def check_labels(self, labels: Tensor) -> None:
        """Raise `DataError` if a label exceeds the model's classes."""
        wrong = labels[(labels < 0) | (labels >= self.num_classes)]
        if len(wrong):
            end = self.num_classes - 1
            raise DataError(f"label {int(wrong[0])} is beyond the model's {self.num_classes} classes, 0 to {end}")

    def check_classes(self, source: str, num_classes: int) -> None:
        """Raise `VitrimError` if data has another number of classes than the training data."""
        if num_classes != self.num_classes:
            found = f"{source} has {num_classes} classes"
            raise VitrimError(f"{found}, but the training data has {self.num_classes} classes")

    def check_loss(self, loss: Loss) -> None:
        """Raise `VitrimError` if the task cannot learn the loss of a recipe."""
        check_known(f"loss of {self.name}", loss.name, self.losses)


def register_task(task: type[T]) -> type[T]:
    """Class decorator: register a task under its ``name``, which must be free, or the same class's."""
    enter(TASKS, task.name, task, f"task '{task.name}'")
    return task
