"""Models reduced before they have memory, or inside inference mode: what a method makes is then not garbage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
import vitrim
from vitrim.core.method import StagedConfig

CONFIGS = pytest.mark.parametrize("config", tiny.configs(), ids=lambda config: config.describe())


def reducers(model: nn.Module) -> list[vitrim.Reducer]:
    return [block.reducer for block in tiny.blocks(model)]


def to_garbage(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """``model.to_empty``, where what memory held before is surely wrong."""

    def full(like: Tensor, **kwargs: Any) -> Tensor:
        return torch.full_like(like, torch.nan if like.is_floating_point() else 10**9, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", full)
        model.to_empty(device="cpu")


@CONFIGS
def test_a_model_reduced_on_meta_equals_one_reduced_in_memory(
    config: vitrim.MethodConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = tiny.HOSTS["vit"]()
    expected = tiny.HOSTS["vit"]()
    torch.manual_seed(4)
    vitrim.reduce_(expected, config)
    model = tiny.HOSTS["vit"]().to("meta")
    vitrim.reduce_(model, config)
    torch.manual_seed(4)
    to_garbage(model, monkeypatch)
    missing, unexpected = model.load_state_dict(dense.state_dict(), strict=False)
    assert not unexpected
    assert all(".reducer." in name for name in missing)
    for own, other in zip(reducers(model), reducers(expected), strict=True):
        assert own.state_tensors().keys() == other.state_tensors().keys()
        for name, tensor in own.state_tensors().items():
            assert torch.equal(tensor, other.state_tensors()[name]), name
    with torch.no_grad():
        torch.testing.assert_close(tiny.run(model, tiny.images()), tiny.run(expected, tiny.images()), atol=0, rtol=0)


def test_amounts_set_on_meta_are_those_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, model = tiny.HOSTS["vit"](), tiny.HOSTS["vit"]().to("meta")
    reduction = vitrim.reduce_(model, "linf:keep_rate=0.9")
    reduction.set(keep_rate=0.5)
    to_garbage(model, monkeypatch)
    model.load_state_dict(dense.state_dict())
    vitrim.reduce_(dense, "linf:keep_rate=0.5")
    with torch.no_grad():
        torch.testing.assert_close(model(tiny.images()), dense(tiny.images()), atol=0, rtol=0)


@pytest.mark.sampled(4)
@CONFIGS
def test_a_model_reduced_in_inference_mode_is_trained(config: vitrim.MethodConfig) -> None:
    model = tiny.HOSTS["vit"]()
    with torch.inference_mode():
        reduction = vitrim.reduce_(model, config)
        if isinstance(config, StagedConfig) and "keep_rate" in config.runtime:
            reduction.set(keep_rate=0.55)
        tensors = [tensor for reducer in reducers(model) for tensor in reducer.state_tensors().values()]
        assert not any(tensor.is_inference() for tensor in tensors)
        model(tiny.images())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.named_parameters()}
    model.train()
    loss: Any = model(tiny.images()).square().sum()
    loss = loss + sum(value.square().sum() for _, _, value in reduction.state.aux)
    loss.backward()
    optimizer.step()
    assert any(not torch.equal(value, before[name]) for name, value in model.named_parameters())
