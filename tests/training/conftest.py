"""The dataset of the tests of training, and a fresh accelerate for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

from tiny_training import write_images


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """It keeps its settings, such as the precision, for a whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 images to train on and 12 to test on, of three classes that differ in their colour."""
    return write_images(tmp_path_factory.mktemp("images"))
