"""A model as a torch.export program from images to one tensor."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitrim.core.plan import Preprocessing
from vitrim.core.registry import ask
from vitrim.errors import VitrimError, first_line

MAX_BATCH = 2**16
"""Largest dynamic batch of a program."""


class Program(nn.Module):
    """``model`` as it is exported.

    Input: (B, C, H, W) float32, or with ``normalise`` (B, H, W, C) uint8, which it scales to [0, 1] and normalises.
    Output: one float32 tensor: the logits, or else the library's embedding, or else the model's first output.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, normalise: Preprocessing | None = None) -> None:
        super().__init__()
        self.model = model
        self.library = ask(model)
        self.normalise = normalise is not None
        if normalise is not None:
            for name, value in zip(("mean", "std"), normalisation(normalise), strict=True):
                self.register_buffer(name, value, persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        if self.normalise:
            image = self.normalised(image)
        weights = next(self.model.parameters())
        output: Any = self.model(image.to(weights.dtype))
        return self.tensor(output).to(torch.float32)

    def normalised(self, image: Tensor) -> Tensor:
        """Normalise images (B, H, W, C) uint8 to (B, C, H, W)."""
        return (image.permute(0, 3, 1, 2).to(self.mean.dtype) / 255.0 - self.mean) / self.std

    def tensor(self, output: Any) -> Tensor:
        """The logits in an output, else the embedding, else the first tensor; raise `VitrimError` if there is none."""
        if not isinstance(output, Tensor):
            logits, vectors = getattr(output, "logits", None), self.library.vector(self.model, output)
            output = logits if logits is not None else output[0] if vectors is None else vectors
        if not isinstance(output, Tensor):
            raise VitrimError(
                f"{type(self.model).__name__} gives no tensor but {type(output).__name__}, which a file cannot: export "
                "classifiers, segmenter: models and models without a head"
            )
        return output


def as_read(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Convert normalised images (B, C, H, W) to (B, H, W, C) uint8, the input of a program that normalises."""
    mean, std = normalisation(preprocessing)
    return ((images * std + mean) * 255.0).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def normalisation(preprocessing: Preprocessing) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, (1, C, 1, 1) each; raise `VitrimError` if they are unknown."""
    if preprocessing.mean is None or preprocessing.std is None:
        raise VitrimError(
            "the model does not say the mean and standard deviation of its images, which preprocessing in the graph "
            "needs: export without it"
        )
    return torch.tensor(preprocessing.mean).view(1, -1, 1, 1), torch.tensor(preprocessing.std).view(1, -1, 1, 1)


def trace(module: Program, images: Tensor, dynamic: bool) -> ExportedProgram:
    """Export ``module`` by a run on ``images``, for their batch size or, if ``dynamic``, for any."""
    shapes = ({0: Dim("batch", min=1, max=MAX_BATCH)},) if dynamic else None
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", UserWarning)  # about torch's own code
            warnings.simplefilter("ignore", FutureWarning)
            return torch.export.export(module, (images,), dynamic_shapes=shapes, strict=False)
    except VitrimError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError) as error:
        name = type(module.model).__name__
        if dynamic and "Constraints violated" in str(error):
            raise VitrimError(
                f"{name} takes the size of a batch for a constant, as len(x) does: write x.shape[0] in its forward, or "
                "a file for one size (batch=8, --batch 8)"
            ) from error
        raise VitrimError(f"torch.export cannot follow {name}: {first_line(error)}") from error
