"""Files in bf16 and int8: what is quantised and what is not, what their metadata say, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import vitrim
from full_matrix import cells
from image_files import write_noise
from vitrim.engines import Exported, writing
from vitrim.engines.formats import onnx as onnx_format
from vitrim.engines.formats import openvino as openvino_format
from vitrim.engines.formats.base import DECISIONS, Array, unreported
from vitrim.engines.parity import Parity
from vitrim.engines.writing import _agreeing, _check_agreement, _made
from vitrim.errors import VitrimError
from vitrim.measure import export as exporting
from vitrim.measure.export import _of_dataset

pytestmark = pytest.mark.xdist_group("onnx")  # its libraries, which take seconds to import, in one process
DATA = Path(__file__).parents[3] / "shared" / "data" / "cifar10-test.parquet"
SIZE = 32
needs_nncf = pytest.mark.skipif(importlib.util.find_spec("nncf") is None, reason="int8 is made by nncf")
needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="no OpenVINO")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is chosen here is not kept in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def model(**options: Any) -> nn.Module:
    import timm

    torch.manual_seed(0)
    small = {"img_size": SIZE, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 3}
    made: nn.Module = timm.create_model("test_vit", **{**small, **options})
    return made.eval()


def images(count: int, batch: int) -> list[Array]:
    every = np.random.default_rng(0).standard_normal((count // batch, batch, 3, SIZE, SIZE)).astype(np.float32)
    return list(every)


# ---- what int8 leaves alone ------------------------------------------------------------------------------------------


METHODS = {
    "tome": ("tome:r=2", 1),
    "topk": ("topk:keep_rate=0.6,blocks=[0]", 1),
    "evit": ("evit:keep_rate=0.6,blocks=[0]", 1),
    "mctf": ("mctf:r=2", 2),
    "dynamicvit": ("dynamicvit:keep_rate=0.6,blocks=[0]", 1),  # which learns the layers that decide
}
"""And the blocks of the model, as few as show it: MCTF has one that decides and one that does not."""


def quantisable(name: str) -> int:
    """Products with weights: four in each block, those that decisions read too, and the head. The embedding is a
    convolution; what DynamicViT ranks by it learns, in layers of its own.

    MCTF has one more: it computes the values of attention apart from queries and keys.
    """
    return 4 * METHODS[name][1] + 1 + (name == "mctf")


def sources_of_openvino(path: Path) -> list[tuple[str, str, set[str]]]:
    return [
        (
            operation.get_friendly_name(),
            operation.get_type_name(),
            {given.get_source_output().get_node().get_type_name() for given in operation.inputs()},
        )
        for operation in openvino_format.core().read_model(path).get_ops()
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A dense model as an ONNX file for any batch."""
    return vitrim.export(model(depth=1), None, tmp_path_factory.mktemp("precision") / "m.onnx", check=0)


@pytest.fixture(scope="module")
def openvino_files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """The OpenVINO file of a model reduced by one of the methods, made once."""
    folder = tmp_path_factory.mktemp("openvino")

    def made(name: str) -> Exported:
        method, depth = METHODS[name]
        return vitrim.export(model(depth=depth), method, folder / f"{name}.xml", check=0, file=vitrim.FileSpec(batch=2))

    return cache(made)


# the products that are left alone are found by code that both formats share, and OpenVINO's graph is made of the ONNX
# one, which takes a quarter of the time: `make test` has one method as OpenVINO, two as ONNX, and Top-K and EViT, in
# which the same product is ranked by as in MCTF, as neither
@needs_nncf
@needs_openvino
@pytest.mark.parametrize("name", cells(METHODS, ("tome",)))
def test_openvino_quantises_products_with_weights_and_no_decision(
    name: str, openvino_files: Callable[[str], Exported], tmp_path: Path
) -> None:
    made = openvino_files(name).in_precision("int8", tmp_path / "i.xml", images(4, 2))
    nodes = sources_of_openvino(made.path)
    deciding = [node for node in nodes if node[0].startswith(f"{DECISIONS}/")]
    assert deciding
    assert [name for name, _, given in deciding if "FakeQuantize" in given] == []
    quantised = [node for node in nodes if node[1] == "MatMul" and "FakeQuantize" in node[2]]
    assert len(quantised) == quantisable(name)
    assert any(kind == "Convolution" and "FakeQuantize" in given for _, kind, given in nodes)
    assert {kind for _, kind, given in nodes if "FakeQuantize" in given} <= {"MatMul", "Convolution"}


