"""Made tables and records, and a tiny model with images, for the tests of every family."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from made_subjects import IMAGES
from made_tables import made_record, tables
from tiny import vit
from vitrim.analysis.family import Tables
from vitrim.analysis.record import Record, titled


@pytest.fixture(scope="module")
def made() -> Tables:
    return tables()


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return titled(
        [
            made_record("tome", "merge", 0, 6, 0.5),
            made_record("topk", "prune", 1, 4, 0.25),
            made_record("atm", "merge", 2, 3, 0.9),
        ]
    )


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return vit()().eval()


@pytest.fixture(scope="module")
def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(IMAGES, 3, 24, 24, generator=generator), torch.arange(IMAGES) % 5)
