"""OpenVINO, converted from ONNX: a graph (.xml) and its weights (.bin)."""

from __future__ import annotations

import ctypes
import sys
import timeit
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from vitrim.engines.formats.base import DECISIONS, KEY, Array, Format, Graph, Run, as_array, quantised, unreported
from vitrim.engines.formats.onnx import ANY_TIE, ONNX
from vitrim.engines.machine import processor
from vitrim.files import remembered

SECTION = "vitrim"


class OpenVINO(Format):
    """``openvino.convert_model`` of the ONNX file.

    Files in fp32 and bf16 both have fp32 weights, which OpenVINO converts when it opens one; the metadata name the
    precision. In bf16 it also decides about tokens in bf16 (2026.4), so some pairs differ. In int8 it computes products
    with weights, and the rest in the faster of fp32 and bf16 (`beside_int8`).
    """

    name = "openvino"
    engine = "openvino"
    suffix = ".xml"
    needs = (*ONNX.needs, "openvino")
    extra = "openvino"
    makes = ("bf16", "int8")

    @classmethod
    def write(cls, graph: Graph, path: Path) -> int:
        # not in /tmp, which may be too small for the weights; but OpenVINO takes a comma for the end of a path (2026.4)
        with TemporaryDirectory(dir=None if "," in str(path.absolute()) else path.parent) as folder:
            onnx = Path(folder) / "model.onnx"
            ONNX.write(graph, onnx)
            with unreported():
                import openvino

                model = openvino.convert_model(onnx)
            _stable(model)
            model.set_rt_info(graph.metadata, [SECTION, KEY])
            openvino.save_model(model, path, compress_to_fp16=graph.dtype == torch.float16)
            return len(model.get_ops())

    @classmethod
    def lacks(cls, precision: str) -> str | None:
        if precision != "bf16" or _has_bf16():
            return None
        return "this processor has no instructions for bf16 (AMX or AVX-512 BF16)"

    @classmethod
    def facts(cls, precision: str) -> Mapping[str, str]:
        return {"beside_int8": beside_int8()} if precision == "int8" else {}

    @classmethod
    def in_precision(cls, path: Path, precision: str, metadata: str, images: Iterable[Array], made: Path) -> int:
        model = core().read_model(path)
        import openvino

        if precision == "int8":
            kept = [
                one.get_friendly_name()
                for one in model.get_ops()
                if one.get_type_name() not in ("MatMul", "Convolution")
                or not any(_source(given).get_type_name() == "Constant" for given in one.inputs())
                or one.get_friendly_name().startswith(DECISIONS)
            ]
            with _signal_stack_kept():
                model = quantised(model, images, model.input().get_any_name(), kept)
        model.set_rt_info(metadata, [SECTION, KEY])
        openvino.save_model(model, made, compress_to_fp16=False)
        return len(model.get_ops())

    @classmethod
    def open(cls, path: Path, threads: int, precision: str = "fp32") -> Run:
        rest = beside_int8() if precision == "int8" else "bf16" if precision == "bf16" else "fp32"
        compiled = core().compile_model(path, "CPU", _settings(rest, threads))
        request = compiled.create_infer_request()
        return lambda images: as_array(request.infer(images, share_inputs=True)[0])

    @classmethod
    def metadata(cls, path: Path) -> str | None:
        model = core().read_model(path)
        place = [SECTION, KEY]
        return str(model.get_rt_info(place).value) if model.has_rt_info(place) else None


@cache
def core() -> Any:
    """The single OpenVINO core of this process."""
    # A core's CPU plugin sets a signal stack for the thread, remembers the previous one, and unmaps its own when it is
    # destroyed (2026.4). If the lifetimes of two cores overlap, the thread is left with an unmapped stack, and the next
    # signal, such as that of a child process that ends, is a segmentation fault.
    with unreported():
        import openvino

    made = openvino.Core()
    made.get_property("CPU", "FULL_DEVICE_NAME")  # loads this core's plugin first
    return made


