"""An exported model: its file, its metadata, and how to run it."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
from pydantic import Strict
from torch import Tensor

from vitrim.checked import Positive, Stored, checked_call
from vitrim.core.library import Library
from vitrim.core.plan import Preprocessing
from vitrim.core.registry import register_library
from vitrim.engines.formats import format_named, formats
from vitrim.engines.formats.base import PRECISIONS, Array, Format, Run, as_array
from vitrim.engines.program import as_read
from vitrim.errors import VitrimError, check_known, first_line, os_errors
from vitrim.files import json_text, parse_json
from vitrim.report import Report

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Exported:
    """One exported file, from `vitrim.export` or `open`.

    Attributes:
        format: onnx, pt2, aoti or openvino.
        inputs: shapes by name; the text "batch" means any batch size.
        nodes: operations in the graph; 0 if unknown.
        bytes: size of the file and of the weights beside it.
        metadata: version, method, model, preprocessing, classes, tokens per block, MACs, precision.
        threads: threads of the engine, if it has its own (onnx, openvino), else `VitrimError`: pt2 and aoti run on
            torch's. None for torch's number when the engine opens.
        report: output and record of `vitrim.export`; None for an opened file.
        trust: allow running the file even if it is code (pt2, aoti). True for results of `vitrim.export`.

    Example:
        >>> import timm, torch, vitrim
        >>> from tempfile import TemporaryDirectory
        >>> model = timm.create_model("test_vit", img_size=32, patch_size=8, depth=2, num_classes=3).eval()
        >>> with TemporaryDirectory() as folder:
        ...     file = vitrim.export(model, None, f"{folder}/m.pt2", check=0)
        ...     file.run(torch.zeros(2, 3, 32, 32).numpy()).shape, file.inputs
        ((2, 3), {'image': ('batch', 3, 32, 32)})
    """

    path: Path
    format: str
    inputs: dict[str, Shape]
    nodes: int
    bytes: int
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    threads: int | None = None
    trust: bool = False
    report: Report | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.threads is not None and not self.kind.own_threads:
            raise VitrimError(
                f"threads of {self.format} files are torch's: leave threads out, and call "
                f"torch.set_num_threads({self.threads})"
            )

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        made = " of ".join(str(self.metadata[key]) for key in ("method", "model") if self.metadata.get(key))
        return f"{self.path}: {made or 'a model'} for {self.engine} in {self.precision}; takes ({shape})"

    @classmethod
    @checked_call
    def open(cls, path: str | Path, *, threads: Positive | None = None, trust: bool = False) -> Self:
        """Open an exported file and read its metadata, which never runs code in it; `VitrimError` if it cannot be used.

        Args:
            threads: threads of the engine, see `Exported`.
            trust: you know who wrote the file. Required to `run` pt2 and aoti files, which are code and can do anything
                you can do. onnx and openvino files are graphs and need no trust.
        """
        path = Path(path)
        if not path.is_file():
            raise VitrimError(f"no exported model at {path}")
        format_named(None, path)  # refuses unknown suffixes
        kind = _kind(path)
        kind.check()
        with _reading(path, kind.name):
            text = kind.metadata(path)
        if text is None:
            raise VitrimError(f"{path} was not written by vitrim export: it holds no metadata of ours")
        known = _known(text, path)
        inputs = {known["input"]["name"]: tuple(known["input"]["shape"])}
        return cls(path, kind.name, inputs, known.get("nodes", 0), size_of(path), known, threads, trust)

    @property
    def kind(self) -> type[Format]:
        """The format, which knows the engine."""
        return formats()[self.format]

    @property
    def files(self) -> list[Path]:
        """The file, and those with its weights."""
        return [file for file in (self.path, *weights_beside(self.path)) if file.is_file()]

    @property
    def engine(self) -> str:
        """The engine of the file: onnxruntime, torch.export, aoti or openvino."""
        return self.kind.engine

    @property
    def precision(self) -> str:
        """The precision of the computation: fp32, fp16, bf16 or int8."""
        return str(self.metadata.get("precision", "fp32"))

    def in_precision(self, precision: str, path: str | Path, images: Iterable[Array] = ()) -> Exported:
        """Write a copy of this fp32 file, at ``path``, that computes in ``precision``.

        Args:
            precision: bf16 (OpenVINO) or int8 (OpenVINO and onnxruntime, with the package for quantisation).
            images: batches as the file takes them, to calibrate int8 on; 100 images like those in use are enough.

        Example:
            >>> import vitrim
            >>> from tempfile import TemporaryDirectory
            >>> options = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 3}
            >>> with TemporaryDirectory() as folder:
            ...     model = vitrim.create_model("test_vit", options=options)
            ...     file = vitrim.export(model, None, f"{folder}/m.xml", check=0)
            ...     file.in_precision("bf16", f"{folder}/half.xml").precision
            'bf16'
        """
        path, images = Path(path), list(images)
        check_known(f"precision of {self.format} files made of fp32", precision, self.kind.makes)
        if self.precision != "fp32":
            raise VitrimError(f"{self.path} is in {self.precision}: start from a file in fp32")
        if precision == "int8" and not images:
            raise VitrimError("int8 finds the ranges of activations on images: give some")
        known = {**self.metadata, "precision": precision, **self.kind.facts(precision)}
        # Only a file that was written to the end appears at its place.
        with staged(path) as place:
            known["nodes"] = self.kind.in_precision(self.path, precision, json_text(known), images, place)
        return replace(self, path=path, nodes=known["nodes"], bytes=size_of(path), metadata=known, report=None)

    @cached_property
    def _run(self) -> Run:
        if self.kind.code and not self.trust:
            raise VitrimError(
                f"{self.path} is not run: {self.format} files are code, and can do what you can do; if you know who "
                "wrote it, open it with trust=True (--trust)"
            )
        with _reading(self.path, self.format):
            return self.kind.open(self.path, self.threads or torch.get_num_threads(), self.precision)

    @property
    def shape(self) -> Shape:
        """The shape of the input."""
        return next(iter(self.inputs.values()))

    @property
    def batch(self) -> int | None:
        """The batch size of the file; None for any."""
        first = self.shape[0]
        return first if isinstance(first, int) else None

    def run(self, images: Array | Tensor) -> Array:
        """Run the file on an array or tensor of its input's shape and dtype, else `VitrimError`.

        float32 (B, C, H, W), or uint8 (B, H, W, C) with preprocessing in the graph. The first call opens the engine.
        """
        wanted, dtype = self.shape, self.metadata.get("input", {}).get("dtype", "float32")
        if isinstance(images, Tensor):
            images = as_array(images)
        if not isinstance(images, np.ndarray):
            raise VitrimError(f"{self.path} takes an array or a tensor of images, not {type(images).__name__}")
        # Engines would broadcast or crash, each in its own way.
        fits = len(images.shape) == len(wanted) and all(
            isinstance(want, str) or want == have for want, have in zip(wanted, images.shape, strict=True)
        )
        if not fits or str(images.dtype) != dtype:
            shape = ", ".join(map(str, wanted))
            raise VitrimError(f"{self.path} takes ({shape}) {dtype}, got {tuple(images.shape)} {images.dtype}")
        return self._run(images)

    def on(self, images: Array | Tensor) -> Callable[[], Array]:
        """A callable that runs ``images``, e.g. for `vitrim.measure.latency.time_interleaved`."""
        return partial(self.run, images)

    def given(self, images: Tensor) -> Array:
        """Normalised images (B, C, H, W) as `run` takes them: as they are, or as bytes."""
        return as_array(as_read(images, self.preprocessing) if self._takes_bytes else images.float().contiguous())

    def read(self, output: Array) -> Tensor:
        """An output as a tensor."""
        return torch.from_numpy(output)

    def peak_mib(self, images: Array) -> float | None:
        """None: the engine has memory of its own."""
        return None

    @property
    def _takes_bytes(self) -> bool:
        return bool(self.metadata["input"].get("dtype") == "uint8")

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing of its images; `VitrimError` if the metadata do not name it."""
        known, sides = self.metadata.get("preprocessing") or {}, [int(side) for side in self.shape[1:]]
        missing = [name for name in ("mean", "std", "interpolation") if not known.get(name)]
        if missing:
            raise VitrimError(f"the metadata of {self.path} do not say how images are prepared (no {missing[0]})")
        channels, height, width = (sides[2], *sides[:2]) if self._takes_bytes else sides
        return Preprocessing(
            channels,
            (height, width),
            tuple(known["mean"]),
            tuple(known["std"]),
            known["interpolation"],
            known.get("crop_share") or 1.0,
            known.get("crop_mode") or "center",
        )

    @cached_property
    def num_classes(self) -> int:
        """The number of classes, as a run finds it; 0 for a file that gives no logits."""
        shape = (self.batch or 1, *(int(side) for side in self.shape[1:]))
        # Any image will do: zeros need no preprocessing.
        found = self.run(np.zeros(shape, self.metadata["input"].get("dtype", "float32")))
        named = (self.metadata.get("output") or {}).get("name", "logits")
        return int(found.shape[1]) if named == "logits" and found.ndim == 2 else 0


