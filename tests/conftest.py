"""Fixtures and the tables the contract tests are parametrised over."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from golden_files import Reference


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes a millisecond, to remember who called it for CUDA
    torch.set_num_threads(1)


@pytest.fixture
def ref(request: pytest.FixtureRequest) -> Reference:
    """A reference file that the test names by `golden_files.cases` and has to use up."""
    return Reference(request.param)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """A test that leaves out an array of its reference file fails."""
    result = yield
    ref = pyfuncitem.funcargs.get("ref")
    if isinstance(ref, Reference):
        assert not ref.left_out(), f"of {ref.part.file} the test neither compares nor reads {ref.left_out()}"
    return result
