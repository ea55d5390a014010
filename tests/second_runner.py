"""A plugin of pytest (``-p second_runner``): vLLM with its Model Runner V2, which is usual on GPUs, on a CPU.

Kernels of that runner are Triton's, and its interpreter runs them. vLLM asks for Triton's backend of CPUs, which no
registry has, so one without a compiler stands in for it.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}  # vLLM ends where it cannot use it

from triton.backends import backends


class Driver:
    """The answers of a driver that vLLM asks for."""

    @staticmethod
    def is_active() -> bool:
        return True

    @staticmethod
    def get_current_target() -> SimpleNamespace:
        return SimpleNamespace(backend="cpu")


backends["cpu"] = SimpleNamespace(driver=Driver)
