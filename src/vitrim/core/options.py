"""Options of methods and selectors: frozen, validated with one-line errors, written ``name:key=value,key=value``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from vitrim.errors import VitrimError, plain, unknown

LONGEST_INTEGER = 64
"""Bits of an integer, sign included: those of a tensor's."""


class Options(BaseModel):
    """Base class of named options. Its direct subclasses hold the options that all of a kind share.

    Example:
        >>> class Tool(Options):
        ...     name = "tool"
        ...     size: int = 1
        >>> Tool(size=3).describe()
        'tool:size=3'
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str] = ""
    runtime: ClassVar[frozenset[str]] = frozenset()
    """Options that ``reduction.set`` may change."""

    if not TYPE_CHECKING:  # a type checker knows the options from the fields

        def __init__(self, /, **options: Any) -> None:
            """Validate the options.

            Raises:
                VitrimError: an unknown option or an invalid value.
            """
            for key in options:
                if key not in type(self).model_fields:
                    raise unknown(f"option of {self.name}", key, type(self).model_fields)
                _check_value(f"{self.name}: {key}", options[key], type(self).model_fields[key].annotation)
            try:
                super().__init__(**options)
            except ValidationError as error:
                raise VitrimError(f"{self.name}: {_problems(error, type(self))}") from None

        def __setattr__(self, key: str, value: Any) -> None:
            raise VitrimError(_frozen(self, f"{key}={_text(value)}"))

        def __delattr__(self, key: str) -> None:
            raise VitrimError(_frozen(self, f"del {key}"))

    def changed(self, *without: str, **changes: Any) -> Self:
        """The same options with ``changes``, and those named ``without`` unset.

        Example:
            >>> import vitrim
            >>> vitrim.ToMe(r=8, proportional=False).changed("r", keep_rate=0.7).describe()
            'tome:keep_rate=0.7,proportional=false'
        """
        return type(self)(**{key: getattr(self, key) for key in self.model_fields_set - {*without}} | changes)

    def describe(self) -> str:
        """The text form, as on the command line, with the options that were given."""
        shared = next(
            base for base in reversed(type(self).__mro__) if base is not Options and issubclass(base, Options)
        )
        own_first = sorted(type(self).model_fields, key=lambda field: field in shared.model_fields)
        given = [field for field in own_first if field in self.model_fields_set]
        options = ",".join(f"{field}={_text(getattr(self, field))}" for field in given)
        return f"{self.name}:{options}" if options else self.name


def read_options(text: str, example: str) -> tuple[str, dict[str, Any]]:
    """Name and options from a text ``name:key=value,key=value``."""
    name, _, rest = text.strip().partition(":")
    options: dict[str, Any] = {}
    for part in split_options(rest):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise VitrimError(f"cannot read '{part}' in '{text}': write name:key=value,key=value, e.g. {example}")
        if key.strip() in options:
            raise VitrimError(f"'{key.strip()}' is given twice in '{text}'")
        options[key.strip()] = read_value(value.strip(), key.strip())
    return name.strip(), options


def split_options(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    parts.append(current)
    return [part for part in parts if part.strip()]


def read_value(text: str, key: str) -> Any:
    """A JSON value where ``text`` is one (number, true, null, list), else the text itself; ``key`` is for messages.

    Example:
        >>> read_value("[16,8]", "r"), read_value("floor_current", "rule")
        ([16, 8], 'floor_current')
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
    except (ValueError, RecursionError):  # what JSON allows and Python does not
        raise VitrimError(f"{key}: a value of {len(text)} characters that cannot be read: {text[:20]}...") from None


def _frozen(config: Options, change: str) -> str:
    amounts = f", reduction.set(...) for the amounts of a reduced model ({', '.join(sorted(config.runtime))})"
    return (
        f"{config.describe()}: {change}: options do not change once they are made; make another {type(config).__name__}"
        f"(...){amounts if config.runtime else ''}"
    )


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, int) and value.bit_length() > LONGEST_INTEGER:  # Python refuses to print thousands of digits
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(_text(entry) for entry in value) + "]"
    return str(value)


def _check_value(option: str, value: Any, kinds: Any) -> None:
    """Refuse values that pydantic would convert to something else, also in a list.

    These are a bool for a number, which it reads as 1 or 0; a set, which it lists in arbitrary order; and an integer
    that no tensor holds.
    """
    entries = value if isinstance(value, list | tuple) else (value,)
    if bool not in (kinds, *get_args(kinds)) and any(isinstance(entry, bool) for entry in entries):
        raise VitrimError(f"{option}={_text(value)}: must be a number or a word, not true or false")
    if isinstance(value, set | frozenset):
        raise VitrimError(f"{option}={_text(value)}: must be a list: a set has no order")
    for number in entries:
        if isinstance(number, int) and number.bit_length() >= LONGEST_INTEGER:
            raise VitrimError(f"{option}={_text(number)}: must be below 2**{LONGEST_INTEGER - 1}")


def _holds_floats(kinds: Any) -> bool:
    """True if a value of this type, or an entry of it, may be a fraction."""
    return kinds is float or any(_holds_floats(part) for part in get_args(kinds))


def _problems(error: ValidationError, options: type[Options]) -> str:
    """Everything that is wrong, in one line. Where an option takes several types, what each of them requires.

    For a list with wrong entries only these are named, not the alternative of a single number.
    """
    found: dict[str, list[str]] = {}
    entries = error.errors()
    in_lists = [any(isinstance(part, int) for part in entry["loc"]) for entry in entries]
    lists = {entry["loc"][0] for entry, in_list in zip(entries, in_lists, strict=True) if in_list}
    for entry, in_list in zip(entries, in_lists, strict=True):
        if entry["loc"] and entry["loc"][0] in lists and not in_list:
            continue
        where = f"{entry['loc'][0]}={_text(entry['input'])}: " if entry["loc"] else ""
        field = options.model_fields.get(str(entry["loc"][0])) if entry["loc"] else None
        fractions = field is not None and _holds_floats(field.annotation)
        listed = "a list in brackets, e.g. " + ("[0.7,0.5]" if fractions else "[1,2]")
        message = plain(entry["msg"].removeprefix("Value error, ").replace("a valid tuple", listed))
        messages = found.setdefault(where, [])
        messages.append(message.removeprefix("must be ") if messages else message)
    return " ".join("; ".join(where + ", or ".join(messages) for where, messages in found.items()).split())
