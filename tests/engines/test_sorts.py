"""Sorts in files: as long as what is read of them, and stable where torch's are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vitrim.engines.formats.base import Graph
from vitrim.engines.formats.onnx import ANY_TIE, to_onnx


class Sorts(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = (x + 1).argsort(dim=1, descending=True, stable=True)[:, :3]
        every = (x + 2).argsort(dim=1, descending=True, stable=True)
        distinct = (x + 3).argsort(dim=1)
        return first, every[:, :2], every[:, 2:], distinct


@pytest.mark.slow  # exports
def test_only_what_is_read_is_sorted_and_only_stable_sorts_stay_so() -> None:
    program = torch.export.export(Sorts(), (torch.zeros(2, 7),))
    graph = to_onnx(Graph(program, "first", "{}", 20, torch.float32)).model.graph
    sorts = [node for node in graph if node.op_type == "TopK"]
    assert [int(node.inputs[1].const_value.numpy().item()) for node in sorts] == [3, 7, 7]
    assert [[output.shape[1] for output in node.outputs] for node in sorts] == [[3, 3], [7, 7], [7, 7]]
    assert [name for name, value in graph.initializers.items() if not value.uses()] == []
    assert [ANY_TIE in node.name for node in sorts] == [False, False, True]


@pytest.mark.parametrize("hint", ["f32", "bf16"])
@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("length", [40, 300])
def test_openvino_sorts_as_numpy_where_numbers_are_equal(length: int, descending: bool, hint: str) -> None:
    """300 counts, which bf16 cannot hold; short rows are left to OpenVINO's own stable sort."""
    openvino = pytest.importorskip("openvino")
    from openvino import opset13 as ops

    from vitrim.engines.formats.openvino import _stable, core

    numbers = np.random.default_rng(0).integers(0, 30, (2, length)).astype(np.float32)
    given = ops.parameter([-1, length], np.float32)
    mode = "max" if descending else "min"
    sort = ops.topk(given, ops.constant(np.int64(length)), 1, mode, "value", index_element_type="i64")
    model = openvino.Model([ops.result(sort.output(1))], [given])
    _stable(model)
    assert ("TopK" in [node.get_type_name() for node in model.get_ops()]) == (length == 40)
    order = core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": hint})(numbers)[0]
    np.testing.assert_array_equal(order, np.argsort(-numbers if descending else numbers, axis=1, kind="stable"))


def test_values_that_are_read_and_other_axes_are_left_to_openvino() -> None:
    openvino = pytest.importorskip("openvino")
    from openvino import opset13 as ops

    from vitrim.engines.formats.openvino import _stable

    given = ops.parameter([2, 100], np.float32)
    sorts = [
        ops.topk(given, ops.constant(np.int64(100)), 1, "max", "value").output(0),
        ops.topk(given, ops.constant(np.int64(2)), 0, "max", "value").output(1),
        ops.topk(given, ops.constant(np.int64(90)), 1, "max", "value").output(1),
    ]
    model = openvino.Model([ops.result(each) for each in sorts], [given])
    _stable(model)
    kept = [node for node in model.get_ops() if node.get_type_name() == "TopK"]
    assert [node.get_attributes()["stable"] for node in kept] == [True] * 3
