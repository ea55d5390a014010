"""Fixtures and the tables the contract tests are parametrised over."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from full_matrix import FULL_MATRIX
from golden_files import Reference, using_up

# no test asserts a time, and a machine that is shared is slow now and then
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# ten thousand tests and the libraries that they import stay to the end: looking through them for garbage is a sixth of
# the time of collecting them
gc.disable()


def pytest_collection_finish() -> None:
    """Have garbage collected among what the tests make."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter end as it does elsewhere."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``full``, except under ``VITRIM_FULL_MATRIX=1``, and give each group to one worker.

    Tests that share a fixture of their module are a group: in two workers the fixture would be made twice. Large groups
    come first by themselves, so that the workers end with single tests, and at about the same time.
    """
    left_out = [] if FULL_MATRIX else [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        shared = {
            one.baseid
            for fixtures in item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
            for one in fixtures[-1:]
            if one.scope == "module"
        }
        if shared and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> Iterator[None]:
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes a millisecond, to remember who called it for CUDA
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)  # what a module's fixtures compute is made before this runs for its first test


@pytest.fixture
def ref(request: pytest.FixtureRequest) -> Reference:
    """A reference file that the test names by `golden_files.cases` and has to use up."""
    return Reference(request.param)


# a test that leaves out an array of its reference file fails
pytest_pyfunc_call = pytest.hookimpl(wrapper=True)(using_up)
