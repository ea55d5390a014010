"""ONNX forms of operators on their own, run one by one: exports of whole graphs are in test_translations.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxscript
import pytest
import torch
import torch.nn.functional as F
from test_translations import Called
from torch import Tensor

from vitrim.engines.formats import operators
from vitrim.engines.formats.base import Graph

pytestmark = pytest.mark.xdist_group("onnx")  # its libraries, which take seconds to import, in one process


def given(value: Tensor) -> Any:
    return onnxscript.tensor.Tensor(value.numpy(), opset=operators.op)


def found(value: Any) -> Any:
    return torch.from_numpy(np.array(value.value))


@pytest.mark.parametrize(("options", "right"), [({}, False), ({"right": True}, True), ({"side": "right"}, True)])
def test_places_among_sorted_values(options: dict[str, Any], right: bool) -> None:
    """Where a value is itself among them, below or behind it."""
    table = torch.tensor([[0.0, 1.0, 1.0, 2.0], [-1.0, -1.0, 3.0, 3.0]])
    values = torch.tensor([[1.0, -5.0, 2.0], [3.0, -1.0, 9.0]])
    expected = torch.searchsorted(table, values, right=right)
    assert torch.equal(found(operators.searchsorted(given(table), given(values), **options)), expected)
    narrow = found(operators.searchsorted(given(table), given(values), out_int32=True, **options))
    assert narrow.dtype == torch.int32
    assert torch.equal(narrow, expected.int())


def test_distances_are_those_of_torch() -> None:
    one, other = torch.randn(2, 5, 3), torch.randn(2, 7, 3)
    torch.testing.assert_close(found(operators.cdist(given(one), given(other))), torch.cdist(one, other))
    same = found(operators.cdist(given(one), given(one)))
    assert bool((same.diagonal(dim1=1, dim2=2) < 1e-2).all())  # not nan, where rounding makes a square negative


@pytest.mark.parametrize("descending", [False, True])
def test_sorts_are_stable_in_both_directions(descending: bool) -> None:
    x = torch.tensor([[2, 1, 2, 1, 0], [3, 3, 3, 0, 3]])
    for kind in (torch.float32, torch.int64):
        values, places = operators.sort_stable(given(x.to(kind)), dim=1, descending=descending)
        expected = x.sort(dim=1, stable=True, descending=descending)
        assert torch.equal(found(values), expected.values.to(kind))
        assert torch.equal(found(places), expected.indices)


Q = torch.randn(1, 2, 6, 4)
ADDED, ALLOWED = torch.zeros(1, 1, 6, 6), torch.ones(1, 1, 6, 6, dtype=torch.bool)
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


@pytest.mark.parametrize(
    ("attends", "inputs", "own"),
    [
        (F.scaled_dot_product_attention, (Q, Q, Q), True),
        (F.scaled_dot_product_attention, (Q, Q, Q, ADDED), True),
        (F.scaled_dot_product_attention, (Q, Q, Q, ALLOWED), False),  # flags are no numbers to add
        (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), (Q,), False),
        (lambda q: F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], enable_gqa=True), (Q,), False),
    ],
)
def test_only_plain_attention_has_a_form_of_its_own(attends: Callable[..., Any], inputs: Any, own: bool) -> None:
    program = torch.export.export(Called(attends), inputs)
    assert (ATTENTION in operators.translations(Graph(program, "out", "", 20, torch.float32))) is own
