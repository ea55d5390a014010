"""What decides a number is stored with it, and measurements of anything else are not taken over."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import vitrim
from vitrim.data import ImageDataset
from vitrim.engines.machine import environment
from vitrim.errors import VitrimError
from vitrim.loading import ModelSpec, ScoredModel, create_model
from vitrim.measure.identity import first_difference, identity
from vitrim.measure.task_data import open_task
from vitrim.tasks import make_task
from vitrim.tasks.options import Protocol
from vitrim.tuning import optimize as optimizing
from vitrim.tuning import tune as tuning
from vitrim.tuning.search import Searches

OPTIONS = {"img_size": 32, "patch_size": 8, "depth": 4, "embed_dim": 32, "num_heads": 2, "num_classes": 4}


def model(seed: int = 0, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    return create_model("test_vit", options={**OPTIONS, **changes})


def png(value: int) -> bytes:
    Image.new("RGB", (32, 32), (value, value, value)).save(file := io.BytesIO(), "png")
    return file.getvalue()


def data(first: int = 0, label: int = 0) -> ImageDataset:
    return ImageDataset([png(first), *map(png, range(1, 90))], [label, *(number % 4 for number in range(1, 90))])


# ---- digests


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(4, 2))


def heads(net: Any) -> None:
    net[1].num_heads = 1


def weight(net: Any) -> None:
    net[0].weight.data[0, 0] += 1e-6


def eps(net: Any) -> None:
    net.append(nn.LayerNorm(2, eps=1e-5, elementwise_affine=False))


@pytest.mark.parametrize(("change", "name"), [(heads, "model"), (weight, "weights"), (eps, "model")])
def test_a_model_is_its_weights_and_what_it_does_with_them(change: Callable[[nn.Module], None], name: str) -> None:
    other = small()
    change(other)
    first, second = (identity(one, None, [torch.zeros(1)]) for one in (small(), other))
    assert [key for key in first if first[key] != second[key]] == [name]
    assert identity(small(), None, [torch.zeros(1)]) == first


def test_images_are_their_contents_their_labels_and_how_they_are_read() -> None:
    net = small()
    first = identity(net, None, data())
    assert identity(net, None, data()) == first
    read = data()
    read.transform = lambda image: torch.zeros(1)
    others = {"images": [data(first=255), data(label=1)], "transform": [read]}
    for name, every in others.items():
        for other in every:
            found = identity(net, None, other)
            assert [key for key in first if first[key] != found[key]] == [name]
    # batches in memory, with and without targets
    images, targets = torch.arange(6.0).reshape(2, 3), torch.tensor([0, 1])
    kinds: list[Any] = [[images], [(images, targets)], [(images, targets.flip(0))], [images.flip(0)], [images.half()]]
    assert len({identity(net, None, each)["images"] for each in kinds}) == len(kinds)
    assert identity(net, None, TensorDataset(images)) != identity(net, None, TensorDataset(images.flip(0)))


def test_a_function_is_the_same_at_another_address() -> None:
    first, second = data(), data()
    for one in (first, second):

        def transform(image: Any) -> torch.Tensor:
            return torch.zeros(1)

        one.transform = transform
    assert first.transform is not second.transform
    assert identity(small(), None, first) == identity(small(), None, second)


def test_a_task_is_how_it_reads_predictions() -> None:
    tasks = [make_task("segmentation", 3) for _ in range(4)]
    tasks[1].protocol = Protocol(mode="slide", window=16)
    tasks[2].columns = [2, 1, 0]
    found = [identity(small(), task, [torch.zeros(1)]) for task in tasks]
    assert found[3] == found[0]
    assert len({one["task"] for one in found}) == 3


def test_learned_parameters_and_files_are_their_contents(tmp_path: Path) -> None:
    for name, content in (("one", b"a"), ("same", b"a"), ("other", b"b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "reducers.safetensors").write_bytes(content)
    net = small()
    one, same, other = (
        identity(net, None, [torch.zeros(1)], learned=tmp_path / name)["learned"] for name in ("one", "same", "other")
    )
    assert one == same != other
    path = tmp_path / "one" / "reducers.safetensors"
    before = identity(net, None, [], files=[path])
    path.write_bytes(b"c")
    assert first_difference(before, identity(net, None, [], files=[path])) is not None


def test_the_weights_beside_a_file_are_part_of_it(tmp_path: Path) -> None:
    """An .xml file is a graph, and its numbers lie in the .bin file beside it."""
    file = vitrim.engines.Exported(tmp_path / "m.xml", "openvino", {}, 0, 0, {})
    for name in ("m.xml", "m.bin", "n.bin"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in file.files] == ["m.xml", "m.bin"]


def test_the_first_difference_is_short() -> None:
    assert first_difference({"a": {"b": 1}, "c": 2}, {"a": {"b": 1}, "c": 2}) is None
    assert first_difference({}, {"new": "x" * 99}) == ("new", "None", "x" * 57 + "...")
    assert first_difference({"old": 1}, {}) == ("old", "1", "None")
    assert first_difference({"a": "0" * 64}, {"a": "f" * 64}) == ("a", "0" * 12, "f" * 12)


# ---- commands


class Reached(Exception):
    """The study accepted what was given."""


def stop_with(study: Any) -> None:
    study.value("a number", lambda: 0.5)
    raise Reached


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches measure one number."""

    def race(*given: Any, **_: Any) -> None:
        stop_with(next(one for one in given if hasattr(one, "value")))

    monkeypatch.setattr(optimizing, "Race", race)
    monkeypatch.setattr(Searches, "run", lambda self: stop_with(self.store))
    monkeypatch.setattr(tuning, "sweep", lambda *given, **_: stop_with(given[4]))


