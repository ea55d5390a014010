"""torch.export and AOTInductor: torch's own packages, which only the same version of torch can read."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrim.engines.formats.base import KEY, Array, Format, Graph, Run, as_array

FILE = f"{KEY}.json"
LARGEST = 2**24
"""Most bytes of metadata: a stranger's file may hold a zip bomb."""


class OfTorch(Format):
    """A package of torch itself, which is code and runs on torch's threads."""

    suffix = ".pt2"
    casts = ("fp32", "fp16", "bf16")
    own_threads = False
    code = True

    @classmethod
    def load(cls, path: Path) -> Callable[[Tensor], Tensor]:
        """Load the model in a file."""
        raise NotImplementedError

    @classmethod
    def open(cls, path: Path, threads: int, precision: str = "fp32") -> Run:
        model = cls.load(path)

        def run(images: Array) -> Array:
            with torch.inference_mode():
                return as_array(model(torch.from_numpy(images)))

        return run


class PT2(OfTorch):
    """``torch.export.save``. Such a file is code: torch unpickles it, and evaluates sizes as Python (by sympy)."""

    name = "pt2"
    engine = "torch.export"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return super().recognises(path) and not is_compiled(path)

    @classmethod
    def write(cls, graph: Graph, path: Path) -> int:
        torch.export.save(graph.program, path, extra_files={FILE: graph.metadata})
        return operations(graph)

    @classmethod
    def load(cls, path: Path) -> Callable[[Tensor], Tensor]:
        return torch.export.load(path).module()

    @classmethod
    def metadata(cls, path: Path) -> str | None:
        return packaged(path, f"/extra/{FILE}")  # torch would load the program and its weights


class AOTI(OfTorch):
    """``torch._inductor.aoti_compile_and_package``, which takes minutes: a shared object, run as soon as loaded."""

    name = "aoti"
    engine = "aoti"

    @classmethod
    def missing(cls) -> str | None:
        # The package itself always comes with torch; its compiler does not.
        lack = compiler_lack()
        if lack is None:
            return None
        return f"aoti needs a C++ compiler, and there is none here ({lack}): install g++, or export to pt2"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return super().recognises(path) and is_compiled(path)

    @classmethod
    def write(cls, graph: Graph, path: Path) -> int:
        inductor: Any = torch._inductor
        settings = {"aot_inductor.metadata": {KEY: graph.metadata}}
        inductor.aoti_compile_and_package(graph.program, package_path=str(path), inductor_configs=settings)
        return operations(graph)

    @classmethod
    def load(cls, path: Path) -> Callable[[Tensor], Tensor]:
        inductor: Any = torch._inductor
        model: Callable[[Tensor], Tensor] = inductor.aoti_load_package(str(path))
        return model

    @classmethod
    def metadata(cls, path: Path) -> str | None:
        text = packaged(path, "_metadata.json")  # torch would load the shared object first
        known = {} if text is None else json.loads(text)
        if not isinstance(known, dict):
            raise ValueError("its metadata are no mapping")
        return known.get(KEY)


def operations(graph: Graph) -> int:
    return sum(node.op == "call_function" for node in graph.program.graph.nodes)


def packaged(path: Path, ending: str) -> str | None:
    """The first entry of a torch package whose name has this ending; None without, `ValueError` for no such package."""
    if not zipfile.is_zipfile(path):  # the list of a package's files is at its end
        raise ValueError("it is no package of torch.export, or the end of it is missing")
    with zipfile.ZipFile(path) as package:
        entry = next((entry for entry in package.infolist() if entry.filename.endswith(ending)), None)
        if entry is None:
            return None
        if entry.file_size > LARGEST:
            raise ValueError(f"{entry.filename} has {entry.file_size} bytes, and metadata have {LARGEST} at most")
        return package.read(entry).decode()


def is_compiled(path: Path) -> bool:
    """True if a torch package holds code compiled by AOTInductor instead of a program."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as package:
        return any("/aotinductor/" in name for name in package.namelist())


def compiler_lack() -> str | None:
    """The name of the C++ compiler that is missing on this machine; None if there is one."""
    compiler = os.environ.get("CXX", "g++")
    return compiler if shutil.which(compiler) is None and shutil.which("clang++") is None else None
