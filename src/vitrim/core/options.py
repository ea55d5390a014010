"""Options of methods and selectors: frozen, validated with one-line errors, written ``name:key=value,key=value``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vitrim.checked import Checked, one_line_of, shown
from vitrim.errors import VitrimError


class Options(Checked):
    """Base class of named options. Its direct subclasses hold the options that all of a kind share.

    Example:
        >>> class Tool(Options):
        ...     name = "tool"
        ...     size: int = 1
        >>> Tool(size=3).describe()
        'tool:size=3'
    """

    name: ClassVar[str] = ""
    runtime: ClassVar[frozenset[str]] = frozenset()
    """Options that ``reduction.set`` may change."""

    if not TYPE_CHECKING:  # a type checker knows the options from the fields

        def __init__(self, /, **options: Any) -> None:
            """Validate the options; `VitrimError` for an unknown option or an invalid value."""
            with one_line_of(self.name, type(self)):
                super().__init__(**options)

        def __setattr__(self, key: str, value: Any) -> None:
            raise VitrimError(_frozen(self, f"{key}={shown(value)}"))

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
        # The class right below `Options` holds the options that all of a kind share; they are written last.
        shared = next(
            base for base in reversed(type(self).__mro__) if base is not Options and issubclass(base, Options)
        )
        own_first = sorted(type(self).model_fields, key=lambda field: field in shared.model_fields)
        given = [field for field in own_first if field in self.model_fields_set]
        options = ",".join(f"{field}={shown(getattr(self, field))}" for field in given)
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
