"""OpenVINO, converted from ONNX: a graph (.xml) and its weights (.bin)."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vitrim.exporting.formats import KEY, Array, Format, Graph, Run, as_array
from vitrim.exporting.formats.onnx import ONNX

SECTION = "vitrim"


class OpenVINO(Format):
    """``openvino.convert_model`` of the ONNX file. Computes in fp32 where the weights are."""

    name = "openvino"
    engine = "openvino"
    suffix = ".xml"
    needs = (*ONNX.needs, "openvino")
    extra = "openvino"

    @classmethod
    def write(cls, graph: Graph, path: Path) -> int:
        import openvino

        with TemporaryDirectory(dir=path.parent) as folder:  # beside it: weights may be larger than /tmp
            onnx = Path(folder) / "model.onnx"
            ONNX.write(graph, onnx)
            model = openvino.convert_model(onnx)
            model.set_rt_info(graph.metadata, [SECTION, KEY])
            openvino.save_model(model, path, compress_to_fp16=graph.half)
            return len(model.get_ops())

    @classmethod
    def open(cls, path: Path, threads: int) -> Run:
        import openvino

        # left to itself it computes in bfloat16 on processors that can
        settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
        }
        compiled = openvino.compile_model(path, "CPU", settings)
        request = compiled.create_infer_request()

        def run(images: Array) -> Array:
            return as_array(request.infer(images, share_inputs=True)[0])

        return run

    @classmethod
    def metadata(cls, path: Path) -> str | None:
        import openvino

        model = openvino.Core().read_model(path)
        place = [SECTION, KEY]
        return str(model.get_rt_info(place).value) if model.has_rt_info(place) else None
