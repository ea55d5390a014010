"""The interface of a task to the training loop: its head, its loss, its metric, and how a batch is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from timm.data import Mixup
from torch import Tensor, nn
from torch.utils.data import default_collate

from vitrim.core.registry import ask, enter
from vitrim.core.versions import require
from vitrim.data.paths import listed
from vitrim.errors import DataError, VitrimError, check_known
from vitrim.tasks.options import Protocol
from vitrim.tasks.transforms_dense import DenseEvalTransform, DenseTrainTransform

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

    from vitrim.tasks.options import DenseAugment, Loss, Mix
    from vitrim.tasks.step import Criterion

T = TypeVar("T", bound="Task")

TASKS: dict[str, type[Task]] = {}
"""The tasks that are known so far; `vitrim.tasks.tasks` knows all."""


class Task(ABC):
    """A kind of problem. A new one is one new file in ``tasks/`` with a subclass of this under `register_task`.

    Args:
        num_classes: K of the data.

    Attributes:
        name: as a recipe writes it.
        selects_by: the metric a model is chosen by; higher is better.
        losses: the losses it can learn.
        agreement_means: what `agreement` compares, in a few words.
        shown: the metrics that tables show; None: all.
        cost_varies: whether the work of a prediction depends on what is in the image.
        learned_by: the kind of model that learns it.
        reads: the task of `vitrim.data.load_data` whose data it learns; None: whatever labels a source has.
        other_classes: whether a model's classes that the data does not have count, too, after `meet`; else they are
            left out.
        mixes: whether images are mixed, with their labels.
        several: whether an image has several labels, (B, K).
        embeds: whether predictions are made of the model's embeddings, by `of_embedding`.
        by_windows: whether images can be evaluated by a protocol of windows and scales.
        query_per_patch: whether `auxiliary` takes an output per patch; otherwise one for the whole image.
        protocol: how images are evaluated; may be replaced.
        unpadded: whether a model sees each image in its own size and shape, after `meet`.
        columns: the places of the logits that are read, in the order of the classes; None: all, as they are.
        places: the model's class of each of the data's, after `meet`; None: they have the same numbers.
        by_number: whether data and model both have class names, and these do not say which class is which.
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
        self.by_number = False
        self.protocol = Protocol()
        self.unpadded = False

    @abstractmethod
    def check(self, dataset: Any) -> None:
        """Raise `VitrimError` if the data does not suit this task: one line that names what is wrong."""

    @abstractmethod
    def criterion(self, loss: Loss) -> Criterion:
        """The loss from logits (B, K) and targets."""

    def mixer(self, mix: Mix) -> Mixup | None:
        """timm's mixup and cutmix as a recipe says, or None if it mixes none.

        It takes images (B, C, H, W), which it overwrites, with B even, and (B,) class indices, or (B, K) where images
        have several labels, and gives the mixed images and (B, K) targets. It draws from numpy's global stream.

        Labels are not smoothed here but by the criterion: both are linear, so mixing smoothed labels and smoothing
        mixed ones is the same.

        Raises:
            VitrimError: the recipe mixes, and the task's targets cannot be mixed, as those of dense tasks.
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
        """The metrics of an evaluation, shares in [0, 1] in float64. Their states are sums or lists of tensors."""

    @abstractmethod
    def check_targets(self, targets: Any, count: int) -> None:
        """Raise `DataError` if these are not the targets of ``count`` images, or beyond the model's classes."""

    @abstractmethod
    def agreement(self, prediction: Any, dense: Any, targets: Any) -> Tensor:
        """The agreement of a prediction with the dense model's: values in [0, 1], whose mean is reported."""

    def auxiliary(self, loss: Loss) -> Criterion | None:
        """The loss of an auxiliary head on patches or on a query, from its output and targets; None: that of logits."""
        return None

    def train_transform(self, geometry: Any, augment: DenseAugment) -> Callable[..., Any] | None:
        """The changes to a training image and its target together; None: of images alone, the training loop's own."""
        return None if self.reads is None else DenseTrainTransform(geometry, augment)

    def eval_transform(self, geometry: Any) -> Callable[..., Any] | None:
        """The processing of an image and its target for evaluation; None: of images alone, the model's own."""
        return None if self.reads is None else DenseEvalTransform(geometry, padded=not self.unpadded)

    def follow(self, protocol: Protocol) -> None:
        """Evaluate by a protocol of windows and scales.

        Raises:
            VitrimError: the task has none, and this is not the plain one.
        """
        if not protocol.plain and not self.by_windows:
            raise VitrimError(f"task {self.name} sees whole images, once: leave the protocol out")
        self.protocol = protocol

    def meet(self, model: nn.Module, class_names: Sequence[str] | None) -> None:
        """Adapt the reading of predictions to a model that may have been made elsewhere, for data with these classes.

        Names decide where both sides have them: the data's classes become the first ones, and the model's others
        follow or are left out. Classes without a name in common are matched by their numbers.

        Raises:
            VitrimError: some names of the data are the model's and others are not, or one is that of several classes.
        """
        library = ask(model)
        known = library.class_names(model)
        if known is not None and len(known) != (library.num_classes(model) or len(known)):
            known = None  # of a head that it had before
        self.places = places_of(class_names, known, numbered=self.reads is not None)
        self.by_number = bool(class_names and known) and self.places is None
        if self.places is not None and self.other_classes:
            self.columns = [*self.places, *sorted(set(range(self.num_classes)).difference(self.places))]
        elif self.places is not None:
            self.columns, self.num_classes = self.places, len(self.places)

    def eval_batch(self, batch_size: int) -> int:
        """The images of a batch of an evaluation, where ``batch_size`` were asked for: one if each has its own size."""
        return batch_size if self.protocol.plain and not self.unpadded else 1

    def collate(self, items: list[Any]) -> Any:
        """A batch of what a dataset gives."""
        return default_collate(items)

    def predict(self, model: nn.Module, images: Tensor, targets: Any = None) -> Any:
        """The prediction of ``model`` for images (B, C, H, W): logits (B, K).

        ``targets`` say at most where in the images there is padding; None: nowhere.
        """
        logits = ask(model).logits(model(images))
        return logits if self.columns is None else logits[:, self.columns]

    def of_embedding(self, vectors: Tensor) -> Tensor:
        """The prediction that embeddings (B, D) are read for, where the task `embeds`: by default themselves."""
        return vectors

    def update(self, metrics: MetricCollection, prediction: Any, targets: Any) -> None:
        """Show a prediction and its targets to the metrics."""
        metrics.update(prediction.float(), targets)

    def by_class(self, metrics: MetricCollection) -> dict[str, list[float]]:
        """Scores of each of the K classes by name, shares in [0, 1], nan for a class that does not occur; may be empty.

        Computed from what the metrics were shown, and too many numbers for a table.
        """
        return {}

    def fit_head(self, model: nn.Module) -> None:
        """Give the model a head for K classes; a head that has K already is left as it is.

        Raises:
            VitrimError: the model's head cannot be replaced.
        """
        library = ask(model)
        if library.num_classes(model) != self.num_classes:
            library.reset_head(model, self.num_classes)

    def check_labels(self, labels: Tensor) -> None:
        """Raise `DataError` if a label is beyond the model's classes."""
        wrong = labels[(labels < 0) | (labels >= self.num_classes)]
        if len(wrong):
            end = self.num_classes - 1
            raise DataError(f"label {int(wrong[0])} is beyond the model's {self.num_classes} classes, 0 to {end}")

    def check_classes(self, source: str, num_classes: int) -> None:
        """Raise `VitrimError` if data has another number of classes than the data that is trained on."""
        if num_classes != self.num_classes:
            found = f"{source} has {num_classes} classes"
            raise VitrimError(f"{found}, but the training data has {self.num_classes} classes")

    def check_loss(self, loss: Loss) -> None:
        """Raise `VitrimError` if the task cannot learn the loss of a recipe."""
        check_known(f"loss of {self.name}", loss.name, self.losses)


