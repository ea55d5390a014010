"""Training in two processes, with DDP and with FSDP2, is training in one; see `distributed_worker.py` for the cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from distributed_worker import CASES, PROCESSES

WORKER = Path(__file__).parents[1] / "distributed_worker.py"
SECONDS = 600  # far more than it takes where the cores are free

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this build of torch has no gloo"),
    pytest.mark.xdist_group("distributed"),  # the processes are started once
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the two processes found, by case."""
    folder = tmp_path_factory.mktemp("distributed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    try:
        outputs = [worker.communicate(timeout=SECONDS)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * PROCESSES, "\n".join(outputs)
    results: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return results


@pytest.mark.parametrize("case", CASES)
def test_one_step_of_two_processes_is_the_step_of_one(found: dict[str, Any], case: str) -> None:
    """Loss, gradients, updated parameters, and outputs after `restore_`."""
    assert isinstance(found[case], float), found[case]
    assert found[case] < 1e-10  # float64


def test_what_learns_is_refused_once_the_model_is_sharded(found: dict[str, Any]) -> None:
    assert "call vitrim.reduce_ first, then fully_shard" in found["refused"]
