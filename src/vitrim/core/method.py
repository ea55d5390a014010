"""The one option of a method that a slider or a search moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from vitrim.core.schedule import Amount, BringBack, KeepRule, effective_keep, keep_rate, on_multiples, quarter_blocks
from vitrim.errors import VitrimError, unknown


@dataclass(frozen=True)
class Knob:
    """An option that says how much is removed, and its range. The more ``strength``, the fewer tokens are left.

    Attributes:
        option: its name.
        mildest: the value that removes the least, for which ``strength`` is 0.
        strongest: the value that removes the most; None for a count of patches: half of those the model has.
        digits: of the value behind the point; 0 for whole numbers.
        similarity: the value is a cosine: tokens that are more alike merge.
        fixed: other options, without which the knob does not mean one amount for all layers.

    Example:
        >>> Knob("keep_rate", 1.0, 0.05, digits=3).value(0.5, patches=196)
        0.525
        >>> Knob("r", 0, None).value(0.25, patches=196)
        24
    """

    option: str
    mildest: float
    strongest: float | None
    digits: int = 0
    similarity: bool = False
    fixed: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def end(self, patches: int) -> float:
        """The value that removes the most from a model of so many patches."""
        return max(patches // 2, 1) if self.strongest is None else self.strongest

    def value(self, strength: float, patches: int) -> int | float:
        """The option's value at a strength in [0, 1], which is clipped to that range."""
        share = min(max(strength, 0.0), 1.0)
        value = self.mildest + share * (self.end(patches) - self.mildest)
        return round(value, self.digits) if self.digits else round(value)

    def removing(self, share: float, patches: int) -> int | float:
        """The value that removes a share in [0, 1] of the patches, of an option that counts patches or is a share kept.

        Example:
            >>> Knob("r", 0, None).removing(0.25, patches=64), Knob("keep_rate", 1.0, 0.05, digits=3).removing(0.25, 64)
            (16, 0.75)
        """
        return round(share * patches) if self.strongest is None else 1.0 - share

    def strength(self, value: float, patches: int) -> float:
        """The strength of a value, in [0, 1].

        Example:
            >>> Knob("r", 0, None).strength(49, patches=196)
            0.5
        """
        share = (value - self.mildest) / (self.end(patches) - self.mildest)
        return min(max(share, 0.0), 1.0)


Restore = Literal["end", "last_block", "zeros"]
Kind = Literal["none", "prune", "merge", "mixed", "soft"]

LONGEST_INTEGER = 64
"""Bits of an integer, sign included, as many as a tensor holds."""


