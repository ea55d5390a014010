"""vLLM's Model Runner V2, usual on GPUs: answers are those of transformers, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-vllm` makes an environment that has it")

TESTS = Path(__file__).parents[1]
CASES = (
    "test_vllm.py::test_answers_are_those_of_transformers[llava]",
    "test_vllm.py::test_images_at_the_end_or_side_by_side[qwen2_vl]",
)
"""Positions that close up, and that come with embeddings; no more, as the interpreter is slow."""


@pytest.mark.timeout(950)
def test_the_second_runner_passes_tests_of_the_first() -> None:
    """In a process of its own: Triton reads, when it is imported, that its kernels are to be interpreted."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "second_runner", *(str(TESTS / "serving" / case) for case in CASES)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    assert f"{len(CASES)} passed" in run.stdout
