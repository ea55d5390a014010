"""Fixtures and the tables the contract tests are parametrised over."""

from __future__ import annotations

import hypothesis
import pytest
import torch

from golden_files import Reference, using_up

# no test asserts a time, and a machine that is shared is slow now and then
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes a millisecond, to remember who called it for CUDA
    torch.set_num_threads(1)


@pytest.fixture
def ref(request: pytest.FixtureRequest) -> Reference:
    """A reference file that the test names by `golden_files.cases` and has to use up."""
    return Reference(request.param)


# a test that leaves out an array of its reference file fails
pytest_pyfunc_call = pytest.hookimpl(wrapper=True)(using_up)
