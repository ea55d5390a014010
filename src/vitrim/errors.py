"""The errors a user can cause. Each message is one line: what was wrong, and what is valid."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

LONGEST_LINE = 500
"""Most characters of a message."""


def one_line(text: str) -> str:
    """Turn a message into one readable line: files, and other libraries, put line breaks and much text into it.

    Example:
        >>> one_line("unknown method 'a\\nb'")
        "unknown method 'a b'"
        >>> len(one_line("x" * 5000))
        483
    """
    text = re.sub(r"\s*[\r\n]+\s*", " ", text)
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    if len(text) <= LONGEST_LINE:
        return text
    return f"{text[: LONGEST_LINE - 180]}...({len(text)} characters)...{text[-140:]}"


class VitrimError(ValueError):
    """Bad input: the command line prints its one line and exits with code 2. Nothing was changed.

    Example:
        >>> str(VitrimError("no folder called\\nhere"))
        'no folder called here'
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(one_line(text) if isinstance(text, str) else text for text in args))


class UnsupportedModelError(VitrimError):
    """The model is of a family vitrim does not know, or of a form it cannot reduce faithfully."""


class MissingPackageError(VitrimError, ModuleNotFoundError):
    """An optional package is needed and not installed; the message says how to install it."""


class DataError(VitrimError):
    """Raised for a dataset that cannot be read as asked; the message is one line and says what is valid.

    Example:
        >>> from vitrim.data import load_images
        >>> try:
        ...     load_images("no-such-folder")
        ... except DataError as error:
        ...     print(str(error).split(";")[0])
        no-such-folder does not exist: there is no 'no-such-folder' in .
    """

    def __init__(self, message: str) -> None:
        # from a worker process the message arrives as a whole traceback, which ends with the error itself
        super().__init__(message.rpartition(f"{__name__}.DataError: ")[2].strip())


class ReductionWarning(UserWarning):
    """The reduction does less than was asked; the message says what it does."""


def check_whole(**given: tuple[object, int]) -> None:
    """Refuse what is no whole number, or too small: every argument with its least value; None stands for a default.

    Raises:
        VitrimError: naming the first that is wrong.

    Example:
        >>> check_whole(batch_size=(8, 1), limit=(None, 1))
        >>> check_whole(batch_size=(0, 1))
        Traceback (most recent call last):
        vitrim.errors.VitrimError: batch_size is a whole number of at least 1, not 0
    """
    for name, (value, least) in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise VitrimError(f"{name} is a whole number of at least {least}, not {value!r:.60}")


TEXT, PATH = (str, "a text"), (str | Path, "a path")
OPTIONS = (Mapping, "a dict of options by name")
KINDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("split", "image_column", "label_column", "dtype"), TEXT),
    **dict.fromkeys(("checkpoint", "learned", "out", "decisions", "predictions", "figure"), PATH),
    **dict.fromkeys(("data_options", "model_options", "protocol"), OPTIONS),
    **dict.fromkeys(("on_progress", "on_report"), (Callable, "a function")),
    **dict.fromkeys(("blocks", "class_names"), (list | tuple | range, "a list")),
}
"""Kinds of arguments that many functions take, and their names in messages."""


def check_kinds(**given: object) -> None:
    """Refuse arguments of another kind than their names have in `KINDS`; None stands for a default.

    Raises:
        VitrimError: naming the first that is wrong.

    Example:
        >>> check_kinds(split="test", model_options=None)
        >>> check_kinds(data_options=5)
        Traceback (most recent call last):
        vitrim.errors.VitrimError: data_options is a dict of options by name, not 5
    """
    for name, value in given.items():
        kind, words = KINDS[name]
        if value is not None and not isinstance(value, kind):
            raise VitrimError(f"{name} is {words}, not {value!r:.60}")


def check_read(given: Any, read: Collection[str]) -> None:
    """Refuse a description with a value that the function which takes it does not read.

    Args:
        given: a dataclass with a default for every field but the first.
        read: the names of the fields that are read, beside the first.

    Raises:
        VitrimError: naming the field and those that are read.
    """
    for field in fields(given)[1:]:
        value = getattr(given, field.name)
        if field.name not in read and value != field.default and value != {}:
            name = type(given).__name__
            raise VitrimError(f"{field.name} of {name} has no effect here: leave it out; read are {', '.join(read)}")


def check_known(what: str, given: object, valid: Collection[str]) -> None:
    """Refuse a name that is not among the ``valid`` ones.

    Raises:
        VitrimError: the one that `unknown` makes.

    Example:
        >>> check_known("method", "tome", ["atm", "tome"])
    """
    if given not in valid:
        raise unknown(what, given, valid)


