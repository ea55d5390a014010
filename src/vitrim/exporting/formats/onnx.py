"""ONNX, run by onnxruntime; translations of operators that torch's exporter lacks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from vitrim.errors import VitrimError, first_line
from vitrim.exporting.formats.base import (
    DECISIONS,
    KEY,
    Array,
    Format,
    Graph,
    Run,
    as_array,
    quantised,
    quiet,
)

LARGEST = 1_900_000_000
"""Largest bytes of weights inside the file: protobuf is limited to 2 GiB."""


class ONNX(Format):
    """``torch.onnx.export``. Weights above 1.9 GB are in a second file, ``NAME.data``."""

    name = "onnx"
    engine = "onnxruntime"
    suffix = ".onnx"
    needs = ("onnx", "onnxscript", "onnxruntime")
    extra = "export"
    makes = ("int8",)

    @classmethod
    def write(cls, graph: Graph, path: Path) -> int:
        written = to_onnx(graph)
        weights = sum(value.const_value.nbytes for value in written.model.graph.initializers.values())
        written.save(path, external_data=weights > LARGEST)
        return len(written.model.graph)

    @classmethod
    def in_precision(cls, path: Path, precision: str, metadata: str, images: Iterable[Array], made: Path) -> int:
        import onnx

        model = onnx.load(str(path))
        weights = {weight.name for weight in model.graph.initializer}
        kept = [
            node.name
            for node in model.graph.node
            if node.op_type not in ("MatMul", "Gemm", "Conv")
            or not weights & set(node.input)
            or node.name.startswith(DECISIONS)
        ]
        model = quantised(model, images, "image", kept)
        others = [entry for entry in model.metadata_props if entry.key != KEY]
        del model.metadata_props[:]
        model.metadata_props.extend(others)
        model.metadata_props.add(key=KEY, value=metadata)
        large = sum(len(weight.raw_data) for weight in model.graph.initializer) > LARGEST
        onnx.save(model, str(made), save_as_external_data=large, location=f"{made.name}.data")
        return len(model.graph.node)

    @classmethod
    def open(cls, path: Path, threads: int, precision: str = "fp32") -> Run:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # threads that spin after a run would slow down the next candidate that is timed
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        (name,) = (given.name for given in session.get_inputs())

        def run(images: Array) -> Array:
            return as_array(session.run(None, {name: images})[0])

        return run

    @classmethod
    def metadata(cls, path: Path) -> str | None:
        import onnx
        from google.protobuf.message import DecodeError

        try:
            model = onnx.load(str(path), load_external_data=False)
        except DecodeError as error:  # a direct subclass of Exception
            raise VitrimError(f"cannot read {path} as onnx: {first_line(error)}") from error
        for place in _places(model):
            if not place or place != Path(place).name:
                raise VitrimError(f"{path} takes weights from '{place}': they must lie beside the file")
        return next((entry.value for entry in model.metadata_props if entry.key == KEY), None)


def _places(message: Any) -> Iterator[str]:
    """Yield the locations outside the file that a model, or a part of it, names for tensors."""
    if message.DESCRIPTOR.name == "TensorProto":
        if message.data_location == message.EXTERNAL:
            yield next((entry.value for entry in message.external_data if entry.key == "location"), "")
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                yield from _places(part)


def to_onnx(graph: Graph) -> Any:
    """The program as torch's ``ONNXProgram`` with input ``image`` and named output; a dynamic batch is named ``batch``.

    Raises:
        VitrimError: an operator of the model has no translation.
    """
    from torch.onnx import OnnxExporterError

    # hide the exporter's notes about its own code; it raises its errors
    with quiet("torch.onnx"), warnings.catch_warnings(action="ignore"):
        try:
            written: Any = torch.onnx.export(
                graph.program,
                dynamo=True,
                verbose=False,
                opset_version=graph.opset,
                input_names=["image"],
                output_names=[graph.output],
                custom_translation_table=translations(graph),
            )
        except OnnxExporterError as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise VitrimError(f"cannot write this model as ONNX: {first_line(cause)}") from error
    written.model.metadata_props[KEY] = graph.metadata
    for node in written.model.graph:
        scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
        if ".reducer" in scopes:  # decides about tokens; the module has this name in every host
            node.name = f"{DECISIONS}/{node.name}"
    _name_batch(written.model)
    return written


def _name_batch(model: Any) -> None:
    """Rename the symbol of the first dimension, which torch numbers, to ``batch`` everywhere."""
    import onnx_ir

    image = model.graph.inputs[0]
    first = image.shape[0]
    if isinstance(first, int):
        return
    symbol = re.compile(rf"\b{re.escape(str(first.value))}\b")
    values = [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = onnx_ir.Shape([_named(dim, symbol) for dim in value.shape])


def _named(dim: Any, symbol: re.Pattern[str]) -> Any:
    """A dimension with ``batch`` for the ``symbol``; numbers and unknown dimensions are unchanged."""
    if isinstance(dim, int) or dim.value is None:
        return dim
    return symbol.sub("batch", str(dim.value))


def translations(graph: Graph) -> dict[Callable[..., Any], Callable[..., Any]]:
    """ONNX forms of operators that torch 2.15 does not translate, or translates into more operations than necessary.

    A stable sort is TopK over the entire axis: among equal values the lower index comes first, in both directions.
    searchsorted counts the entries below (or up to) each value.
    """
    import onnxscript

    op: Any = onnxscript.opset18
    aten = torch.ops.aten

    def sort_stable(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
        numbers = self
        small = self.dtype is not None and self.dtype.name in ("INT8", "UINT8", "INT16", "BOOL")
        if small:  # runtimes sort wide integers only
            numbers = op.Cast(self, to=6)
        size = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
        values, indices = op.TopK(numbers, size, axis=dim, largest=int(descending), sorted=1)
        return (op.CastLike(values, self) if small else values), indices

    def searchsorted(
        sorted_sequence: Any,
        self: Any,
        out_int32: bool = False,
        right: bool = False,
        side: str | None = None,
        sorter: Any = None,
    ) -> Any:
        entries = op.Unsqueeze(sorted_sequence, op.Constant(value_ints=[-2]))
        values = op.Unsqueeze(self, op.Constant(value_ints=[-1]))
        passed = op.LessOrEqual(entries, values) if right or side == "right" else op.Less(entries, values)
        count = op.ReduceSum(op.Cast(passed, to=7), op.Constant(value_ints=[-1]), keepdims=0)
        return op.Cast(count, to=6) if out_int32 else count

    def cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: int | None = None) -> Any:
        """For p = 2, the only value that methods use; computed as torch does for many rows: |a|^2 + |b|^2 - 2 a b."""
        last = op.Constant(value_ints=[-1])
        first_square = op.ReduceSum(op.Mul(x1, x1), last, keepdims=1)
        second_square = op.Transpose(op.ReduceSum(op.Mul(x2, x2), last, keepdims=1), perm=[0, 2, 1])
        product = op.MatMul(x1, op.Transpose(x2, perm=[0, 2, 1]))
        twice = op.Add(product, product)
        return op.Sqrt(op.Relu(op.Sub(op.Add(first_square, second_square), twice)))

    def maximum(self: Any, dim: int, keepdim: bool = False) -> Any:
        """Values and indices in one operation instead of two."""
        values, places = op.TopK(self, op.Constant(value_ints=[1]), axis=dim)
        if keepdim:
            return values, places
        axis = op.Constant(value_ints=[dim])
        return op.Squeeze(values, axis), op.Squeeze(places, axis)

    def mean(self: Any, dim: Any = None, keepdim: bool = False, dtype: int = -1) -> Any:
        """A sum times a number: in bf16, OpenVINO inserts a conversion after a mean, but not after a product."""
        dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
        counts = [self.shape[each] for each in dims] or list(self.shape)
        if dtype not in (-1, self.dtype):
            self = op.Cast(self, to=dtype)
        axes = op.Constant(value_ints=dims) if dims else None
        if not all(isinstance(count, int) and count > 0 for count in counts):
            return op.ReduceMean(self, axes, keepdims=int(keepdim))
        share = op.CastLike(op.Constant(value_float=1 / prod(counts)), self)
        return op.Mul(op.ReduceSum(self, axes, keepdims=int(keepdim)), share)

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """Scale only the queries, where torch scales queries and keys by the root: keys are then used unchanged."""
        if scale is None:
            scale = query.shape[-1] ** -0.5
        scaled = op.Mul(query, op.CastLike(op.Constant(value_float=scale), query))
        logits = op.MatMul(scaled, op.Transpose(key, perm=[0, 1, 3, 2]))
        if attn_mask is not None:
            logits = op.Add(logits, attn_mask)
        return op.MatMul(op.Softmax(logits, axis=-1), value)

    table: dict[Callable[..., Any], Callable[..., Any]] = {
        aten.max.dim: maximum,
        aten.mean.dim: mean,
        aten.sort.stable: sort_stable,
        aten.searchsorted.Tensor: searchsorted,
        aten._cdist_forward.default: cdist,
    }
    calls = [node for node in graph.program.graph.nodes if node.target is aten.scaled_dot_product_attention.default]
    if graph.opset < 23 and all(_is_plain(node) for node in calls):  # ONNX has its own attention operator from 23 on
        table[aten.scaled_dot_product_attention.default] = attention
    return table


def _is_plain(attention: torch.fx.Node) -> bool:
    """True for an attention call whose mask, if any, is additive, without dropout, causal mask or grouped heads."""
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), attention.args, strict=False))
    given.update(attention.kwargs)
    mask = given.get("attn_mask")
    additive = not isinstance(mask, torch.fx.Node) or mask.meta["val"].dtype != torch.bool
    return additive and not any(given.get(option) for option in ("dropout_p", "is_causal", "enable_gqa"))
