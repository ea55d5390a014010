"""Recipes: everything about a training run but the data, as a validated, frozen record, read from YAML.

Those of the papers are the files in ``recipes/``, one per published table, and the rows of its ``study.csv``
(`vitrim.training.study`). A recipe may name a ``base: NAME`` and contain only differences.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator

from vitrim.checked import Checked, checked_call, one_line_of
from vitrim.core.registry import parse_method
from vitrim.errors import VitrimError, unknown
from vitrim.tasks.options import DenseAugment, Loss, Mix, Protocol, flat, short
from vitrim.training import study
from vitrim.yaml_files import parse_yaml, read_yaml

FOLDER = Path(__file__).with_name("recipes")
DEFAULT = "default"
COMMAND_LINE = "command line"
AUTO = "auto"
"""Chooses a split by the names of the data's splits."""
MAX_EPOCHS = 1e7
MAX_REPEATS = 1000
"""Far above any useful value, so typing errors are reported at once."""

# ---- keys, defaults, ranges and their dependencies -------------------------------------------------------------------


class Augment(Checked):
    """Augmentation of a training image. Sizes, mean and standard deviation are the model's."""

    crop: Literal["resized", "padded", "squash"] = Field(
        "resized",
        description="resized: a random area, resized; padded: a random window of the image with a margin; "
        "squash: the entire image, resized regardless of its aspect ratio",
    )
    scale: tuple[float, float] = Field((0.08, 1.0), description="area of a resized crop, as a share of the image")
    ratio: tuple[float, float] = Field((3 / 4, 4 / 3), description="width over height of a resized crop")
    padding: int = Field(4, ge=0, description="margin of a padded crop in pixels, filled by reflection")
    hflip: float = Field(0.5, ge=0, le=1, description="probability of a horizontal flip")
    cutout: float = Field(
        0.0, ge=0, le=1, description="probability of filling a rectangle of half the sides with a random colour"
    )
    color_jitter: float = Field(0.0, ge=0, description="strength; unused with auto")
    auto: str | None = Field(None, description="name of a timm policy, e.g. rand-m9-mstd0.5-inc1")
    erase: float = Field(0.0, ge=0, le=1, description="probability of erasing a rectangle, filled with noise")
    interpolation: Literal["bicubic", "bilinear", "random"] = Field(
        "bicubic", description="for resizing, and for the rotations and shears of auto"
    )
    repeats: int = Field(
        1,
        ge=1,
        le=MAX_REPEATS,
        description="augmented copies of an image in an epoch, which keeps its length and sees fewer images",
    )
    shuffle: bool = Field(
        True,
        description="false: the order of the data in every epoch, as in DeiT's repeated augmentation with "
        "shuffle=False, which then only sees the first 1 / repeats of them",
    )

    def faults(self) -> Iterator[str]:
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high:
                yield f"{name} is a range from low to high above 0, not {low:g} to {high:g}"


class Distil(Checked):
    """Distillation from the dense model's logits (DeiT)."""

    kind: Literal["soft", "hard"] = "soft"
    alpha: float = Field(0.5, ge=0, le=1, description="weight of the teacher")
    tau: float = Field(3.0, gt=0, description="temperature of soft distillation")


class Optimizer(Checked):
    """The optimiser, by timm's name, and its parameter groups."""

    name: str = "adamw"
    lr: float = Field(1e-3, ge=0, description="learning rate for a batch of lr_batch images, or of any size")
    lr_batch: int | None = Field(None, ge=1, description="lr is scaled by batch_size / lr_batch; null: not scaled")
    weight_decay: float = Field(0.05, ge=0)
    decay_all: bool = Field(False, description="decay biases, norms, positions and class tokens as well")
    betas: tuple[float, float] | None = Field(None, description="of Adam variants; null: the optimiser's default")
    momentum: float | None = Field(None, ge=0, lt=1, description="of SGD and Muon; null: the optimiser's default")
    layer_decay: float | None = Field(
        None, gt=0, le=1, description="factor on the learning rate, min_lr and warmup_lr per layer from the top"
    )
    backbone_scale: float = Field(
        1.0,
        ge=0,
        description="factor on the learning rate of the parts that a new task or method does not replace: blocks, "
        "class token, last norm",
    )
    backbone: Literal["trunk", "host"] = Field(
        "trunk",
        description="parts for backbone_scale and freeze_epochs; trunk: blocks, class token, last norm; host: "
        "everything except the method's parts, so also head, positions and patch embedding",
    )
    freeze_epochs: float = Field(
        0.0, ge=0, le=MAX_EPOCHS, description="epochs in which the learning rate of the backbone is 0"
    )
    clip: float | None = Field(None, gt=0, description="largest norm of the gradient; null: no clipping")