class MethodConfig(BaseModel):
    """Options of a method: frozen, validated, versioned. A method subclasses it next to its reducer, in one file.

    Class attributes describe the method for `vitrim list methods`; the fields below are options every method has.

    Example:
        >>> import vitrim
        >>> vitrim.ToMe(r=13).describe()
        'tome:r=13'
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    kind: ClassVar[Kind] = "prune"
    training_free: ClassVar[bool] = True
    needs_class_token: ClassVar[bool] = False
    needs_attention_map: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    """Counts depend on the images: known only by running."""
    may_fall_short: ClassVar[bool] = True
    """A layer may keep more than its amount asks for; where that never happens, no warning is needed."""
    batch_dependent: ClassVar[bool] = False
    """With its default options, an image's result depends on the other images of its batch."""
    runtime: ClassVar[frozenset[str]] = frozenset()
    """Options that ``reduction.set`` may change."""
    knob: ClassVar[Knob | None] = None
    """The option a slider or a search moves; None: there is no one option that says how much is removed."""
    amounts_option: ClassVar[str | None] = None
    """The option that takes a list with a value for each of `scheduled`, each as the knob's; None: there is none."""
    places_option: ClassVar[str | None] = None
    """The option that says which blocks those are, if any may be chosen; None: they cannot be."""
    first_place: ClassVar[int] = 0
    """The first block that may be chosen."""
    depth_option: ClassVar[str | None] = None
    """The option that is a number of blocks, 0 to all, after which the method decides in another way; None: there is
    none."""
    restores_by: ClassVar[str] = ""
    """The option by which a method itself says whether pruned patches come back; it then has no `restore`."""
    fixed_by: ClassVar[tuple[Literal["freeze", "capacity"], ...]] = ()
    """The ways to fixed counts that an adaptive method has: `frozen`, `bounded`."""
    alignable: ClassVar[bool] = True
    """Fixed counts may be rounded (`align`): no amount says more than a count."""
    version: ClassVar[int] = 1

    _made_for: Mapping[str, Any] | None = PrivateAttr(None)

    proportional: bool = Field(False, description="add log(size) to the attention logits once tokens have merged")
    last_block: Literal["full", "class_token", "auto"] = Field(
        "full",
        description="'class_token': the last block computes only the rows the head reads (exact, a shorter output); "
        "'auto': that, where the head reads prefix tokens only",
    )
    restore: Restore | None = Field(
        None,
        description="what pruned patches are where every patch is read: 'end': their value when pruned, set in after "
        "the last block; 'last_block': the same, set in before it; 'zeros'. Default: 'end' for dense heads, else "
        "'zeros'",
    )
    strict: bool = Field(False, description="refuse, instead of warn, when a layer cannot remove as much as asked")
    align: int = Field(
        1, ge=1, description="round what blocks keep up to so many tokens, prefix included, or a multiple; 1: do not"
    )

    if not TYPE_CHECKING:  # a type checker knows the options from the fields

        def __init__(self, /, **options: Any) -> None:
            """Validate the options.

            Raises:
                VitrimError: an unknown option or a value that is not valid, in one line.
            """
            for key in options:
                if key not in type(self).model_fields:
                    raise unknown(f"option of {self.name}", key, type(self).model_fields)
                _check_switch(self.name, key, options[key], type(self).model_fields[key].annotation)
                _check_order(self.name, key, options[key])
                _check_range(self.name, key, options[key])
            try:
                super().__init__(**options)
            except ValidationError as error:
                raise VitrimError(f"{self.name}: {_problems(error)}") from None

        def __setattr__(self, key: str, value: Any) -> None:
            raise VitrimError(_frozen(self, f"{key}={_text(value)}"))

        def __delattr__(self, key: str) -> None:
            raise VitrimError(_frozen(self, f"del {key}"))

    @model_validator(mode="after")
    def _check_restore(self) -> MethodConfig:
        if self.align > 1 and (self.is_adaptive() or not self.alignable or self.kind in ("soft", "none")):
            raise ValueError(f"align={self.align} rounds fixed counts of tokens, and this method has none to round")
        if self.restore is None:
            return self
        if self.restores_by:
            raise ValueError(f"restore={self.restore} is said by {self.restores_by} here: give that instead")
        if self.kind not in ("prune", "mixed"):
            raise ValueError(
                f"restore={self.restore} is for methods that prune: merged patches get their group's value"
            )
        if self.is_adaptive() and self.restore != "zeros":
            raise ValueError(
                f"restore={self.restore} needs as many pruned patches in every image, and this method prunes as many "
                "as each image needs"
            )
        return self

    def restoring(self) -> Restore:
        """The form in which pruned patches reach a dense head."""
        if self.kind not in ("prune", "mixed") or self.is_adaptive():
            return "zeros"
        return self.restore or "end"

    def amounts(self, num_layers: int) -> list[Amount | None]:
        """The amount of every layer, None where the method does not act. Run-time adaptive methods have none.

        Raises:
            VitrimError: these options do not fit a model of ``num_layers`` blocks.
        """
        return [None] * num_layers

    def planned(self, num_layers: int, num_prefix: int) -> list[Amount | None]:
        """The amounts as they are planned for a model with ``num_prefix`` tokens in front: rounded by `align`."""
        every, others = self.amounts(num_layers), (num_prefix, self.added_tokens())
        return every if self.align == 1 else on_multiples(every, self.align, self.counts_of, others)

    def scheduled(self, num_layers: int) -> tuple[int, ...]:
        """The blocks that a list given as `amounts_option` has a value for, in order; by default all."""
        return tuple(range(num_layers))

    def only_at(self, depth: int, value: int | float, num_layers: int) -> MethodConfig | None:
        """The method acting in one block alone: ``value`` of `amounts_option` there, nothing in the others.

        Args:
            depth: of the block, from 0.
            value: as the knob's.
            num_layers: blocks of the model.

        Returns:
            The other options stay. None where the method takes no value per block, or none for this one.

        Example:
            >>> import vitrim
            >>> vitrim.ToMe(r=8).only_at(1, 16, num_layers=4).describe()
            'tome:r=[0,16,0,0]'
        """
        blocks = self.scheduled(num_layers)
        if self.amounts_option is None or self.knob is None or depth not in blocks:
            return None
        values = [value if block == depth else self.knob.mildest for block in blocks]
        return self.with_amounts({self.amounts_option: values})

    def with_amounts(self, amounts: Mapping[str, Any]) -> MethodConfig:
        """The same method with other ``amounts``, by option; none that was given stays besides them."""
        old = {*self.runtime, str(self.amounts_option), *(() if self.knob is None else (self.knob.option,))}
        return self.changed(*old, **amounts)

    def rejoining(self) -> Mapping[str, MethodConfig]:
        """Forms of the method in which the pruned tokens come back before the last block (``last_layer``) and after it
        (``concat``); none for a method that does not bring them back for any head."""
        return {}

    def check(self, num_layers: int) -> None:
        """Raise `VitrimError` if options other than amounts do not fit a model of ``num_layers`` blocks."""

    def requires_class_token(self) -> bool:
        """Return whether these options need a class token; by default, the method's general answer."""
        return self.needs_class_token

    def requires_prefix(self) -> bool:
        """Return whether these options need tokens in front of the patches, whatever they are."""
        return False

    def is_adaptive(self) -> bool:
        """Return whether, with these options, counts depend on the images; by default, the method's general answer."""
        return self.adaptive

    def obstacle(self) -> str | None:
        """The reason why a model reduced by these options cannot become a fixed graph; None where it can."""
        return "how many tokens it keeps depends on the images" if self.is_adaptive() else None

    def frozen(self, initial: int, counts: Sequence[float]) -> MethodConfig:
        """The same method with fixed counts, for every image.

        Args:
            initial: patches that enter the first block.
            counts: patches after each block, means over images; rounded to the nearest number.

        Raises:
            VitrimError: the method has no such form.
        """
        raise VitrimError(f"{self.name} cannot be frozen: {self._why_not()}")

    def bounded(self, counts: Sequence[int]) -> MethodConfig:
        """The same method in fixed slots, a mask marking those that an image leaves empty.

        Args:
            counts: slots for patches after each block.

        Raises:
            VitrimError: the method has no such form.
        """
        raise VitrimError(f"{self.name} cannot be given a capacity: {self._why_not()}")

    def _why_not(self) -> str:
        return (self.obstacle() or "") if self.is_adaptive() else "its counts are fixed already"

    def needs_grid(self) -> bool:
        """Return whether these options need the grid of the patches in every forward (`TokenState.grid`)."""
        return False

    @staticmethod
    def least_kept(current: int) -> int:
        """The fewest patch tokens one layer can be reduced to: 1, or half for bipartite matching."""
        return 1

    def added_tokens(self) -> int:
        """Tokens a reduction creates besides those it keeps (EViT's fused token)."""
        return 0

    def counts(
        self, initial: int, num_layers: int, grid: tuple[int, int] | None = None, num_prefix: int = 1
    ) -> list[int] | None:
        """Patch tokens left after each block, from ``initial``; None if that depends on the images. Patches that come
        back by `restore` are not counted. ``grid``: where they lie, and ``num_prefix``: tokens in front of them, for
        options to which that matters."""
        return None if self.is_adaptive() else self.counts_of(self.planned(num_layers, num_prefix), initial)

    def counts_of(self, amounts: Sequence[Amount | None], initial: int) -> list[int]:
        """Patch tokens left after each block under ``amounts``, from ``initial``."""
        counts, current = [], initial
        for amount in amounts:
            if isinstance(amount, BringBack):
                current = initial
            elif amount is not None:
                kept = effective_keep(amount, self.least_kept(current), initial, current)
                current = kept + self.added_tokens() if kept < current else current
            counts.append(current)
        return counts

    @property
    def made_for(self) -> Mapping[str, Any] | None:
        """The model that a search found these options for, as the file says that they are from; None for others."""
        return self._made_for

    def found_for(self, model: Mapping[str, Any]) -> MethodConfig:
        """The same options, with the model they were found for (`vitrim.core.checks.described`)."""
        config = self.model_copy()
        BaseModel.__setattr__(config, "_made_for", dict(model))
        return config

    def given(self) -> dict[str, Any]:
        """The options that were given, by name; the others have their defaults."""
        return {key: getattr(self, key) for key in self.model_fields_set}

    def changed(self, *without: str, **changes: Any) -> Self:
        """The same method with some options changed, and those called ``without`` as if they had not been given.

        Raises:
            VitrimError: a value is invalid.

        Example:
            >>> import vitrim
            >>> vitrim.ToMe(r=8, proportional=False).changed("r", keep_rate=0.7).describe()
            'tome:keep_rate=0.7,proportional=false'
        """
        return type(self)(**{key: value for key, value in self.given().items() if key not in without} | changes)

    def describe(self) -> str:
        """The method as it is written on the command line, with the options that were given."""
        own_first = sorted(type(self).model_fields, key=lambda field: field in MethodConfig.model_fields)
        given = self.given()
        options = ",".join(f"{field}={_text(given[field])}" for field in own_first if field in given)
        return f"{self.name}:{options}" if options else self.name


