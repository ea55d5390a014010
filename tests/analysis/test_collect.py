"""Records of one pass: against the states of a plain forward, the engine's own numbers, and the study's runs."""

from __future__ import annotations

import copy
import itertools
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch.utils.data import TensorDataset

import golden_learned as learned
import golden_models as golden
import vitrim
from golden_files import Reference
from golden_runs import FEATURE_BLOCKS, STAGES, composed, mask
from tiny import GEOMETRY, images
from vitrim.analysis import collect as module
from vitrim.analysis.collect import Collect, collect, records_of
from vitrim.analysis.families.depth import depth_map
from vitrim.analysis.families.patterns import v_measure
from vitrim.analysis.record import Record
from vitrim.data import DataError
from vitrim.errors import VitrimError
from vitrim.measure.contestants import contestants
from vitrim.measure.decisions import DecisionsProbe
from vitrim.measure.evaluation import standard_probes
from vitrim.measure.records import Processes, read
from vitrim.measure.run import Measurement, run
from vitrim.tasks import make_task

ATM = "atm:alpha=0.9,beta=0.2,theta_min=0.1"
METHODS = [
    *("tome:r=4", "topk:keep_rate=0.5", "evit:keep_rate=0.6", "ats:keep_rate=0.6", "kmedoids:keep_rate=0.5"),
    *("patchmerger:keep_rate=0.5", f"{ATM},granularity=image", "none"),
]