class Schedule(Checked):
    """The learning rate over time: linear warm-up, then a curve, changed at every update."""

    shape: Literal["cosine", "poly", "steps", "constant"] = Field(
        "cosine",
        description="after the warm-up; poly: (1 - share of the run)^power; steps: times `factor` at every milestone",
    )
    power: float = Field(0.9, gt=0, description="of poly")
    milestones: tuple[float, ...] = Field((), description="of steps, in epochs, ascending")
    factor: float = Field(0.1, gt=0, lt=1, description="of steps")
    warmup_epochs: float = Field(0.0, ge=0, le=MAX_EPOCHS)
    warmup_lr: float = Field(1e-6, ge=0, description="learning rate of the first update")
    min_lr: float = Field(1e-5, ge=0, description="final learning rate of cosine and poly, for all groups")
    shift: bool = Field(False, description="true: the curve begins after the warm-up; false: it runs from the start")
    cooldown_epochs: float = Field(
        0.0, ge=0, le=MAX_EPOCHS, description="epochs at min_lr after the curve, beyond `epochs`"
    )

    def faults(self) -> Iterator[str]:
        if (self.shape == "steps") != bool(self.milestones):
            yield "milestones go with shape steps, and steps need some"
        first = self.warmup_epochs if self.shift else 0.0  # a shifted curve begins behind the warm-up
        if list(self.milestones) != sorted(set(self.milestones)) or any(one <= first for one in self.milestones):
            yield f"milestones are epochs above {first:g}, ascending"
        if self.cooldown_epochs and self.shape in ("steps", "constant"):
            yield f"cooldown_epochs are at min_lr, which {self.shape} does not have: set it to 0"


class Ema(Checked):
    """The moving average of the weights."""

    decay: float = Field(0.9999, gt=0, lt=1)
    warmup: bool = Field(False, description="start with a small decay, like timm's ModelEmaV3")


PATCH_DROP = "patch_drop"
"""A ramp with this name sets the share of patches that a timm model drops in training."""


class Ramp(Checked):
    """An amount that changes over the epochs."""

    option: str = Field(
        description="a run-time option of the method, e.g. keep_rate or r; or patch_drop, the share of patches that a "
        "timm model created with patch_drop_rate drops at random in training"
    )
    start: float
    stop: float
    begin_epoch: float = Field(0.0, ge=0, description="`start` until this epoch")
    end_epoch: float = Field(gt=0, description="`stop` from this epoch on")
    shape: Literal["linear", "cosine", "step"] = Field("linear", description="step: `start` until end_epoch")
    whole: bool = Field(False, description="round to an integer (r, not keep_rate)")

    def faults(self) -> Iterator[str]:
        if self.end_epoch <= self.begin_epoch:
            yield f"end_epoch must be after begin_epoch {self.begin_epoch:g}"


class Switch(Checked):
    """An option of the method that changes once, at an epoch; for values that a numeric ramp cannot express."""

    option: str = Field(description="a run-time option of the method, e.g. blocks or stage")
    value: Any = Field(description="value from that epoch on; before it, the method's own")
    epoch: float = Field(gt=0)


