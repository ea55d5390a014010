"""MCTF against the published code: models, operators, training; its own rules; the counts of its tables."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim
from vitrim.core.attention import Attention, KnownMap
from vitrim.core.matching import match
from vitrim.core.plan import Layer
from vitrim.core.schedule import Fuse
from vitrim.engines.macs import profile_of
from vitrim.methods.mctf import fuse_map
from vitrim.tasks.step import Step
from vitrim.training.objectives import losses as losses_of
from vitrim.training.objectives.mctf import draw, objective, teacher_amounts

CASES: list[tuple[str, dict[str, Any]]] = [
    ("mctf_r8", {"r": 8}),
    ("mctf_r2", {"r": 2}),
    ("mctf_r8_uni", {"r": 8, "bidirectional": False}),
    ("mctf_r8_simonly", {"r": 8, "tau_info": 0.0, "tau_size": 0.0}),
    ("mctf_r8_pool_mean", {"r": 8, "pooling": "mean"}),
    ("mctf_r8_precise", {"r": 8, "attention": "precise"}),
    ("mctf_r8_no_osa", {"r": 8, "attention": "after"}),
    ("mctf_ratio035_fast", {"r": 0.35, "blocks": (1, 3, 5)}),
]
MAPS = ("recomputed", "kept", "shared")


@golden.cases(
    [(f"merging/{name}", options, attention_map) for name, options in CASES for attention_map in MAPS],
    "options, attention_map",
)
def test_matches_reference(ref: golden.Reference, options: dict[str, Any], attention_map: str) -> None:
    learned.check_dense(ref)
    model = golden.vit(ref)
    reduction = vitrim.reduce_(model, vitrim.MCTF(**options, attention_map=attention_map), record=True)
    learned.check_outputs(ref, model, reduction)
    learned.check_float32(ref, model)


OPERATORS = {"default": {"r": 6}, "uni": {"r": 6, "bidirectional": False}, "mean": {"r": 5, "pooling": "mean"}}


@golden.cases([(golden.Part("merging/ops_mctf", ("size", f"{case}/*")), case) for case in OPERATORS], "case")
def test_operator_matches_reference(ref: golden.Reference, case: str) -> None:
    data = {key: torch.from_numpy(value).double() for key, value in golden.weights.tensors(ref).items()}
    x, logits = data["x"], data["attention_logits"]
    size = golden.tensor(ref, "size").double()
    config = vitrim.MCTF(**OPERATORS[case], blocks=(0,), min_patches=1)
    reducer = tiny.reducer(config, Layer(0, 1, 12, 2, 0, 1, True, (4, 5)))
    state = replace(vitrim.TokenState.start(x, num_prefix=1), size=size, uniform=False)
    keys = torch.eye(21, dtype=x.dtype).expand(2, 2, 21, 21)  # logits @ identity are the logits
    attention = KnownMap.of(Attention(logits, keys, None, 1.0))
    hard = reducer(x, attention, state)
    merged, after = hard.apply(x, state)
    ref.check(f"{case}/merged_x", merged)
    ref.check(f"{case}/merged_size", after.size)
    ref.check(f"{case}/source", after.source)
    ref.check(f"{case}/merged_attention", fuse_map(hard, attention.known, size))


# ---- training --------------------------------------------------------------------------------------------------------


@golden.cases([("merging/mctf_train_teacher_r0", attention_map) for attention_map in MAPS], "attention_map")
def test_training_matches_reference(ref: golden.Reference, attention_map: str) -> None:
    model = golden.vit(ref).train()
    reduction = vitrim.reduce_(model, vitrim.MCTF(r=8, attention_map=attention_map))
    learned.check_float32(ref, model)
    model = golden.vit(ref).train()
    reduction = vitrim.reduce_(model, vitrim.MCTF(r=8, attention_map=attention_map))
    runs = []
    for r, tokens in ((8, "student_tokens"), (0, "teacher_tokens")):
        reduction.set(r=r)
        features = model.forward_features(golden.images(ref))
        ref.check(tokens, features.shape[1], Tensor.item)
        runs.append((model.forward_head(features), features[:, 0]))
    (student, z_student), (teacher, z_teacher) = runs
    ref.check("logits", student)
    ref.check("logits_teacher", teacher)
    targets, args = torch.tensor(ref["config"]["targets"]), ref["config"]["args"]

    def losses_of(images: slice, confidence: float) -> dict[str, Tensor]:
        return objective(
            student[images],
            targets[images],
            features=z_student[images],
            teacher_logits=teacher[images],
            teacher_features=z_teacher[images],
            weight=args["consistency_weight"],
            confidence=confidence,
            confident_of="label",  # as the vectors have it
        )

    single = [slice(image, image + 1) for image in range(3)]
    ref.check("consistency_per_sample", torch.stack([losses_of(image, 0.0)["consistency"] for image in single]))
    confidence = [confidence_of(partial(losses_of, image)) for image in single]
    ref.check("confidence", torch.tensor(confidence, dtype=torch.float64))
    losses = losses_of(slice(None), args["confidence_threshold"])
    ref.check("loss/total", losses["total"])
    ref.check("loss/consistency", losses["consistency"])
    losses["total"].backward()
    learned.check_gradients(ref, model, {})


def confidence_of(losses: Callable[[float], dict[str, Tensor]]) -> float:
    """The threshold above which an image no longer counts as confident, by bisection."""
    low, high = 0.0, 1.0
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if losses(middle)["consistency"] > 0 else (low, middle)
    return low


def test_consistency_counts_confident_images_only_and_spares_the_teacher() -> None:
    logits = torch.tensor([[4.0, 0.0], [0.0, 4.0]], requires_grad=True)
    z_student = torch.tensor([[1.0, 1.0], [9.0, 9.0]], requires_grad=True)
    z_teacher = torch.zeros(2, 2, requires_grad=True)
    targets = torch.tensor([0, 0])  # the second image is wrong, and as confident
    runs = {"features": z_student, "teacher_logits": logits, "teacher_features": z_teacher}
    assert objective(logits, targets, **runs)["consistency"].item() == 41.0  # mean of 1 and 81
    unsure = objective(logits * torch.tensor([[1.0], [0.0]]), targets, **runs, confidence=0.6)
    assert unsure["consistency"].item() == 1.0  # UDA: the largest probability
    losses = objective(logits, targets, **runs, confident_of="label")
    assert losses["consistency"].item() == 1.0
    with pytest.raises(vitrim.VitrimError, match="confident_of"):
        objective(logits, targets, **runs, confident_of="class")  # type: ignore[arg-type]
    losses["consistency"].backward()
    assert z_teacher.grad is None
    assert z_student.grad.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    none = objective(logits, targets, **runs, confidence=0.999)
    assert none["consistency"].item() == 0.0


def smooth(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)


def step_of(host: str = "vit", r: float = 4, targets: Tensor | None = None) -> Step:
    model = tiny.HOSTS[host]().train()
    reduction = vitrim.reduce_(model, vitrim.MCTF(r=r))
    return Step(model, reduction, tiny.images(), torch.tensor([1, 2]) if targets is None else targets, smooth)


def test_a_step_has_the_losses_and_gradients_of_the_reference() -> None:
    ref = golden.load("merging/mctf_train_teacher_r0")
    model = golden.vit(ref).train()
    reduction = vitrim.reduce_(model, vitrim.MCTF(r=8))
    cross_entropy = torch.nn.functional.cross_entropy
    step = Step(model, reduction, golden.images(ref), torch.tensor(ref["config"]["targets"]), cross_entropy)
    args = ref["config"]["args"]
    options = {"weight": args["consistency_weight"], "confidence": args["confidence_threshold"]}
    options["confident_of"] = "label"  # as the vectors have it
    losses = losses_of(step, **options, teacher_r=0)
    ref.check("loss/total", losses["total"])
    ref.check("loss/consistency", losses["consistency"])
    assert reduction.config.r == 8
    assert reduction.state.num_tokens == ref["student_tokens"]  # the handle shows the student
    losses["total"].backward()
    learned.check_gradients(ref, model, {})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("r", "teacher_r", "amounts"),
    [(4, None, range(4)), (4, (1, 2), (1, 2)), (4, 0.1, None), (0.2, 0.1, None), (0.2, None, range(8))],
)
def test_the_teacher_draws_its_amount_and_the_model_keeps_its_own(r: float, teacher_r: Any, amounts: Any) -> None:
    step = step_of(r=r)
    drawn = []
    own = step.reduction.set

    def spy(r: float) -> None:
        drawn.append(r)
        own(r=r)

    step.reduction.set = spy
    for _ in range(6):
        losses_of(step, teacher_r=teacher_r)
    assert drawn[1::2] == [r] * 6
    allowed = [hundredth / 100 for hundredth in range(11)] if amounts is None else amounts
    assert set(drawn[::2]) <= set(allowed)
    assert len(set(drawn[::2])) > 1


def test_draws_reach_both_ends() -> None:
    assert {draw(0, 7) for _ in range(200)} == set(range(8))
    assert {draw(0.02, 0.05) for _ in range(100)} == {0.02, 0.03, 0.04, 0.05}
    assert all(isinstance(draw(0, 7), int) for _ in range(3))


def test_the_criterion_of_the_recipe_is_that_of_both_runs() -> None:
    step = step_of()
    losses = losses_of(step, weight=0.0, teacher_r=0)
    logits = step.model(step.images)
    torch.testing.assert_close(losses["student"], smooth(logits, step.targets))
    vitrim.restore_(step.model)
    torch.testing.assert_close(losses["teacher"], smooth(step.model(step.images), step.targets))
    torch.testing.assert_close(losses["total"], losses["student"] + losses["teacher"])


def test_an_error_in_the_teacher_leaves_the_amount() -> None:
    step = step_of()
    amounts = [block.reducer.layer.amount for block in step.model.blocks]
    step.model.head.register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        losses_of(step, teacher_r=(1, 3))
    assert step.reduction.config.r == 4
    assert [block.reducer.layer.amount for block in step.model.blocks] == amounts


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (4, "teacher_r=4 is not below r=4"),
        ((5, 3), "is no range"),
        ((1, 2, 3), "is no range"),
        (-1, "is no range"),
        (1.5, "whole numbers of tokens"),
    ],
)
def test_amounts_of_the_teacher_that_are_refused(given: Any, message: str) -> None:
    with pytest.raises(vitrim.VitrimError, match=message):
        teacher_amounts(4, given, 64)
    with pytest.raises(vitrim.VitrimError, match=r"teacher_r=0.3 is not below r=0.3"):
        teacher_amounts(0.3, 0.3, 64)
    assert teacher_amounts(0, None, 64) == teacher_amounts(1, None, 64) == (0, 0)
    # a fraction is a number of the patches: 3 of 64, 22 of 64
    assert teacher_amounts(0.05, None, 64) == (0, 2)
    assert teacher_amounts(0.35, None, 64) == (0, 7)
    with pytest.raises(vitrim.VitrimError, match=r"teacher_r=7 is not below r=0.05"):
        teacher_amounts(0.05, 7, 64)
    assert teacher_amounts(0.35, 7, 64) == (0, 7)


def test_what_cannot_be_trained_so_is_refused() -> None:
    mixed = step_of(targets=torch.full((2, 5), 0.2))
    with pytest.raises(vitrim.VitrimError, match=r"one class per image: set mix.mixup=0"):
        losses_of(mixed)
    without = step_of("no_class_token_avg")
    with pytest.raises(vitrim.VitrimError, match="this VisionTransformer has none"):
        losses_of(without)
    checkpointed = step_of()
    checkpointed.model.set_grad_checkpointing(True)
    with pytest.raises(vitrim.VitrimError, match="grad_checkpointing=false"):
        losses_of(checkpointed)


# ---- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("pooling", ["attention_size", "size", "mean", "max"])
@pytest.mark.parametrize("attention", ["one_step_ahead", "precise", "after"])
def test_both_maps_and_the_class_token_only_agree(pooling: str, attention: str) -> None:
    outputs = []
    last = ["full", "class_token"] if attention != "after" else ["full"]
    for options in [{"attention_map": m, "last_block": b} for m in MAPS for b in last]:
        model = tiny.HOSTS["vit"]().double()
        vitrim.reduce_(model, vitrim.MCTF(r=4, pooling=pooling, attention=attention, **options))
        with torch.no_grad():
            outputs.append(model(tiny.images().double()))
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("pooling", ["size", "mean", "max"])
def test_pooling_by_hand(pooling: str) -> None:
    """One block on given tokens: every new token is its group pooled, and the fused map follows."""
    torch.manual_seed(1)
    x = torch.randn(2, 11, 6, dtype=torch.float64)
    logits = torch.randn(2, 3, 11, 11, dtype=torch.float64)
    state = vitrim.TokenState.start(x, num_prefix=1)
    keys = torch.eye(11, dtype=x.dtype).expand(2, 3, 11, 11)
    reducer = tiny.reducer(
        vitrim.MCTF(r=5, pooling=pooling, blocks=(0,), min_patches=1), Layer(0, 1, 6, 3, 0, 1, True, (2, 5))
    )
    attention = KnownMap.of(Attention(logits, keys, None, 1.0))
    hard = reducer(x, attention, state)
    target, merged = hard.target(11), hard.pool(x, state.size)
    fused = fuse_map(hard, attention.known, state.size)
    for image in range(2):
        groups = [target[image] == token for token in range(6)]
        for token, group in enumerate(groups):
            members = x[image, group]
            expected = members.amax(0) if pooling == "max" else members.mean(0)
            torch.testing.assert_close(merged[image, token], expected, atol=1e-12, rtol=0)
            # the published order: key columns are summed first, then query rows pooled; it matters to the maximum
            summed = torch.stack([attention.known[image][:, :, column].sum(2) for column in groups], 2)[:, group]
            expected = summed.amax(1) if pooling == "max" else summed.mean(1)
            torch.testing.assert_close(fused[image, :, token], expected, atol=1e-12, rtol=0)


def test_chains_end_in_one_group() -> None:
    """Even 0 goes to odd 0, which moves on to even 1 with it."""
    attraction = torch.tensor([[[0.9, 0.1], [0.8, 0.2]]])
    keep, moved, into = match(attraction, torch.tensor([1, 3]), torch.tensor([0, 2]), 2, bidirectional=True)
    assert keep.tolist() == [[3, 2]]
    assert moved.tolist() == [[1, 0]]
    assert into.tolist() == [[0, 0]]


def test_counts() -> None:
    assert vitrim.MCTF().counts(196, 12) == [196, *range(180, 19, -16)]
    assert vitrim.MCTF(r=0.35, blocks=(3, 6, 9)).counts(196, 12) == [196] * 3 + [128] * 3 + [84] * 3 + [55] * 3
    assert vitrim.MCTF(r=20).counts(196, 12)[-4:] == [36, 18, 9, 9]  # never fewer than 10 tokens, class token included
    assert vitrim.MCTF(r=20, min_patches=1).counts(196, 12)[-4:] == [36, 18, 9, 5]
    assert vitrim.MCTF(r=4).counts(5, 3) == [5, 5, 5]  # fewer than the floor: left alone
    assert Fuse(0.29, least=1).keep(100, 100) == 71
    assert vitrim.MCTF(r=1).describe() == "mctf:r=1"


def test_no_nan_where_a_token_receives_no_attention() -> None:
    x = torch.randn(1, 9, 4)
    logits = torch.zeros(1, 1, 9, 9)
    logits[..., 3] = -300.0  # exp underflows to 0
    keys = torch.eye(9).expand(1, 1, 9, 9)
    reducer = tiny.reducer(vitrim.MCTF(r=3, blocks=(0,), min_patches=1), Layer(0, 1, 4, 1, 0, 1, True, (2, 4)))
    hard = reducer(x, Attention(logits, keys, None, 1.0), vitrim.TokenState.start(x, 1))
    assert hard.pool(x, torch.ones(1, 9)).isfinite().all()


# ---- published FLOPs -------------------------------------------------------------------------------------------------


GEOMETRY = {"DeiT-T": (192, 3), "DeiT-S": (384, 6)}
IMAGE = torch.zeros(1, 3, 224, 224)


@pytest.fixture(scope="module")
def models() -> dict[str, VisionTransformer]:
    return {name: VisionTransformer(embed_dim=dim, num_heads=heads).eval() for name, (dim, heads) in GEOMETRY.items()}


def published(r: int, dim: int, **options: Any) -> int:
    """MACs of DeiT under MCTF by the paper's count: products, and 5 per element of a LayerNorm."""
    stem, head = 196 * 768 * dim, 1000 * dim
    n, total = 197, stem + head
    for patches in vitrim.MCTF(r=r, **options).counts(196, 12):
        m = patches + 1
        if m < n:
            before = 5 * n * dim + 2 * n * dim**2 + n * n * dim + ((n + 1) // 2) * (n // 2) * dim
            total += before + 5 * m * dim + m * dim**2 + m * m * dim + m * dim**2
        else:
            total += 5 * n * dim + 4 * n * dim**2 + 2 * n * n * dim
        total += 5 * m * dim + 8 * m * dim**2
        n = m
    return total + 5 * n * dim


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", GEOMETRY)
def test_tables_c_and_d(name: str, models: dict[str, VisionTransformer]) -> None:
    """The formula gives every row to its printed digits, and the profiler what the formula gives, up to two trifles:

    the published matching has a row for the class token, and here an active block that cannot fuse norms once more.
    """
    dim, _ = GEOMETRY[name]
    path = golden.GOLDEN / "tables" / "mctf_table_c_d.csv"
    rows = [row for row in csv.DictReader(path.open()) if row["model"] == name]
    assert len(rows) == 42  # Table D repeats the FLOPs of Table C
    for row in rows:
        r = 0 if row["r"] == "base" else int(row["r"])
        assert f"{published(r, dim) / 1e9:.2f}" == row["gflops"], row
    printed = {row["r"]: row["gflops"] for row in rows}
    for r in (1, 16, 20):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", vitrim.ReductionWarning)  # r = 20 asks for more than there is at the end
            found = profile_of(models[name], vitrim.MCTF(r=r, attention_map="shared"), IMAGE).macs.total
        assert f"{found / 1e9:.2f}" == printed[str(r)]
        assert abs(found / published(r, dim) - 1.0) < 2e-4
    assert profile_of(models[name], None, IMAGE).macs.total == published(0, dim)


def test_mctf_fast_rows(models: dict[str, VisionTransformer]) -> None:
    for name, gflops in (("DeiT-T", "0.75"), ("DeiT-S", "2.76")):
        config = vitrim.MCTF(r=0.35, blocks=(3, 6, 9), attention_map="shared")
        assert f"{profile_of(models[name], config, IMAGE).macs.total / 1e9:.2f}" == gflops
