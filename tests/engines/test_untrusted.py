"""Files of strangers: opening one runs nothing of it, and no file that is code runs without ``trust=True``.

The files are made by hand, by each engine's own library, and not by vitrim. Those that are code leave a mark when they
run; the last test but one shows that they do, where they are trusted.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from untrusted_worker import IMAGES
from vitrim.engines import Exported
from vitrim.engines.formats import formats
from vitrim.errors import VitrimError

pytestmark = pytest.mark.xdist_group("onnx")  # its libraries, which take seconds to import, in one process
ENVELOPE = {"input": {"name": "image", "shape": ["batch", 3, 4, 4], "dtype": "float32"}}
METADATA = json.dumps(ENVELOPE)


# ---- the files: a path and a place for a mark ------------------------------------------------------------------------


class Marks:
    """Unpickled, it writes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (open, (str(self.mark), "w"))


class Twice(torch.nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return 2 * image


def _onnx(path: Path, mark: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    sides = ["batch", 3, 4, 4]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, sides) for name in ("image", "logits")]
    graph = helper.make_graph([helper.make_node("Neg", ["image"], ["logits"])], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    helper.set_model_props(model, {"vitrim": METADATA})
    onnx.save(model, path)


def _openvino(path: Path, mark: Path) -> None:
    openvino = pytest.importorskip("openvino")
    image = openvino.opset13.parameter([-1, 3, 4, 4], np.float32, name="image")
    model = openvino.Model([openvino.opset13.negative(image)], [image], "g")
    model.set_rt_info(METADATA, ["vitrim", "vitrim"])
    openvino.save_model(model, path)


def _repacked(path: Path, edit: Callable[[str, bytes], bytes]) -> None:
    """Write a package of torch again, with every entry as ``edit(name, content)`` has it."""
    with zipfile.ZipFile(path) as package:
        entries = {name: package.read(name) for name in package.namelist()}
    with zipfile.ZipFile(path, "w") as package:
        for name, content in entries.items():
            package.writestr(name, edit(name, content))


def _program(path: Path) -> None:
    dynamic = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(Twice(), (torch.zeros(2, 3, 4, 4),), dynamic_shapes=dynamic)
    torch.export.save(program, path, extra_files={"vitrim.json": METADATA})


def _pickled(path: Path, mark: Path) -> None:
    """A pickle among the example inputs: torch reads them without ``weights_only`` where it must."""
    _program(path)
    evil = io.BytesIO()
    torch.save([Marks(mark)], evil)
    _repacked(path, lambda name, content: evil.getvalue() if name.endswith("sample_inputs/model.pt") else content)


def _evaluated(path: Path, mark: Path) -> None:
    """No pickle, but a size that is Python: sympy evaluates it."""
    _program(path)

    def edit(name: str, content: bytes) -> bytes:
        if not name.endswith("models/model.json"):
            return content
        program = json.loads(content)
        for value in program["graph_module"]["graph"]["tensor_values"].values():
            value["sizes"][0] = {"as_expr": {"expr_str": f"open({str(mark)!r}, 'w') and 2", "hint": None}}
        return json.dumps(program).encode()

    _repacked(path, edit)


def _compiled(path: Path, mark: Path) -> None:
    """A shared object that acts as soon as it is loaded."""
    if (gcc := shutil.which("gcc")) is None:
        pytest.skip("there is no C compiler")
    source, built = path.with_suffix(".c"), path.with_suffix(".so")
    acts = f'FILE *f = fopen("{mark}", "w"); if (f) fclose(f);'
    source.write_text(f"#include <stdio.h>\n__attribute__((constructor)) static void act(void) {{ {acts} }}\n")
    subprocess.run([gcc, "-shared", "-fPIC", "-o", built, source], check=True)
    told = {"vitrim": METADATA, "AOTI_DEVICE_KEY": "cpu"}
    with zipfile.ZipFile(path, "w") as package:
        for name, text in (("archive_format", "pt2"), ("archive_version", "0"), (".data/version", "3")):
            package.writestr(f"m/{name}", text)
        package.write(built, "m/data/aotinductor/model/a.wrapper.so")
        package.writestr("m/data/aotinductor/model/a.wrapper_metadata.json", json.dumps(told))


FILES = {
    ("onnx", "graph"): _onnx,
    ("openvino", "graph"): _openvino,
    ("pt2", "pickled"): _pickled,
    ("pt2", "evaluated"): _evaluated,
    ("aoti", "compiled"): _compiled,
}


# ---- what they may do ------------------------------------------------------------------------------------------------


def test_every_format_has_a_file_of_a_stranger() -> None:
    assert {name for name, _ in FILES} == set(formats())
    assert {name for name, kind in formats().items() if kind.code} == {"pt2", "aoti"}


@pytest.mark.slow
def test_no_import_no_shell_and_no_pickle_of_a_file(tmp_path: Path) -> None:
    """In one process for all files, which has a hook of the interpreter: it cannot be taken off again."""
    present = [(name, way) for name, way in FILES if formats()[name].missing() is None]
    assert {"onnx", "pt2"} <= {name for name, _ in present}
    given: list[str] = []
    for name, way in present:
        path = tmp_path / f"{name}-{way}" / f"m{formats()[name].suffix}"
        path.parent.mkdir()
        FILES[name, way](path, path.with_name("mark"))
        given += [name, str(path)]
    command = [sys.executable, str(Path(__file__).parents[1] / "untrusted_worker.py"), *given]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    results = [json.loads(line) for line in process.stdout.splitlines()]
    for (name, way), result in zip(present, results, strict=True):
        assert result["asked"] == []
        assert result["metadata"] == ENVELOPE
        if formats()[name].code:
            assert f"{name} files are code" in result["found"]
            assert "open it with trust=True" in result["found"]
        else:
            np.testing.assert_array_equal(result["found"], -IMAGES)
        assert not (tmp_path / f"{name}-{way}" / "mark").exists()


@pytest.mark.parametrize(("name", "way"), [one for one in FILES if formats()[one[0]].code], ids=lambda part: part)
def test_what_is_trusted_runs(name: str, way: str, tmp_path: Path) -> None:
    """So the files above are as hostile as they seem."""
    if formats()[name].missing() is not None:
        pytest.skip(str(formats()[name].missing()))
    path, mark = tmp_path / "m.pt2", tmp_path / "mark"
    FILES[name, way](path, mark)
    file = Exported.open(path, trust=True)
    with suppress(VitrimError, AssertionError, AttributeError):  # some fail afterwards, as they hold little else
        file.run(IMAGES)
    assert mark.exists()


def test_a_file_that_vitrim_did_not_spoil_runs_where_it_is_trusted(tmp_path: Path) -> None:
    _program(tmp_path / "m.pt2")
    np.testing.assert_array_equal(Exported.open(tmp_path / "m.pt2", trust=True).run(IMAGES), 2 * IMAGES)


# ---- weights elsewhere, damaged metadata -----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["../secret", "sub/weights", "/etc/hostname", "", "m.onnx.data"])
@pytest.mark.parametrize("nested", [False, True], ids=["graph", "attribute"])
def test_weights_lie_beside_an_onnx_file(place: str, nested: bool, tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    weight = helper.make_tensor("w", TensorProto.FLOAT, [1], [0.0])
    weight.ClearField("float_data")
    weight.data_location = TensorProto.EXTERNAL
    entry = weight.external_data.add()
    entry.key, entry.value = "location", place
    nodes = [helper.make_node("Constant", [], ["c"], value=weight)] if nested else []
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3, 4, 4]) for name in ("image", "y")]
    nodes.append(helper.make_node("Neg", ["image"], ["y"]))
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], initializer=[] if nested else [weight])
    model = helper.make_model(graph)
    helper.set_model_props(model, {"vitrim": METADATA})
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    if place == "m.onnx.data":
        assert Exported.open(tmp_path / "m.onnx").format == "onnx"
        return
    with pytest.raises(VitrimError, match=f"takes weights from '{place}': they must lie beside the file"):
        Exported.open(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "{}", '{"input": 1}', '{"input": {"name": "image"}}', "[" * 100_000, "\ud800"),
        *('{"input": {"name": "image", "shape": [1, 2]}}', '{"input": {"name": "image", "shape": "abcd"}}'),
        *('{"input": {"name": "image", "shape": [1, 3, -4, 4]}}', '{"input": {"name": [], "shape": [1, 3, 4, 4]}}'),
        *('{"input": {"name": "image", "shape": [null, 3, 4, 4]}}', '{"input": {"shape": [1, 3, 4, 4]}}'),
        '{"input": {"name": "image", "shape": [1, 3, 4, 4]}, "nodes": "many"}',
    ],
    ids=lambda text: text[:60],
)
def test_damaged_metadata(text: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as package:
        package.writestr("m/extra/vitrim.json", text.encode("utf-8", "surrogatepass"))
    with pytest.raises(VitrimError, match=r"cannot read .*m\.pt2 as "):
        Exported.open(tmp_path / "m.pt2")


@pytest.mark.parametrize("where", ["m/extra/vitrim.json", "m/data/aotinductor/model/a.wrapper_metadata.json"])
@pytest.mark.parametrize("damage", ["bomb", "method", "encrypted", "data"])
def test_damaged_packages(damage: str, where: str, tmp_path: Path) -> None:
    """A bomb is refused by its size before it is read."""
    content = b"0" * (2**24 + 1) if damage == "bomb" else METADATA.encode() * 9
    with zipfile.ZipFile(tmp_path / "m.pt2", "w", zipfile.ZIP_DEFLATED) as package:
        package.writestr(where, content)
    raw = bytearray((tmp_path / "m.pt2").read_bytes())
    entry = raw.index(b"PK\x01\x02")
    if damage == "method":
        raw[8:10] = raw[entry + 10 : entry + 12] = (98).to_bytes(2, "little")
    elif damage == "encrypted":
        raw[6] |= 1
        raw[entry + 8] |= 1
    elif damage == "data":
        raw[30 + len(where)] ^= 0xFF
    (tmp_path / "m.pt2").write_bytes(raw)
    if damage == "data":
        with pytest.raises((zlib.error, zipfile.BadZipFile)):
            zipfile.ZipFile(tmp_path / "m.pt2").read(where)
    with pytest.raises(VitrimError, match=r"cannot read .*m\.pt2 as (pt2|aoti)"):
        Exported.open(tmp_path / "m.pt2")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_package_that_was_cut_short(share: float, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as package:
        package.writestr("m/extra/vitrim.json", METADATA)
    raw = (tmp_path / "m.pt2").read_bytes()
    assert Exported.open(tmp_path / "m.pt2").format == "pt2"
    (tmp_path / "m.pt2").write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(VitrimError, match=r"cannot read .*m\.pt2 as pt2: .* or the end of it is missing"):
        Exported.open(tmp_path / "m.pt2")
