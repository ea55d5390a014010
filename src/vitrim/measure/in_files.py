"""Exported files as models to measure: the deployed file beside the model it was made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.core.registry import ask, parse_methods
from vitrim.errors import VitrimError
from vitrim.loading import ModelSpec, Origin
from vitrim.measure.contestants import Contestant, ModelOutput
from vitrim.measure.macs import PARTS
from vitrim.tasks.base import Task


@runtime_checkable
class InFile(Protocol):
    """The parts of `vitrim.Exported` that measurements use."""

    @property
    def path(self) -> Path: ...
    @property
    def files(self) -> Sequence[Path]: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def shape(self) -> tuple[int | str, ...]: ...
    @property
    def batch(self) -> int | None: ...
    @property
    def engine(self) -> str: ...
    @property
    def precision(self) -> str: ...
    def run(self, images: Any) -> Any: ...


AnyModel: TypeAlias = nn.Module | str | ModelSpec | InFile
MethodsAndFiles: TypeAlias = MethodConfig | str | InFile | Sequence[MethodConfig | str | InFile] | None


class FileModel(nn.Module):
    """An exported file as a model: from images (B, C, H, W), normalised by its metadata, to its output tensor.

    Batches are split and padded to the file's batch size, and converted to bytes if the file normalises them itself.

    Args:
        file: an open file, trusted if it is code.

    Raises:
        VitrimError: it cannot run, or its metadata lack the preprocessing.

    Example:
        >>> import vitrim
        >>> from tempfile import TemporaryDirectory
        >>> options = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 3}
        >>> with TemporaryDirectory() as folder:
        ...     dense = vitrim.create_model("test_vit", options=options)
        ...     model = FileModel(vitrim.export(dense, None, f"{folder}/m.onnx", check=0))
        ...     model(torch.zeros(2, 3, 32, 32)).shape, model.num_classes
        (torch.Size([2, 3]), 3)
    """

    def __init__(self, file: InFile) -> None:
        super().__init__()
        if not hasattr(file, "metadata"):
            raise VitrimError(
                f"expected a model or its name, e.g. deit_small_patch16_224, or a file, got {type(file).__name__}"
            )
        self.file = file
        self.vitrim_origin = Origin(str(file.path), str(file.path), {}, None, 0)
        self.place = nn.Parameter(torch.zeros(()), requires_grad=False)  # marks the device and dtype: CPU, float32
        self.as_bytes = file.metadata["input"].get("dtype") == "uint8"
        sides = [int(side) for side in file.shape[1:]]
        channels, height, width = (sides[2], *sides[:2]) if self.as_bytes else sides
        known = file.metadata.get("preprocessing") or {}
        stated = {"mean": known.get("mean"), "std": known.get("std"), "interpolation": known.get("interpolation")}
        missing = [name for name, value in stated.items() if not value]
        if missing:
            raise VitrimError(f"the metadata of {file.path} do not say how images are prepared (no {missing[0]})")
        self.img_size = (height, width)
        self.pretrained_cfg: dict[str, Any] = {
            "input_size": (channels, height, width),
            **stated,
            "crop_pct": known.get("crop_share") or 1.0,
            "crop_mode": known.get("crop_mode") or "center",
            "label_names": file.metadata.get("classes"),
        }
        with torch.no_grad():
            found = self(torch.zeros(1, channels, height, width))
        output = file.metadata.get("output") or {}
        self.num_classes = found.shape[1] if output.get("name", "logits") == "logits" and found.ndim == 2 else 0
        self.embedding = output.get("embedding", "the file's output")

    def __deepcopy__(self, memo: dict[int, Any]) -> FileModel:
        """Return itself: an open file cannot be copied, and is never changed."""
        return self

    def forward(self, images: Tensor) -> Tensor:
        def run(batch: Tensor) -> Tensor:
            return torch.from_numpy(self.file.run(batch.numpy()))

        return in_batches(run, self._given(images), self.file.batch or len(images))

    def _given(self, images: Tensor) -> Tensor:
        if not self.as_bytes:
            return images.float().contiguous()
        mean, std = (torch.tensor(self.pretrained_cfg[name])[:, None, None] for name in ("mean", "std"))
        return ((images * std + mean) * 255.0).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def in_batches(run: Callable[[Tensor], Tensor], images: Tensor, size: int) -> Tensor:
    """Apply ``run``, which only takes batches of ``size``: split the images and pad the last batch.

    Example:
        >>> in_batches(lambda batch: batch + len(batch), torch.tensor([0, 1, 2]), 2).tolist()
        [2, 3, 4]
    """
    found = []
    for part in images.split(size):
        full = torch.cat([part, part[:1].expand(size - len(part), *part.shape[1:])])
        found.append(run(full)[: len(part)])
    return torch.cat(found)


def parted(methods: MethodsAndFiles) -> tuple[list[MethodConfig], dict[str, FileModel]]:
    """Split a list, or a single entry, into methods and files by path.

    Example:
        >>> [config.describe() for config in parted("tome:r=8")[0]]
        ['tome:r=8']
    """
    given: Any = [methods] if hasattr(methods, "metadata") else methods
    files = [one for one in given if hasattr(one, "metadata")] if isinstance(given, list | tuple) else []
    configs = parse_methods([one for one in given if not hasattr(one, "metadata")] if files else given)
    return configs, {str(file.path): FileModel(file) for file in files}


class OnFile(Contestant):
    """A contestant whose predictions a file computes; MACs and tokens come from its metadata.

    Attributes:
        dense_gmacs: 10^9 MACs of its dense model; None if the metadata lack them.
        is_dense: the file is the dense model, in fp32.

    Raises:
        VitrimError: the task needs embeddings, and the file returns logits.
    """

    def __init__(self, model: FileModel, task: Task) -> None:
        if task.embeds and model.num_classes:
            raise VitrimError(f"{model.file.path} gives logits, and no embedding: export the model without its head")
        super().__init__(model, task)
        self.model, known = model, model.file.metadata
        self.name = str(model.file.path)
        self.tokens = [float(count) for count in known.get("tokens_per_block") or ()]
        self.forward.num_blocks = len(self.tokens)
        self.dense_gmacs: float | None = known.get("dense_gmacs")
        self.counts = dict.fromkeys(PARTS, 0.0) | (known.get("gmacs_parts") or {})

    @property
    def is_dense(self) -> bool:
        return self.model.file.metadata.get("method") == "none" and self.model.file.precision == "fp32"

    def run(self, images: Tensor, targets: Any = None, *, count: bool = False) -> ModelOutput:
        found = super().run(images, targets)
        many = len(images)
        return ModelOutput(
            found.prediction,
            None,
            tuple(round(many * each) for each in self.tokens),
            round(many * self.tokens[-1]) if self.tokens else 0,
            {part: round(many * each * 1e9) for part, each in self.counts.items()},
            (images.shape[2], images.shape[3]),
        )


def check_alike(model: nn.Module, files: Sequence[FileModel]) -> None:
    """Refuse ``files`` of another size or normalisation than ``model``."""
    for file in files:
        preprocessing = ask(model).preprocessing(model)
        own: dict[str, Any] = {"size": file.img_size, **{name: file.pretrained_cfg[name] for name in ("mean", "std")}}
        for name, value in own.items():
            other = getattr(preprocessing, name)
            if other is not None and not np.allclose(other, value, atol=1e-6):
                raise VitrimError(
                    f"{file.file.path} takes images with {name} {tuple(value)}, and this {type(model).__name__} with "
                    f"{tuple(other)}: they cannot be compared on the same batches"
                )


def file_words(files: Sequence[FileModel]) -> str:
    """A note on the origin of the files, and on the one size of batches that some take.

    Example:
        >>> file_words([])
        ''
    """
    texts = [
        f"{one.file.path} is {known.get('method', 'none')} of {known.get('model', 'a model')} on {one.file.engine} in "
        f"{one.file.precision}"
        + ("" if one.file.batch is None else f", in batches of {one.file.batch}: others are split or padded")
        for one in files
        for known in [one.file.metadata]
    ]
    return "; ".join(texts)
