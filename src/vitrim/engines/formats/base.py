"""The base class of export formats, and their shared parts: arrays, int8. `vitrim.engines.formats` lists them."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram

from vitrim.errors import MissingPackageError, check_installed

Array: TypeAlias = NDArray[Any]
Run: TypeAlias = Callable[[Array], Array]
"""Maps images to predictions, by an open engine."""

KEY = "vitrim"
"""The entry of a file's metadata that holds vitrim's, as JSON."""

OPSETS = range(18, 24)
"""ONNX operator sets that the exporter writes and onnxruntime reads."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = {**DTYPES, "int8": torch.float32}
"""Precisions with the dtype of torch's weights: engines derive int8 from float32."""

DECISIONS = "reducer"
"""Name prefix of operations that decide about tokens, which are never quantised."""


@dataclass(frozen=True)
class Graph:
    """A program to write, with the input ``image``; ``metadata`` is JSON to store in the file."""

    program: ExportedProgram
    output: str
    metadata: str
    opset: int
    dtype: torch.dtype = torch.float32


class Format:
    """A file format and its engine. Class methods only.

    Class attributes:
        name: name for ``--to``.
        needs: import names of required packages; ``extra`` is the extra of vitrim that installs them.
        casts: precisions that are dtypes of the weights.
        makes: precisions derived from a written fp32 file, see `in_precision`.
        own_threads: the engine has its own threads, set by `open`; else it runs on torch's.
        code: opening the file in the engine runs its author's code, with the user's rights. `metadata` never does.
    """

    name: ClassVar[str] = ""
    engine: ClassVar[str] = ""
    suffix: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""
    casts: ClassVar[tuple[str, ...]] = ("fp32", "fp16")
    makes: ClassVar[tuple[str, ...]] = ()
    own_threads: ClassVar[bool] = True
    code: ClassVar[bool] = False

    @classmethod
    def missing(cls) -> str | None:
        """The requirements that this machine lacks, as a message; None if it lacks none."""
        absent = [name for name in cls.needs if importlib.util.find_spec(name) is None]
        if not absent:
            return None
        return f"{cls.name} needs {' and '.join(absent)}: pip install '.[{cls.extra}]'"

    @classmethod
    def check(cls) -> None:
        """Raise `MissingPackageError` if a requirement is missing."""
        lack = cls.missing()
        if lack is not None:
            raise MissingPackageError(lack)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """True if a file has this format: by its suffix, unless formats share it."""
        return path.suffix == cls.suffix

    @classmethod
    def write(cls, graph: Graph, path: Path) -> int:
        """Write the program to ``path``, in a folder of its own; return the number of operations in its graph."""
        raise NotImplementedError

    @classmethod
    def lacks(cls, precision: str) -> str | None:
        """The reason why this machine cannot run a file in a supported ``precision``; None if it can."""
        return None

    @classmethod
    def facts(cls, precision: str) -> Mapping[str, str]:
        """Additional metadata of a file made on this machine in ``precision``, one of `makes`."""
        return {}

    @classmethod
    def in_precision(cls, path: Path, precision: str, metadata: str, images: Iterable[Array], made: Path) -> int:
        """Write the fp32 file ``path`` again, to ``made``, in one of `makes`; return the number of operations in its
        graph.

        ``metadata`` replaces that in the file; ``images`` are batches as the file takes them, to calibrate int8 on.
        """
        raise NotImplementedError

    @classmethod
    def open(cls, path: Path, threads: int, precision: str = "fp32") -> Run:
        """Load a file with this number of threads, if the engine has its own; ``precision`` is that of its metadata."""
        raise NotImplementedError

    @classmethod
    def metadata(cls, path: Path) -> str | None:
        """vitrim's metadata in a file; None if it has none. Never runs code in the file."""
        raise NotImplementedError


def as_array(value: Any) -> Array:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def check_quantiser() -> None:
    """Raise `MissingPackageError` if the package for quantisation is missing."""
    check_installed("int8", "nncf")


def quantised(model: Any, images: Iterable[Array], name: str, kept: Iterable[str]) -> Any:
    """``model``, of OpenVINO or ONNX, with products in int8: weights per channel, activations per tensor.

    All products with weights are quantised, including those that decisions read: of 22 settings on ViT-Ti and DeiT-T
    and 1,000 photographs, all lose at most 2.0 points of top-1, except `mctf:r=16` with 3.5 ± 0.8 on DeiT-T
    (docs/results/engines.md). ``kept`` names the operations to leave out: attention, normalisation and the decisions
    themselves (similarities, ranks, sizes). ``images`` are batches as the file takes them.
    """
    check_quantiser()
    given = [{name: batch} for batch in images]
    # nncf prints its progress; its import looks for a CUDA compiler, which torch remarks on, and would report its use
    # to its makers
    with quiet("nncf", "torch.utils.cpp_extension"), redirect_stdout(io.StringIO()), unreported():
        import nncf

        # Activations are first smoothed (SmoothQuant), which transformers need. Weights use 7 bits, so that a file
        # gives the same results on every processor: with 8 bits, sums saturate without VNNI.
        return nncf.quantize(
            model,
            nncf.Dataset(given),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(given),
            ignored_scope=nncf.IgnoredScope(names=sorted(kept), validate=False),
            advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=nncf.OverflowFix.ENABLE),
        )


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Silence messages below errors in the logs of these names."""
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextmanager
def unreported() -> Iterator[None]:
    """Keep nncf and OpenVINO from reporting their use to their makers, by environment variables."""
    # nncf reads them on import, OpenVINO also when a conversion begins. A conversion sends some thirty messages, and
    # OpenVINO forks this process for each (2026.4), which takes seconds.
    variables = {"NNCF_CI": "1", "CI": "true"}
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)
