"""What a block projects, on every host: values alone, keys for matching, the first queries alone."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
import vitrim
from vitrim.core.attention import Attention
from vitrim.core.registry import host_of
from vitrim.core.tokens import TokenState

CREATE = {**tiny.HOSTS, **tiny.FURTHER}
FIRST = sorted(CREATE, key="hf_sam3".__ne__)
"""The one host that rotates keys by windows comes first, which `sampled` never leaves out."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize("host", FIRST)
def test_values_alone_and_keys_for_matching(host: str) -> None:
    """`values` gives those of `project`; tokens that are equal have equal keys for matching, wherever they stand."""
    model: Any = tiny.shaken(CREATE[host]().double())
    images = tiny.given(host)
    vitrim.reduce_(model, "none")
    block, seen, read = tiny.blocks(model)[1], [], host_of(model).facts(model).head_rows

    def project(self: Any, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        found: Attention = type(self).project(self, x, state, rows, given)
        torch.testing.assert_close(self.values(x), found.values, atol=1e-9, rtol=1e-9)
        alike = type(self).project(self, x[:, -1:].expand_as(x), state, rows, given)
        first = alike.keys[:, :, :1]
        torch.testing.assert_close(alike.keys, first.expand_as(alike.keys), atol=1e-9, rtol=1e-9)
        assert not torch.equal(found.keys[:, :, -1:].expand_as(found.keys), found.keys)
        if read is not None:  # no other head asks for its rows alone
            few = type(self).project(self, x, state, read, given)
            torch.testing.assert_close(few.q, found.q[:, :, :read], atol=1e-9, rtol=1e-9)
            torch.testing.assert_close(few.output(), found.output()[:, :, :read], atol=1e-6, rtol=1e-6)
        seen.append(found)
        return found

    block.project = MethodType(project, block)
    block.plain = False  # or the library's own forward would run
    with torch.no_grad():
        model(images.double() if images.is_floating_point() else images)
    assert len(seen) == 1