@register_library(f"{Exported.__module__}.{Exported.__qualname__}")
class FileLibrary(Library):
    """Answers about exported files, by their metadata: `vitrim.core.registry.ask` takes a file for a model."""

    name = "file"

    def num_classes(self, model: Any) -> int | None:
        return int(model.num_classes)

    def class_names(self, model: Any) -> Sequence[str] | None:
        names: Sequence[str] | None = model.metadata.get("classes")
        return names

    def preprocessing(self, model: Any) -> Preprocessing:
        found: Preprocessing = model.preprocessing
        return found

    def embedding_name(self, model: Any) -> str:
        return str((model.metadata.get("output") or {}).get("embedding", "the file's output"))


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Yield a path of the same name in a new folder beside ``path``; at the end, all files in it are moved beside it.

    After an error nothing is moved, and existing files are unchanged. The folder is locked while it is used.
    """
    with os_errors(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Folders of the same name that a killed process left are not locked any more.
        for left in path.parent.glob(f".{glob.escape(path.stem)}.*.partial"):
            if left.is_dir() and (lock := _locked(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        folder, lock = _own_folder(path)
    try:
        yield folder / path.name
        # The weights first: a file whose weights are missing would be seen as damaged.
        files = sorted(folder.iterdir(), key=lambda file: file.name == path.name)  # the file itself last
        places = {file: path.with_name(file.name) for file in files}
        taken = next((place for place in places.values() if place.is_dir()), None)
        if taken is not None:
            raise VitrimError(f"cannot write {taken}: it is a folder")
        with os_errors(f"cannot write {path}"):
            for file, place in places.items():
                os.replace(file, place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _own_folder(path: Path) -> tuple[Path, int | None]:
    """A new folder beside ``path``, and its lock; None where there are no locks."""
    while True:
        # On the same file system as the target, so that moving is atomic.
        folder = Path(tempfile.mkdtemp(prefix=f".{path.stem}.", suffix=".partial", dir=path.parent))
        lock = _locked(folder)
        if folder.is_dir():  # another process may remove it before it is locked
            return folder, lock
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """The lock of a folder, to be closed; None if a process has it, or where folders cannot be locked."""
    # The system releases the locks of a process that is killed, which a file with a number would not.
    if fcntl is None:
        return None
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # it is gone, a link, or another user's
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def sidecar(path: Path) -> Path:
    """The JSON file with a copy of the metadata, beside an exported file: m.onnx.json of m.onnx."""
    return path.with_name(f"{path.name}.json")


def weights_beside(path: Path) -> list[Path]:
    """The possible weight files of an exported file: m.onnx.data of m.onnx, m.xml.data and m.bin of m.xml."""
    return [path.with_name(f"{path.name}.data"), *([path.with_suffix(".bin")] if path.suffix == ".xml" else [])]


def size_of(path: Path) -> int:
    """Bytes of an exported file and of the weights beside it."""
    return sum(file.stat().st_size for file in (path, *weights_beside(path)) if file.is_file())


def _kind(path: Path) -> type[Format]:
    """The format that recognises a file."""
    with _reading(path, path.suffix.removeprefix(".")):
        kind = next((kind for kind in formats().values() if kind.recognises(path)), None)
    if kind is None:
        raise VitrimError(f"{path} is not an exported model: {path.suffix} files are packages of torch.export")
    return kind


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Report errors of reading a damaged file in one line."""
    try:
        yield
    except VitrimError:
        raise
    except (RuntimeError, OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise VitrimError(f"cannot read {path} as {what}: {first_line(error)}") from error


class _Input(Stored):
    name: str
    shape: Annotated[tuple[int | str, Positive, Positive, Positive], Strict(False)]  # from a list


class _Metadata(Stored):
    input: _Input
    nodes: int = 0
    precision: str = "fp32"


def _known(text: str, path: Path) -> dict[str, Any]:
    """The metadata of a file, with the entries needed to run it."""
    name = f"{path} as an exported model"
    known = _Metadata.of(parse_json(text, name), f"cannot read {name}")
    check_known(f"precision of {path}", known.precision, PRECISIONS)
    return known.model_dump(mode="json", exclude_unset=True)  # tuples are lists again
