"""The families that run the model, on a tiny one, against plain lines."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vitrim
from tiny import GEOMETRY, HOSTS, configs, vit
from vitrim.analysis.families import EXPERIMENTS, check_stored, experiments
from vitrim.analysis.families.attention import attention
from vitrim.analysis.families.loss import loss
from vitrim.analysis.families.router import on_grid, router
from vitrim.analysis.families.sensitivity import sensitivity
from vitrim.analysis.families.throughput import align, one_fewer, throughput
from vitrim.analysis.families.tsne import silhouettes, tsne
from vitrim.analysis.family import FamilyResult
from vitrim.analysis.subject import Subject, Watch
from vitrim.core.registry import parse_method
from vitrim.errors import VitrimError
from vitrim.measure.latency import Budget
from vitrim.tasks import make_task

IMAGES, PATCHES, LAYERS = 40, 36, 4


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return vit()().eval()


@pytest.fixture(scope="module")
def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(IMAGES, 3, 24, 24, generator=generator), torch.arange(IMAGES) % 5)


def subject(model: nn.Module, data: TensorDataset, *methods: str, **options: Any) -> Subject:
    given = {"batch_size": 16, **options}
    return Subject(model, [parse_method(method) for method in methods], make_task("classification", 5), data, **given)


def reduced(model: nn.Module, method: str | vitrim.MethodConfig) -> vitrim.Reduction:
    return vitrim.reduce_(copy.deepcopy(model), method, record=True)


def rows(result: FamilyResult, name: str) -> list[dict[str, Any]]:
    return next(table.records() for table in result.tables if table.name == name)


# ---- loss ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lost(model: nn.Module, data: TensorDataset) -> FamilyResult:
    return loss(subject(model, data, "tome:r=4", "atm", "topk", "ats", "cropr:r=4"))


@pytest.mark.parametrize(
    ("method", "kind", "value", "block", "alone"),
    [
        ("tome:r=4", "share removed", 0.25, 1, "tome:r=[0,9,0,0]"),
        ("topk", "share removed", 0.375, 2, "topk:blocks=[2],keep_rate=0.625"),
        ("atm", "threshold", 0.8, 0, "atm:theta=[0.8,1.0,1.0,1.0]"),
    ],
)
@torch.no_grad()
def test_one_block_alone(
    model: nn.Module,
    data: TensorDataset,
    lost: FamilyResult,
    method: str,
    kind: str,
    value: float,
    block: int,
    alone: str,
) -> None:
    found = next(
        row
        for row in rows(lost, "loss_alone")
        if (row["method"], row["setting"], row["value"], row["block"]) == (method, kind, value, block)
    )
    own = reduced(model, alone).model
    distances, divergences = [], []
    for images in data.tensors[0].split(16):  # atm decides by the batch
        dense, other = (net(images).double().log_softmax(1) for net in (model, own))
        divergences.append((dense.exp() * (dense - other)).sum(1))
        features = [net.forward_head(net.forward_features(images), pre_logits=True) for net in (model, own)]
        distances.append(1 - torch.cosine_similarity(*(one.double() for one in features)))
    assert found["images"] == IMAGES
    assert found["kl_nats"] == pytest.approx(torch.cat(divergences).mean().item(), rel=1e-6)
    assert found["cosine_distance"] == pytest.approx(torch.cat(distances).mean().item(), rel=1e-5)
    assert found["kl_nats_low"] <= found["kl_nats"] <= found["kl_nats_high"]


def test_every_block_and_amount_has_its_row_and_what_has_none_its_line(lost: FamilyResult) -> None:
    assert len(rows(lost, "loss_alone")) == 3 * 4 * LAYERS
    one = [row for row in rows(lost, "loss_alone") if row["method"] == "topk" and row["block"] == 3]
    mean = next(row for row in rows(lost, "loss_alone_mean") if row["method"] == "topk" and row["block"] == 3)
    assert mean["kl_nats"] == pytest.approx(np.mean([row["kl_nats"] for row in one]))
    assert any("ats is left out of one block at a time: it takes no amount" in note for note in lost.notes)
    assert any("cropr:r=4 is left out of one block at a time: what it learned" in note for note in lost.notes)


@torch.no_grad()
def test_errors_of_merging_are_of_the_tokens_between_attention_and_mlp(
    model: nn.Module, data: TensorDataset, lost: FamilyResult
) -> None:
    reduction = reduced(model, "tome:r=4")
    reduction.model(data.tensors[0])
    groups = reduction.states[1].source[:, 1:]
    block, seen = model.blocks[0], []
    block.norm2.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(data.tensors[0])
    block.norm2._forward_pre_hooks.clear()
    errors = []
    for x, group in zip(seen[0][:, 1:].double(), groups, strict=True):
        total = 0.0
        for label in group.unique():
            members = torch.nn.functional.normalize(x[group == label], dim=-1)
            total += (1 - torch.cosine_similarity(members, members.mean(0, keepdim=True))).sum().item()
        errors.append(total)
    found = next(row for row in rows(lost, "merging_error") if row["method"] == "tome:r=4" and row["block"] == 0)
    assert found["merged"] == 4
    assert found["error"] == pytest.approx(np.mean(errors), rel=1e-5)
    for row in rows(lost, "merging_error"):
        assert row["error_least"] - 1e-9 <= row["error"] <= row["error_most"] + 1e-9
        assert row["error_least"] == pytest.approx(row["error_most"] / 2)


@pytest.mark.parametrize("config", configs(), ids=lambda config: config.describe())
def test_one_block_alone_is_one_block_alone(config: vitrim.MethodConfig) -> None:
    """Over the registry: nothing is removed anywhere else."""
    if config.knob is None or config.amounts_option is None or not config.training_free:
        return
    for depth in range(2, LAYERS):
        value = 0.5 if config.knob.similarity else config.knob.removing(0.5, PATCHES)
        alone = config.only_at(depth, value, LAYERS)
        assert alone is not None
        counts = alone.counts(PATCHES, LAYERS, (6, 6))
        if counts is not None and not config.restores_by:
            removed = -np.diff([PATCHES, *counts])
            assert removed[depth] > 0
            assert not np.delete(removed, depth).any() or config.name == "evo_vit"  # whose patches come back


# ---- sensitivity -----------------------------------------------------------------------------------------------------


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


# ---- attention -------------------------------------------------------------------------------------------------------


def class_row(model: nn.Module, x: Tensor, size: Tensor | None = None) -> Tensor:
    """(B, N) of the class token in block 1, mean over heads, as timm computes it."""
    block = model.blocks[1]
    q, k, _ = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
    logits = q[:, :, :1] @ k.transpose(-2, -1) * block.attn.scale
    return (logits if size is None else logits + size.log()[:, None, None]).softmax(-1).mean(1)[:, 0]


@torch.no_grad()
def test_attention_given_and_computed(model: nn.Module, data: TensorDataset) -> None:
    result = attention(subject(model, data, "mctf:r=6", "tome:r=4", limit=8, batch_size=8))
    arrays = result.arrays
    assert arrays["mctf:r=6/blocks"].tolist() == [1, 2, 3]
    assert arrays["images"].shape == (8, 24, 24, 3)
    reduction = reduced(model, "mctf:r=6")
    watch = Watch(reduction)
    images = data.tensors[0][subject(model, data, limit=8).places()]
    reduction.model(images)
    decision, state = watch.take()[0], reduction.states[2]
    x, source = model.blocks[0](model._pos_embed(model.patch_embed(images))), state.source
    before = class_row(model, x)
    given = torch.zeros(8, state.num_tokens).scatter_add(1, source, before)
    assert decision.assignment is not None
    precise = class_row(model, decision.assignment.pool(x, torch.ones(8, PATCHES + 1)), state.size)
    for name, row in (("given", given), ("precise", precise)):
        spread = (row / state.size).gather(1, source)[:, 1:]
        assert np.allclose(arrays[f"mctf:r=6/{name}"][:, 0], spread.numpy(), atol=1e-6)
    found = rows(result, "attention")[0]
    assert (found["method"], found["block"], found["images"]) == ("mctf:r=6", 1, 8)
    assert found["mean_absolute"] == pytest.approx((given - precise).abs().mean().item(), rel=1e-4)
    divergence = (precise.double() * (precise / given).double().log()).sum(1).mean().item()
    assert found["kl_nats"] == pytest.approx(divergence, rel=1e-3)


@pytest.mark.parametrize("method", ["tome:r=4", "mctf:r=4,attention=precise"])
def test_methods_that_compute_their_attention_are_left_out(model: nn.Module, data: TensorDataset, method: str) -> None:
    result = attention(subject(model, data, method))
    assert not result.tables
    assert result.notes == ["attention skipped: it needs a method that fuses its attention map, such as mctf"]


# ---- router ----------------------------------------------------------------------------------------------------------

SAMPLES = ("ats", "zero_tprune")
"""They draw by their scores, or drop what is alike afterwards."""


@pytest.mark.parametrize("config", configs(), ids=lambda config: config.describe())
@torch.no_grad()
def test_patches_that_stay_rank_above_those_that_go(
    model: nn.Module, data: TensorDataset, config: vitrim.MethodConfig
) -> None:
    """Over the registry: whatever a reducer says that it ranks by is what decides."""
    reduction = reduced(model, config)
    watch = Watch(reduction, scores=True)
    images = data.tensors[0][:4]
    torch.manual_seed(1)
    before = reduction.model(images)
    decisions = [decision for decision in watch.take() if decision.scores is not None]
    for decision in decisions:
        scores, stays = on_grid(decision)
        for one, kept in zip(scores, stays, strict=True):
            gone = np.isfinite(one) & ~kept
            if kept.any() and gone.any() and config.name not in SAMPLES:
                assert one[kept].min() >= one[gone].max() - 1e-9
    torch.manual_seed(1)
    assert torch.equal(before, reduced_like(model, config, reduction)(images))  # looking changes nothing


def reduced_like(model: nn.Module, config: vitrim.MethodConfig, other: vitrim.Reduction) -> nn.Module:
    """The same reduction, not watched."""
    found = reduced(model, config).model
    found.load_state_dict(other.model.state_dict())
    return found


def test_scores_over_the_image(model: nn.Module, data: TensorDataset) -> None:
    result = router(subject(model, data, "topk:keep_rate=0.5", "cropr:r=4", "tome:r=4"))
    assert result.notes == ["tome:r=4 is left out of router: it does not rank patches"]
    arrays = result.arrays
    assert arrays["topk:keep_rate=0.5/scores"].shape == (8, 3, PATCHES)
    known = np.isfinite(arrays["topk:keep_rate=0.5/scores"]).sum(-1)
    assert known.tolist() == [[36, 18, 9]] * 8
    depth = arrays["topk:keep_rate=0.5/depth"]
    assert [int((depth == block).sum(1)[0]) for block in (1, 2, 3, 4)] == [18, 9, 5, 4]
    with torch.no_grad():  # block 1 is the first to prune: it sees the tokens of the dense model
        images = data.tensors[0][subject(model, data).places(32)][:8]
        expected = class_row(model, model.blocks[0](model._pos_embed(model.patch_embed(images))))[:, 1:]
    assert np.allclose(arrays["topk:keep_rate=0.5/scores"][:, 0], expected.numpy(), atol=1e-6)
    found = [row for row in rows(result, "router") if row["method"] == "topk:keep_rate=0.5"]
    assert [(row["block"], row["scored"], row["kept"]) for row in found] == [(1, 36, 18), (2, 18, 9), (3, 9, 4)]
    assert found[0]["score_kept"] > found[0]["score"] > found[0]["score_removed"]
    assert found[2]["persistence"] is None


# ---- t-SNE -----------------------------------------------------------------------------------------------------------


def test_pruned_tokens_before_the_head(model: nn.Module, data: TensorDataset) -> None:
    torch.manual_seed(0)
    result = tsne(subject(model, data, "cropr:r=4", "tome:r=4", limit=40))
    assert result.notes == ["cropr:r=4 has not learned its routers: it prunes at random"] or result.tables == []
    twice = TensorDataset(*(torch.cat([one, one]) for one in data.tensors))
    result = tsne(subject(model, twice, "cropr:r=4"))
    found = rows(result, "tsne")
    assert [(row["fusion"], row["block"]) for row in found] == [
        (fusion, block) for fusion in ("last_layer", "concat") for block in ("all", 1, 2)
    ]
    assert [row["points"] for row in found] == [160, 80, 80] * 2
    points, blocks = (result.arrays[f"cropr:r=4/concat/{name}"] for name in ("points", "blocks"))
    assert points.shape == (160, 2)
    assert found[3]["silhouette_map"] == pytest.approx(silhouettes(points, blocks)[0], abs=1e-5)
    several = tsne(subject(model, twice, "cropr:r=4", "cropr:r=3"))
    assert len(several.tables) == 1
    assert [row["method"] for row in rows(several, "tsne")] == ["cropr:r=4"] * 6 + ["cropr:r=3"] * 6
    assert tsne(subject(model, data, "tome:r=4")).notes[0].startswith("tsne skipped: it needs a method whose pruned")
    assert any("more than 90 points" in note for note in tsne(subject(model, data, "cropr:r=4", limit=9)).notes)


@torch.no_grad()
def test_concatenated_tokens_are_as_they_were_when_pruned(model: nn.Module, data: TensorDataset) -> None:
    from vitrim.analysis.families.tsne import _Pruned

    own = subject(model, data, limit=8, batch_size=8)
    form = parse_method("cropr:r=4").rejoining()["concat"]
    models = own.contestants([form])
    pruned = _Pruned(models[1])
    decisions: list[Any] = []
    other = Watch(models[1].reduction, scores=True)
    own.follow(models, {1: lambda *seen: (decisions.extend(other.take()), pruned.see(*seen))}, own.batches())
    tokens, blocks = pruned.found()
    expected = []
    for decision in decisions:
        order = decision.scores.argsort(1, descending=True)
        best = order[:, decision.assignment.anchor.shape[1] - 1] + 1  # the first that is not kept
        expected.append(decision.x[torch.arange(8), best])
    assert blocks.tolist() == [1] * 8 + [2] * 8
    assert np.allclose(tokens, torch.cat(expected).numpy(), atol=1e-6)


def test_silhouettes_by_hand() -> None:
    points, labels = np.array([[0.0], [2.0], [5.0], [6.0], [20.0]]), [3, 3, 7, 7, 9]
    each = [(5.5 - 2) / 5.5, (3.5 - 2) / 3.5, (4 - 1) / 4, (5 - 1) / 5, 0]
    expected = [np.mean(each), np.mean(each[:2]), np.mean(each[2:4]), 0]
    assert np.allclose(silhouettes(points, labels), expected)
    assert np.isnan(silhouettes(points, [1] * 5)).all()


# ---- throughput ------------------------------------------------------------------------------------------------------

QUICK = Budget(min_rounds=1, min_seconds=0.0, warmup_rounds=0)


def test_speed_of_all_combinations(model: nn.Module, data: TensorDataset) -> None:
    own = subject(model, data, "tome:r=2", "mctf:r=2", batch_size=2, sizes=(24, 16))
    result = throughput(own, QUICK)
    found = rows(result, "throughput")
    settings = {(r["method"], r["size"], r["precision"], r["kernel"], r["tokens"]) for r in found}
    kinds = [("dense", t) for t in ("M", "M-1")] + [("tome:r=2", t) for t in ("M", "M-1", "aligned")]
    kinds += [("mctf:r=2", t) for t in ("M", "M-1")]
    assert settings == {
        (method, size, precision, kernel, tokens)
        for method, tokens in kinds
        for size in (24, 16)
        for precision in ("fp32", "autocast")
        for kernel in ("fused", "unfused")
    }
    assert len(found) == len(settings)
    for row in found:
        assert row["images_per_second"] == pytest.approx(2000 / row["latency_ms"])
        assert row["peak_memory_mib"] > 0
        if (row["method"], row["tokens"]) == ("dense", "M"):
            assert (row["speedup"], row["speedup_q1"], row["speedup_q3"]) == (1, 1, 1)
    assert result.notes == ["mctf:r=2 is left out of aligned counts: its counts do not follow from plain amounts"]
    assert model.patch_embed.img_size == (24, 24)


def test_a_model_in_half_precision_is_called_by_it(model: nn.Module, data: TensorDataset) -> None:
    half = copy.deepcopy(model).to(torch.bfloat16)
    found = rows(throughput(subject(half, data, "tome:r=2", batch_size=2), QUICK), "throughput")
    assert {row["precision"] for row in found} == {"bf16"}


def test_a_model_of_one_size(data: TensorDataset) -> None:
    host = HOSTS["torchvision_vit"]().eval()
    with pytest.raises(VitrimError, match="cannot be given images of 16 pixels"):
        throughput(subject(host, data, sizes=(16,)), QUICK)


@torch.no_grad()
def test_one_patch_fewer(model: nn.Module, data: TensorDataset) -> None:
    images = data.tensors[0][:2]
    x = model._pos_embed(model.patch_embed(images))[:, :-1]
    expected = model.head(model.norm(model.blocks(x))[:, 0])
    assert torch.allclose(one_fewer(copy.deepcopy(model))(images), expected, atol=1e-6)
    reduction = reduced(model, "topk:keep_rate=0.5")
    one_fewer(reduction.model)(images)
    assert reduction.tokens_per_block == [36, 18, 9, 5]


@pytest.mark.parametrize("config", configs(), ids=lambda config: config.describe())
@torch.no_grad()
def test_aligned_counts(model: nn.Module, data: TensorDataset, config: vitrim.MethodConfig) -> None:
    """Over the registry: the least multiples of 4 that are no fewer than was asked, or nothing changed."""
    reduction = reduced(model, config)
    torch.manual_seed(0)
    plain = reduction.model(data.tensors[0][:2])
    before = [state.num_tokens for state in reduction.states[1:]]
    if not align(reduction, 4):
        torch.manual_seed(0)
        assert torch.equal(plain, reduction.model(data.tensors[0][:2]))
        return
    reduction.model(data.tensors[0][:2])
    after = [state.num_tokens for state in reduction.states[1:]]
    added = config.added_tokens()
    for had, old, new in zip([PATCHES + 1, *after], before, after, strict=False):
        assert new >= old
        at_end = new in (had, config.least_kept(had - 1) + 1, PATCHES + 1)  # no more, or no less, can be done
        assert (new - added) % 4 == 0 or at_end


# ---- all of them -----------------------------------------------------------------------------------------------------


def test_experiments_run_where_they_are_named(model: nn.Module, data: TensorDataset) -> None:
    own = subject(model, data, "topk:keep_rate=0.5", limit=6)
    assert experiments(own, []) == {}
    found = experiments(own, ["router", "patterns", "attention"])
    assert list(found) == ["attention", "router"]
    assert "router: estimated from 6 images, fewer than 30" in found["router"].notes
    with pytest.raises(VitrimError, match="unknown family 'speed'"):
        experiments(own, ["speed"])
    for name in set(EXPERIMENTS) - {"loss"}:
        with pytest.raises(VitrimError, match=f"{name} runs the model, which stored records do not hold"):
            check_stored(["patterns", name])
    check_stored(["loss", "depth"])


def test_nothing_is_left_of_an_experiment(model: nn.Module, data: TensorDataset) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    experiments(subject(model, data, "mctf:r=4", "topk", limit=4), ["attention", "router", "loss"])
    assert hooks == sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert set(GEOMETRY) <= {"img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_classes"}
