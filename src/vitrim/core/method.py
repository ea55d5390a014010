"""`MethodConfig`: the options of a method, the amounts it removes, and what it needs of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from vitrim.core.options import Options
from vitrim.core.schedule import (
    Amount,
    BringBack,
    KeepRule,
    OnMultiples,
    Pattern,
    effective_keep,
    keep_rate,
    one_token,
    quarter_blocks,
    square_of,
)
from vitrim.errors import VitrimError


@dataclass(frozen=True)
class Tunable:
    """The option that sets how much is removed, for sliders and searches. More ``strength`` leaves fewer tokens.

    Attributes:
        mildest: the value that removes the least, at strength 0.
        strongest: the value that removes the most; None for a count of patches: half of the model's.
        digits: decimals of the value; 0 for whole numbers.
        similarity: the value is a cosine threshold: more similar tokens merge.
        fixed: values of other options, required for the value to mean one amount for all layers.
        per_layer: the option that takes a list with one such value per block of `MethodConfig.stages`.
        places: the option that chooses those blocks.
        first_place: the first block that a search may choose; None: a search does not move the places.
        others: further options that set how much is removed, and the value at which each removes nothing; None: unset.

    Example:
        >>> Tunable("keep_rate", 1.0, 0.05, digits=3).value(0.5, patches=196)
        0.525
        >>> Tunable("r", 0, None).value(0.25, patches=196)
        24
    """

    option: str
    mildest: float
    strongest: float | None
    digits: int = 0
    similarity: bool = False
    fixed: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    per_layer: str | None = None
    places: str | None = None
    first_place: int | None = None
    others: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def end(self, patches: int) -> float:
        """The value that removes the most from a model of ``patches``."""
        return max(patches // 2, 1) if self.strongest is None else self.strongest

    def value(self, strength: float, patches: int) -> int | float:
        """The option's value at a ``strength``, clipped to [0, 1]."""
        share = min(max(strength, 0.0), 1.0)
        value = self.mildest + share * (self.end(patches) - self.mildest)
        return round(value, self.digits) if self.digits else round(value)

    def removing(self, share: float, patches: int) -> int | float:
        """The value that removes a ``share`` in [0, 1] of the patches, for options that are a count or a share kept.

        Example:
            >>> Tunable("r", 0, None).removing(0.25, 64), Tunable("keep_rate", 1.0, 0.05, digits=3).removing(0.25, 64)
            (16, 0.75)
        """
        return round(share * patches) if self.strongest is None else 1.0 - share

    def strength(self, value: float, patches: int) -> float:
        """The strength of a value, in [0, 1].

        Example:
            >>> Tunable("r", 0, None).strength(49, patches=196)
            0.5
        """
        share = (value - self.mildest) / (self.end(patches) - self.mildest)
        return min(max(share, 0.0), 1.0)

    def alone(self, config: MethodConfig, depth: int, value: int | float, num_layers: int) -> MethodConfig | None:
        """``config`` acting only in block ``depth``, with ``value`` there; None if the method takes no value for this
        block.

        Example:
            >>> import vitrim
            >>> vitrim.ToMe.tunable.alone(vitrim.ToMe(r=8), 1, 16, num_layers=4).describe()
            'tome:r=[0,16,0,0]'
        """
        if self.per_layer is None:
            return None
        nothing = {option: value for option, value in self.others.items() if value is not None}
        # Everything that sets an amount is unset first, so that this block alone removes.
        bare = config.changed(*config.runtime, self.option, self.per_layer, *self.others, **nothing)
        if self.places is not None:
            return bare.changed(**{self.places: (depth,), self.per_layer: value})
        stages = bare.stages(num_layers)
        values = [value if block == depth else self.mildest for block in stages]
        return bare.changed(**{self.per_layer: values}) if depth in stages else None