Share = Annotated[float, Field(gt=0.0, le=1.0)]


class StagedConfig(MethodConfig):
    """Options of methods that keep a share of the patch tokens at some blocks. A subclass may give other defaults.

    Example:
        >>> from vitrim.methods.random import Random
        >>> Random(keep_rate=0.5).stages(12)
        (3, 6, 9)
    """

    runtime: ClassVar[frozenset[str]] = frozenset({"keep_rate"})
    knob = Knob("keep_rate", 1.0, 0.05, digits=3)
    amounts_option = "keep_rate"
    places_option = "blocks"

    keep_rate: Share | tuple[Share, ...] = Field(
        0.7, description="share of patch tokens kept at each stage, or a list with one share per stage"
    )
    blocks: tuple[int, ...] | None = Field(None, description="stages, 0-based; default a quarter of the depth apart")
    rule: KeepRule = Field("floor_initial_power", description="how keep_rate becomes a count")

    def default_stages(self, num_layers: int) -> tuple[int, ...]:
        """The stages where ``blocks`` is not given."""
        return quarter_blocks(num_layers)

    def stages(self, num_layers: int) -> tuple[int, ...]:
        """The blocks that reduce, 0-based, in order."""
        return tuple(sorted(self.default_stages(num_layers) if self.blocks is None else self.blocks))

    def scheduled(self, num_layers: int) -> tuple[int, ...]:
        return self.stages(num_layers)

    def only_at(self, depth: int, value: int | float, num_layers: int) -> MethodConfig | None:
        return self.with_amounts({"blocks": (depth,), "keep_rate": value})

    def amounts(self, num_layers: int) -> list[Amount | None]:
        return keep_rate(self.keep_rate, self.stages(num_layers), self.rule, num_layers)