class Recipe(Checked):
    """A training run without its data.

    Example:
        >>> Recipe(model="vit_tiny_patch16_224", epochs=3).optimizer.name
        'adamw'
    """

    paper: str = Field("", description="the reproduced result, and its place in the paper")
    notes: str = Field("", description="interpretations of the paper and deviations from it, with reasons")
    dataset: str = Field("", description="the data set for --data")

    model: str = Field(description="as on the command line: a name of timm, torchvision:NAME, hf:NAME or vitrim:NAME")
    model_options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the library's model; null: none, not even the base's"
    )
    pretrained: bool = Field(False, description="start from the library's weights; --checkpoint replaces them")
    backbone: str | None = Field(
        None,
        description="weights for the backbone of a dense model: vitrim:NAME, a file, or the folder of a run; patch "
        "kernels and positions are resampled",
    )
    init: Literal["default", "mimetic"] = Field(
        "default",
        description="starting weights of a model that is not pretrained; mimetic: attention and positions as in "
        "pretrained ViTs (Trockman and Kolter 2023)",
    )
    method: str = Field("none", description="name:key=value,key=value, or @FILE")
    objective: dict[str, Any] = Field(
        default_factory=dict, description="options of the method's own loss; null: none, not even the base's"
    )
    teacher: Literal["dense"] | None = Field(None, description="dense: a frozen copy of the starting model")
    teacher_checkpoint: str | None = Field(
        None, description="safetensors file with the teacher's weights; null: the model's starting weights"
    )
    distil: Distil | None = None
    trainable: tuple[str, ...] = Field(("*",), description="patterns of the names of trained parameters")

    task: str = "classification"
    data_options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the data's reader, e.g. class_names or ignore of masks"
    )
    stream: bool = Field(
        False,
        description="read the training images sequentially, shuffled by file and within a buffer: for tables that are "
        "too large to download or to index",
    )
    split: str | None = Field(
        "train",
        description="split to train on; null if there is only one; auto: train if there are splits, else all images",
    )
    eval_split: str | float | None = Field(
        "test",
        description="split for evaluations during training, or a share of the training images, e.g. 0.1, to hold out "
        "(the same images for every seed); null: none; auto: the split val or test, or a tenth of the training images",
    )
    test_split: str | None = Field(None, description="split to score once, at the end; null: none")

    limit: int | None = Field(
        None, ge=1, description="largest number of images of every split, spread evenly over it; null: all"
    )
    unit: Literal["epochs", "updates"] = Field(
        "epochs",
        description="unit of the run's length and of all its other times, whatever their names: with updates, "
        "epochs=40000 is 40,000 updates",
    )
    epochs: float = Field(gt=0, le=MAX_EPOCHS, description="length of the run")
    batch_size: int = Field(128, ge=1, description="images of one update, over all processes")
    micro_batch: int | None = Field(None, ge=1, description="images at once on one device; null: its entire share")
    augment: Augment = Augment()
    dense_augment: DenseAugment = DenseAugment()
    protocol: Protocol = Protocol()
    mix: Mix = Mix()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    ema: Ema | None = None
    ramps: tuple[Ramp, ...] = ()
    switches: tuple[Switch, ...] = ()
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    grad_checkpointing: bool = False
    seed: int = Field(0, ge=0, lt=2**40)
    eval_every: float | None = Field(1.0, gt=0, description="epochs between evaluations; null: only at the end")

    def updates_per_unit(self, updates_per_epoch: int) -> int:
        """Updates per `unit`."""
        return 1 if self.unit == "updates" else updates_per_epoch

    @field_validator("model_options", "data_options", "objective", mode="before")
    @classmethod
    def _none_is_empty(cls, value: Any) -> Any:
        return {} if value is None else value

    @field_validator("method")
    @classmethod
    def _from_file(cls, value: str) -> str:
        """Replace a file name by the method in the file, which may change later."""
        return parse_method(value).describe() if value.strip().startswith("@") else value

    @field_validator("eval_split", mode="before")
    @classmethod
    def _split_or_share(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, str | int | float | None):
            raise ValueError("expected the name of a part of the data, a share of the training images, or null")
        if isinstance(value, int | float) and not 0 < value < 1:
            raise ValueError("a share of the training images is above 0 and below 1")
        return value

    def faults(self) -> Iterator[str]:
        optimizer, micro = self.optimizer, self.micro_batch or self.batch_size
        held_out = isinstance(self.eval_split, float) or AUTO in (self.split, self.eval_split)
        own_rates = optimizer.layer_decay is not None
        # what is wrong, in the order in which it is said
        rules = {
            f"batch_size {self.batch_size} is not a multiple of micro_batch {micro}": self.batch_size % micro,
            "distil needs a teacher: set teacher=dense": self.distil and not self.teacher,
            f"distil learns from logits of one label per image: leave it out for task {self.task}": (
                self.distil and self.task != "classification"
            ),
            "teacher_checkpoint needs a teacher: set teacher=dense": self.teacher_checkpoint and not self.teacher,
            "init is for models of timm that are not pretrained: set init=default": (
                self.init != "default" and (self.pretrained or ":" in self.model)
            ),
            "a stream gives every image once in an epoch: set augment.repeats=1 or stream=false": (
                self.stream and self.augment.repeats > 1
            ),
            "of a stream no images can be held out: name an eval_split, or set it to null": self.stream and held_out,
            "a stream is read from front to back: set limit=null, or stream=false": self.stream and self.limit,
            "layer_decay has rates of its own: set optimizer.backbone_scale=1, optimizer.freeze_epochs=0": (
                own_rates and (optimizer.backbone_scale != 1 or optimizer.freeze_epochs > 0)
            ),
            "asl takes unmixed labels: set mix.mixup=0 and mix.cutmix=0": self.loss.name == "asl" and self.mix.on,
        }
        yield from (rule for rule, wrong in rules.items() if wrong)


