"""The errors a user can cause. Each message is one line: what was wrong, and what is valid."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VitrimError(ValueError):
    """Bad input: the command line prints its one line and exits with code 2. Nothing was changed."""


class UnsupportedModelError(VitrimError):
    """The model is of a family vitrim does not know, or of a form it cannot reduce faithfully."""


class MissingPackageError(VitrimError, ModuleNotFoundError):
    """An optional package is needed and not installed; the message says how to install it."""


class ReductionWarning(UserWarning):
    """The reduction does less than was asked; the message says what it does."""


def unknown(what: str, given: str, valid: Iterable[str]) -> VitrimError:
    """ "unknown METHOD 'tomme'; did you mean 'tome'? valid: ..." as an error to raise.

    Example:
        >>> str(unknown("method", "tomme", ["atm", "tome"]))
        "unknown method 'tomme'; did you mean 'tome'? valid: atm, tome"
    """
    names = sorted(valid)
    spelled = {name.lower(): name for name in names}
    near = difflib.get_close_matches(given.lower(), spelled, n=1, cutoff=0.5)
    hint = f" did you mean '{spelled[near[0]]}'?" if near else ""
    return VitrimError(f"unknown {what} '{given}';{hint} valid: {', '.join(names)}")


def first_line(error: BaseException) -> str:
    """What an error of another library says, cut to one line; its kind if it says nothing.

    Example:
        >>> first_line(RuntimeError("no memory\\nTraceback: ...")), first_line(KeyError())
        ('no memory', 'KeyError')
    """
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
