"""One vector per image, compared by its cosine."""

from __future__ import annotations

import pytest
import torch

from vitrim.tasks import make_task


def test_agreement_is_the_cosine_and_what_points_elsewhere_agrees_in_nothing() -> None:
    """At 0, 60, 90, 120 and 180 degrees, whatever the lengths: opposite embeddings are not worth less than nothing."""
    angles = torch.tensor([0, 60, 90, 120, 180], dtype=torch.float64).deg2rad()
    reduced = torch.stack([angles.cos(), angles.sin()], dim=1) * torch.tensor([[1.0], [2], [3], [4], [5]])
    dense = torch.tensor([[7.0, 0.0]]).expand(5, 2)
    found = make_task("embedding", 0).agreement(reduced.float(), dense, None)
    assert found.tolist() == pytest.approx([1, 0.5, 0, 0, 0], abs=1e-6)
    assert (found >= 0).all()
