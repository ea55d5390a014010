"""The processes that measure together."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch

from vitrim.errors import MissingPackageError


@dataclass(frozen=True)
class Processes:
    """This process and how many there are.

    Attributes:
        index: the place of this process, from 0. The first one prints and writes.
        count: how many measure together; more than one were started by ``accelerate launch``.
        device: the accelerator of this process where there are several, else None.

    Example:
        >>> Processes().gather("alone")
        ['alone']
    """

    index: int = 0
    count: int = 1
    device: torch.device | None = None

    @classmethod
    def launched(cls, device: str | None = None) -> Processes:
        """Join the processes that ``accelerate launch`` started, or be alone.

        Args:
            device: "cpu" joins them without an accelerator.

        Raises:
            MissingPackageError: there are several, and accelerate is not installed.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        if importlib.util.find_spec("accelerate") is None:
            raise MissingPackageError("several processes need the package accelerate: pip install 'vitrim[train]'")
        from accelerate import PartialState

        state = PartialState(cpu=device == "cpu")
        return cls(state.process_index, state.num_processes, state.device)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in their order. Every process must call it; it waits for the others."""
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        gathered: list[Any] = gather_object([value])
        return gathered
