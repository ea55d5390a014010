"""Accuracy, agreement and cosine of reduced models, against a plain recomputation."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import tiny
import vitrim
from full_matrix import cells
from tiny import GEOMETRY, HOSTS, images
from vitrim.core.block import ReducedBlock
from vitrim.core.registry import ask
from vitrim.data import DataError, ImageDataset
from vitrim.engines.macs import count_macs
from vitrim.errors import UnsupportedModelError, VitrimError
from vitrim.measure import evaluation
from vitrim.measure.contestants import contestants
from vitrim.measure.evaluation import standard_probes
from vitrim.measure.records import Batch, Processes, Row
from vitrim.measure.run import Measurement
from vitrim.tasks import make_task

ATM = "atm:alpha=0.9,beta=0.2,theta_min=0.1"
METHODS = ["tome:r=4", "random:keep_rate=0.5", ATM, f"{ATM},granularity=image"]


def classifier(num_classes: int = 12) -> VisionTransformer:
    """A model whose logits, and whose decisions, differ from image to image."""
    torch.manual_seed(1)
    model = VisionTransformer(**{**GEOMETRY, "num_classes": num_classes}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def data(num_classes: int = 12, sizes: tuple[int, ...] = (5, 3)) -> list[tuple[Tensor, Tensor]]:
    """Batches with labels of all kinds: right, among the first five and wrong for some model."""
    generator = torch.Generator().manual_seed(4)
    return [
        (images(size, seed=10 + index), torch.randint(num_classes, (size,), generator=generator))
        for index, size in enumerate(sizes)
    ]


def evaluate(model: nn.Module, methods: Any, batches: Any, **options: Any) -> Sequence[Row]:
    """The rows of the report."""
    return cast(Sequence[Row], evaluation.evaluate(model, methods, batches, **options).rows)


def reduced(model: nn.Module, method: str) -> tuple[nn.Module, vitrim.Reduction]:
    model = copy.deepcopy(model)
    return model, vitrim.reduce_(model, method, record=True)


def started(model: nn.Module, methods: list[str]) -> Measurement:
    task = make_task("classification", 12)
    return Measurement(contestants(model, methods, task), standard_probes(task), task)


def batch(pair: tuple[Tensor, Tensor], index: int = 0) -> Batch:
    return Batch(*pair, torch.arange(len(pair[1])), index)


def by_name(rows: list[Row]) -> dict[str, Row]:
    return {row.method: row for row in rows}


# ---- the numbers


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["tome:r=4", "evit:keep_rate=0.6", ATM, f"{ATM},granularity=image"])
def test_numbers_are_those_of_a_plain_recomputation(method):
    model = classifier().double()
    batches = [(x.double(), y) for x, y in data()]
    copied, reduction = reduced(model, method)
    top1, top5, agree, cosines, tokens, end, macs = [], [], [], [], [], [], []
    with torch.no_grad():
        for x, y in batches:
            dense, logits = model(x), copied(x)
            per_block, final = reduction.tokens_per_block, reduction.state
            class_token = copied.forward_features(x)[:, 0]
            dense_token = model.forward_features(x)[:, 0]
            batch_macs = count_macs(copied, x).total
            for i in range(len(y)):
                ranking = logits[i].argsort(descending=True).tolist()
                top1.append(ranking[0] == y[i])
                top5.append(int(y[i]) in ranking[:5])
                agree.append(ranking[0] == int(dense[i].argmax()))
                cosines.append(torch.cosine_similarity(class_token[i], dense_token[i], dim=0))
                if final.mask is None:
                    tokens.append(per_block)
                    end.append(final.num_tokens)
                else:
                    masks = [s.mask[i] if s.mask is not None else s.size[i] > 0 for s in reduction.states[1:]]
                    tokens.append([int(mask.sum()) for mask in masks[:-1]] + per_block[-1:])
                    end.append(int(final.mask[i].sum()))
                macs.append(batch_macs)

    dense_row, row = evaluate(model, [method], batches)
    count = len(top1)
    assert count == row["images"] == dense_row["images"] == 8
    assert row["top1"] == sum(top1) / count
    assert row["top5"] == sum(top5) / count
    assert row["agreement"] == sum(agree) / count
    assert row["cosine"] == pytest.approx(float(sum(cosines)) / count, abs=1e-12)
    assert row["tokens_per_block"] == pytest.approx([sum(block) / count for block in zip(*tokens, strict=True)])
    assert row["tokens_at_end"] == pytest.approx(sum(end) / count)
    assert sum(row["gmacs"].values()) == pytest.approx(sum(macs) / count / 1e9, rel=1e-6)
    assert 0 < row["cosine"] < 0.9999  # the comparison has something to compare
    assert row["tokens_per_block"][-1] < dense_row["tokens_per_block"][-1]


def test_the_data_tell_the_metrics_apart():
    """What the test above compares must not be all 0 or all 1."""
    rows = by_name(evaluate(classifier().double(), ["evit:keep_rate=0.6"], [(x.double(), y) for x, y in data()]))
    row = rows["evit:keep_rate=0.6"]
    assert 0 < row["agreement"] < 1
    assert 0 < row["top5"] < 1
    assert len({row["top1"], row["top5"], row["agreement"]}) == 3


def test_no_reduction_agrees_with_dense():
    dense, none = evaluate(classifier(), ["none"], data())
    assert none["agreement"] == 1.0
    assert none["cosine"] == pytest.approx(1.0, abs=1e-6)
    assert (none["top1"], none["top5"], none["gmacs"], none["tokens_per_block"]) == (
        dense["top1"],
        dense["top5"],
        dense["gmacs"],
        dense["tokens_per_block"],
    )


def test_one_pass_for_all_methods_equals_a_pass_for_each():
    model, together = classifier(), evaluate(classifier(), METHODS, data())
    for row in together[1:]:
        assert evaluate(model, [row.method], data()) == [together[0], row]


@pytest.mark.slow
def test_data_are_read_once():
    read = iter(data())  # a second pass would find nothing
    rows = evaluate(classifier(), METHODS, read)
    assert {row["images"] for row in rows} == {8}


@pytest.mark.parametrize(("num_classes", "scores"), [(12, ["top1", "top5"]), (6, ["top1", "top5"]), (5, ["top1"])])
def test_top_5_of_more_than_five_classes(num_classes, scores):
    row = evaluate(classifier(num_classes), [], data(num_classes))[0]
    assert [key for key in row if key.startswith("top")] == scores


HEADS = (*tiny.PLAIN, "distilled", "avg_fc_norm", "avgmax", "map", "hf_vit_model", "hf_deit_teacher", "hf_dinov2_model")
"""Every way to read the tokens; the other hosts differ in their blocks."""


def read_by_classifier(model, batches):
    """(B, C) features in the host's own words, for timm's models; None for others."""
    if not hasattr(model, "forward_head"):
        return None
    with torch.no_grad():
        return torch.cat([model.forward_head(model.forward_features(x), pre_logits=True) for x, _ in batches])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("host", cells([name for name in HOSTS if name not in ("headless", "no_pool")], HEADS))
def test_every_host_form(host):
    model = HOSTS[host]()
    batches = data(num_classes=5)
    if ask(model).tasks(model):  # evaluated in `hosts/transformers/test_hf_dense_tasks.py`
        with pytest.raises(VitrimError, match=r"unknown task of .*'classification'"):
            evaluate(model, ["none"], vitrim.ScoredData(batches, task="classification"))
        return
    if not ask(model).classifiers(model):
        if ask(model).num_classes(model) is None:
            with pytest.raises(VitrimError, match="does not say how many classes it predicts"):
                evaluate(model, ["none"], batches)
        else:
            none = evaluate(model, ["none"], batches)[1]
            assert (none["neighbours"], none["loss"]) == (1.0, 0.0)
        return
    dense, none, tome = evaluate(model, ["none", "tome:r=4"], batches)
    with torch.no_grad():
        right = sum(int((tiny.logits(model(x)).argmax(1) == y).sum()) for x, y in batches)
    assert dense["top1"] == right / dense["images"]
    assert dense["gmacs"] == count_macs(model, batches[0][0][:1]).gmacs()
    assert none["agreement"] == 1.0
    assert none["cosine"] == pytest.approx(1.0, abs=1e-6)
    copied, _ = reduced(model, "tome:r=4")
    assert tome["gmacs"] == count_macs(copied, batches[0][0][:1]).gmacs()
    features, changed = read_by_classifier(model, batches), read_by_classifier(copied, batches)
    if features is not None:
        assert tome["cosine"] == pytest.approx(
            float(torch.cosine_similarity(changed, features, dim=1).mean()), abs=1e-6
        )
    assert 0.0 < tome["cosine"] < 1.0


# ---- random numbers, dtype


def test_every_batch_draws_anew():
    evaluation = started(classifier(), ["random:keep_rate=0.4"])
    sums = [0.0]
    for index in range(4):
        evaluation.update(batch(data()[0], index))
        row = evaluation.rows()[1]
        sums.append(row["cosine"] * row["images"])
    added = [after - before for before, after in itertools.pairwise(sums)]
    assert len({round(value, 6) for value in added}) == 4


def test_dtype_is_that_of_the_computation_also_under_autocast():
    model = classifier()
    full = evaluate(model, ["tome:r=4", ATM], data())
    half = evaluate(vitrim.ScoredModel(model, dtype=torch.bfloat16), ["tome:r=4", ATM], data())
    assert half[1]["cosine"] != full[1]["cosine"]
    assert half[1]["cosine"] == pytest.approx(full[1]["cosine"], abs=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert evaluate(model, ["tome:r=4", ATM], data()) == full  # all in float32


# ---- the model is left as it was


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "training"), [(None, True), (torch.bfloat16, False)])
def test_the_model_is_left_as_it_was(dtype, training):
    model = classifier().train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluate(vitrim.ScoredModel(model, dtype=dtype), METHODS, data())
    assert model.training is training
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.dtype == torch.float32 and value.requires_grad for value in model.parameters())
    assert not any(isinstance(module, ReducedBlock) for module in model.modules())


def test_a_model_in_training_mode_is_evaluated_in_eval_mode():
    model = VisionTransformer(**GEOMETRY, drop_rate=0.5)
    assert evaluate(model.train(), [], data(5)) == evaluate(model.eval(), [], data(5))


def test_reduced_models_share_one_copy_of_the_parameters():
    model = classifier()
    evaluation = started(model, METHODS)
    own = {id(parameter) for parameter in model.parameters()}
    held = {id(p) for contestant in evaluation.models for p in contestant.model.parameters()}
    assert len(held) == len(own)
    assert not held & own


# ---- errors


def test_a_method_that_fails_leaves_no_half_counted_batch(monkeypatch):
    evaluation = started(classifier(), ["none", "tome:r=4"])
    evaluation.update(batch(data()[0]))
    rows = evaluation.rows()

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(evaluation.models[2].model, "forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        evaluation.update(batch(data()[1], 1))
    assert evaluation.rows() == rows


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 12]), "label 12 is beyond the model's 12 classes, 0 to 11"),
        (torch.tensor([-1, 0]), "label -1 is beyond the model's 12 classes, 0 to 11"),
        (torch.zeros(2, 12), r"expected 2 integer labels, one per image, got torch.float32 of \(2, 12\)"),
    ],
)
def test_labels_must_be_classes_of_the_model(labels, message):
    with pytest.raises(DataError, match=message):
        evaluate(classifier(), ["tome:r=4"], [(images(2), labels)])


def test_broken_weights_are_an_error_and_no_number():
    model = classifier()
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)
    with pytest.raises(VitrimError, match="dense: the model's outputs are not finite"):
        evaluate(model, ["tome:r=4"], data())


def test_no_images():
    with pytest.raises(DataError, match="no images"):
        evaluate(classifier(), ["tome:r=4"], [])
    assert started(classifier(), ["tome:r=4"]).rows() == []


def test_models_and_methods_that_do_not_fit():
    assert "recall1" in evaluate(HOSTS["headless"](), [], data())[0]  # it has an embedding
    with pytest.raises(VitrimError, match="this Linear does not say how many classes it predicts"):
        evaluate(nn.Linear(2, 2), [], data())
    with pytest.raises(VitrimError, match="unknown method 'tomme'; did you mean 'tome'"):
        evaluate(classifier(), ["tomme"], data())
    with pytest.raises(UnsupportedModelError, match="class token"):
        evaluate(HOSTS["no_class_token_avg"](), ["none", "evit"], data())


def test_an_error_while_reading_passes_through_after_the_progress_so_far():
    seen: list[tuple[int, int | None]] = []

    def broken():
        yield from data()
        raise DataError("cannot read image 8")

    with pytest.raises(DataError, match="cannot read image 8"):
        evaluate(classifier(), ["tome:r=4"], broken(), on_progress=lambda images, of: seen.append((images, of)))
    assert seen == [(5, None), (8, None)]


def test_the_total_of_a_process_is_its_share_of_the_images_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class First(Processes):
        def gather(self, value: Any) -> list[Any]:
            return [value]

    monkeypatch.setattr(evaluation.Processes, "launched", lambda device: First(0, 2))
    pixels = np.zeros((32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "png")
    model = timm.create_model("test_vit", img_size=32, patch_size=8, num_classes=2)
    seen: list[tuple[int, int | None]] = []
    evaluation.evaluate(
        model,
        "tome:r=2",
        vitrim.ScoredData(ImageDataset([file.getvalue()] * 5, [0, 1, 0, 1, 0]), batch_size=2),
        on_progress=lambda images, of: seen.append((images, of)),
    )
    assert seen == [(2, 3), (3, 3)]