# ---- recipes by name or file -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resolved:
    """A recipe, its name, and the source of each value.

    Attributes:
        origin: sources by dotted name, e.g. ``optimizer.lr``: "default", the name of a recipe, or "command line".
    """

    name: str
    recipe: Recipe
    origin: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Yield dotted name, value and source of every value."""
        for name, value in flat(self.recipe.model_dump(mode="json")):
            yield name, value, self.origin.get(name, DEFAULT)


@cache
def recipes() -> Mapping[str, Path]:
    """The recipes in the package by name, with the file that each is in; read once.

    Example:
        >>> found = recipes()
        >>> found["cifar10_vit"].name, found["study/coco"].name, found["study/coco/topk@25"].name
        ('cifar10_vit.yaml', 'coco.yaml', 'study.csv')
    """
    files = {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in FOLDER.rglob("*.yaml")}
    return MappingProxyType(dict(sorted((files | dict.fromkeys(study.names(), study.TABLE)).items())))


@checked_call
def load_recipe(name: str | Path | Mapping[str, Any], changes: Sequence[str] | Mapping[str, Any] = ()) -> Resolved:
    """Read a recipe by its name or file, and change some of its values; `VitrimError` names what is wrong in one line.

    Args:
        name: one of `recipes`, e.g. ``evit_deit_small`` or ``study/imagenet/topk@25``, a YAML file, or the values
            themselves.
        changes: ``key=value`` with dotted keys and YAML values, or a mapping with dotted keys; the last of duplicates
            counts.

    Returns:
        The validated recipe with the origin of each value.

    Example:
        >>> load_recipe("cifar10_vit", ["epochs=2", "optimizer.lr=1e-4"]).recipe.optimizer.lr
        0.0001
    """
    if isinstance(name, Mapping):
        own_name, given = "recipe", [("recipe", copy.deepcopy(dict(name)))]
    elif Path(name).suffix in (".yaml", ".yml"):
        own_name = Path(name).stem
        if not Path(name).is_file():
            raise VitrimError(f"no recipe file {short(str(name))}")
        given = _chain(own_name, Path(name))
    else:
        own_name = str(name)
        given = _chain(own_name, _shipped(own_name))
    layers = [*given, (COMMAND_LINE, nested(changes))]
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    # YAML's anchors can put a section into itself; a merge of it never ends.
    try:
        for source, layer in layers:
            merge(values, layer)
            origin |= dict.fromkeys(dict(flat(layer)), source)
    except RecursionError:
        raise VitrimError(f"{own_name}: a section lies within itself") from None
    return resolve(values, name=own_name, origin=origin)


def resolve(values: Mapping[str, Any], *, name: str = "recipe", origin: Mapping[str, str] | None = None) -> Resolved:
    """Validate the values of a recipe; one line of `VitrimError` names an invalid key or value."""
    with one_line_of(name, Recipe):
        recipe = Recipe.model_validate(values)
    return Resolved(name, recipe, dict(origin or {}))


def recipe_text(recipe: Recipe) -> str:
    """All values of a recipe as YAML for `load_recipe`."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)