# ---- metadata --------------------------------------------------------------------------------------------------------


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What OpenVINO would send to its makers, which is asked anew whether it may, as outside of a service for tests."""
    telemetry = pytest.importorskip("openvino_telemetry")
    from openvino_telemetry.utils.sender import TelemetrySender

    openvino_format.core()
    found: list[Any] = []
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(telemetry.Telemetry().backend, "app_name", "another program")
    monkeypatch.setattr(TelemetrySender, "send", lambda self, backend, message: found.append(message))
    return found


def test_the_environment_is_as_it_was_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "mine")
    monkeypatch.delenv("NNCF_CI", raising=False)
    before = dict(os.environ)
    seen: list[str] = []

    def failing() -> None:
        with unreported():
            seen.extend(os.environ[name] for name in ("CI", "NNCF_CI"))
            raise ValueError("within")

    with pytest.raises(ValueError, match="within"):
        failing()
    assert seen == ["true", "1"]
    assert dict(os.environ) == before


@needs_openvino
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.with_suffix(".bin").unlink(), "bin file cannot be found"),
        (lambda path: path.with_suffix(".bin").write_bytes(b"12"), "Incorrect weights in bin file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "tags|offset|document"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(
    damage: Callable[[Path], Any], reason: str, openvino_files: Callable[[str], Exported], tmp_path: Path
) -> None:
    """OpenVINO's reason stands behind two lines on where in its source it failed."""
    path = openvino_files("tome").path
    for file in (path, path.with_suffix(".bin")):
        shutil.copy(file, tmp_path / file.name)
    damage(tmp_path / path.name)
    with pytest.raises(VitrimError, match=f"as openvino: .*({reason})") as error:
        Exported.open(tmp_path / path.name)
    assert not any(word in str(error.value) for word in ("Exception from", ".cpp", "\n"))