def unknown(what: str, given: object, valid: Iterable[str]) -> VitrimError:
    """ "unknown METHOD 'tomme'; did you mean 'tome'? valid: ..." as an error to raise.

    Example:
        >>> str(unknown("method", "tomme", ["atm", "tome"]))
        "unknown method 'tomme'; did you mean 'tome'? valid: atm, tome"
    """
    names = sorted(valid)
    near = nearest(str(given), names)
    hint = "" if near is None else f" did you mean '{near}'?"
    return VitrimError(f"unknown {what} '{given}';{hint} valid: {', '.join(names)}")


def nearest(given: str, names: Iterable[str]) -> str | None:
    """The name that was meant: the shortest one that begins with what was given, else the one that looks most like it.

    Example:
        >>> nearest("deit_small", ["deit_small_patch16_224", "deit3_small", "deit_small_distilled_patch16_224"])
        'deit_small_patch16_224'
        >>> nearest("tomme", ["atm", "tome"]), nearest("x", ["tome"])
        ('tome', None)
    """
    spelled = {name.lower(): name for name in names}
    longer = [name for name in spelled if len(given) > 1 and name.startswith(given.lower())]
    near = [min(longer, key=len)] if longer else difflib.get_close_matches(given.lower(), spelled, n=1, cutoff=0.5)
    return spelled[near[0]] if near else None


PLAIN = (
    (
        r"a valid integer(, (unable to parse string as an|got a number with a fractional).*?(integer|part))?",
        "a whole number",
    ),
    (r"a valid number(, unable to parse string as a number)?", "a number"),
    (r"a valid boolean(, unable to interpret input)?", "true or false"),
    (r"a valid string", "a text"),
    (r"a valid (dictionary|mapping)", "options by name"),
    (r"a valid (list|tuple|array)", "a list"),
    (r"a finite number", "a finite number"),
    (r"greater than or equal to ", "at least "),
    (r"less than or equal to ", "at most "),
    (r"greater than ", "above "),
    (r"less than ", "below "),
    (r"", ""),
)
"""Endings of pydantic's "Input should be ...", and what they are here; the first that fits counts."""
LENGTH = re.compile(r"\w+ should have (at least|at most) (\d+) items? after validation, not (\w+)")
"""Pydantic's words for a list that is too short or too long."""


def plain(message: str) -> str:
    """A message of pydantic in this project's words.

    Example:
        >>> plain("tome: r=x: Input should be a valid integer, unable to parse string as an integer")
        'tome: r=x: must be a whole number'
        >>> plain("epochs: Input should be greater than 0"), plain("rule: Input should be 'ceil' or 'floor'")
        ('epochs: must be above 0', "rule: must be 'ceil' or 'floor'")
    """
    message = LENGTH.sub(r"must have \1 \2 entries, not \3", message)
    for ending, own in PLAIN:
        found = re.search(f"Input should be {ending}", message)
        if found is not None:
            return plain(message[: found.start()] + f"must be {own}" + message[found.end() :])
    return message


WHERE = re.compile(r"(Exception from|Check '.*' failed at) \S+:\d+:")
"""A line that says where in its source a library failed, and not why: OpenVINO's, in front of the reason."""


def first_line(error: BaseException) -> str:
    """The first line of another library's error message that gives a reason; the kind of error if there is no message.

    Example:
        >>> first_line(RuntimeError("no memory\\nTraceback: ...")), first_line(KeyError())
        ('no memory', 'KeyError')
        >>> first_line(RuntimeError("Exception from src/cpp/core.cpp:84:\\nIncorrect weights in bin file!"))
        'Incorrect weights in bin file!'
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if line and not WHERE.fullmatch(line)), lines[0])


@contextmanager
def os_errors(what: str, kind: type[VitrimError] = VitrimError) -> Iterator[None]:
    """Turn an error of the operating system into a ``kind``: ``what``, such as "cannot read x.json", and the reason.

    Example:
        >>> with os_errors("cannot read x.json"):
        ...     raise OSError(13, "Permission denied")
        Traceback (most recent call last):
        vitrim.errors.VitrimError: cannot read x.json: Permission denied
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or first_line(error)}") from error


@contextmanager
def one_line_errors(setting: str, kept: str = "; settings finished before are kept") -> Iterator[None]:
    """Turn running out of memory, and a dtype that the device cannot compute in, into a `VitrimError`.

    Args:
        setting: what ran, for the message.
        kept: what the message says of what was there before.
    """
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise VitrimError(f"out of memory at {setting}{kept}") from error
    except RuntimeError as error:
        message = str(error)
        if any(sign in message for sign in ("can't allocate memory", "Storage size calculation overflowed")):
            raise VitrimError(f"out of memory at {setting}{kept}") from error
        if "not implemented for" in message:
            raise VitrimError(f"cannot run at {setting}: {first_line(error)}{kept}") from error
        raise
