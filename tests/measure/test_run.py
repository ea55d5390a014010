"""The measuring engine: several labels, processes, partial results that are resumed, records of decisions."""

from __future__ import annotations

import copy
import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.metrics import average_precision_score
from test_evaluation import ATM, classifier, images
from torch import Tensor
from torch.utils.data import TensorDataset
from torchmetrics import Metric

import vitrim
from vitrim.data import DataError
from vitrim.engines.machine import seeded_draws
from vitrim.errors import VitrimError
from vitrim.measure import run as run_file
from vitrim.measure.contestants import contestants
from vitrim.measure.decisions import Decisions, DecisionsProbe, file_name, save_decisions
from vitrim.measure.evaluation import evaluate, standard_probes
from vitrim.measure.identity import digest_of
from vitrim.measure.probes import Gauge, joined
from vitrim.measure.records import Batch, Processes, Row, as_batches, read
from vitrim.measure.run import Measurement, Partial
from vitrim.tasks import Task, make_task

METHODS = ["tome:r=4", "random:keep_rate=0.5", ATM]
SETTINGS = {"model": "made", "methods": METHODS}

others = partial(pytest.param, marks=pytest.mark.slow)
"""Further pairs of how an evaluation is cut and what its labels are: these have nothing to do with each other."""


def dataset(count: int = 11, several: bool = False) -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(12, (count,), generator=generator)
    many = (torch.rand(count, 12, generator=generator) < 0.3).float()
    return TensorDataset(images(count, seed=8), many if several else labels)


def started(several: bool = False, processes: Processes | None = None) -> Measurement:
    task = make_task("multilabel" if several else "classification", 12)
    models = contestants(classifier(), METHODS, task)
    return Measurement(models, [*standard_probes(task), DecisionsProbe()], task, processes=processes, seed=3)


def gathered(measurements: list[Measurement]) -> Measurement:
    """The first one, to which `Processes.gather` hands what all have seen, as it does between real processes."""

    class Together(Processes):
        def gather(self, value: object) -> list[object]:
            return [(one.images, one.state()) for one in measurements]

    first = measurements[0]
    first.processes = Together(0, len(measurements))
    return first


# ---- tasks


def test_several_labels_are_scored_as_by_sklearn():
    data = dataset(several=True)
    dense, tome = evaluate(classifier(), ["tome:r=4"], vitrim.ScoredData(read(data, 4), task="multilabel")).rows
    reduced = classifier()
    vitrim.reduce_(reduced, "tome:r=4")
    with torch.no_grad():
        logits, changed = classifier()(data.tensors[0]), reduced(data.tensors[0])
    targets = data.tensors[1].numpy()
    precisions = [
        average_precision_score(targets[:, k], logits[:, k].double().numpy()) for k in range(12) if targets[:, k].any()
    ]
    assert dense["mAP"] == pytest.approx(sum(precisions) / 12, abs=1e-6)
    assert dense["mAP_occurring"] == pytest.approx(np.mean(precisions), abs=1e-6)
    found = [
        len(a & b) / len(a | b) if a | b else 1.0
        for a, b in (
            (set((one > 0).nonzero().flatten().tolist()), set((other > 0).nonzero().flatten().tolist()))
            for one, other in zip(changed, logits, strict=True)
        )
    ]
    assert tome["agreement"] == pytest.approx(np.mean(found), abs=1e-12)
    assert 0 < tome["agreement"] < 1


def test_targets_of_another_task_are_refused():
    with pytest.raises(DataError, match=r"expected 4 rows of 12 classes, 0 or 1 each, got torch.int64 of \(4,\)"):
        evaluate(classifier(), [], vitrim.ScoredData(read(dataset(), 4), task="multilabel"))
    with pytest.raises(DataError, match=r"expected 4 integer labels, one per image, got torch.float32 of \(4, 12\)"):
        evaluate(classifier(), [], read(dataset(several=True), 4))


# ---- processes


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("processes", "several"), [(2, True), (3, False), others(2, False), others(3, True)])
def test_rows_are_the_same_however_many_processes_share_the_batches(processes: int, several: bool):
    alone = started(several)
    for batch in read(dataset(several=several), 3):
        alone.update(batch)
    measurements = []
    for index in range(processes):
        part = Processes(index, processes)
        measurements.append(started(several, part))
        turns = list(read(dataset(several=several), 3, processes=part))
        assert len(turns) == -(-4 // processes)
        for batch in turns:
            measurements[-1].update(batch)
    together = gathered(measurements)
    assert together.rows() == alone.rows()
    found = [gauges[-1].decisions() for gauges in together.findings().gauges[1:]]
    expected = [gauges[-1].decisions() for gauges in alone.findings().gauges[1:]]
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.source, other.source)
        assert np.array_equal(one.ids, np.arange(11))


