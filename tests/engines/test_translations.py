"""ONNX forms of operators, against torch's own results; and how many operations a block that merges takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrim.engines.formats.base import Graph
from vitrim.engines.formats.operators import translations

pytestmark = pytest.mark.xdist_group("onnx")  # its libraries, which take seconds to import, in one process


class Called(nn.Module):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> object:
        return self.function(*given)


def run(function: Callable[..., object], *given: Tensor, opset: int = 20) -> tuple[list[Tensor], Counter[str]]:
    """What onnxruntime gives, and the operations by kind."""
    program = torch.export.export(Called(function), given)
    table = translations(Graph(program, "out", "", opset, torch.float32))
    written = torch.onnx.export(
        program, dynamo=True, verbose=False, opset_version=opset, custom_translation_table=table
    )
    kinds = Counter(node.op_type for node in written.model.graph)
    return [torch.as_tensor(each.numpy()) for each in written(*given)], kinds


def test_a_maximum_and_its_place_are_one_operation_and_the_first_of_equal_ones_counts() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0], [-3.0, -1.0, -1.0]])
    cases = ((1, False), (-1, True), (0, False))
    found, kinds = run(lambda x: [part for dim, keep in cases for part in x.max(dim, keep)], x)
    for place, (dim, keep) in enumerate(cases):
        expected = x.max(dim, keep)
        assert torch.equal(found[2 * place], expected.values)
        assert torch.equal(found[2 * place + 1], expected.indices)
    assert kinds["TopK"] == len(cases)
    assert kinds["ArgMax"] == kinds["ReduceMax"] == 0


@pytest.mark.slow
def test_means() -> None:
    x = torch.randn(2, 3, 4, 5)
    cases = [(dim, keep) for dim in (1, -1, (0, 2), (1, 2, 3)) for keep in (False, True)]
    found, _ = run(lambda x: [x.mean(dim, keep) for dim, keep in cases], x)
    for mean, (dim, keep) in zip(found, cases, strict=True):
        torch.testing.assert_close(mean, x.mean(dim, keep), msg=lambda text, case=(dim, keep): f"{case}: {text}")


def test_means_of_half_precision_are_summed_in_the_dtype_that_is_asked_for() -> None:
    x = torch.randn(2, 300, 4).half()
    (found,), _ = run(lambda x: x.mean(1, dtype=torch.float32), x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, x.mean(1, dtype=torch.float32))


@pytest.mark.slow
def test_attention_scales_queries_alone() -> None:
    cases = [(scale, shape) for scale in (None, 0.3) for shape in (None, (2, 1, 1, 7), (3, 5, 7))]
    given = [
        ((q, k, v) if shape is None else (q, k, v, torch.randn(shape)))
        for _, shape in cases
        for q, k, v in [(torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8))]
    ]

    def each(*flat: Tensor) -> list[Tensor]:
        parts = iter(flat)
        return [
            F.scaled_dot_product_attention(*(next(parts) for _ in one), scale=scale)
            for one, (scale, _) in zip(given, cases, strict=True)
        ]

    flat = [part for one in given for part in one]
    found, kinds = run(each, *flat)
    for one, expected in zip(found, each(*flat), strict=True):
        torch.testing.assert_close(one, expected)
    assert kinds["Mul"] == kinds["Transpose"] == len(cases)


def test_opset_23_has_an_operator_of_attention() -> None:
    q = torch.randn(1, 2, 3, 4)
    program = torch.export.export(Called(F.scaled_dot_product_attention), (q, q, q))
    attention = torch.ops.aten.scaled_dot_product_attention.default
    assert attention in translations(Graph(program, "out", "", 22, torch.float32))
    assert attention not in translations(Graph(program, "out", "", 23, torch.float32))


def test_opset_23_repeats_the_row_of_a_mask() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    for rows in (1, 6):
        mask = torch.randn(2, 1, rows, 6)
        (found,), _ = run(F.scaled_dot_product_attention, q, k, v, mask, opset=23)
        torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, mask))