class _Stack(ctypes.Structure):
    """``stack_t`` of the C library."""

    _fields_ = (("place", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def _signal_stack_kept() -> Iterator[None]:
    """Restore the signal stack after other cores came and went, see `core`."""
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
    """True if this processor supports bf16 for OpenVINO."""
    return "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def _settings(precision: str, threads: int) -> dict[str, Any]:
    """Settings for fp32 or bf16: by default OpenVINO uses bf16 on processors that support it."""
    hint = {"fp32": "f32", "bf16": "bf16"}[precision]
    return {"INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}


@cache
def beside_int8() -> str:
    """The faster precision here for operations outside int8, fp32 or bf16: timed on a product of a DeiT-S block."""
    # Support for bf16 does not make it fast: without AMX it took 478 ms for what fp32 computes in 276. Timed once per
    # processor and version of OpenVINO, and kept: where both are nearly as fast, processes would choose by chance, and
    # a dense file run otherwise than a reduced one.
    if not _has_bf16():
        return "fp32"
    import openvino

    both = ("fp32", "bf16")
    key = f"{processor()}, openvino {openvino.__version__}"
    return remembered("beside_int8.json", key, lambda: min(both, key=_product_ms), both)


def _product_ms(precision: str) -> float:
    """Shortest time in ms of a product of (197, 384) by (384, 1536) and GELU."""
    import openvino
    from openvino import opset13

    rows = opset13.parameter([1, 197, 384], np.float32)
    weights = np.random.default_rng(0).standard_normal((384, 1536), dtype=np.float32)
    model = openvino.Model([opset13.gelu(opset13.matmul(rows, weights, False, False), "erf")], [rows])
    request = core().compile_model(model, "CPU", _settings(precision, torch.get_num_threads())).create_infer_request()
    given = np.ones((1, 197, 384), np.float32)
    return 1e3 * min(timeit.repeat(partial(request.infer, given), number=1, repeat=30))


def _stable(model: Any) -> None:
    """Make the sorts and maxima of ``model`` stable that are stable in torch."""
    from openvino import opset11

    # OpenVINO reads ONNX's TopK as unstable (2026.4). Token sizes are often equal: ATM, which sorts by them, merged
    # other tokens, and logits of ViT-Ti were off by up to 0.5. A stable sort of 196 takes 78 us where an unstable one
    # takes 4.
    for old in model.get_ops():
        if old.get_type_name() != "TopK" or ANY_TIE in old.get_friendly_name():
            continue
        known = {key: old.get_attributes()[key] for key in ("axis", "mode", "sort", "index_element_type")}
        if _sorts_all(old):
            new = _counted(old.input_value(0), known["mode"] == "max", known["index_element_type"])
            new.set_friendly_name(old.get_friendly_name())
            new.output(0).get_tensor().set_names(old.output(1).get_names())
            old.output(1).replace(new.output(0))
            continue
        new = opset11.topk(old.input_value(0), old.input_value(1), **known, stable=known["sort"] == "value")
        new.set_friendly_name(old.get_friendly_name())
        for own, other in zip(old.outputs(), new.outputs(), strict=True):
            other.get_tensor().set_names(own.get_names())
            own.replace(other)


COUNTED = 96
"""Fewest entries to sort by `_counted`: a stable sort of 196 takes 78 us, `_counted` 25; of 64 both 7."""


def _sorts_all(topk: Any) -> bool:
    """True for a stable sort of whole rows (B, N), of which only the order is read."""
    shape, k = topk.input(0).get_partial_shape(), topk.input_value(1).get_node()
    if topk.get_attributes()["sort"] != "value" or topk.output(0).get_target_inputs():
        return False
    if shape.rank.is_dynamic or len(shape) != 2 or shape[1].is_dynamic or topk.get_axis() != 1:
        return False
    length = shape[1].get_length()
    return bool(k.get_type_name() == "Constant" and int(k.get_data().item()) == length >= COUNTED)


def _counted(values: Any, descending: bool, kind: str) -> Any:
    """The order (B, N) of a stable sort of ``values`` (B, N), from the number of entries before each."""
    from openvino import opset13 as ops

    length = values.get_partial_shape()[1].get_length()
    axes = {axis: ops.constant(np.array([axis], np.int64)) for axis in (0, 1, 2)}
    # Entry i (own) against entry j (other): those before it in the order, and of equal ones those before it in place.
    own, other = ops.unsqueeze(values, axes[2]), ops.unsqueeze(values, axes[1])
    place = np.arange(length, dtype=np.int32)
    earlier = ops.less(ops.constant(place[None, None]), ops.constant(place[None, :, None]))
    first = ops.greater(other, own) if descending else ops.less(other, own)
    before = ops.logical_or(first, ops.logical_and(ops.equal(other, own), earlier))
    # Integers, which no hint computes in bf16.
    rank = ops.reduce_sum(ops.convert(before, "i32"), axes[2], False)
    places = ops.convert(ops.broadcast(ops.constant(place), ops.shape_of(rank)), kind)
    # The rank of every entry is its place in the order; writing places at ranks inverts it.
    return ops.scatter_elements_update(places, rank, places, axes[1])


def _source(given: Any) -> Any:
    """The operation that computes an input, skipping conversions of constants."""
    source = given.get_source_output().get_node()
    while source.get_type_name() in ("Convert", "Transpose", "Reshape"):
        source = source.input(0).get_source_output().get_node()
    return source
