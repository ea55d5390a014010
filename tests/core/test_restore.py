"""Pruned patches that come back (`MethodConfig.restore`): on dense models, and where it is asked for elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny
import vitrim
from dense_models import segmenter
from vitrim.core.registry import make_method

PRUNING = [
    config
    for config in tiny.configs()
    if config.kind in ("prune", "mixed") and not config.is_adaptive() and config.name not in ("cropr", "evo_vit")
]
NOTHING = {
    "topk": {"keep_rate": 1.0},
    "random": {"keep_rate": 1.0},
    "l1": {"keep_rate": 1.0},
    "evit": {"keep_rate": 1.0},
    "dynamicvit": {"keep_rate": 1.0},
    "gtp": {"num_prop": 0},
    "zero_tprune": {"num_similar": 0, "keep_rate": 1.0},
    "tofu": {"keep_rate": 1.0},
    "diffrate": {"r": 0},
    "ppt": {"r": 0},
}


def restoring(config: vitrim.MethodConfig, restore: str) -> vitrim.MethodConfig:
    return make_method(config.name, **{key: getattr(config, key) for key in config.model_fields_set}, restore=restore)


@pytest.mark.parametrize("restore", ["end", "last_block"])
@pytest.mark.parametrize("name", NOTHING)
def test_nothing_pruned_is_the_dense_model_bit_for_bit(name: str, restore: str) -> None:
    model, images = segmenter(), tiny.images()
    with torch.no_grad():
        vitrim.reduce_(model, "none")
        expected = model(images)
        vitrim.restore_(model)
        vitrim.reduce_(model, make_method(name, **NOTHING[name], restore=restore))
        # gtp writes attention out; what is compared is that nothing else is done
        assert (
            torch.allclose(model(images), expected, atol=1e-6)
            if name == "gtp"
            else torch.equal(model(images), expected)
        )


@pytest.mark.parametrize("config", PRUNING, ids=lambda config: config.describe())
def test_a_pruned_patch_is_in_the_end_what_it_was_when_pruned(config: vitrim.MethodConfig) -> None:
    """Every banked row, followed from the block that pruned it to the full grid."""
    model, images = segmenter(dtype=torch.float64), tiny.images().double()
    model.backbone.norm = nn.Identity()
    reduction = vitrim.reduce_(model, restoring(config, "end"), record=True)
    with torch.no_grad():
        torch.manual_seed(0)
        tokens, _ = model.tokens(images)
        states = reduction.states[1:]
        torch.manual_seed(0)
        maps = model.backbone.forward_intermediates(images, output_fmt="NLC", intermediates_only=True)
    pruned = 0
    for depth, state in enumerate(states[:-1]):
        gone = state.source[:, 1:] < 0
        pruned += int(gone.sum())
        assert all(torch.equal(later[gone], maps[depth][gone]) for later in (*maps[depth:], tokens))
    assert pruned > 0 or config.kind == "mixed"
    assert tokens.shape == (2, 36, 32)
    assert (tokens != 0).any(-1).all()
    assert states[-1].source.min() >= 0


BEFORE_LAST = ["topk", "random", "l1", "dynamicvit", "evit:fuse_token=false"]


@pytest.mark.parametrize("method", BEFORE_LAST)
def test_end_is_last_block_where_the_last_block_does_nothing(method: str) -> None:
    found = []
    for restore in ("end", "last_block"):
        model = segmenter(dtype=torch.float64)
        last = model.backbone.blocks[-1]
        for parameter in (*last.attn.proj.parameters(), *last.mlp.fc2.parameters()):
            nn.init.zeros_(parameter)
        config = vitrim.parse_method(f"{method}{',' if ':' in method else ':'}blocks=[1,2],restore={restore}")
        vitrim.reduce_(model, config)
        torch.manual_seed(0)
        with torch.no_grad():
            found.append(model.tokens(tiny.images().double())[0])
    assert torch.equal(*found)


def test_last_block_runs_on_all_tokens_and_end_on_those_that_are_left() -> None:
    for restore, expected in (("end", 26), ("last_block", 37)):
        model = segmenter()
        vitrim.reduce_(model, make_method("topk", blocks=[1], restore=restore))
        seen: list[int] = []
        model.backbone.blocks[3].mlp.register_forward_hook(lambda m, args, out, seen=seen: seen.append(out.shape[1]))
        model(tiny.images())
        assert seen == [expected]


def test_the_fused_token_of_evit_is_no_value_of_any_patch() -> None:
    model = segmenter(dtype=torch.float64)
    reduction = vitrim.reduce_(model, "evit:keep_rate=0.5,blocks=[1,2]", record=True)
    with torch.no_grad():
        model(tiny.images().double())
    state = reduction.state
    referred = torch.zeros_like(state.size).scatter(1, state.source, 1.0)
    assert state.num_tokens == 37 + 2
    assert (referred.sum(1) == 37).all()  # one of each patch; two fused tokens that nothing refers to


def test_gradients_reach_pruned_patches() -> None:
    model = segmenter().train()
    vitrim.reduce_(model, "random:keep_rate=0.5")
    images = tiny.images().requires_grad_()
    tokens, _ = model.tokens(images)
    tokens.square().sum().backward()
    per_patch = images.grad.unfold(2, 4, 4).unfold(3, 4, 4).abs().sum((1, 4, 5))
    assert (per_patch > 0).all()


# ---- other heads -----------------------------------------------------------------------------------------------------


def test_other_heads_get_nothing_back_unless_asked() -> None:
    model = tiny.vit(global_pool="", num_classes=0)()
    for options, count in (
        ({}, 13),
        ({"restore": "zeros"}, 13),
        ({"restore": "end"}, 37),
        ({"restore": "last_block"}, 37),
    ):
        reduction = vitrim.reduce_(model, make_method("topk", **options))
        with torch.no_grad():
            assert model(tiny.images()).shape == (2, count, 32)
        assert reduction.state.banking == (count == 37)
        vitrim.restore_(model)


def test_a_classifier_may_read_a_restored_class_token() -> None:
    model, images = tiny.vit()(), tiny.images()
    logits = []
    for method in ("topk:blocks=[1,2]", "topk:blocks=[1,2],restore=end", "topk:blocks=[1,2],restore=last_block"):
        vitrim.reduce_(model, method + ",last_block=auto")
        with torch.no_grad():
            logits.append(model(images))
        vitrim.restore_(model)
    torch.testing.assert_close(logits[0], logits[1], atol=1e-6, rtol=1e-6)  # the class token saw the same
    assert not torch.allclose(logits[0], logits[2])


@pytest.mark.parametrize(
    ("method", "host", "message"),
    [
        ("topk:restore=last_block", {"depth": 1}, "restore=last_block needs a block before the last one"),
        (
            "topk:restore=end,last_block=class_token",
            {},
            "restore=end hands out all patches, and last_block=class_token",
        ),
    ],
)
def test_restore_that_does_not_fit_a_model_is_refused(method: str, host: dict[str, int], message: str) -> None:
    options = ",blocks=[0]" if host else ""
    with pytest.raises(vitrim.VitrimError, match=message):
        vitrim.reduce_(tiny.vit(**host)(), method + options)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("cropr:restore=end", "restore=end does not go with cropr: give fusion"),
        ("cropr:fusion=none,restore=zeros", "restore=zeros does not go with cropr: give fusion"),
        ("evo_vit:restore=end", "restore=end does not go with evo_vit: give rejoin"),
        ("tome:restore=end", "restore=end is for methods that prune"),
        ("ats:restore=end", "restore=end needs as many pruned patches in every image"),
        ("topk:restore=start", "restore=start: must be 'end', 'last_block' or 'zeros'"),
    ],
)
def test_restore_that_does_not_fit_a_method_is_refused(method: str, message: str) -> None:
    with pytest.raises(vitrim.VitrimError, match=message):
        vitrim.parse_method(method)


@pytest.mark.parametrize("name", ["ats", "a_vit", "patchmerger", "sit", "tome:last_block=class_token"])
def test_what_a_dense_head_cannot_read_is_refused(name: str) -> None:
    model = segmenter()
    classes = [type(block) for block in model.backbone.blocks]
    with pytest.raises(vitrim.UnsupportedModelError, match=r"dense head reads every patch|head reads its patch tokens"):
        vitrim.reduce_(model, name)
    assert [type(block) for block in model.backbone.blocks] == classes


def test_scores_of_a_class_token_need_one_on_dense_heads_too() -> None:
    with pytest.raises(vitrim.UnsupportedModelError, match="this model has none; use score=column_mean"):
        vitrim.reduce_(segmenter("no_class_token_avg"), "topk")
    vitrim.reduce_(segmenter("no_class_token_avg"), "topk:score=column_mean")
