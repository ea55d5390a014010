"""The base of export formats, and what several of them share: arrays, int8. `vitrim.exporting.formats` lists them."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram

from vitrim.errors import MissingPackageError

Array: TypeAlias = NDArray[Any]
Run: TypeAlias = Callable[[Array], Array]
"""Images in, predictions out, by one engine that is open."""

KEY = "vitrim"
"""The entry of a file's metadata that holds ours, as JSON."""

OPSETS = range(18, 24)
"""Versions of the ONNX operator set that the exporter writes and onnxruntime reads."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = {**DTYPES, "int8": torch.float32}
"""The precisions of a model, with the dtype of the weights that torch then holds: an engine makes int8 of float32."""

ANY = "any"
"""The processors that a file in int8 is for, as its metadata say. Files whose metadata do not say it, of earlier
versions, are for those with VNNI: on others their sums saturate."""

CPU_FACTS = Path("/proc/cpuinfo")

DECISIONS = "reducer"
"""The beginning of the names of operations that decide about tokens: they are never quantised."""


@dataclass(frozen=True)
class Graph:
    """One program to write.

    Attributes:
        program: of torch.export, with the input ``image`` and the output ``output``.
        output: name of the output.
        metadata: JSON, to be kept inside the file.
        opset: version of the ONNX operator set, for the formats that are or pass through ONNX.
        dtype: of the weights.
    """

    program: ExportedProgram
    output: str
    metadata: str
    opset: int
    dtype: torch.dtype = torch.float32


class Format:
    """A file format and its engine. Class methods only.

    Class attributes:
        name: as ``--to`` says it.
        engine: what runs the file.
        suffix: of the file.
        needs: packages by the name they are imported by; ``extra`` is vitrim's extra that has them.
        casts: precisions that are dtypes of the weights. Others are made of a written fp32 file, see `in_precision`.
        makes: those others.
        own_threads: the engine has threads of its own, as many as `open` is told; else it runs on torch's.
        code: to open a file in the engine runs what its author wrote, with the rights of whoever opens it. `metadata`
            runs nothing in any format.
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
        """The parts that this machine lacks to write and run the format, in words; None if nothing."""
        absent = [name for name in cls.needs if importlib.util.find_spec(name) is None]
        if not absent:
            return None
        return f"{cls.name} needs {' and '.join(absent)}: pip install 'vitrim[{cls.extra}]'"

    @classmethod
    def check(cls) -> None:
        """Refuse where something is missing.

        Raises:
            MissingPackageError: saying what to install.
        """
        lack = cls.missing()
        if lack is not None:
            raise MissingPackageError(lack)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """True if a file is of this format: by its suffix, unless several formats share that."""
        return path.suffix == cls.suffix

    @classmethod
    def write(cls, graph: Graph, path: Path) -> int:
        """Write the program to ``path``, in a folder of its own, and return the number of operations of its graph."""
        raise NotImplementedError

    @classmethod
    def lacks(cls, precision: str) -> str | None:
        """The reason in words why this machine cannot run a file in ``precision``, which the format has; else None."""
        return None

    @classmethod
    def facts(cls, precision: str) -> Mapping[str, str]:
        """Further metadata of a file that this machine makes in ``precision``, one of `makes`."""
        return {"processors": ANY} if precision == "int8" else {}

    @classmethod
    def in_precision(cls, path: Path, precision: str, metadata: str, images: Iterable[Array], made: Path) -> int:
        """Write the fp32 file ``path`` again, to ``made``, to be computed in one of `makes`.

        Args:
            path: of a file that `write` wrote.
            precision: of `makes`.
            metadata: in place of those in the file.
            images: for int8: batches as the file takes them, to find the ranges of activations on.
            made: in a folder of its own.

        Returns:
            The number of operations of its graph.

        Raises:
            MissingPackageError: a package that quantises is not installed.
        """
        raise NotImplementedError

    @classmethod
    def open(cls, path: Path, threads: int, precision: str = "fp32") -> Run:
        """Load a file for so many threads; an engine without threads of its own runs on those that torch has.

        Args:
            path: of the file.
            threads: of the engine.
            precision: what its metadata say that it computes in.
        """
        raise NotImplementedError

    @classmethod
    def metadata(cls, path: Path) -> str | None:
        """The metadata kept in a file, or None where it has none of ours. Runs nothing of the file."""
        raise NotImplementedError


def as_array(value: Any) -> Array:
    """An output of any engine as an array."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def check_quantiser() -> None:
    """Refuse where what quantises is missing.

    Raises:
        MissingPackageError: saying what to install.
    """
    if importlib.util.find_spec("nncf") is None:
        raise MissingPackageError("int8 needs nncf: pip install 'vitrim[int8]'")


def without_vnni() -> bool:
    """True if this processor is known to add products of int8 in 16 bits, as x86 without VNNI does.

    Sums of two products then saturate, unless weights keep to 7 bits.
    """
    if platform.machine() not in ("x86_64", "AMD64") or not CPU_FACTS.is_file():
        return False
    return not {"avx512_vnni", "avx_vnni"} & set(CPU_FACTS.read_text(encoding="utf-8", errors="replace").split())


def quantised(model: Any, images: Iterable[Array], name: str, kept: Iterable[str]) -> Any:
    """``model``, of OpenVINO or ONNX, with products in int8: weights per channel, activations per tensor.

    All products with weights are quantised, those that decisions read too: of 22 settings on ViT-Ti and DeiT-T and
    1,000 photographs, all lose at most 2.0 points of top-1 by that, but `mctf:r=16` 3.5 ± 0.8 on DeiT-T
    (docs/results/engines.md), and weights are as small as dense ones. Attention,
    normalisation and what itself decides about tokens (similarities, ranks, sizes) stay as they are. Activations are
    smoothed first (SmoothQuant), as transformers need it, and weights keep to 7 bits, so that a file gives the same on
    every processor: with 8, sums saturate on those without VNNI.

    Args:
        model: read from an fp32 file.
        images: batches, as the file takes them.
        name: of the input.
        kept: names of all operations of the graph but products with weights, and of those that decide.

    Raises:
        MissingPackageError: nncf is not installed.
    """
    check_quantiser()
    given = [{name: batch} for batch in images]
    # nncf tells its steps, with bars; on import it looks for a compiler of CUDA, which torch remarks on, and would
    # report its use to its makers
    with quiet("nncf", "torch.utils.cpp_extension"), redirect_stdout(io.StringIO()), unreported():
        import nncf

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
    """Keep what is below an error in the logs of these names off the screen."""
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
    """Keep nncf and OpenVINO from reporting their use to their makers: both look at the environment for leave.

    nncf looks when it is imported, OpenVINO then and when it begins to convert. A conversion has some thirty messages,
    and OpenVINO forks this process for each of them (2026.4), which takes seconds.
    """
    told = {"NNCF_CI": "1", "CI": "true"}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
