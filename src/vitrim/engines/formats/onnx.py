"""ONNX, run by onnxruntime."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from vitrim.engines.formats.base import DECISIONS, KEY, Array, Format, Graph, Run, as_array, quantised, quiet
from vitrim.errors import VitrimError, first_line

ANY_TIE = "any_tie"
"""Suffix of the names of sorts that may leave equal values in any order."""
UNSTABLE = ("aten.sort.default", "aten.topk.default")
"""Sorts of torch that promise no order of equal values."""

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
        # Only products with a weight among their inputs are quantised, and not those that decide.
        kept = [
            node.name
            for node in model.graph.node
            if node.op_type not in ("MatMul", "Gemm", "Conv")
            or not weights & set(node.input)
            or node.name.startswith(DECISIONS)
        ]
        model = quantised(model, images, "image", kept)
        onnx.helper.set_model_props(model, {**{one.key: one.value for one in model.metadata_props}, KEY: metadata})
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
        return lambda images: as_array(session.run(None, {name: images})[0])

    @classmethod
    def metadata(cls, path: Path) -> str | None:
        import onnx
        from google.protobuf.message import DecodeError

        try:
            model = onnx.load(str(path), load_external_data=False)
        except DecodeError as error:  # a direct subclass of Exception
            raise VitrimError(f"cannot read {path} as onnx: {first_line(error)}") from error
        # A stranger's file could name any file of this machine as its weights.
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
    """The program as torch's ``ONNXProgram``, or `VitrimError`; input ``image``, named output, a dynamic ``batch``."""
    from torch.onnx import OnnxExporterError

    from vitrim.engines.formats.operators import translations

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
                dynamic_shapes={"image": {0: "batch"}},  # its name, if it is dynamic
                custom_translation_table=translations(graph),
            )
        except OnnxExporterError as error:
            # The last cause names the operator; the errors around it only repeat where it was met.
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise VitrimError(f"cannot write this model as ONNX: {first_line(cause)}") from error
    written.model.metadata_props[KEY] = graph.metadata
    for node in written.model.graph:
        scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
        if ".reducer" in scopes:  # decides about tokens; the module has this name in every host
            node.name = f"{DECISIONS}/{node.name}"
        if node.op_type == "TopK":
            _sort_first(node)
            made_of = node.metadata_props.get("pkg.torch.onnx.fx_node", "")
            if any(call in made_of for call in UNSTABLE):
                node.name = f"{node.name}/{ANY_TIE}"
    return written


def _sort_first(topk: Any) -> None:
    """Sort only as many entries as the graph reads, where slices read the first ones.

    Shapes follow, and a count that no sort reads goes: ONNX Runtime warns of both where it opens a file.
    """
    # Every use must read the same first entries, or a shorter sort would leave something out.
    uses = [use.node for output in topk.outputs for use in output.uses()]
    if not uses or any(node.op_type != "Slice" or len(node.inputs) < 5 for node in uses):
        return
    read = [[_whole_number(value) for value in node.inputs[1:]] for node in uses]
    axis, every = topk.attributes.get_int("axis", -1), _whole_number(topk.inputs[1])
    starts, ends, axes, steps = (set(each) for each in zip(*read, strict=True))
    (end, *others) = ends
    if not others and end and every and end < every and starts == {0} and steps == {1} and axes == {axis}:
        count = topk.inputs[1]
        topk.replace_input_with(1, uses[0].inputs[2])
        for output in topk.outputs:
            output.shape[axis] = end
        if not count.uses():
            del topk.graph.initializers[count.name]


def _whole_number(value: Any) -> int | None:
    """The only entry of an initializer; None if ``value`` is none, or has several."""
    known = value.const_value if value.is_initializer() else None
    return int(known.numpy().item()) if known is not None and known.size == 1 else None
