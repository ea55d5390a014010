"""Errors that a user can cause. Each message is one line: the problem and the valid values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

LONGEST_LINE = 500
"""Most characters of a message."""


def one_line(text: str) -> str:
    """Turn a message, which may contain text of files and libraries, into one readable line.

    Example:
        >>> one_line("unknown method 'a\\nb'")
        "unknown method 'a b'"
        >>> len(one_line("x" * 5000))
        483
    """
    text = re.sub(r"\s*[\r\n]+\s*", " ", text)
    # Text of a stranger's file may hold control signs, which a terminal would obey: they are printed as escapes.
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    if len(text) <= LONGEST_LINE:
        return text
    return f"{text[: LONGEST_LINE - 180]}...({len(text)} characters)...{text[-140:]}"


class VitrimError(ValueError):
    """Bad input. Nothing was changed; the command line prints the line and exits with code 2."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(one_line(text) if isinstance(text, str) else text for text in args))


class UnsupportedModelError(VitrimError):
    """The model's family is unknown, or vitrim cannot reduce its form faithfully."""


class MissingPackageError(VitrimError, ModuleNotFoundError):
    """An optional package is missing; the message contains the command to install it."""


EXTRAS = {
    **dict.fromkeys(("scipy", "ot", "threadpoolctl", "matplotlib", "jinja2", "sklearn"), "analysis"),
    **dict.fromkeys(("accelerate", "tensorboard"), "train"),
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "export"),
    **dict.fromkeys(("fastapi", "uvicorn"), "serve"),
    **dict.fromkeys(("optuna", "greenlet"), "tune"),
    **dict.fromkeys(("datasets", "PIL", "pyarrow"), "data"),
    **dict.fromkeys(("torchvision", "pycocotools"), "dense"),
    "transformers": "hf",
    "open_clip": "clip",
    "openvino": "openvino",
    "nncf": "int8",
    "numba": "fast",
    "gradio": "app",
    "vllm": "vllm",
    "ray": "ray",
}
"""The extra of `pyproject.toml` that installs a package, by the name that is imported."""


def check_installed(what: str, *packages: str, extra: str | None = None) -> None:
    """Refuse to begin without the ``packages`` of ``what`` that are not installed; one that is not in `EXTRAS` is its
    own.
    """
    missing = next((package for package in packages if find_spec(package) is None), None)
    if missing is not None:
        raise not_installed(what, missing, extra)


def not_installed(what: str, package: str, extra: str | None = None) -> MissingPackageError:
    """The error of `check_installed` for a package whose absence another library tells."""
    extra = extra or EXTRAS.get(package)
    # no index has a release yet: "." is a checkout
    install = f"pip install {package}" if extra is None else f"pip install '.[{extra}]'"
    return MissingPackageError(f"{what} needs the package '{package}': {install}")


class DataError(VitrimError):
    """A dataset cannot be read with these arguments.

    Example:
        >>> from vitrim.data import load_images
        >>> load_images("no-such-folder")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        vitrim.errors.DataError: no-such-folder does not exist: there is no 'no-such-folder' in .; ...
    """

    def __init__(self, message: str) -> None:
        # from a worker process the message is a traceback that ends with the error
        super().__init__(message.rpartition(f"{__name__}.DataError: ")[2].strip())


class ReductionWarning(UserWarning):
    """The reduction does less than requested; the message describes the difference."""


def check_known(what: str, given: object, valid: Collection[str]) -> None:
    """Refuse a name that is not among the ``valid`` names, with the error of `unknown`."""
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
    """The likely name: the shortest that begins with ``given``, else the most similar.

    Example:
        >>> nearest("deit_small", ["deit_small_patch16_224", "deit3_small", "deit_small_distilled_patch16_224"])
        'deit_small_patch16_224'
        >>> nearest("tomme", ["atm", "tome"]), nearest("x", ["tome"])
        ('tome', None)
    """
    spelled = {name.lower(): name for name in names}
    # One letter begins many names: a beginning counts from two letters on.
    longer = [name for name in spelled if len(given) > 1 and name.startswith(given.lower())]
    near = [min(longer, key=len)] if longer else difflib.get_close_matches(given.lower(), spelled, n=1)
    return spelled[near[0]] if near else None


WHERE = re.compile(r"(Exception from|Check '.*' failed at) \S+:\d+:")
"""A line with the place in a library's source, without a reason: OpenVINO writes one before the reason."""


def first_line(error: BaseException) -> str:
    """The first line with a reason of a library's error message; the type of the error if the message is empty."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if line and not WHERE.fullmatch(line)), lines[0])


@contextmanager
def os_errors(what: str, kind: type[VitrimError] = VitrimError) -> Iterator[None]:
    """Turn an `OSError` into a ``kind`` with the message "``what``: reason".

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
    """Turn an out-of-memory error, or an unsupported dtype, at a ``setting`` into a `VitrimError` that ends with
    ``kept``.
    """
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise VitrimError(f"out of memory at {setting}{kept}") from error
    except RuntimeError as error:
        # Torch's allocator for CPUs raises a plain RuntimeError: only its words tell it apart from a mistake.
        message = str(error)
        if any(sign in message for sign in ("can't allocate memory", "Storage size calculation overflowed")):
            raise VitrimError(f"out of memory at {setting}{kept}") from error
        if "not implemented for" in message:
            raise VitrimError(f"cannot run at {setting}: {first_line(error)}{kept}") from error
        raise
