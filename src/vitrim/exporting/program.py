"""A reduced model as a program of torch.export: images in, one tensor out."""

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
"""Most images in a batch of a program whose batch is dynamic."""


class Program(nn.Module):
    """``model`` as it is exported.

    Takes (B, C, H, W) float32 as the model does, or with ``normalise`` (B, H, W, C) uint8 as images are read: then it
    scales to [0, 1] and normalises. Gives one float32 tensor: the logits, or else the first thing the model gives.
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
            image = (image.permute(0, 3, 1, 2).to(self.mean.dtype) / 255.0 - self.mean) / self.std
        weights = next(self.model.parameters())
        output: Any = self.model(image.to(weights.dtype))
        return self.tensor(output).to(torch.float32)

    def tensor(self, output: Any) -> Tensor:
        """The logits in an output, else the first tensor in it.

        Raises:
            VitrimError: there is no tensor.
        """
        if not isinstance(output, Tensor):
            output = output.logits if getattr(output, "logits", None) is not None else output[0]
        if not isinstance(output, Tensor):
            raise VitrimError(
                f"{type(self.model).__name__} gives no tensor but {type(output).__name__}, which a file cannot: export "
                "classifiers, segmenter: models and models without a head"
            )
        return output


def as_read(images: Tensor, told: Preprocessing) -> Tensor:
    """Normalised images (B, C, H, W) back as (B, H, W, C) uint8: what a program that normalises takes.

    Raises:
        VitrimError: the preprocessing has no mean or no standard deviation.
    """
    mean, std = normalisation(told)
    return ((images * std + mean) * 255.0).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def normalisation(told: Preprocessing) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, (1, C, 1, 1) each.

    Raises:
        VitrimError: the model does not say them.
    """
    if told.mean is None or told.std is None:
        raise VitrimError(
            "the model does not say the mean and standard deviation of its images, which preprocessing in the graph "
            "needs: export without it"
        )
    return torch.tensor(told.mean).view(1, -1, 1, 1), torch.tensor(told.std).view(1, -1, 1, 1)


def trace(module: Program, images: Tensor, dynamic: bool) -> ExportedProgram:
    """Export ``module``, run on ``images``, for that number of images or, if ``dynamic``, for any.

    Raises:
        VitrimError: the model has a forward that torch.export cannot follow.
    """
    shapes = ({0: Dim("batch", min=1, max=MAX_BATCH)},) if dynamic else None
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", UserWarning)  # torch's, about itself
            warnings.simplefilter("ignore", FutureWarning)
            return torch.export.export(module, (images,), dynamic_shapes=shapes, strict=False)
    except VitrimError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError) as error:
        raise VitrimError(f"torch.export cannot follow {type(module.model).__name__}: {first_line(error)}") from error
