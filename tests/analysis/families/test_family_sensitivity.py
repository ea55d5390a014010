"""Sensitivity: batches, orders, splitting layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from made_subjects import reduced, subject
from made_tables import rows
from vitrim.analysis.families.sensitivity import draw_batch_sizes, sensitivity
from vitrim.analysis.family import Tables
from vitrim.report import Table


@pytest.mark.slow
@torch.no_grad()
def test_sensitivity_to_the_batch(model: nn.Module, data: TensorDataset) -> None:
    own = subject(model, data, "atm:alpha=0.9,beta=0.2,theta_min=0.1", limit=8, batch_size=4)
    result = sensitivity(own)
    found = {row["batch_size"]: row for row in rows(result, "batch_sizes")}
    assert list(found) == [1, 2, 4, 8]
    places = own.places()
    images, labels = (tensor[places] for tensor in data.tensors)
    reduction = reduced(model, own.methods[0])
    for size, row in found.items():
        logits = torch.cat([reduction.model(part) for part in images.split(size)])
        assert row["top1"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())
        same = logits.argmax(1) == model(images).argmax(1)
        assert row["agreement"] == pytest.approx(same.double().mean().item())
    orders = rows(result, "orders")
    assert [row["shuffle"] for row in orders] == [0, 1, 2]
    spread = rows(result, "orders_spread")[0]
    assert spread["gmacs_std"] == pytest.approx(np.std([row["gmacs"] for row in orders]))
    depths = rows(result, "splitting_layers")
    assert [row["blocks"] for row in depths] == [0, 1, 2, 3, 4]
    last = reduced(model, "atm:alpha=0.9,beta=0.2,theta_min=0.1,splitting_layer=4")
    logits = torch.cat([last.model(part) for part in images.split(4)])
    assert depths[-1]["top1"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())


def test_an_image_alone_does_not_depend_on_its_batch(model: nn.Module, data: TensorDataset) -> None:
    method = "atm:alpha=0.9,beta=0.2,theta_min=0.1,granularity=image"
    result = sensitivity(subject(model, data, method, limit=4, batch_size=2))
    assert len({row["agreement"] for row in rows(result, "batch_sizes")}) == 1
    skipped = sensitivity(subject(model, data, "tome:r=4"))
    assert not skipped.tables
    assert len(skipped.notes) == 2


def test_lines_over_batch_sizes() -> None:
    columns = ("method", "batch_size", "images", "top1", "agreement", "gmacs")
    made = [("atm", 2**power, 8, 0.1 * power, 1.0, 2.0) for power in range(3)]
    figure = draw_batch_sizes(Tables({"batch_sizes": Table("batch_sizes", "", columns, made)}))
    assert [axis.get_title() for axis in figure.axes] == ["top1", "agreement", "GMACs"]
    assert figure.axes[0].lines[0].get_xdata().tolist() == [1, 2, 4]