class Needs(NamedTuple):
    """The needs of a method: what a model must have.

    Attributes:
        class_token: a class token, whose attention it reads.
        prefix: any tokens in front of the patches.
        attention_map: attention between all patches, not only column means or rows of prefix tokens.
        grid: rows and columns of the patches in every forward (`TokenState.grid`).
        pixels: the pixels of every patch, too (`TokenState.pixels`).
        pixel_std: these in the scale of [0, 1]: by the deviations that the model says its images were divided by, or by
            these numbers, of all channels or of each.
        probabilities: attention probabilities of any kind, so also column means, rows, or a softmax of its own.
    """

    class_token: bool = False
    prefix: bool = False
    attention_map: bool = False
    grid: bool = False
    pixels: bool = False
    pixel_std: bool | tuple[float, ...] = False
    probabilities: bool = False

    @property
    def reads_attention(self) -> bool:
        """True if attention probabilities are read, which a user's own attention function does not show."""
        return self.class_token or self.attention_map or self.probabilities


@dataclass(frozen=True)
class Traits:
    """Facts about a method that hold whatever its options; a method states only what differs.

    Attributes:
        batch_dependent: with the default options, an image's result depends on the other images of its batch.
        single_images: counts depend on the images, and graphs for single images support that
            (`vitrim.core.tokens.flagged`).
        least_kept: the fewest of the current patch tokens that one layer can leave: by default 1;
            `vitrim.core.schedule.half` where it merges pairs by bipartite matching.
        fixed_by: options of ``vitrim export`` that fix the counts of an `Adaptive` method: ``freeze`` by `frozen`,
            ``capacity`` by `bounded`.
        aligns: the option ``align`` can round the tokens that it keeps, for every image if counts depend on the images.
        version: of its options and parameters, in saved reductions.
    """

    training_free: bool = True
    batch_dependent: bool = False
    single_images: bool = False
    least_kept: Callable[[int], int] = one_token
    fixed_by: tuple[Literal["freeze", "capacity"], ...] = ("freeze",)
    aligns: bool = True
    version: int = 1


class Flow(NamedTuple):
    """Patch tokens at a block of a plan: ``entering``, ``left`` at its end, ``leaving`` with those brought back."""

    entering: int
    left: int
    leaving: int


Restore = Literal["end", "last_block", "zeros"]
Kind = Literal["none", "prune", "merge", "mixed", "soft"]


