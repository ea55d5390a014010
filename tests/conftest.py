"""Fixtures and the tables the contract tests are parametrised over."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes a millisecond, to remember who called it for CUDA
    torch.set_num_threads(1)
