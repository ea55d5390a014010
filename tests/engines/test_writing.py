"""Around the graph of an exported file: metadata, preprocessing, places, refusals; the model stays as it was."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiny
import vitrim
from vitrim.engines import Exported, check
from vitrim.engines import formats as file_formats
from vitrim.engines.exported import staged
from vitrim.engines.formats import formats, register_format
from vitrim.engines.formats.base import Array, Format, Graph, Run
from vitrim.engines.writing import FileSpec

pytestmark = pytest.mark.xdist_group("onnx")  # its libraries, which take seconds to import, in one process
SIZE = 32
CLASSES = ("cat", "dog", "car")
FOUND = ("nodes", "parity", "near_ties", "largest_difference")
"""What is known of a file when it is written, and so stands beside it alone."""


def model(**options: Any) -> nn.Module:
    import timm

    torch.manual_seed(0)
    small = {"img_size": SIZE, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 3}
    made: nn.Module = timm.create_model("test_vit", **{**small, **options})
    return made.eval()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Exported]:
    """A model, and an ONNX file of it that normalises its images itself."""
    made = model()
    path = tmp_path_factory.mktemp("exported") / "m.onnx"
    return made, vitrim.export(
        made, "tome:r=2", path, check=6, file=vitrim.FileSpec(preprocess=True, classes=CLASSES, name="a name")
    )


def test_metadata_are_in_the_file_and_beside_it(written: tuple[nn.Module, Exported]) -> None:
    _, file = written
    again = Exported.open(file.path)
    beside = json.loads(Path(f"{file.path}.json").read_text())
    inside = {key: value for key, value in beside.items() if key not in FOUND}
    assert dict(again.metadata) == inside
    assert beside == json.loads(json.dumps(dict(file.metadata)))
    assert (again.inputs, again.bytes, again.format) == (file.inputs, file.bytes, "onnx")
    known = again.metadata
    assert (known["vitrim"], known["model"], known["method"]) == (vitrim.__version__, "a name", "tome:r=2")
    assert known["classes"] == list(CLASSES)
    assert known["tokens_per_block"] == [15, 13]
    assert known["gmacs"] < known["dense_gmacs"]
    assert known["preprocessing"]["mean"] == [0.5, 0.5, 0.5]
    assert known["input"] == {
        "name": "image",
        "shape": ["batch", SIZE, SIZE, 3],
        "dtype": "uint8",
        "layout": "NHWC, as read, 0 to 255",
    }
    assert "same top-1 in 6" in beside["parity"]


def test_other_programs_find_the_names_and_the_metadata(written: tuple[nn.Module, Exported]) -> None:
    import onnx

    graph = onnx.load(written[1].path)
    assert [value.name for value in graph.graph.input] == ["image"]
    assert [value.name for value in graph.graph.output] == ["logits"]
    assert graph.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert json.loads(next(entry.value for entry in graph.metadata_props if entry.key == "vitrim"))["method"]
    onnx.checker.check_model(graph)


def test_preprocessing_in_the_graph(written: tuple[nn.Module, Exported]) -> None:
    made, file = written
    reduced = copy.deepcopy(made)
    vitrim.reduce_(reduced, "tome:r=2")
    images = np.random.default_rng(0).integers(0, 256, (3, SIZE, SIZE, 3), dtype=np.uint8)
    with torch.no_grad():
        expected = reduced((torch.from_numpy(images).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5)
    np.testing.assert_allclose(file.run(images), expected.numpy(), atol=1e-5)
    assert check(file, reduced, images).holds


def test_a_wrong_model_is_noticed(written: tuple[nn.Module, Exported]) -> None:
    made, file = written
    images = torch.randint(256, (6, SIZE, SIZE, 3), dtype=torch.uint8)
    found = check(file, made, images)  # the dense one
    assert not found.holds
    assert found.beyond > 0
    assert found.batches == (1, 2, 3)


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((1, 3, SIZE, SIZE), np.float32),
        np.zeros((1, SIZE, SIZE, 3), np.float32),
        np.zeros((1, SIZE, 30, 3), np.uint8),
    ],
    ids=lambda value: f"{value.shape}-{value.dtype}",
)
def test_images_of_another_shape_are_refused(written: tuple[nn.Module, Exported], images: Array) -> None:
    with pytest.raises(vitrim.VitrimError, match=r"takes \(batch, 32, 32, 3\) uint8, got"):
        written[1].run(images)


# ---- with torch.export, which is quick ------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_model_stays_as_it_was(tmp_path: Path) -> None:
    made = model(depth=1).train()
    before = copy.deepcopy(made.state_dict())
    vitrim.export(made, "tome:r=2", tmp_path / "m.pt2", check=0)
    half = vitrim.export(made, "tome:r=2", tmp_path / "m.pt2", check=20, file=vitrim.FileSpec(precision="fp16"))
    assert half.metadata["weights"] == "fp16"
    assert made.training
    assert not hasattr(made, "vitrim_reduction")
    after = made.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and after[key].dtype == before[key].dtype for key in before)


@pytest.mark.slow
def test_a_model_that_is_reduced_already_keeps_what_it_learned(tmp_path: Path) -> None:
    made = model(depth=1)
    vitrim.reduce_(made, "dynamicvit:blocks=[0],keep_rate=0.5")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    made.class_names = list(CLASSES)
    file = vitrim.export(made, None, tmp_path / "m.pt2", check=8)
    assert vitrim.Exported.open(tmp_path / "m.pt2").metadata["classes"] == list(CLASSES)  # the model's own
    assert file.metadata["method"] == "dynamicvit:keep_rate=0.5,blocks=[0]"
    assert "same top-1 in 8" in file.metadata["parity"]
    other = vitrim.export(made, "tome:r=2", tmp_path / "n.pt2", check=8)  # of the dense model in it
    assert other.metadata["method"] == "tome:r=2"


@pytest.mark.slow
def test_one_size_of_batch_and_another_of_images(tmp_path: Path) -> None:
    resizable = model(dynamic_img_size=True)
    file = vitrim.export(
        resizable, "tome:r=2", tmp_path / "m.pt2", check=8, file=vitrim.FileSpec(size=(48, 64), batch=3)
    )
    assert file.inputs == {"image": (3, 3, 48, 64)}
    assert "6 images in batches of 3:" in file.metadata["parity"]
    with pytest.raises(vitrim.VitrimError, match=r"takes \(3, 3, 48, 64\) float32, got \(2, 3, 48, 64\)"):
        file.run(np.zeros((2, 3, 48, 64), np.float32))
    assert file.metadata["tokens_per_block"] == [47, 45]
    assert file.metadata["preprocessing"]["size"] == [48, 64]
    oblong = vitrim.FileSpec(size=(48, 64))
    with pytest.raises(vitrim.VitrimError, match="VisionTransformer takes no images of 48 x 64: "):
        vitrim.export(model(dynamic_img_size=False), "tome:r=2", tmp_path / "n.pt2", file=oblong)


def test_a_model_without_a_head_gives_its_features(tmp_path: Path) -> None:
    file = vitrim.export(model(depth=1, num_classes=0), None, tmp_path / "m.pt2", check=3)
    assert file.metadata["output"]["name"] == "features"
    assert "top-1" not in file.metadata["parity"]


def test_threads_are_those_of_the_engine_or_of_torch(written: tuple[nn.Module, Exported], tmp_path: Path) -> None:
    assert {name for name, kind in formats().items() if kind.own_threads} == {"onnx", "openvino"}
    assert Exported.open(written[1].path, threads=1).threads == 1
    file = vitrim.export(model(depth=1), None, tmp_path / "m.pt2", check=0)
    message = r"threads of pt2 files are torch's: leave threads out, and call torch.set_num_threads\(1\)"
    with pytest.raises(vitrim.VitrimError, match=message):
        Exported.open(file.path, threads=1)
    with pytest.raises(vitrim.VitrimError, match=message):
        replace(file, threads=1)  # else timing would record a number that is not in force


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def off_by_a_bit() -> Iterator[type[Format]]:
    """A format whose engine adds a little to every logit but the first."""

    @register_format
    class OffByABit(Format):
        name, engine, suffix = "off", "off", ".off"

        @classmethod
        def write(cls, graph: Graph, path: Path) -> int:
            path.write_text("graph")
            path.with_name(f"{path.name}.data").write_text("weights")
            return 1

        @classmethod
        def open(cls, path: Path, threads: int, precision: str = "fp32") -> Run:
            return lambda images: np.full((len(images), 3), 0.5, np.float32)

    yield OffByABit
    del file_formats._FORMATS["off"]


def test_a_file_that_disagrees_does_not_stay(off_by_a_bit: type[Format], tmp_path: Path) -> None:
    path = tmp_path / "m.off"
    path.write_text("what was there")
    with pytest.raises(vitrim.VitrimError, match=r"is not written: as off it disagrees with the model; 9 images"):
        vitrim.export(model(depth=1), "tome:r=2", path, check=9)
    assert [file.name for file in tmp_path.iterdir()] == ["m.off"]
    assert path.read_text() == "what was there"
    vitrim.export(model(depth=1), "tome:r=2", path, check=0)  # unless nobody looks
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.off", "m.off.data", "m.off.json"]


def test_a_file_runs_tensors_and_says_what_it_is(written: tuple[nn.Module, Exported]) -> None:
    file = written[1]
    images = torch.randint(256, (2, SIZE, SIZE, 3), dtype=torch.uint8)
    np.testing.assert_array_equal(file.run(images), file.run(images.numpy()))
    assert str(file) == f"{file.path}: tome:r=2 of a name for onnxruntime in fp32; takes (batch, 32, 32, 3)"
    for wrong in (None, 3, [1.0]):
        with pytest.raises(
            vitrim.VitrimError, match=f"takes an array or a tensor of images, not {type(wrong).__name__}"
        ):
            file.run(wrong)  # type: ignore[arg-type]
    with pytest.raises(vitrim.VitrimError, match="threads=-1: must be at least 1"):
        Exported.open(file.path, threads=-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"file": FileSpec(precision="bf16")}, "unknown precision of onnx files 'bf16'.* valid: fp16, fp32, int8"),
        ({"file": FileSpec(classes=["a"])}, "classes are 1 names, and the model has 3 classes"),
        (
            {"check": torch.zeros(4, 3, 48, 48)},
            r"check holds images \(4, 3, 48, 48\) float32, and the file takes \(n, 3, 32, 32\) float32",
        ),
        (
            {"check": torch.zeros(4, 3, 32, 32), "file": FileSpec(preprocess=True)},
            r"check holds images \(4, 3, 32, 32\) float32, and the file takes \(n, 32, 32, 3\) uint8",
        ),
        (
            {"check": torch.zeros(4, 3, 32, 32), "file": FileSpec(batch=5)},
            "check holds 4 images, too few for a file for batches of 5",
        ),
    ],
)
def test_options_that_are_not_valid(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(vitrim.VitrimError, match=message):
        vitrim.export(model(), "tome:r=2", tmp_path / "m.onnx", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("to", "name"), [("m.onnx", "m.onnx.data"), ("m.xml", "m.bin"), ("m.pt2", "m.pt2.json")])
def test_places_that_are_taken(to: str, name: str, tmp_path: Path) -> None:
    """Refused before the work, and nothing is left behind; a pipe or a device is not replaced by a file."""
    (tmp_path / name).mkdir()
    with pytest.raises(vitrim.VitrimError, match=f"cannot write .*{name}: it is a folder"):
        vitrim.export(nn.Identity(), None, tmp_path / to)
    (tmp_path / name).rmdir()
    os.mkfifo(tmp_path / name)
    with pytest.raises(vitrim.VitrimError, match=f"cannot write .*{name}: it is a device or a pipe"):
        vitrim.export(nn.Identity(), None, tmp_path / to)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def _fill(place: Path, taken: Path) -> None:
    with staged(place) as beside:
        for name in ("m", "m.data", "m.json"):
            beside.with_name(name).write_text(name)
        taken.mkdir()


def test_a_place_that_is_taken_in_the_meantime(tmp_path: Path) -> None:
    with pytest.raises(vitrim.VitrimError, match=r"cannot write .*m\.json: it is a folder"):
        _fill(tmp_path / "m", tmp_path / "m.json")
    assert [file.name for file in tmp_path.iterdir()] == ["m.json"]


def test_a_size_is_refused_without_its_memory(tmp_path: Path) -> None:
    made = model(dynamic_img_size=False)
    held: list[int] = []
    made.register_forward_pre_hook(lambda _, given: held.append(given[0].untyped_storage().nbytes()))
    with pytest.raises(vitrim.VitrimError, match="VisionTransformer takes no images of 4096 x 4096: "):
        vitrim.export(made, None, tmp_path / "m.pt2", file=vitrim.FileSpec(size=(4096, 4096)))
    assert max(held) < 1000  # the image has 201,326,592 bytes


def test_a_model_that_says_nothing_of_its_images_has_no_preprocessing_in_the_graph(tmp_path: Path) -> None:
    with pytest.raises(vitrim.VitrimError, match="does not say the mean and standard deviation"):
        vitrim.export(tiny.HOSTS["hf_vit"](), "tome:r=4", tmp_path / "m.pt2", file=vitrim.FileSpec(preprocess=True))


@pytest.mark.parametrize("content", [b"PK\x03\x04 torn"])
def test_files_of_others_are_refused(tmp_path: Path, content: bytes) -> None:
    for suffix in (".pt2", ".onnx"):
        path = tmp_path / f"m{suffix}"
        path.write_bytes(content)
        with pytest.raises(vitrim.VitrimError):
            Exported.open(path)
    with pytest.raises(vitrim.VitrimError, match="no exported model at"):
        Exported.open(tmp_path / "none.onnx")


@pytest.mark.slow
def test_a_folder_may_have_commas_in_its_name(tmp_path: Path) -> None:
    """OpenVINO takes a comma for the end of a path, and schedules have them."""
    path = tmp_path / "r=[0,2]" / "m.xml"
    path.parent.mkdir()
    file = vitrim.export(model(), "tome:r=[0,2]", path, check=0)
    assert file.path == path
    assert list(path.parent.glob("tmp*")) == []
    assert file.run(np.zeros((1, 3, SIZE, SIZE), np.float32)).shape == (1, 3)


@pytest.mark.slow
def test_a_model_of_one_size_is_written_for_another_and_takes_its_images(tmp_path: Path) -> None:
    made = model()
    file = vitrim.export(made, "tome:r=2", tmp_path / "m.pt2", check=8, file=vitrim.FileSpec(size=24))
    assert file.inputs["image"][2:] == (24, 24)
    assert file.metadata["preprocessing"]["size"] == [24, 24]
    images = torch.rand(2, 3, 24, 24)
    other = copy.deepcopy(made)
    other.set_input_size((24, 24))  # type: ignore[operator]
    with vitrim.reduced(other, "tome:r=2"), torch.no_grad():
        np.testing.assert_allclose(file.run(images.numpy()), other(images).numpy(), atol=1e-5)
