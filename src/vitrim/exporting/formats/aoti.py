"""AOTInductor: a program compiled for this processor by the C++ compiler of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from vitrim.exporting.format import KEY, Array, Format, Graph, Run, as_array, register_format
from vitrim.exporting.formats.pt2 import is_compiled, operations, packaged
from vitrim.speed.engines import compiler_lack


@register_format
class AOTI(Format):
    """``torch._inductor.aoti_compile_and_package``. Threads are those of torch; compiling takes minutes.

    Such a file is code: a shared object, which runs as soon as it is loaded.
    """

    name = "aoti"
    engine = "aoti"
    suffix = ".pt2"
    own_threads = False
    code = True

    @classmethod
    def missing(cls) -> str | None:
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
    def open(cls, path: Path, threads: int) -> Run:
        inductor: Any = torch._inductor
        model = inductor.aoti_load_package(str(path))

        def run(images: Array) -> Array:
            with torch.inference_mode():
                return as_array(model(torch.from_numpy(images)))

        return run

    @classmethod
    def metadata(cls, path: Path) -> str | None:
        text = packaged(path, "_metadata.json")  # torch would load the shared object first
        known = {} if text is None else json.loads(text)
        if not isinstance(known, dict):
            raise ValueError("its metadata are no mapping")
        return known.get(KEY)
