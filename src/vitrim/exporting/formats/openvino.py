"""OpenVINO, converted from ONNX: a graph (.xml) and its weights (.bin)."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from vitrim.exporting.formats.base import KEY, Array, Format, Graph, Operation, Run, as_array, quantised, unreported
from vitrim.exporting.formats.onnx import ONNX

SECTION = "vitrim"


class OpenVINO(Format):
    """``openvino.convert_model`` of the ONNX file.

    OpenVINO converts weights to what it computes in when a file is opened: one file of fp32 weights serves for fp32 and
    bf16, and its metadata say which. In bf16 it decides about tokens in bf16, too, which no attribute of an operation
    prevents (2026.4): some pairs change places. In int8 it computes products with weights, and the rest in bf16 where
    the processor has instructions for it, else in fp32: DeiT-S with `tome:r=13` took 24 ms instead of 31 at batch 1.
    """

    name = "openvino"
    engine = "openvino"
    suffix = ".xml"
    needs = (*ONNX.needs, "openvino")
    extra = "openvino"
    makes = ("bf16", "int8")

    @classmethod
    def write(cls, graph: Graph, path: Path) -> int:
        with TemporaryDirectory(dir=path.parent) as folder:  # beside it: weights may be larger than /tmp
            onnx = Path(folder) / "model.onnx"
            ONNX.write(graph, onnx)
            with unreported():
                import openvino

                model = openvino.convert_model(onnx)
            model.set_rt_info(graph.metadata, [SECTION, KEY])
            openvino.save_model(model, path, compress_to_fp16=graph.dtype == torch.float16)
            return len(model.get_ops())

    @classmethod
    def lacks(cls, precision: str) -> str | None:
        if precision != "bf16" or _has_bf16():
            return None
        return "this processor has no instructions for bf16 (AMX or AVX-512 BF16)"

    @classmethod
    def in_precision(cls, path: Path, precision: str, metadata: str, images: Iterable[Array], made: Path) -> int:
        model = core().read_model(path)
        import openvino

        if precision == "int8":
            operations = []
            for one in model.get_ops():
                kind, inputs = one.get_type_name(), one.inputs()
                if kind in ("Constant", "Parameter", "Result"):
                    continue
                constant = any(_source(given).get_type_name() == "Constant" for given in inputs)
                sources = (given.get_source_output().get_node().get_friendly_name() for given in inputs)
                weighted = kind in ("MatMul", "Convolution") and constant
                name = one.get_friendly_name()
                operations.append(Operation(name, weighted, kind == "TopK", kind == "Add", tuple(sources)))
            with _signal_stack_kept():
                model = quantised(model, images, model.input().get_any_name(), operations)
        model.set_rt_info(metadata, [SECTION, KEY])
        openvino.save_model(model, made, compress_to_fp16=False)
        return len(model.get_ops())

    @classmethod
    def open(cls, path: Path, threads: int, precision: str = "fp32") -> Run:
        in_bf16 = precision == "bf16" or (precision == "int8" and _has_bf16())
        settings: dict[str, Any] = {
            # left to itself it computes in bf16 on processors that can
            "INFERENCE_PRECISION_HINT": "bf16" if in_bf16 else "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
        }
        compiled = core().compile_model(path, "CPU", settings)
        request = compiled.create_infer_request()

        def run(images: Array) -> Array:
            return as_array(request.infer(images, share_inputs=True)[0])

        return run

    @classmethod
    def metadata(cls, path: Path) -> str | None:
        model = core().read_model(path)
        place = [SECTION, KEY]
        return str(model.get_rt_info(place).value) if model.has_rt_info(place) else None


@cache
def core() -> Any:
    """One core of OpenVINO, for as long as the process lives.

    A core loads its own plugin for the CPU, which gives the thread a stack for signals, remembers the one before, and
    unmaps its own when it goes (2026.4). Where the lives of two cores overlap, the thread is left with a stack that is
    no more, and the next signal, of a process that ends, is a segmentation fault.
    """
    with unreported():
        import openvino

    made = openvino.Core()
    made.get_property("CPU", "FULL_DEVICE_NAME")  # loads the plugin, before any that others load
    return made


class _Stack(ctypes.Structure):
    """``stack_t`` of the C library."""

    _fields_ = (("place", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def _signal_stack_kept() -> Iterator[None]:
    """Have signals handled on the stack of before, also after cores of others came and went: see `core`."""
    if sys.platform != "linux":
        yield
        return
    core()
    library, before = ctypes.CDLL(None), _Stack()
    library.sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        library.sigaltstack(ctypes.byref(before), None)


@cache
def _has_bf16() -> bool:
    """True if OpenVINO computes in bf16 on this processor by itself."""
    return "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def _source(given: Any) -> Any:
    """The operation behind an input, seen through conversions of constants."""
    source = given.get_source_output().get_node()
    while source.get_type_name() in ("Convert", "Transpose", "Reshape"):
        source = source.input(0).get_source_output().get_node()
    return source
