"""What is particular to torchvision: its nn.MultiheadAttention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer

import tiny
import vitrim
from vitrim.core.registry import ask, host_of
from vitrim.engines.macs import profile_of


def model() -> VisionTransformer:
    return tiny.HOSTS["torchvision_vit"]()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_first": False}, "batch_first=False"),
        ({"kdim": 16, "vdim": 16}, "kdim or vdim"),
        ({"add_bias_kv": True}, "add_bias_kv=True"),
        ({"add_zero_attn": True}, "add_zero_attn=True"),
    ],
)
def test_other_forms_of_attention_are_refused(options: dict, named: str) -> None:
    host = model()
    host.encoder.layers[2].self_attention = nn.MultiheadAttention(32, 2, **{"batch_first": True, **options})
    with pytest.raises(vitrim.UnsupportedModelError, match=f"with {named} in its MultiheadAttention"):
        vitrim.reduce_(host, "tome:r=4")
    assert not hasattr(host.encoder.layers[0], "reducer")


def test_another_attention_class_is_refused() -> None:
    class Mine(nn.MultiheadAttention):
        pass

    host = model()
    host.encoder.layers[1].self_attention.__class__ = Mine
    with pytest.raises(vitrim.UnsupportedModelError, match="attention of class Mine"):
        vitrim.reduce_(host, "tome:r=4")


def test_a_subclass_with_another_forward_is_refused_and_without_one_is_served() -> None:
    class Pooled(VisionTransformer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    class Renamed(VisionTransformer):
        pass

    host = model()
    host.__class__ = Pooled
    with pytest.raises(vitrim.UnsupportedModelError, match="Pooled overrides forward"):
        vitrim.reduce_(host, "tome:r=4")
    host.__class__ = Renamed
    vitrim.reduce_(host, "tome:r=4")


def test_attention_without_a_bias() -> None:
    host = model()
    for block in host.encoder.layers:
        block.self_attention = nn.MultiheadAttention(32, 2, bias=False, batch_first=True)
    host.eval()
    with torch.no_grad():
        dense = host(tiny.images())
        vitrim.reduce_(host, "none")
        torch.testing.assert_close(host(tiny.images()), dense)


def test_the_head_may_be_replaced() -> None:
    host = model()
    host.heads = nn.Linear(32, 7)
    assert host_of(host).facts(host).num_classes == 7
    assert ask(host).readers(host) == [host.heads]
    host.heads = nn.Identity()
    assert host_of(host).facts(host).num_classes == 0
    with pytest.raises(vitrim.UnsupportedModelError, match="no classifier"):
        ask(host).readers(host)


def test_dropout_is_applied_in_training_only() -> None:
    host = VisionTransformer(24, 4, 4, 2, 32, 64, dropout=0.2, attention_dropout=0.3, num_classes=5)
    nn.init.normal_(host.heads.head.weight)
    vitrim.reduce_(host.train(), "tome:r=4")
    assert not torch.equal(host(tiny.images()), host(tiny.images()))
    host.eval()
    assert torch.equal(host(tiny.images()), host(tiny.images()))


def test_macs_are_those_of_the_same_architecture_in_timm() -> None:
    """Dense and reduced; timm's head and MLP of the same sizes."""
    timm_host = tiny.vit(mlp_ratio=2.0)()
    for method in (None, "tome:r=4", "topk:keep_rate=0.6", "tome:r=4,last_block=class_token"):
        ours = profile_of(model(), method, tiny.images(1))
        theirs = profile_of(timm_host, method, tiny.images(1))
        assert ours.macs == theirs.macs, method
        assert ours.tokens_per_block == theirs.tokens_per_block
        assert ours.params == theirs.params


@pytest.mark.parametrize("hidden", [None, 16])
def test_a_new_head_is_known_by_its_number_of_classes(hidden: int | None) -> None:
    """The last layer alone is new, and zero, as torchvision starts it."""
    host: Any = tiny.HOSTS["torchvision_vit"]() if hidden is None else with_hidden_layer(hidden)
    before = {name: value.clone() for name, value in host.state_dict().items()}
    ask(host).reset_head(host, 7)
    assert host.num_classes == ask(host).num_classes(host) == 7
    assert torch.equal(host(tiny.images()), torch.zeros(2, 7))
    changed = [name for name, value in host.state_dict().items() if value.shape != before[name].shape]
    assert changed == ["heads.head.weight", "heads.head.bias"]


def with_hidden_layer(width: int) -> Any:
    return VisionTransformer(
        image_size=24, patch_size=4, num_layers=1, num_heads=2, hidden_dim=32, mlp_dim=32, representation_size=width
    ).eval()