def write(path: Path, seed: int) -> None:
    """A table with two columns of labels."""
    draw = np.random.default_rng(seed)
    rows = [{"bytes": png(int(value)), "path": None} for value in draw.integers(0, 255, 90)]
    labels = np.arange(90) % 4
    pq.write_table(pa.table({"image": rows, "a": labels, "b": labels[::-1]}), path)


def optimized(net: nn.Module, images: Any, out: Any) -> None:
    vitrim.optimize(net, images, methods="topk", engine="torch.export", precision="fp32", out=out)


def tuned(net: nn.Module, images: Any, out: Any) -> None:
    vitrim.tune(net, "topk", images, target="macs=0.8", out=out)


def swept(net: nn.Module, images: Any, out: Any) -> None:
    vitrim.tune_grid(net, "topk:keep_rate=0.5|0.7", images, out=out)


@pytest.mark.filterwarnings("ignore:the model has random weights:UserWarning")
@pytest.mark.filterwarnings("ignore:a loss of 1 point:UserWarning")
@pytest.mark.parametrize("command", [optimized, tuned, swept])
def test_a_study_of_other_weights_labels_or_images_is_not_resumed(
    command: Callable[..., None], stopped: None, tmp_path: Path
) -> None:
    table, out = tmp_path / "d.parquet", tmp_path / "out"
    few = {"few": True} if command is optimized else {}

    def attempt(column: str = "a", seed: int = 0, resume: bool = True, **changes: Any) -> None:
        kind = vitrim.JudgedData if few else vitrim.DataSpec
        images = kind(str(table), label_column=column, limit=90, **few)
        command(model(seed, **changes), images, vitrim.Results(out, resume=resume))

    write(table, 0)
    with pytest.raises(Reached):
        attempt(resume=False)
    before = (out / "study.jsonl").read_bytes()
    with pytest.raises(Reached):
        attempt()
    for changes, name in (({"column": "b"}, "images"), ({"seed": 1}, "weights"), ({"num_heads": 4}, "model")):
        with pytest.raises(VitrimError, match=rf"is of another run: its (content\.{name}|made_for\.parameters) is"):
            attempt(**changes)
    write(table, 9)
    with pytest.raises(VitrimError, match=r"is of another run: its content\.images is"):
        attempt()
    assert (out / "study.jsonl").read_bytes() == before


def test_an_evaluation_with_other_learned_parameters_is_not_resumed(tmp_path: Path) -> None:
    """The dense model and its images are the same; what the method learned is not."""
    net, images, out = model(), data(), tmp_path / "out"
    reduction = vitrim.reduce_(learning := model(), "dynamicvit:keep_rate=0.5")
    reduction.save(tmp_path / "learned")

    def attempt(*, resume: bool = True) -> None:
        spec = ScoredModel(net, learned=tmp_path / "learned")
        vitrim.evaluate(spec, "dynamicvit:keep_rate=0.5", images, out=vitrim.Results(out, resume=resume))

    attempt(resume=False)
    attempt()
    with torch.no_grad():
        for name, value in learning.named_parameters():
            if name not in dict(net.named_parameters()):
                value.add_(1.0)
    reduction.save(tmp_path / "learned")
    with pytest.raises(VitrimError, match=r"holds an evaluation with content\.learned="):
        attempt()


@pytest.mark.filterwarnings("ignore:the model has random weights:UserWarning")
@pytest.mark.filterwarnings("ignore:a loss of 1 point:UserWarning")
def test_the_first_line_of_a_study_names_what_it_is_of(stopped: None, tmp_path: Path) -> None:
    images = vitrim.JudgedData(data(), few=True)
    with pytest.raises(Reached):
        optimized(model(), images, tmp_path)
    head = json.loads((tmp_path / "study.jsonl").read_text().splitlines()[0])["value"]
    task, dataset = open_task(ModelSpec(model()).load(), images.source)
    assert head["content"] == identity(model(), task, dataset)
    assert head["environment"] == environment(dtype="fp32", seed=0)
