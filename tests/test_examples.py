"""Every script in examples/ runs as it stands, offline."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import logging
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
from PIL import Image
from timm.models import _registry as timm_registry

import vitrim
from full_matrix import cells
from vitrim.core import registry

FOLDER = Path(__file__).parents[1] / "examples"
SAYS = {
    "huggingface_pipeline": "tokens after every block: [57, 49, 41, 33, 25, 17]",
    "clip_zero_shot": "image tokens after every block: [57, 49, 41, 33, 25, 1]",
    "vlm": "tome:r=8: image tokens [24, 24], prefill ",
    "select_image_tokens": "server, divprune:tokens=16: counted 16 tokens per image before any pixel, received 32",
    "video": "tokens after every block: [29, 26, 23, 20, 17, 14]",
    "dinov2_dense_features": "every feature map: (1, 64, 8, 8)",
    "own_method": "[101, 51, 51, 26, 13, 13]",
    "own_host": "tokens after each block: [57, 49, 41, 33]",
    "own_vit": "tokens after each block [57, 49, 41, 33]\nNanoViT: tokens after each block [56, 48, 40, 32]\n"
    "PairViT: tokens after each block [57, 49, 41, 33]",
    "ray_features": "features of 24 images made, of 0 were there",
    "export_onnx": "tome:r=4: tokens after every block [13, 9]",
    "serve": "tome:r=4: 64 of 64 answers right",
    "export_for_web": "tome:r=4: ",
    "onnx_pipeline": "tome:r=8: tokens after every block [57, 49]",
    "dense_heads": "UperNetForSemanticSegmentation: tokens after every block [59, 53, 47, 41]",
    "dense_pictures": "wrote pictures/00000.png: dense, tome:r=12, topk:keep_rate=0.7,restore=last_block",
}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SLOW = ("export_for_web", "onnx_pipeline", "export_onnx", "dense_pictures")
"""Those that export to ONNX as `export_onnx` does; `make test-full` runs them."""
REGISTERING = ("own_host", "own_method", "own_vit")
"""They register what they add."""


@pytest.fixture
def own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what is registered, with vitrim and with timm, forgotten at the end."""
    monkeypatch.setattr(registry, "_METHODS", dict(registry.methods()))
    monkeypatch.setattr(registry, "_REDUCERS", dict(registry._REDUCERS))
    for table in (registry._HOSTS, registry._LIBRARIES):
        monkeypatch.setattr(table, "entries", dict(table.entries))
    for name, known in list(vars(timm_registry).items()):
        if name.startswith(("_model", "_module")) and isinstance(known, dict | set):
            monkeypatch.setattr(timm_registry, name, copy.copy(known))


@pytest.mark.usefixtures("own_tables")
@pytest.mark.parametrize("name", REGISTERING)
def test_an_example_that_registers_something(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert SAYS[name] in capsys.readouterr().out


@pytest.mark.slow  # `hosts/test_selecting.py` shortens prompts
def test_tokens_that_another_process_encodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a script, since the process that it starts imports it again."""
    script = str(FOLDER / "select_image_tokens.py")
    monkeypatch.setattr(sys, "argv", [script])
    runpy.run_path(script, run_name="__main__")
    assert SAYS["select_image_tokens"] in capsys.readouterr().out


WATCHED = ("dinov2_dense_features", "ray_features", "select_image_tokens", "serve")
"""Those with a test of their own."""
IN_PROCESS = sorted({path.stem for path in FOLDER.glob("*.py")} - {*REGISTERING, *WATCHED})


@pytest.mark.parametrize("name", cells(IN_PROCESS, [name for name in IN_PROCESS if name not in SLOW]))
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where one writes something
    load(name).main([])
    assert SAYS.get(name, "") in capsys.readouterr().out


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleType, list[Any]]:
    """The example of a server, and the files that it makes for itself, once for all tests."""
    serve = load("serve")
    return serve, serve.tiny(tmp_path_factory.mktemp("served"))


@pytest.mark.slow  # exports and serves; `engines/test_writing.py` runs its files
def test_answers_of_a_server(
    served: tuple[ModuleType, list[Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (serve, files), handler, closed = served, logging.StreamHandler(), list[bool]()
    monkeypatch.setattr(handler, "close", lambda: closed.append(True))  # absl's, which OpenVINO imports, close a stream
    monkeypatch.setattr(serve, "tiny", lambda folder: files)
    serve.main([])
    assert SAYS["serve"] in capsys.readouterr().out
    assert not closed


def test_dense_features_are_close_to_those_of_the_dense_model(capsys: pytest.CaptureFixture[str]) -> None:
    load("dinov2_dense_features").main([])
    out = capsys.readouterr().out
    assert SAYS["dinov2_dense_features"] in out
    lines = [line for line in out.splitlines() if "mean cosine" in line]
    assert len(lines) == 3
    assert all(float(line.split()[-1]) > 0.5 for line in lines)


def test_pictures_need_a_model_and_data(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("dense_pictures").main(["vitdet:test_vit"])
    assert "give a model and --data, or neither" in capsys.readouterr().err


def by_the_model_alone(path: Path, method: str) -> torch.Tensor:
    """The feature (C,) of an image file."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit").eval()
    prepare = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
    vitrim.reduce_(model, method)
    with torch.inference_mode():
        tokens = model.forward_features(prepare(Image.open(path).convert("RGB"))[None])
        return model.forward_head(tokens, pre_logits=True)[0]