@pytest.mark.slow
@needs_openvino
def test_bf16_is_recorded_and_asked_for_when_the_file_is_opened(
    openvino_files: Callable[[str], Exported], reports: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made of a file in fp32, for any batch, that computes what the model does; nobody is told of it."""
    file = vitrim.export(
        model(depth=1), "tome:r=2", tmp_path / "m.xml", check=8, file=vitrim.FileSpec(precision="bf16")
    )
    assert reports == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.bin", "m.xml", "m.xml.json"]
    assert (file.precision, file.metadata["weights"]) == ("bf16", "fp32")
    assert file.metadata["parity"].endswith("of 8 random images")
    settings: list[str] = []
    core = openvino_format.core()

    class Watched:
        read_model = core.read_model

        def compile_model(self, path: Path, device: str, config: dict[str, Any]) -> Any:
            settings.append(config["INFERENCE_PRECISION_HINT"])
            return core.compile_model(path, device, config)

    monkeypatch.setattr(openvino_format, "core", Watched)
    again = Exported.open(file.path)
    assert (again.precision, again.metadata["method"]) == ("bf16", "tome:r=2")
    again.run(images(2, 2)[0])
    Exported.open(openvino_files("tome").path).run(images(2, 2)[0])
    assert settings == ["bf16", "f32"]


@needs_openvino
@pytest.mark.parametrize(
    ("precision", "able", "times", "hint"),
    [
        ("bf16", True, (1.0, 2.0), "bf16"),
        ("int8", True, (2.0, 1.0), "bf16"),
        ("int8", True, (1.0, 2.0), "f32"),
        ("int8", False, (2.0, 1.0), "f32"),
    ],
)
def test_beside_products_in_int8_the_rest_is_in_what_is_faster(
    precision: str, able: bool, times: tuple[float, float], hint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    core = MagicMock()
    monkeypatch.setattr(openvino_format, "_has_bf16", lambda: able)
    monkeypatch.setattr(openvino_format, "_product_ms", dict(zip(("fp32", "bf16"), times, strict=True)).__getitem__)
    monkeypatch.setattr(openvino_format, "core", lambda: core)
    openvino_format.beside_int8.cache_clear()
    openvino_format.OpenVINO.open(Path("m.xml"), 2, precision)
    assert core.compile_model.call_args.args[2]["INFERENCE_PRECISION_HINT"] == hint
    facts = openvino_format.OpenVINO.facts(precision)
    spoken = {"f32": "fp32", "bf16": "bf16"}[hint]
    assert facts == ({"beside_int8": spoken} if precision == "int8" else {})
    openvino_format.beside_int8.cache_clear()


@needs_openvino
def test_what_is_faster_is_decided_once_per_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where both take about as long, the next process would choose otherwise, and measure other files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(openvino_format, "_has_bf16", lambda: True)
    timed: list[str] = []

    def chosen(processor: str, faster: str) -> str:
        def took(precision: str) -> float:
            timed.append(precision)
            return 1.0 if precision == faster else 1.01

        monkeypatch.setattr(openvino_format, "_product_ms", took)
        monkeypatch.setattr(openvino_format, "processor", lambda: processor)
        openvino_format.beside_int8.cache_clear()  # as in another process
        return openvino_format.beside_int8()

    assert [chosen("one", "bf16"), chosen("one", "fp32"), chosen("other", "fp32")] == ["bf16", "bf16", "fp32"]
    assert timed == ["fp32", "bf16"] * 2
    openvino_format.beside_int8.cache_clear()


@needs_openvino
def test_a_product_takes_time_in_fp32() -> None:
    assert openvino_format._product_ms("fp32") > 0


# ---- processors without VNNI -----------------------------------------------------------------------------------------


def rewritten(path: Path, change: dict[str, Any]) -> None:
    """Change the metadata inside an ONNX file; None leaves an entry out."""
    import onnx

    file = onnx.load(str(path))
    (entry,) = (entry for entry in file.metadata_props if entry.key == "vitrim")
    known = {**json.loads(entry.value), **change}
    entry.value = json.dumps({key: value for key, value in known.items() if value is not None})
    onnx.save(file, str(path))


@pytest.mark.parametrize("precision", ["fp8", 8, ["int8"], {}])
def test_a_precision_that_there_is_not_is_refused(written: Exported, precision: Any) -> None:
    rewritten(written.path, {"precision": precision})
    with pytest.raises(vitrim.VitrimError, match="precision"):
        Exported.open(written.path)
    rewritten(written.path, {"precision": "fp32"})


# ---- export ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def not_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in int8 compute in fp32: what is done around nncf, which takes seconds and is run above."""
    monkeypatch.setattr(onnx_format, "quantised", lambda model, *_: model)


@needs_nncf
@pytest.mark.usefixtures("not_quantised")
def test_int8_is_calibrated_on_other_images_than_it_is_compared_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_noise(tmp_path / "images", 20)
    seen: list[tuple[int, int]] = []
    made = writing._made

    def watched(written: Exported, *given: Any, strict: bool) -> Exported:
        calibration, compared = given[-2:]
        same = (calibration[:, None] == compared[None]).flatten(2).all(2)
        assert not same.any()
        assert strict
        seen.append((len(calibration), len(compared)))
        return made(written, *given, strict=False)  # noise may get any class

    monkeypatch.setattr(writing, "_made", watched)
    monkeypatch.setattr(exporting, "CALIBRATED", 16)
    given = {"file": vitrim.FileSpec(precision="int8"), "images": str(tmp_path / "images"), "check": 12}
    file = vitrim.export(model(depth=1), None, tmp_path / "m.onnx", **given)
    assert seen == [(16, 12)]
    assert (file.precision, file.batch) == ("int8", None)
    assert "of 12 random images" in file.metadata["parity"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "m.onnx", "m.onnx.json"]


@pytest.mark.parametrize(("images", "calibrated", "compared"), [(20, 10, 10), (128, 64, 64), (1000, 64, 64)])
def test_images_to_calibrate_and_to_compare_on_are_spread_over_sorted_data(
    images: int, calibrated: int, compared: int
) -> None:
    """Of too few images both get their share."""
    values = torch.arange(float(images))
    data = TensorDataset(values[:, None, None, None], torch.zeros(images))
    subject: Any = SimpleNamespace(wanted=vitrim.FileSpec(precision="int8"))
    check, calibration = (found.flatten() for found in _of_dataset(subject, data, 64))  # type: ignore[union-attr,arg-type]
    assert (len(calibration), len(check)) == (calibrated, compared)
    assert not set(calibration.tolist()) & set(check.tolist())
    for found in (calibration, check):
        assert found.diff().max() <= 3 * images / len(found)
        assert found[0] <= images / 10
        assert found[-1] >= images - images / 10


@needs_nncf
@pytest.mark.usefixtures("not_quantised")
def test_embeddings_are_compared_by_their_cosine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_noise(tmp_path / "images", 10)
    monkeypatch.setattr(exporting, "CALIBRATED", 8)
    given = {"file": vitrim.FileSpec(precision="int8"), "images": str(tmp_path / "images"), "check": 4}
    file = vitrim.export(model(depth=1, num_classes=0), None, tmp_path / "m.onnx", **given)
    assert file.metadata["parity"] == (
        "embeddings with a cosine of 1.0000, and 0.98 or more as fp32 in 100.0 % of 4 images"
    )
    monkeypatch.setattr(writing, "ALIKE", 1.01)
    with pytest.raises(vitrim.VitrimError, match="int8 is too coarse for it; embeddings with a cosine of"):
        vitrim.export(model(depth=1, num_classes=0), None, tmp_path / "n.onnx", **given)


REFUSED, KEPT = r"m\.onnx is not written: int8 is too coarse for it; ", "do not show whether it is below 80 %: "


@pytest.mark.parametrize(
    ("same", "count", "kept"),
    [(13, 16, ""), (12, 16, KEPT), (9, 16, None), (45, 64, None), (0, 1, KEPT), (7990, 10000, KEPT)],
)
def test_a_file_is_refused_where_it_is_shown_to_agree_too_seldom(same: int, count: int, kept: str | None) -> None:
    """By scipy's exact test: of files that agree in 80 %, fewer than one in twenty would agree so seldom."""
    stats = pytest.importorskip("scipy.stats")
    shown = stats.binomtest(same, count, 0.8, alternative="less").pvalue < 0.05
    assert shown == (kept is None)
    given: Any = (Path("m.onnx"), "int8", same, count, "same top-1 as fp32 in so many %")
    if kept is None:
        with pytest.raises(VitrimError, match=rf"{REFUSED}same top-1 as fp32 in so many % of {count} images"):
            _check_agreement(*given, strict=True)
    else:
        clause = _check_agreement(*given, strict=True)
        assert kept in clause
        assert ("only many more would tell" in clause) == (same == 7990)
        if kept and same != 7990:  # as many would tell, at this share, and half of them would not
            told = int(clause.split()[-3])
            found = [stats.binomtest(round(same / count * n), n, 0.8, alternative="less") for n in (told, told // 2)]
            assert found[0].pvalue < 0.05 <= found[1].pvalue
    assert _check_agreement(*given, strict=False) == ""


def test_a_method_that_agrees_well_enough_is_hardly_ever_refused_by_chance() -> None:
    """Of the default 64 images, one that agrees in 84.8 % of many: once in 300 times, and not once in six."""
    stats = pytest.importorskip("scipy.stats")

    def refused(same: int) -> bool:
        try:
            _check_agreement(Path("m.onnx"), "int8", same, 64, "", strict=True)
        except VitrimError:
            return True
        return False

    assert sum(stats.binom.pmf(same, 64, 0.848) for same in range(65) if refused(same)) < 1 / 300
    assert sum(stats.binom.pmf(same, 64, 0.5) for same in range(65) if refused(same)) > 0.99


@pytest.mark.parametrize(("same", "kept"), [(64, True), (52, True), (45, False)])
def test_a_file_in_half_precision_must_agree_as_one_in_int8(
    same: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits are as near as torch's in that precision; then its classes count, of real images."""
    found = Parity(64, (1, 2, 61), 0.3, 3, same, 0.4, 3, 20)
    monkeypatch.setattr(writing, "compare", lambda *_: found)
    file = Exported(Path("m.pt2"), "pt2", {"image": ("batch", 3)}, 0, 0, {"weights": "bf16", "precision": "bf16"})
    given: Any = (file, Path("m.pt2"), None, torch.zeros(1))
    assert _agreeing(*given, strict=False).metadata["agreement"] == same / 64
    if kept:
        assert _agreeing(*given, strict=True).metadata["parity"] == str(found)
        return
    with pytest.raises(
        VitrimError, match=r"m.pt2 is not written: bf16 is too coarse for it; same top-1 as fp32 in 70.3 %"
    ):
        _agreeing(*given, strict=True)


@pytest.mark.parametrize("finite", [True, False])
def test_a_file_that_few_images_cannot_judge_is_kept_and_says_so(
    finite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 images a file in int8 has another class in 4."""
    exact = np.eye(16, 3, dtype=np.float32)
    coarse = exact.copy()
    coarse[3:7] = [0.0, 0.0, 2.0] if finite else np.nan
    known: dict[str, Any] = {"input": {"dtype": "float32"}, "output": {"name": "logits"}}
    names, logits = ("m.onnx", "m.made.onnx"), (exact, coarse)
    files = [Exported(tmp_path / name, "onnx", {"image": ("batch", 3)}, 0, 0, known) for name in names]
    for file, found in zip(files, logits, strict=True):
        file.path.write_bytes(b"")
        vars(file)["_run"] = lambda given, found=found: found[: len(given)]
    written, made = files
    monkeypatch.setattr(Exported, "in_precision", lambda *_: made)
    given: Any = (written, tmp_path / "m.onnx", "int8", None, torch.zeros(16, 3))
    if not finite:
        with pytest.raises(VitrimError, match=f"{REFUSED}its outputs are not finite"):
            _made(*given, strict=True)
        return
    file = _made(*given, strict=True)
    assert file.metadata["agreement"] == 0.75
    assert file.metadata["parity"] == (
        "same top-1 as fp32 in 75.0 % of 16 images; 16 images do not show whether it is below 80 %: --check 256 would "
        "tell"
    )
    assert _made(*given, strict=False).metadata["parity"] == "same top-1 as fp32 in 75.0 % of 16 random images"


def test_int8_without_images_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(vitrim.VitrimError, match="activations on images: give them, with --images DATA"):
        vitrim.export(model(), None, tmp_path / "m.onnx", file=vitrim.FileSpec(precision="int8"))
    assert not list(tmp_path.iterdir())


@needs_openvino
def test_a_processor_without_bf16_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_format, "_has_bf16", lambda: False)
    lack = openvino_format.OpenVINO.lacks("bf16")
    assert lack == "this processor has no instructions for bf16 (AMX or AVX-512 BF16)"
    assert openvino_format.OpenVINO.lacks("int8") is None
