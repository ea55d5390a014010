"""Objects that users give and functions they call, whose types pydantic checks; one line for what does not fit."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, fields
from typing import Annotated, Any, ParamSpec, Self, TypeVar, dataclass_transform, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator, validate_call
from pydantic.dataclasses import dataclass as checked_dataclass

from vitrim.errors import VitrimError, unknown

T = TypeVar("T")
P = ParamSpec("P")

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
"""Whole numbers from 1, and from 0."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""Whole numbers that torch takes as seeds."""

STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)
"""A number is no text and no truth."""
LARGEST = 2**63
"""Integers are below it, those of a tensor's."""
WIDEST = 60
"""Most characters of a value in a message."""


# ---- objects ---------------------------------------------------------------------------------------------------------


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def checked(kind: type[T]) -> type[T]:
    """Make ``kind`` a frozen dataclass that raises a `VitrimError` for a value of another type than its field's.

    Example:
        >>> @checked
        ... class Box:
        ...     side: Positive = 1
        >>> Box(0)
        Traceback (most recent call last):
        vitrim.errors.VitrimError: Box: side=0: must be at least 1
    """
    made: Any = checked_dataclass(frozen=True, config=STRICT)(kind)
    validate, names = made.__init__, [each.name for each in fields(made)]

    @functools.wraps(validate)
    def init(self: Any, *args: Any, **given: Any) -> None:
        with one_line_of(kind.__name__, made, names):
            validate(self, *args, **given)

    made.__init__ = init
    return made  # type: ignore[no-any-return]


class Refined:
    """Base of the objects that refine an argument of several functions; the first field is the argument itself."""

    @classmethod
    def of(cls, given: Any) -> Self:
        """``given`` as such an object: one with fewer fields is completed, one with more refused, else it is the first
        field.
        """
        if type(given) is cls:
            return given
        if not isinstance(given, Refined):
            return cls(given)  # type: ignore[call-arg]
        unread = sorted(set(vars(given)) - {each.name for each in fields(cls)})  # type: ignore[arg-type]
        if unread:
            theirs = type(given).__name__
            raise VitrimError(f"{theirs} has {', '.join(unread)}, which nothing reads here: give a {cls.__name__}")
        return cls(**vars(given))


class Checked(BaseModel):
    """Base of frozen objects that are read from text or YAML, without unknown keys.

    Example:
        >>> class Range(Checked):
        ...     low: int = 0
        ...     high: int = 1
        ...     def faults(self):
        ...         if self.low > self.high:
        ...             yield "low is above high"
        >>> try:
        ...     Range(low=2)
        ... except ValidationError as error:
        ...     print(refusal("range", error, Range))
        range: low is above high
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def faults(self) -> Iterator[str]:
        """Sentences on fields that contradict each other, though each is right; the first one is raised."""
        yield from ()

    @model_validator(mode="after")
    def _no_fault(self) -> Self:
        for fault in self.faults():
            raise ValueError(fault)
        return self

    @model_validator(mode="before")
    @classmethod
    def _nothing_else(cls, values: Any) -> Any:
        """Refuse what pydantic would turn into another value: a truth for a number, a set for a list, an integer above
        a tensor's.
        """
        for name, value in values.items() if isinstance(values, Mapping) else ():
            kinds = cls.model_fields[name].annotation if name in cls.model_fields else Any
            entries = value if isinstance(value, list | tuple) else (value,)
            wanted = None
            if kinds is not Any and not _names(kinds, bool) and any(type(entry) is bool for entry in entries):
                wanted = "a number or a word, not true or false"
            elif isinstance(value, set | frozenset):
                wanted = "a list: a set has no order"
            elif any(isinstance(entry, int) and abs(entry) >= LARGEST for entry in entries):
                wanted = "below 2**63"
            if wanted is not None:
                raise ValueError(f"{name}={shown(value)}: must be {wanted}")
        return values


class Stored(BaseModel):
    """Base of what is read from files. Keys without a field may hold anything, and are kept.

    Example:
        >>> class Classes(Stored):
        ...     classes: list[str]
        >>> Classes.of({"classes": "cat"}, "result.json")
        Traceback (most recent call last):
        vitrim.errors.VitrimError: result.json: classes=cat: must be a list in brackets
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    @classmethod
    def of(cls, content: Any, name: object) -> Self:
        """The ``content`` of a file called ``name``; `VitrimError` with all that is wrong."""
        with one_line_of(str(name), cls):
            return cls.model_validate(content)


def _names(annotation: Any, kind: type) -> bool:
    """True if a type is ``kind`` or has it within, as ``bool | None`` has; also of an annotated one."""
    return annotation is kind or any(_names(part, kind) for part in get_args(annotation))


# ---- functions -------------------------------------------------------------------------------------------------------


def checked_call(function: Callable[P, T], name: str | None = None) -> Callable[P, T]:
    """``function``, called ``name`` in messages, which raises a `VitrimError` for an argument of another type than
    annotated.

    Example:
        >>> @checked_call
        ... def half(number: int) -> float:
        ...     return number / 2
        >>> half("3")
        Traceback (most recent call last):
        vitrim.errors.VitrimError: half: number=3: must be a whole number
    """
    validated, names = validate_call(config=STRICT)(function), list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> T:
        with one_line_of(name or function.__name__, function, names):
            return validated(*args, **given)

    return call


# ---- messages --------------------------------------------------------------------------------------------------------