def test_a_chunk_of_features_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of `ray_features`, in this process: rows of three groups, then a file cut short."""
    example, photos, out = load("ray_features"), tmp_path / "photos", tmp_path / "features"
    photos.mkdir()
    out.mkdir()
    example.pictures(photos, 8)
    files, source = sorted(photos.glob("*.png")), tmp_path / "photos.parquet"
    pq.write_table(pa.table({"image": [file.read_bytes() for file in files]}), source, row_group_size=3)
    setting = {"model": "test_vit", "pretrained": False, "checkpoint": None, "method": "tome:r=4", "column": "image"}
    options = argparse.Namespace(
        source=source, out=out, threads=torch.get_num_threads(), gpus=0, batch_size=2, chunk=5, **setting
    )
    images, worker = example.listed(source)[2:], example.Features(options)
    example.check_setting(options, images)
    first, second = example.missing(options, images)
    made = worker({name: [value] for name, value in first.items()})
    assert made["images"].tolist() == [5]
    table = pq.read_table(out)
    assert table.column("name").to_pylist() == [f"photos.parquet:{number}" for number in range(2, 7)]
    for feature, file in zip(table.column("feature").to_pylist(), files[2:7], strict=True):
        torch.testing.assert_close(torch.tensor(feature), by_the_model_alone(file, "tome:r=4"), atol=1e-5, rtol=1e-4)

    def torn(table: pa.Table, file: IO[bytes]) -> None:
        file.write(b"PAR1")
        raise OSError("no space left")

    monkeypatch.setattr(pq, "write_table", torn)
    with pytest.raises(OSError, match="no space left"):
        worker({name: [value] for name, value in second.items()})
    assert len(list(out.glob("*.parquet"))) == 1
    assert example.missing(options, images) == [second]
    options.method = "tome:r=2"
    with pytest.raises(vitrim.VitrimError, match="another setting"):
        example.check_setting(options, images)


@pytest.mark.slow  # starts Ray, which `.[dev]` does not have, three times
@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_features_under_ray_go_on_where_files_are(kind: str, tmp_path: Path) -> None:
    """Two workers; started again where three of ten files are there: each image once, as by the model alone."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install '.[ray]'")
    example = load("ray_features")
    photos, out = tmp_path / "photos", tmp_path / "features"
    (photos / "of" / "two").mkdir(parents=True)
    example.pictures(photos, 40)
    for path in sorted(photos.glob("*.png"))[20:]:
        path.rename(photos / "of" / "two" / path.name)
    source = photos
    if kind == "parquet":
        files = sorted(photos.rglob("*.png"))
        table = pa.table({"img": [{"bytes": path.read_bytes(), "path": path.name} for path in files]})
        source = tmp_path / "photos.parquet"
        pq.write_table(table, source, row_group_size=7)
    command = [
        sys.executable,
        str(FOLDER / "ray_features.py"),
        str(source),
        str(out),
        "--chunk",
        "4",
        "--column",
        "img",
    ]
    subprocess.run(command, capture_output=True, check=True)
    for path in sorted(out.glob("*.parquet"))[3:]:  # as if it had ended there
        path.unlink()
    there = {path.name: path.read_bytes() for path in out.glob("*.parquet")}
    assert len(there) == 3
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"features of {40 - 4 * len(there)} images made, of {4 * len(there)} were there" in done.stdout
    files = sorted(out.glob("*.parquet"))
    assert len(files) == 10
    assert all((out / name).read_bytes() == written for name, written in there.items())
    rows = [row for path in files for row in pq.read_table(path).to_pylist()]
    paths = sorted(path for path in photos.rglob("*.png"))
    if kind == "folder":
        assert [row["name"] for row in rows] == [str(path.relative_to(photos)) for path in paths]
    else:
        assert [row["name"] for row in rows] == [f"photos.parquet:{number}" for number in range(40)]
    for row, path in list(zip(rows, paths, strict=True))[::9]:
        expected = by_the_model_alone(path, "tome:r=4")
        torch.testing.assert_close(torch.tensor(row["feature"]), expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(subprocess.CalledProcessError) as refused:
        subprocess.run([*command, "-m", "tome:r=2"], capture_output=True, text=True, check=True)
    assert "holds features of another setting (method tome:r=4 -> tome:r=2)" in refused.value.stderr
    assert "Traceback" not in refused.value.stderr