class MethodConfig(Options):
    """Options of a method: frozen, validated, versioned. A method subclasses it in the file of its reducer.

    Class attributes describe the method for `vitrim list methods`; the fields below are options of every method.

    Example:
        >>> import vitrim
        >>> vitrim.ToMe(r=13).describe()
        'tome:r=13'
    """

    paper: ClassVar[str] = ""
    kind: ClassVar[Kind] = "prune"
    traits: ClassVar[Traits] = Traits()
    tunable: ClassVar[Tunable | None] = None
    """The option that a slider or a search moves; None if no single option sets how much is removed."""

    _made_for: Mapping[str, Any] | None = PrivateAttr(None)

    proportional: bool = Field(False, description="add log(size) to the attention logits once tokens have merged")
    last_block: Literal["full", "class_token", "auto"] = Field(
        "full",
        description="'class_token': the last block computes only the rows the head reads (exact, a shorter output); "
        "'auto': the same, if the head reads prefix tokens only",
    )
    restore: Restore | None = Field(
        None,
        description="values of pruned patches for heads that read every patch: 'end': their value when pruned, put "
        "back after the last block; 'last_block': the same, before it; 'zeros'. Default: 'end' for dense heads, else "
        "'zeros'",
    )
    strict: bool = Field(False, description="refuse, instead of warn, when a layer cannot remove as much as asked")
    align: int = Field(
        1, ge=1, description="round the tokens that blocks keep, prefix included, up to a multiple of this; 1: do not"
    )

    @model_validator(mode="after")
    def _check_general(self) -> MethodConfig:
        if self.align > 1 and not self.can_align():
            raise ValueError(f"align={self.align} rounds counts of tokens, and this method has none to round")
        if self.restore is not None and self.kind not in ("prune", "mixed"):
            raise ValueError(
                f"restore={self.restore} is for methods that prune: merged patches get their group's value"
            )
        if self.restore not in (None, "zeros") and self.is_adaptive():
            raise ValueError(
                f"restore={self.restore} needs as many pruned patches in every image, and this method prunes as many "
                "as each image needs"
            )
        return self

    def can_align(self) -> bool:
        """True if the option ``align`` can round the tokens that the method leaves."""
        return self.traits.aligns and self.kind not in ("soft", "none")

    def restoring(self) -> Restore:
        """The form in which pruned patches reach a dense head."""
        if self.kind not in ("prune", "mixed") or self.is_adaptive():
            return "zeros"
        return self.restore or "end"

    def amounts(self, num_layers: int) -> list[Amount | None]:
        """The amount of every layer, None where it does not act; `VitrimError` if options do not fit the depth."""
        return [None] * num_layers

    def planned(self, num_layers: int, num_prefix: int) -> list[Amount | None]:
        """`amounts`, rounded by the option ``align`` for a model with ``num_prefix`` prefix tokens."""
        every, others = self.amounts(num_layers), (num_prefix, self.added_tokens())
        if self.align == 1:
            return every
        return [
            amount
            if amount is None or isinstance(amount, BringBack | Pattern)
            else OnMultiples(tuple(every[: layer + 1]), self.counts_of, self.align, others)
            for layer, amount in enumerate(every)
        ]

    def stages(self, num_layers: int) -> tuple[int, ...]:
        """The blocks that may act, 0-based, in order; a list of amounts has a value for each. By default all."""
        return tuple(range(num_layers))

    def needs(self) -> Needs:
        """The needs of these options."""
        return Needs()

    def is_adaptive(self) -> bool:
        """True if counts depend on the images with these options."""
        return False

    def obstacle(self) -> str | None:
        """The reason why a model reduced by these options cannot become a fixed graph; None if it can."""
        return "how many tokens it keeps depends on the images" if self.is_adaptive() else None

    def in_graph(self, batch: int | None) -> str | None:
        """The `obstacle` for a graph with a fixed ``batch`` (None: any). A batch of 1 allows `Traits.single_images`."""
        return None if batch == 1 and self.traits.single_images and self.is_adaptive() else self.obstacle()

    def unplaced(self) -> str | None:
        """The reason why tokens belong to no place in the image; None if every patch has a value."""
        return "mixes patches into tokens that belong to none" if self.kind == "soft" else None

    def added_tokens(self) -> int:
        """Tokens that a reduction creates besides those it keeps (EViT's fused token)."""
        return 0

    def counts(
        self, initial: int, num_layers: int, grid: tuple[int, int] | None = None, num_prefix: int = 1
    ) -> list[int] | None:
        """Patch tokens left after each block, from ``initial``; None if they depend on the images.

        Patches that come back by `restore` are not counted. ``grid`` (by default a square, else `VitrimError`) and
        ``num_prefix`` matter to some options only.
        """
        flow = self.flow(initial, num_layers, grid, num_prefix)
        return None if flow is None else [block.left for block in flow]

    def flow(
        self,
        initial: int,
        num_layers: int,
        grid: tuple[int, int] | None = None,
        num_prefix: int = 1,
        restore: Restore | None = None,
    ) -> list[Flow] | None:
        """The `counts`, with what enters and leaves every block, for pruned patches that come back by ``restore``."""
        if self.is_adaptive():
            return None
        amounts = self.planned(num_layers, num_prefix)
        if any(isinstance(amount, Pattern) for amount in amounts):
            grid = square_of(initial) if grid is None else grid
            if grid[0] * grid[1] != initial:
                raise VitrimError(f"{self.name}: a grid of {grid[0]} x {grid[1]} does not hold {initial} patches")
        flow, current, waiting = list[Flow](), initial, 0
        for depth, amount in enumerate(amounts):
            ends = depth == num_layers - 1 and restore in ("end", "last_block")
            if ends and restore == "last_block":
                current, waiting = current + waiting, 0
            left = self._left(amount, initial, current, grid)
            # Pruned patches wait for `restore`, unless this block is the method's own way to bring them back.
            waiting = 0 if isinstance(amount, BringBack) else waiting + self.pruned(depth, num_layers, current, left)
            flow.append(Flow(current, left, left + waiting if ends else left))
            current = left
        return flow

    def counts_of(
        self, amounts: Sequence[Amount | None], initial: int, grid: tuple[int, int] | None = None
    ) -> list[int]:
        """Patch tokens left after each block under ``amounts``, from ``initial`` on ``grid``."""
        counts, current = [], initial
        for amount in amounts:
            current = self._left(amount, initial, current, grid)
            counts.append(current)
        return counts

    def _left(self, amount: Amount | None, initial: int, current: int, grid: tuple[int, int] | None) -> int:
        """Patch tokens of ``current`` that one block leaves."""
        if isinstance(amount, BringBack):
            return initial
        if amount is None:
            return current
        kept = effective_keep(amount, self.traits.least_kept(current), initial, current, grid)
        return kept + self.added_tokens() if kept < current else current

    def pruned(self, depth: int, num_layers: int, current: int, left: int) -> int:
        """The patches that block ``depth`` prunes rather than merges, those that `restore` brings back."""
        if self.kind not in ("prune", "mixed") or left == current:
            return 0
        return current - left + self.added_tokens()

    @property
    def made_for(self) -> Mapping[str, Any] | None:
        """The model that these options were found for, if they are from the file of a search; else None."""
        return self._made_for

    def found_for(self, model: Mapping[str, Any]) -> MethodConfig:
        """The same options, with the ``model`` they were found for (`vitrim.core.checks.described`)."""
        config = self.model_copy()
        # Past the frozen `__setattr__`: a private attribute is no option.
        BaseModel.__setattr__(config, "_made_for", dict(model))
        return config


Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Fused = Count | Annotated[float, Field(ge=0, lt=1)]
"""Patches that merge, or below 1 a share of the current ones (`vitrim.core.schedule.Fuse`)."""


