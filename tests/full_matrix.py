"""Which tests run in `make test`, which in `make test-slow`, and which in `make test-full` alone.

A test that is marked ``slow`` takes half a second or more, and other tests run nearly all lines of the package that it
runs: CI runs it, `make test` leaves it out. A test, or a case of one, that is marked ``full`` runs under
``VITRIM_FULL_MATRIX=1`` alone: beside each of them stands what still sees a mistake of its kind in `make test`. Of a
table marked ``sampled`` the cases that stay see those of its other cases (`suite.py`).
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from typing import Any

import pytest

FULL_MATRIX = os.environ.get("VITRIM_FULL_MATRIX") == "1"
"""Everything runs: every method on every host in every test."""


def cells(values: Iterable[Any], short: Container[Any]) -> list[Any]:
    """Values to parametrise by: those of ``short`` in every run, the others in the full matrix."""
    return [value if value in short else pytest.param(value, marks=pytest.mark.full) for value in values]
