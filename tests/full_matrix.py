"""Tests of `make test`, and those that run in `make test-full` alone.

A test, or a case of one, that is marked ``slow`` runs under ``VITRIM_FULL_MATRIX=1`` alone: it takes half a second or
more, and what still sees a mistake of its kind runs in `make test`. Of a table marked ``sampled`` the cases that stay
see those of its other cases (`suite.py`).
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from typing import Any

import pytest

FULL_MATRIX = os.environ.get("VITRIM_FULL_MATRIX") == "1"
"""All tests run, with all their cases."""


def cells(values: Iterable[Any], short: Container[Any]) -> list[Any]:
    """Values to parametrise by: those of ``short`` in every run, the others in `make test-full`."""
    return [value if value in short else pytest.param(value, marks=pytest.mark.slow) for value in values]