class Adaptive(MethodConfig):
    """Options of methods whose counts depend on the images, unless their option ``r`` fixes them."""

    def is_adaptive(self) -> bool:
        fixed: object = getattr(self, "r", None)
        return fixed is None

    def frozen(self, initial: int, counts: Sequence[float]) -> MethodConfig:
        """The same method with fixed counts: rounded means after each block, of ``initial`` patches at first."""
        raise NotImplementedError

    def bounded(self, counts: Sequence[int]) -> MethodConfig:
        """The same method with ``counts`` slots for patches after each block; a mask marks empty ones."""
        raise NotImplementedError


class StagedConfig(MethodConfig):
    """Options of methods that keep a share of the patch tokens at some blocks. Subclasses may change the defaults.

    Example:
        >>> from vitrim.methods.random import Random
        >>> Random(keep_rate=0.5).stages(12)
        (3, 6, 9)
    """

    runtime = frozenset({"keep_rate"})
    tunable = Tunable("keep_rate", 1.0, 0.05, digits=3, per_layer="keep_rate", places="blocks", first_place=0)

    keep_rate: Share | tuple[Share, ...] = Field(
        0.7, description="share of patch tokens kept at each stage, or a list with one share per stage"
    )
    blocks: tuple[int, ...] | None = Field(None, description="stages, 0-based; default a quarter of the depth apart")
    rule: KeepRule = Field("floor_initial_power", description="how keep_rate becomes a count")

    def default_stages(self, num_layers: int) -> tuple[int, ...]:
        """The stages if ``blocks`` is not given."""
        return quarter_blocks(num_layers)

    def stages(self, num_layers: int) -> tuple[int, ...]:
        return tuple(sorted(self.default_stages(num_layers) if self.blocks is None else self.blocks))

    def amounts(self, num_layers: int) -> list[Amount | None]:
        return keep_rate(self.keep_rate, self.stages(num_layers), self.rule, num_layers)
