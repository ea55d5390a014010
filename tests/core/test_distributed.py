"""Training in two processes, with DDP and with FSDP2, is training in one; see `distributed_worker.py` for the cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from distributed_worker import CASES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this build of torch has no gloo"),
    pytest.mark.xdist_group("distributed"),  # the processes are started once
]


@pytest.fixture
def found(two_processes: Path) -> dict[str, Any]:
    """What the two processes found, by case."""
    results: dict[str, Any] = json.loads((two_processes / "found.json").read_text())
    return results


@pytest.mark.parametrize("case", CASES)
def test_one_step_of_two_processes_is_the_step_of_one(found: dict[str, Any], case: str) -> None:
    """Loss, gradients, updated parameters, and outputs after `restore_`."""
    assert isinstance(found[case], float), found[case]
    assert found[case] < 1e-10  # float64


def test_what_learns_is_refused_once_the_model_is_sharded(found: dict[str, Any]) -> None:
    assert "call vitrim.reduce_ first, then fully_shard" in found["refused"]