def _frozen(config: MethodConfig, change: str) -> str:
    amounts = f", reduction.set(...) for the amounts of a reduced model ({', '.join(sorted(config.runtime))})"
    return (
        f"{config.describe()}: {change}: options do not change once they are made; make another {type(config).__name__}"
        f"(...){amounts if config.runtime else ''}"
    )


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, int) and value.bit_length() > LONGEST_INTEGER:  # Python refuses to write thousands of digits
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(_text(entry) for entry in value) + "]"
    return str(value)


def _check_switch(method: str, key: str, value: Any, kinds: Any) -> None:
    """Refuse true and false for a number, also in a list: Python would take them for 1 and 0."""
    entries = value if isinstance(value, list | tuple) else (value,)
    if bool not in (kinds, *get_args(kinds)) and any(isinstance(entry, bool) for entry in entries):
        raise VitrimError(f"{method}: {key}={_text(value)}: Input should be a number or a word, not true or false")


def _check_order(method: str, key: str, value: Any) -> None:
    """Refuse a set, of which pydantic would make a list in an order that nobody chose."""
    if isinstance(value, set | frozenset):
        raise VitrimError(f"{method}: {key}={_text(value)}: Input should be a list: a set has no order")


def _check_range(method: str, key: str, value: Any) -> None:
    """Refuse integers, also in a list, of more bits than any count has."""
    for number in value if isinstance(value, list | tuple) else (value,):
        if isinstance(number, int) and number.bit_length() >= LONGEST_INTEGER:
            raise VitrimError(f"{method}: {key}={_text(number)}: Input should be less than 2**{LONGEST_INTEGER - 1}")


def _problems(error: ValidationError) -> str:
    """List everything that is wrong, in one line; where an option takes several types, what each of them wants.

    Of a list with wrong entries only these are named, not that a single number would do, too.
    """
    found: dict[str, list[str]] = {}
    entries = error.errors()
    lists = {entry["loc"][0] for entry in entries if _is_in_list(entry["loc"])}
    for entry in entries:
        if entry["loc"] and entry["loc"][0] in lists and not _is_in_list(entry["loc"]):
            continue
        where = f"{entry['loc'][0]}={_text(entry['input'])}: " if entry["loc"] else ""
        listed = "a list in brackets, e.g. " + ("[0.7,0.5]" if isinstance(entry["input"], float) else "[1,2]")
        message = entry["msg"].removeprefix("Value error, ").replace("a valid tuple", listed)
        messages = found.setdefault(where, [])
        messages.append(message.removeprefix("Input should be ") if messages else message)
    return " ".join("; ".join(where + ", or ".join(messages) for where, messages in found.items()).split())


def _is_in_list(place: tuple[int | str, ...]) -> bool:
    return any(isinstance(part, int) for part in place)
