"""What formats ask of their engines, without a model: the exports themselves are in the other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitrim.engines.formats import openvino as openvino_format
from vitrim.engines.formats.base import Graph, quantised
from vitrim.engines.formats.onnx import ONNX
from vitrim.engines.formats.openvino import OpenVINO

pytestmark = pytest.mark.xdist_group("onnx")  # its libraries, which take seconds to import, in one process


def test_int8_keeps_weights_to_seven_bits_and_sees_all_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight bits saturate without VNNI; and what is left out is what was named."""
    nncf = pytest.importorskip("nncf")
    asked: dict[str, Any] = {}

    def quantize(model: Any, dataset: Any, **options: Any) -> str:
        asked.update(options, model=model, seen=list(dataset.get_inference_data()))
        return "made"

    monkeypatch.setattr(nncf, "quantize", quantize)
    batches = [np.full((2, 3, 4, 4), value, np.float32) for value in range(5)]
    assert quantised("model", iter(batches), "image", {"b", "a"}) == "made"
    assert asked["model"] == "model"
    assert asked["advanced_parameters"].overflow_fix == nncf.OverflowFix.ENABLE
    assert asked["subset_size"] == 5
    assert [list(each) for each in asked["seen"]] == [["image"]] * 5
    assert [float(each["image"].mean()) for each in asked["seen"]] == [0, 1, 2, 3, 4]
    assert asked["model_type"] == nncf.ModelType.TRANSFORMER
    assert asked["ignored_scope"].names == ["a", "b"]


def test_sorts_of_an_openvino_file_are_stable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a graph that is written by hand: ONNX defines its TopK so, and OpenVINO reads it otherwise."""
    pytest.importorskip("openvino")
    import onnx
    from onnx import TensorProto, helper

    rows = helper.make_tensor_value_info("image", TensorProto.FLOAT, [2, 5])
    outputs = [
        helper.make_tensor_value_info("values", TensorProto.FLOAT, [2, 5]),
        helper.make_tensor_value_info("order", TensorProto.INT64, [2, 5]),
    ]
    count = helper.make_tensor("count", TensorProto.INT64, [1], [5])
    sort = helper.make_node("TopK", ["image", "count"], ["values", "order"], axis=1, largest=0, sorted=1)
    model = helper.make_model(helper.make_graph([sort], "sort", [rows], outputs, [count]))
    model.opset_import[0].version, model.ir_version = 18, 10

    def write(graph: Graph, path: Path) -> int:
        onnx.save(model, str(path))
        return 1

    monkeypatch.setattr(ONNX, "write", write)
    path = tmp_path / "m.xml"
    OpenVINO.write(Graph(None, "values", "{}", 20), path)  # type: ignore[arg-type]
    sorts = [one for one in openvino_format.core().read_model(path).get_ops() if one.get_type_name() == "TopK"]
    assert [(one.get_attributes()["stable"], one.get_attributes()["mode"]) for one in sorts] == [(True, "min")]
    given = np.array([[2, 1, 2, 1, 0], [0, 0, 0, 0, 0]], np.float32)
    assert OpenVINO.open(path, 1)(given).tolist() == np.sort(given).tolist()


@pytest.mark.parametrize("half", [True, False])
def test_openvino_halves_weights_where_they_are_half(
    half: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino = pytest.importorskip("openvino")
    import torch
    from openvino import opset13

    weights = np.ones((64, 64), np.float32)
    rows = opset13.parameter([1, 64], np.float32, name="image")
    model = openvino.Model([opset13.matmul(rows, weights, False, False)], [rows])
    monkeypatch.setattr(ONNX, "write", lambda graph, path: 1)
    monkeypatch.setattr(openvino, "convert_model", lambda path: model)
    dtype = torch.float16 if half else torch.float32
    OpenVINO.write(Graph(None, "values", "{}", 20, dtype), tmp_path / "m.xml")  # type: ignore[arg-type]
    assert (tmp_path / "m.bin").stat().st_size == weights.nbytes // (2 if half else 1)


def test_onnxruntime_gets_the_threads_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    seen: list[Any] = []

    class Session:
        def __init__(self, path: str, options: Any, providers: list[str]) -> None:
            seen.append(options)

        def get_inputs(self) -> list[Any]:
            return [type("Input", (), {"name": "image"})]

        def run(self, outputs: None, given: dict[str, Any]) -> list[Any]:
            return [given["image"] + 1, None]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    run = ONNX.open(Path("m.onnx"), 3)
    assert (seen[0].intra_op_num_threads, seen[0].inter_op_num_threads) == (3, 1)
    assert run(np.zeros(2)).tolist() == [1, 1]