def test_every_image_is_read_once_in_batches_that_do_not_depend_on_processes():
    def batches(processes: int) -> dict[int, list[int]]:
        found = {}
        for index in range(processes):
            for batch in read(dataset(10), 3, processes=Processes(index, processes)):
                assert torch.equal(batch.images, dataset(10).tensors[0][batch.ids])
                if batch.counts:
                    assert found.setdefault(batch.index, batch.ids.tolist()) == batch.ids.tolist()
        return found

    assert batches(1) == {0: [0, 1, 2], 1: [3, 4, 5], 2: [6, 7, 8], 3: [9]}
    assert batches(2) == batches(3) == batches(8) == batches(1)


def test_batches_without_processes_are_numbered():
    made = [(torch.zeros(2, 3, 4, 4), torch.zeros(2)), (torch.zeros(1, 3, 4, 4), torch.zeros(1))]
    assert [(b.index, b.ids.tolist(), b.counts) for b in as_batches(made)] == [(0, [0, 1], True), (1, [2], True)]
    with pytest.raises(DataError, match=r"expected images \(B, C, H, W\), got a tensor of \(3, 4, 4\)"):
        list(as_batches([(torch.zeros(3, 4, 4), torch.zeros(3))]))


def test_images_of_integers_are_refused_in_batches_and_in_a_dataset():
    raw = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2)
    for batches in (as_batches([raw]), read(TensorDataset(*raw), 2)):
        with pytest.raises(DataError, match=r"as the model takes them, normalised, got torch\.uint8: convert"):
            next(batches)


# ---- partial results


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("stop", "several"), [(1, False), (3, True), others(1, True), others(3, False)])
def test_a_measurement_that_was_stopped_goes_on_to_the_same_rows(tmp_path: Path, stop: int, several: bool):
    whole = started(several)
    for batch in read(dataset(several=several), 3):
        whole.update(batch)
    first, partial = started(several), Partial(tmp_path / "part", SETTINGS, Processes())
    for batch in list(read(dataset(several=several), 3))[:stop]:
        first.update(batch)
    partial.keep(first, now=True)

    second, partial = started(several), Partial(tmp_path / "part", SETTINGS, Processes(), resume=True)
    done = partial.restore(second)
    assert (done, second.images) == (stop, 3 * stop)
    assert second.rows() == first.rows()
    for batch in read(dataset(several=several), 3, done=done):
        second.update(batch)
    assert second.rows() == whole.rows()
    records = [one.findings().gauges[1][-1].decisions() for one in (second, whole)]
    assert np.array_equal(records[0].source, records[1].source)


@pytest.mark.slow
def test_lists_come_back_in_their_order(tmp_path: Path):
    """Of more than ten batches: as text, 10 comes before 2."""
    first, second = started(), started()
    for batch in read(dataset(12), 1):
        first.update(batch)
    partial = Partial(tmp_path / "part", SETTINGS, Processes())
    partial.keep(first, now=True)
    partial.restore(second)
    states, again = first.state(), second.state()
    lists = [(gauge, key) for gauge, state in states.items() for key, value in state.items() if isinstance(value, list)]
    assert any(len(states[gauge][key]) == 12 for gauge, key in lists)
    for gauge, key in lists:
        pairs = zip(states[gauge][key], again[gauge][key], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), key