def places_of(names: Sequence[str] | None, known: Sequence[str] | None, *, numbered: bool = False) -> list[int] | None:
    """The places of the data's classes among those a model knows, by name; case, spaces, - and _ count as spelling.

    Args:
        names: of the data's classes.
        known: of the model's.
        numbered: the data has the numbers of a published list, of which there are several spellings: names that the
            model does not have are left to their numbers, where all others are the model's in the same order.

    Returns:
        One place per name; None where one side has no names, or they say nothing about which class is which.

    Raises:
        VitrimError: the first name that is unknown to a model that has others of them, or that several classes have.

    Example:
        >>> places_of(["cat", "Dog"], ["N/A", "dog", "cat", "N/A"]), places_of(["cat"], ["n02123045"])
        ([2, 1], None)
    """
    if not names or not known:
        return None
    if list(names) == list(known):  # ImageNet has two cranes
        return list(range(len(known)))
    exact: dict[str, list[int]] = {}
    spelt: dict[str, list[int]] = {}
    for place, name in enumerate(known):
        exact.setdefault(name, []).append(place)
        spelt.setdefault(spelling(name), []).append(place)
    found = [exact.get(name) or spelt.get(spelling(name)) or [] for name in names]
    if not any(found):
        return None
    own_places = len(names) == len(known) and all(place in each for place, each in enumerate(found) if each)
    if own_places and all(found):
        return list(range(len(known)))
    missing = next((name for name, places in zip(names, found, strict=True) if not places), None)
    if missing is not None:
        if numbered and own_places:
            return None
        raise VitrimError(
            f"class '{missing}' of the data is not among the {len(known)} classes of the model ({listed(known)}), "
            "though others are: name the classes as the model does"
        )
    places = [each[0] for each in found]
    doubled = next((n for n, each in enumerate(found) if len(each) > 1 or places.index(places[n]) < n), None)
    if doubled is not None:
        raise VitrimError(
            f"class '{names[doubled]}' of the data cannot be told by its name, which is not that of one class of the "
            f"model ({listed(known)}): name the classes as the model does"
        )
    return places


def spelling(name: str) -> str:
    """The part of a name that its spelling does not change.

    Example:
        >>> spelling("Traffic_Light "), spelling("traffic light")
        ('traffic light', 'traffic light')
    """
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


def register_task(task: type[T]) -> type[T]:
    """Class decorator: register a task under its ``name``. A name can be registered only once."""
    enter(TASKS, task.name, task, f"task '{task.name}'")
    return task