def classifier() -> VisionTransformer:
    """A model whose logits, and whose decisions, differ from image to image."""
    torch.manual_seed(1)
    model = VisionTransformer(**{**GEOMETRY, "num_classes": 12}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def dataset(count: int = 7) -> TensorDataset:
    return TensorDataset(images(count, seed=8), torch.arange(count) % 12)


@pytest.fixture(scope="module")
def records() -> dict[str, Record]:
    return collect(classifier(), METHODS, read(dataset(), 3), header={"model": "made"})


def test_logits_and_features_are_those_of_the_model(records: dict[str, Record]) -> None:
    model, method = classifier(), METHODS[2]
    x, y = dataset().tensors
    with torch.no_grad():
        plain, tokens = model(x), model.forward_features(x)[:, 0]
        reduction = vitrim.reduce_(copied := copy.deepcopy(model), method, record=True)
        logits, reduced = copied(x), copied.forward_features(x)[:, 0]
    assert reduction.config.describe() == method
    record = records[method]
    assert np.allclose(record.arrays["logits"], logits, rtol=2e-3, atol=2e-3)
    assert record.arrays["logits"].dtype == np.float16
    assert np.array_equal(record.first(), logits.argmax(1))
    assert np.allclose(record.feature(None), reduced, rtol=2e-3, atol=2e-3)
    assert np.allclose(records["dense"].feature(None), tokens, rtol=2e-3, atol=2e-3)
    assert np.allclose(record.arrays["head_cosine"], torch.cosine_similarity(reduced, tokens), atol=1e-5)
    divergence = torch.nn.functional.kl_div(
        logits.log_softmax(1), plain.log_softmax(1), log_target=True, reduction="none"
    ).sum(1)
    assert np.allclose(record.arrays["kl"], divergence, atol=1e-5)
    task = make_task("classification", 12)
    rows = {row.method: row for row in run(model, METHODS, [(x, y)], standard_probes(task), task=task)}
    for name, one in records.items():
        assert one.correct().mean() == rows[name]["top1"]
        *before, end = one.tokens().mean(0).tolist()
        *expected, _ = rows[name]["tokens_per_block"]  # ATM's last block computes the class token alone
        assert before == pytest.approx(expected)
        assert end == pytest.approx(rows[name]["tokens_at_end"])
        assert one.arrays["head_cosine"].mean() == pytest.approx(rows[name]["cosine"], abs=1e-6)


def test_class_tokens_are_those_after_the_blocks(records: dict[str, Record]) -> None:
    model, seen = classifier(), {}
    for depth, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _, args, out, depth=depth: seen.update({depth: out[:, 0]}))
    with torch.no_grad():
        model(dataset().tensors[0])
        plain = [seen[depth] for depth in range(len(model.blocks))]
        vitrim.reduce_(model, "tome:r=4")
        model(dataset().tensors[0])
    record = records["tome:r=4"]
    layers = len(model.blocks)
    assert record.header["feature_blocks"] == sorted({layers // 4, layers // 2, layers * 3 // 4, layers - 1})
    for block in record.header["feature_blocks"]:
        assert np.allclose(record.feature(block), seen[block], rtol=2e-3, atol=2e-3)
    for depth, token in enumerate(plain):
        expected = torch.cosine_similarity(seen[depth], token)
        assert np.allclose(record.arrays["cosine"][:, depth], expected, atol=1e-5)
    assert np.allclose(records["dense"].arrays["cosine"], 1, atol=1e-6)
    assert not records["dense"].arrays["kl"].any()


@pytest.mark.parametrize("method", METHODS)
def test_labels_are_the_decisions(records: dict[str, Record], method: str) -> None:
    task = make_task("classification", 12)
    measurement = Measurement(contestants(classifier(), [method], task), [DecisionsProbe()], task)
    for batch in read(dataset(), 3):
        measurement.update(batch)
    expected = measurement.findings().gauges[1][0].decisions()
    record, tokens = records[method], expected.source.shape[-1]
    source = np.tile(np.arange(tokens), (len(record), record.header["num_layers"], 1))
    for stage, block in enumerate(record.blocks):  # until the next block that changed something
        source[:, block:] = record.arrays["source"][:, stage, None]
    assert np.array_equal(source, expected.source)
    assert np.array_equal(record.arrays["num_tokens"], expected.num_tokens)
    assert np.array_equal(record.arrays["ids"], expected.ids)
    assert {name: record.header[name] for name in expected.header} == dict(expected.header)


@pytest.mark.parametrize("method", METHODS)
def test_stages_compose_to_the_labels(records: dict[str, Record], method: str) -> None:
    labels = records[method].labels()
    for image in labels:
        for before, after in itertools.pairwise(image):
            assert (after[before < 0] == -1).all()  # nothing comes back
            for token in set(before.tolist()) - {-1}:  # and no token is divided
                assert len(set(after[before == token].tolist())) == 1


def test_kept_patches_are_those_that_tokens_stand_on(records: dict[str, Record]) -> None:
    for method in METHODS:
        record = records[method]
        if record.header["soft"]:
            with pytest.raises(VitrimError, match="has no kept patches"):
                record.kept()
            continue
        kept, labels = record.kept(), record.labels()
        for (image, stage), tokens in np.ndenumerate(record.tokens()[:, record.blocks]):
            alone = list(set(labels[image, stage]) - {-1})
            if record.header["kind"] == "prune":
                sizes = [(labels[image, stage] == token).sum() for token in alone]
                assert kept[image, stage].sum() == sizes.count(1)
                assert (labels[image, stage][kept[image, stage]] >= 0).all()
            else:  # one patch of every group
                assert kept[image, stage].sum() == tokens - 1 == len(alone)
                assert set(labels[image, stage][kept[image, stage]]) == set(alone)
    assert records["none"].blocks == []
    evit = records["evit:keep_rate=0.6"]
    fused = (evit.labels() >= 0).sum(-1) - evit.kept().sum(-1)
    assert (fused[:, 0] > 0).all()


def test_the_depth_of_a_static_schedule(records: dict[str, Record]) -> None:
    record = records["topk:keep_rate=0.5"]
    depth = depth_map(record.kept(), record.blocks, record.header["num_layers"])
    counts = [record.num_patches, *(record.tokens()[0, record.blocks] - 1)]
    for block, before, after in zip(record.blocks, counts[:-1], counts[1:], strict=True):
        assert ((depth == block).sum(1) == before - after).all()


def test_one_pass_over_many_methods_is_many_passes_and_batches_do_not_matter(records: dict[str, Record]) -> None:
    method = "evit:keep_rate=0.6"
    alone = collect(classifier(), [method], [dataset().tensors])[method]
    for name, array in records[method].arrays.items():
        if name == "batch":
            continue
        found = alone.arrays[name]
        assert found.dtype == array.dtype
        assert np.array_equal(found, array) if array.dtype.kind in "iu" else np.allclose(found, array, atol=4e-3)


def test_processes_put_their_images_together(records: dict[str, Record]) -> None:
    """In the order of the ids, whatever process saw them."""
    task, method = make_task("classification", 12), "tome:r=4"
    seen = []
    for index in (0, 1):
        processes = Processes(index, 2)
        probe = Collect()
        measurement = Measurement(contestants(classifier(), [method], task), [probe], task, processes=processes)
        for batch in read(dataset(), 3, processes=processes):
            measurement.update(batch)
        seen.append((measurement.images, measurement.state()))
    measurement.processes = type("Together", (Processes,), {"gather": lambda self, value: seen})(1, 2)
    found = records_of(measurement.findings(), {"model": "made"})[method]
    assert found.header == records[method].header
    for name, array in records[method].arrays.items():
        assert np.array_equal(found.arrays[name], array), name


def test_what_is_not_wanted_is_left_out() -> None:
    probe = Collect(patterns=False)
    found = collect(classifier(), ["tome:r=4"], [dataset().tensors], probe)["tome:r=4"]
    assert {"source", "kept"}.isdisjoint(found.arrays)
    assert found.blocks == []
    one = collect(classifier(), ["tome:r=4"], [dataset().tensors], Collect(blocks=[1]))["tome:r=4"]
    assert one.arrays["features"].shape == (7, 1, classifier().embed_dim)


def test_the_class_is_that_of_the_logits_before_they_are_rounded() -> None:
    model = classifier()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor([8.0, 8.001, *[0.0] * 10]))
    found = collect(model, [], [dataset().tensors])["dense"]
    assert found.arrays["logits"].argmax(1).tolist() == [0] * 7
    assert found.first().tolist() == [1] * 7
    arrays = {"ids": np.arange(2), "logits": np.full((2, 2), 8, np.float16), "first": np.array([1, 0])}
    assert Record({}, arrays).first().tolist() == [1, 0]


def test_many_classes_keep_the_largest_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY_CLASSES", 11)
    monkeypatch.setattr(module, "TOP", 4)
    found = collect(classifier(), [], [dataset().tensors])["dense"]
    assert "logits" not in found.arrays
    with torch.no_grad():
        expected = classifier()(dataset().tensors[0]).topk(4)
    assert np.array_equal(found.arrays["top_classes"], expected.indices)
    assert np.array_equal(found.first(), expected.indices[:, 0])
    assert np.allclose(found.arrays["top_logits"], expected.values, rtol=2e-3, atol=2e-3)


def test_bad_input_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = dataset().tensors
    with pytest.raises(DataError, match="no images"):
        collect(classifier(), [], [])
    with pytest.raises(VitrimError, match="block 9 is none of the model's, 0 to 3"):
        collect(classifier(), [], [(x, y)], Collect(blocks=[9]))
    monkeypatch.setattr(module, "LARGEST", 5000)
    with pytest.raises(VitrimError, match=r"GiB for 700 images.*: set a limit of at most [0-9]+ images"):
        collect(classifier(), ["tome:r=4"], [(x, y)], Collect(num_images=700))


# ---- the study's runs


CONFIGS = {
    "topk": vitrim.TopK,
    "evit": partial(vitrim.EViT, rule="floor_initial_power"),
    "tome": vitrim.ToMe,
    "heuristic": partial(vitrim.L2, float32_rings=True),
    "dpcknn": partial(vitrim.DPCKNN, epsilon=1e-6),
}
RUNS = [f"analysis/run_{method}_{rate}" for method in CONFIGS for rate in (50, 70)]


@pytest.mark.filterwarnings("ignore::vitrim.ReductionWarning")  # of ToMe at 0.5, on purpose
@golden.cases([*RUNS, "analysis/run_deit_100"], slow=RUNS)  # what methods decide is compared in `tests/methods`
def test_the_runs_of_the_study(ref: Reference) -> None:
    """Those were in float32, where an image or two decides otherwise by a last bit."""
    settings, task, x = ref["config"]["args"], make_task("classification", 10), golden.images(ref)
    make = CONFIGS.get(settings["method"])
    models = contestants(golden.vit(ref), [] if make is None else [make(keep_rate=settings["keep_rate"])], task)
    if settings["method"] == "dpcknn":
        prefixes = {block: f"cluster_layers.{stage}." for stage, block in enumerate(STAGES)}
        learned.load_reducers(models[-1].model, ref, prefixes, {})
    targets, probe = torch.from_numpy(ref["targets"]).long(), Collect(blocks=FEATURE_BLOCKS)
    measurement = Measurement(models, [probe], task)
    for batch in read(TensorDataset(x, targets), 20):
        measurement.update(batch)
    gauge = measurement.gauges[-1][0]
    found, record = gauge.lists.compute(), gauge.record({})  # features of the record are rounded

    same = np.ones(len(x), bool)
    if "kept_abs/3" in ref:
        stored = [mask(ref[f"kept_abs/{block}"]) for block in STAGES]
        same &= np.all([np.equal(a, b).all(1) for a, b in zip(stored, record.kept().swapaxes(0, 1), strict=True)], 0)
    if "assign/3" in ref:
        stored = composed([ref[f"assign/{block}"] for block in STAGES])
        same &= (v_measure(stored, record.labels()) > 1 - 1e-12).all(1)
    assert same.sum() >= 58
    ref.compared.update(key for key in ref if key.startswith(("kept_abs/", "assign/")))
    rows = torch.from_numpy(same)
    for place, block in enumerate(FEATURE_BLOCKS):
        ref.check(f"cls_features/{block}", found["features"][rows, place].T, lambda stored: stored[:, rows])
    logits = found["logits"]
    top5 = logits.topk(5).indices
    ref.check("top5", top5[rows], lambda stored: stored[rows])
    if same.all():
        hit = top5 == targets[:, None]
        ref.check("top1_accuracy", 100 * hit[:, 0].double().mean())
        ref.check("top5_accuracy", 100 * hit.any(1).double().mean())
        losses = [F.cross_entropy(*pair) for pair in zip(logits.split(20), targets.split(20), strict=True)]
        ref.check("batch_loss", torch.stack(losses))
    else:  # numbers of all images
        ref.compared.update({"top1_accuracy", "top5_accuracy", "batch_loss"})