def test_a_state_is_a_copy(tmp_path: Path):
    """What metrics add in place, and what is appended to their lists, later, is not in it; nor the other way round."""

    class Seen(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", torch.zeros(2), "sum")
            self.add_state("values", [], "cat")

        def update(self, value: Tensor) -> None:
            self.total += value
            self.values.append(value)

        def compute(self) -> Tensor:
            return self.total

    class Watching(Gauge):
        def see(self, batch: Batch, output: object, dense: object) -> None:
            self.metrics["seen"].update(batch.images)

        def result(self) -> dict[str, object]:
            return {}

    gauge = Watching({"seen": Seen()})
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    gauge.metrics["seen"].update(one)
    state = gauge.state()
    gauge.metrics["seen"].update(two)
    assert state["seen.total"].tolist() == [1.0, 2.0]
    assert [value.tolist() for value in state["seen.values"]] == [[1.0, 2.0]]
    state["seen.total"] += 5.0
    state["seen.values"].clear()
    assert gauge.metrics["seen"].total.tolist() == [11.0, 22.0]
    assert len(gauge.metrics["seen"].values) == 2


def test_what_is_gathered_is_kept_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    partial, measurement = Partial(tmp_path / "part", SETTINGS, Processes()), started()
    measurement.update(next(read(dataset(), 3)))
    for seconds, kept in ((-1.0, False), (1.0, True)):
        later = partial.written + run_file.SECONDS_BETWEEN + seconds
        monkeypatch.setattr(run_file.time, "monotonic", lambda later=later: later)
        partial.keep(measurement)
        assert (tmp_path / "part" / "part-0.safetensors").is_file() is kept


def test_states_are_joined_in_their_order():
    """And those that lack a sum are refused, and not counted as nothing."""
    first = {"a": torch.tensor([1.0]), "b": [torch.tensor(1)]}
    whole = joined([first, {"a": torch.tensor([2.0]), "b": [torch.tensor(2), torch.tensor(3)]}, {"b": []}])
    assert (whole["a"].tolist(), [value.item() for value in whole["b"]]) == ([3.0], [1, 2, 3])
    assert (first["a"].tolist(), len(first["b"])) == ([1.0], 1)
    with pytest.raises(TypeError):  # a list in one process and a tensor in another
        joined([{"a": []}, {"a": torch.zeros(1)}])
    measurement = started()
    gauge = next(gauge for gauges in measurement.gauges for gauge in gauges if gauge.state())
    name = next(name for name, value in gauge.state().items() if isinstance(value, Tensor))
    with pytest.raises(KeyError, match=f"no {name} in the state of a gauge"):
        gauge.load({key: value for key, value in gauge.state().items() if key != name})


def test_nothing_is_resumed_from_a_folder_that_is_not_there(tmp_path: Path):
    partial, measurement = Partial(tmp_path / "part", SETTINGS, Processes()), started()
    assert partial.restore(measurement) == 0
    assert not (tmp_path / "part").exists()
    partial.keep(measurement)  # only now and then: nothing is written yet
    assert not (tmp_path / "part").exists()


@pytest.fixture(scope="module")
def of_one_batch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a partial measurement of one batch; tests take copies."""
    folder = tmp_path_factory.mktemp("kept") / "part"
    measurement = started()
    measurement.update(next(read(dataset(), 3)))
    Partial(folder, SETTINGS, Processes()).keep(measurement, now=True)
    return folder


@pytest.fixture
def kept(of_one_batch: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(of_one_batch, tmp_path / "part"))


@pytest.mark.parametrize(
    ("settings", "processes", "message"),
    [
        ({**SETTINGS, "methods": ["tome:r=5"]}, 1, r"holds an evaluation with methods=\['tome:r=4', .*, this one has"),
        ({**SETTINGS, "limit": 3}, 1, "holds an evaluation with limit=None, this one has 3: resume with the same"),
        (SETTINGS, 2, "holds an evaluation with processes=1, this one has 2"),
    ],
)
def test_other_settings_are_refused_and_nothing_is_written(kept: Path, settings, processes, message):
    before = (kept / "part-0.safetensors").read_bytes()
    with pytest.raises(VitrimError, match=message):
        Partial(kept, settings, Processes(0, processes), resume=True)
    assert [file.name for file in kept.iterdir()] == ["part-0.safetensors"]
    assert (kept / "part-0.safetensors").read_bytes() == before


def test_a_folder_in_use_is_not_begun_anew(kept: Path):
    with pytest.raises(VitrimError, match="holds an evaluation: resume it, or name another folder"):
        Partial(kept, SETTINGS, Processes())


@pytest.mark.parametrize("damage", ["changed", "missing", "list", "images", "turns", "deep"])
def test_a_partial_measurement_whose_contents_are_damaged_is_one_line(kept: Path, damage: str):
    """A whole file of safetensors, but not what a measurement has written."""
    file = kept / "part-0.safetensors"
    with safe_open(file, "pt") as parts:
        header = json.loads(parts.metadata()["vitrim"])
        tensors = {name: parts.get_tensor(name) for name in parts.keys()}  # noqa: SIM118 -- it is no dict
    name = next(name for name in sorted(tensors) if name.endswith("tp"))
    if damage == "changed":
        tensors[name] += 1
    elif damage == "missing":
        del tensors[name]
    elif damage == "shape":
        tensors[name] = torch.zeros(3, dtype=tensors[name].dtype)
    elif damage == "list":
        tensors[f"{name}/00000000"] = tensors.pop(name)
    else:
        header |= {damage: "3"} if damage == "images" else {damage: -1}
    if damage != "changed":
        header["digest"] = digest_of(dict(sorted(tensors.items())))
    text = "[" * 100_000 if damage == "deep" else json.dumps(header)
    save_file(tensors, file, {"vitrim": text})
    measurement = started()
    with pytest.raises(VitrimError, match=r"part-0\.safetensors is .*damaged.*: name another folder$"):
        Partial(kept, SETTINGS, Processes(), resume=True).restore(measurement)


# ---- rows and decisions


def test_a_row_is_a_mapping_that_json_takes():
    row = Row("tome:r=4", {"top1": 0.5})
    assert json.loads(json.dumps(dict(row))) == {"method": "tome:r=4", "top1": 0.5} == row
    assert row != Row("tome:r=5", {"top1": 0.5})
    with pytest.raises(KeyError):
        row["top5"]


def recorded(method: str) -> Decisions:
    task: Task = make_task("classification", 12)
    measurement = Measurement(contestants(classifier(), [method], task), [DecisionsProbe()], task)
    for batch in read(dataset(), 4):
        measurement.update(batch)
    dense, (gauge,) = measurement.findings().gauges
    assert dense[0].decisions() is None
    return gauge.decisions()


@pytest.mark.parametrize("method", ["tome:r=4", "topk:keep_rate=0.5", f"{ATM},granularity=image"])
def test_decisions_are_those_of_the_states(method: str, tmp_path: Path):
    found = recorded(method)
    model = copy.deepcopy(classifier())
    reduction = vitrim.reduce_(model, method, record=True)
    for first in range(0, 11, 4):
        with torch.no_grad():
            model(dataset().tensors[0][first : first + 4])
        for block, state in enumerate(reduction.states[1:]):
            for image in range(len(state.size)):
                assert found.source[first + image, block].tolist() == state.source[image].tolist()
                tokens = state.num_tokens if state.mask is None else int(state.mask[image].sum())
                assert found.num_tokens[first + image, block] == tokens
    assert found.header == {"method": reduction.config.describe(), "num_prefix": 1, "soft": False}

    found.save(tmp_path / "one.npz")
    again = Decisions.load(tmp_path / "one.npz")
    assert np.array_equal(again.source, found.source)
    assert np.array_equal(again.num_tokens, found.num_tokens)
    assert np.array_equal(again.ids, found.ids)
    assert again.header["method"] == found.header["method"]
    with np.load(tmp_path / "one.npz") as arrays:
        assert arrays["source"].dtype == np.uint8


def test_more_tokens_than_a_byte_counts_are_kept(tmp_path: Path):
    source = np.arange(-1, 299, dtype=np.int32).reshape(1, 1, 300)
    Decisions({"method": "none"}, np.arange(1), source, np.full((1, 1), 300)).save(tmp_path / "many.npz")
    assert np.array_equal(Decisions.load(tmp_path / "many.npz").source, source)


def test_decisions_of_every_method_get_a_file(tmp_path: Path):
    measurement = started()
    measurement.update(next(read(dataset(), 3)))
    files = save_decisions(measurement.findings(), tmp_path / "new")
    assert [file.name for file in files] == [f"{file_name(model.name)}.npz" for model in measurement.models[1:]]
    assert [Decisions.load(file).header["method"] for file in files] == [m.name for m in measurement.models[1:]]


def test_decisions_about_a_single_image_have_its_shape():
    measurement = started()
    measurement.update(next(read(dataset(1), 3)))
    one = measurement.findings().gauges[1][-1].decisions()
    assert (one.ids.shape, one.source.ndim, len(one.source), len(one.num_tokens)) == ((1,), 3, 1, 1)


def test_nothing_is_seeded_but_what_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.manual_seed` seeds the generators of all accelerators, which nobody would put back."""
    before = torch.get_rng_state()
    with seeded_draws(torch.device("cpu"), 7):
        drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    monkeypatch.setattr(torch, "manual_seed", None)
    with seeded_draws(torch.device("cpu"), 7):
        assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(torch.get_rng_state(), before)


def test_long_settings_are_files_of_their_own() -> None:
    rates = ",".join(["0.912"] * 40)
    names = [file_name(f"topk:keep_rate=[{rates}],blocks=[1,{last}]") for last in (38, 39)]
    assert max(map(len, names)) <= 120
    assert names[0] != names[1]
