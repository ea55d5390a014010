"""`Runnable`: a model that is ready to run, as a `Module` of torch or as an exported file (`vitrim.Exported`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vitrim.engines.copies import shared_copy
from vitrim.engines.memory import peak_memory_mib
from vitrim.engines.program import Program


class Runnable(Protocol):
    """A model that runs batches of images on an engine, in a precision."""

    @property
    def engine(self) -> str:
        """The name of the engine."""

    @property
    def precision(self) -> str:
        """The precision of the computation: fp32, fp16, bf16 or int8."""

    @property
    def batch(self) -> int | None:
        """The only size of its batches; None for any."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """All that is known of the model without running it: its MACs and tokens, and those of its dense self."""

    def given(self, images: Tensor) -> Any:
        """Normalised images (B, C, H, W) as `run` takes them: in another dtype, on another device, as bytes."""

    def run(self, images: Any) -> Any:
        """The output for a batch from `given`."""

    def read(self, output: Any) -> Tensor:
        """An output as one float32 tensor: logits (B, K), or else an embedding (B, D), or else its first tensor."""

    def peak_mib(self, images: Any) -> float | None:
        """The peak memory of a `run` in MiB; None if the engine has memory of its own."""


@dataclass(eq=False)
class Module:
    """A module that torch runs, dense or reduced, in eval mode; ``call`` is its compiled form, if it has one."""

    model: nn.Module
    engine: str = "eager"
    precision: str = "fp32"
    batch: int | None = None
    call: Callable[[Tensor], Any] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def given(self, images: Tensor) -> Tensor:
        like = next(self.model.parameters())
        return images.to(like.device, like.dtype)

    def run(self, images: Tensor) -> Any:
        return (self.model if self.call is None else self.call)(images)

    def read(self, output: Any) -> Tensor:
        return Program(self.model).tensor(output).float()

    def peak_mib(self, images: Tensor) -> float | None:
        # of a copy, because this forward would release what the model still holds of its last one
        run = shared_copy(self.model) if self.call is None else self.call
        return peak_memory_mib(lambda: run(images), images.device)


def outputs(runnable: Runnable, images: Tensor) -> Tensor:
    """The outputs for any number of normalised images (N, C, H, W): split into batches, the last of which is padded.

    Example:
        >>> outputs(Module(nn.Conv2d(3, 2, 4), batch=2), torch.zeros(3, 3, 4, 4)).shape
        torch.Size([3, 2, 1, 1])
    """
    size, found = runnable.batch or len(images), []
    for part in images.split(size):
        # A file takes one size of batches: copies of the first image fill the last one.
        full = torch.cat([part, part[:1].expand(size - len(part), *part.shape[1:])])
        found.append(runnable.read(runnable.run(runnable.given(full)))[: len(part)])
    return torch.cat(found)