def _shipped(name: str) -> Path:
    known = recipes()
    if name in known:
        return known[name]
    better = study.hint(name)
    if better is not None:
        raise VitrimError(better)
    hint = str(unknown("recipe", short(name), known)).partition(" valid:")[0]
    raise VitrimError(
        f"{hint} a recipe says how to train, e.g. finetune (pretrained models on your own images) or evit_deit_small "
        "(a paper's); valid: a YAML file of your own, or a name that `vitrim train --list` prints"
    )


def _chain(name: str, path: Path, seen: tuple[Path, ...] = ()) -> list[tuple[str, dict[str, Any]]]:
    """The values of a recipe's bases and then its own, each with the name of its recipe."""
    if path in seen:
        raise VitrimError(f"{path.name} is its own base: {' -> '.join(p.stem for p in (*seen, path))}")
    if path == study.TABLE:
        given = study.study(name)
    else:
        given = read_yaml(path)
        if not isinstance(given, dict):
            raise VitrimError(f"{path} is not a recipe: expected keys and values")
    base = given.pop("base", None)
    if base is None:
        return [(name, given)]

    # a base is a file beside the recipe, or a recipe of the package
    known = recipes()
    if not isinstance(base, str) or not base or (base != Path(base).name and base not in known):
        wanted = "the name of a recipe: a file beside this one, without .yaml, or one of the package"
        raise VitrimError(f"{path}: base is {wanted}, not {short(base)}")
    near = path.parent / f"{base}.yaml"
    if near.is_file() and not (near == path and base in known):  # a file may have the name of its base
        own_name = next((shipped for shipped, file in known.items() if file == near), near.stem)
        below = _chain(own_name, near, (*seen, path))
    else:
        below = _chain(base, _shipped(base), (*seen, path))
    return [*below, (name, given)]


# ---- values as written by people: YAML, and key=value with dotted keys -----------------------------------------------


def nested(changes: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The nested values of ``key=value`` texts, or of a mapping with dotted keys; the last of duplicate keys counts.

    Example:
        >>> nested(["epochs=5", "optimizer.lr=1e-4"])
        {'epochs': 5, 'optimizer': {'lr': 0.0001}}
    """
    values: dict[str, Any] = {}
    for change in changes:
        if isinstance(changes, Mapping):
            key, value = change, changes[change]
        else:
            key, equals, text = change.partition("=")
            if not equals or not key:
                raise VitrimError(f"cannot read '{short(change)}': write key=value, e.g. optimizer.lr=1e-4")
            # YAML reserves the @ of a method's file
            value = text if text.startswith("@") else parse_yaml(text, f"'{short(change)}'")
            if isinstance(value, str) and not text.startswith("@"):  # YAML 1.1 reads 1e-4 as text
                with suppress(ValueError):
                    value = float(value)
        for part in reversed(key.split(".")):
            value = {part: value}
        merge(values, value)
    return values


def merge(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Override ``values`` with ``given``, section by section, in place."""
    for key, value in given.items():
        if isinstance(value, Mapping) and isinstance(values.get(key), dict):
            merge(values[key], value)
        else:
            values[key] = dict(value) if isinstance(value, Mapping) else value