SAID = {
    **dict.fromkeys(("missing", "missing_argument", "missing_keyword_only_argument"), "is missing"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    "finite_number": "must be a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "string_type": "must be a text",
    "callable_type": "must be a function",
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "model_attributes_type"), "must be options by name"),
    **dict.fromkeys(("list_type", "tuple_type", "sequence_str", "iterable_type"), "must be a list in brackets"),
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "literal_error": "must be {expected}",
    "is_instance_of": "must be a {class}",
    "dataclass_exact_type": "must be a {class_name}",
    "too_short": "must have at least {min_length} entries, not {actual_length}",
    "too_long": "must have at most {max_length} entries, not {actual_length}",
    "value_error": "{error}",
    "unexpected_positional_argument": "is one argument too many",
    "multiple_argument_values": "is given twice",
}
"""Our words for pydantic's types of errors."""
KNOWN = {"a Sequence": "a list in brackets", "a Path": "a path", "a Module": "a torch.nn.Module"}
"""Better words for classes."""
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""Types of errors about names."""


@contextmanager
def one_line_of(name: str, kind: Any, known: Collection[str] = ()) -> Iterator[None]:
    """Turn the `ValidationError` of a ``kind`` of object or function into a `VitrimError` that begins with ``name``.

    ``known``: names of its fields or parameters, in order; default: those of a `Checked`.
    """
    try:
        yield
    except ValidationError as error:
        raise refusal(name, error, kind, known) from None


def refusal(name: str, error: ValidationError, kind: Any = None, known: Collection[str] = ()) -> VitrimError:
    """Everything that is wrong, in one line. Unknown names come alone, because they explain missing ones.

    Where several types are possible, what each of them requires; for a list with wrong entries only these.

    Example:
        >>> class Mix(Checked):
        ...     alpha: float = Field(0.0, ge=0)
        >>> try:
        ...     Mix.model_validate({"alpha": -1})
        ... except ValidationError as error:
        ...     print(refusal("mix", error, Mix))
        mix: alpha=-1: must be at least 0
    """
    entries = error.errors(include_url=False)
    own = entries[0].get("ctx", {}).get("error")
    if isinstance(own, VitrimError) and not entries[0]["loc"]:  # a check of a whole object, which says all of it
        return own
    entries = [entry for entry in entries if entry["type"] in UNKNOWN] or entries
    # For `list[int] | int` pydantic says both "no int" and which entry is wrong: the entry alone helps.
    in_lists = {entry["loc"][:1] for entry in entries if any(isinstance(part, int) for part in entry["loc"][1:])}
    said: dict[str, list[str]] = {}
    for entry in entries:
        if entry["loc"][:1] in in_lists and not any(isinstance(part, int) for part in entry["loc"][1:]):
            continue
        path, section = _where(entry["loc"], kind, list(known))
        if entry["type"] in UNKNOWN:
            what = f"option of {name if known or not path else '.'.join(path)}"
            said_of = unknown(what, entry["loc"][-1], known or section.model_fields)
            # Fields that a subclass has are options of another command: say which object takes them.
            wider = [each.__name__ for each in _below(kind) if entry["loc"][-1] in each.__dataclass_fields__]
            if wider:
                return VitrimError(f"{said_of}; it is one of {' and '.join(wider)}")
            return VitrimError(f"{name}: {said_of}") if path and not known else said_of
        facts: dict[str, Any] = entry.get("ctx", {})
        words = "must be a {class_name}" if known and entry["type"] == "model_type" else SAID.get(entry["type"])
        numbers = {key: f"{value:.12g}" for key, value in facts.items() if isinstance(value, float)}
        message = entry["msg"] if words is None else words.format(**facts | numbers)
        for plain, better in KNOWN.items():
            message = message.replace(plain, better)
        message = re.sub(r"\ba (?=[AEIO][a-z])", "an ", message)  # names of classes
        where = ".".join(path)
        if message == "is missing":
            where += " "
        else:
            where += ": " if isinstance(entry["input"], Mapping) else f"={shown(entry['input'])}: "
        messages = said.setdefault(where if path else "", [])
        if message not in messages:
            messages.append(message.removeprefix("must be ") if messages else message)
    return VitrimError(f"{name}: " + "; ".join(where + ", or ".join(messages) for where, messages in said.items()))


def _below(kind: Any) -> Iterator[Any]:
    """The classes with more fields than a `Refined` one."""
    for each in kind.__subclasses__() if isinstance(kind, type) and issubclass(kind, Refined) else ():
        yield each
        yield from _below(each)


def _where(loc: tuple[int | str, ...], kind: Any, known: list[str]) -> tuple[list[str], Any]:
    """The names that lead to a value, and the section that has it; pydantic's names for alternatives are left out."""
    if known:
        return [known[part] if isinstance(part, int) and part < len(known) else str(part) for part in loc[:1]], kind
    path = [] if hasattr(kind, "model_fields") else [str(part) for part in loc]
    for part in loc if not path else ():
        inside = getattr(kind, "model_fields", {})
        if isinstance(part, int):
            path.append(str(part))
        elif part in inside:
            path.append(part)
            kinds = [inside[part].annotation, *get_args(inside[part].annotation)]
            kind = next((one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)), kind)
    # An index at the end belongs to an alternative of the type, not to a name that a user wrote.
    while hasattr(kind, "model_fields") and path and path[-1].isdecimal():
        path.pop()
    return path, kind


def shown(value: Any, depth: int = 5) -> str:
    """A value as on the command line, in one line; lists of lists down to ``depth``.

    Example:
        >>> shown(None), shown(True), shown((1, 2)), shown("floor"), shown(10**100)
        ('null', 'true', '[1,2]', 'floor', 'a number of 333 bits')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= LARGEST:  # Python refuses to print thousands of digits
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list | tuple):
        return "[" + (",".join(shown(entry, depth - 1) for entry in value) if depth else "...") + "]"
    text = " ".join(str(value).split()) if isinstance(value, str | int | float) else f"{value!r}"
    return text if len(text) <= WIDEST else f"{text[:WIDEST]}..."
