"""The page of examples/web in a real browser, where onnxruntime-web lies: in the folder that VITRIM_ORT_WEB names.

npm install --prefix /tmp/ort onnxruntime-web
VITRIM_ORT_WEB=/tmp/ort python -m pytest tests/test_web_example.py
"""

from __future__ import annotations

import functools
import json
import os
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitrim
from browsers import Watched, chromium
from test_examples import load

pytestmark = pytest.mark.xdist_group("browser")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = os.environ.get("VITRIM_ORT_WEB")
    if engine is None:
        pytest.skip("VITRIM_ORT_WEB names no folder with onnxruntime-web")
    out = tmp_path_factory.mktemp("web")
    load("export_for_web").main([str(out)])
    (out / "node_modules").symlink_to(Path(engine) / "node_modules")
    return out


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_a_browser_computes_what_onnxruntime_computes(folder: Path, address: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "image.png")
    share = json.loads((folder / "model.onnx.json").read_text())["preprocessing"]["crop_share"]
    with chromium() as browser:
        watched = Watched(browser, width=375)
        watched.page.goto(address)
        watched.page.locator("#file:enabled").set_input_files(folder / "image.png")
        watched.page.locator("#classes tr").first.wait_for()
        rows = [row.split("\t") for row in watched.page.locator("#classes").inner_text().splitlines()]
        drawn = watched.page.evaluate(
            "Array.from(document.getElementById('canvas').getContext('2d').getImageData(0, 0, 32, 32).data)"
        )
        assert "tome:r=4" in watched.page.locator("#model").inner_text()
        assert re.fullmatch(r"[0-9.]+ ms", watched.page.locator("#time").inner_text())
        assert (watched.complaints, watched.elsewhere(), watched.sideways() <= 0) == ([], [], True)
        watched.close()
    seen = np.array(drawn, dtype=np.uint8).reshape(32, 32, 4)[None, :, :, :3]
    if share == 1:
        assert np.array_equal(seen[0], pixels), "nothing is scaled, so nothing may change"
    logits = vitrim.Exported.open(folder / "model.onnx").run(np.ascontiguousarray(seen))[0].astype(np.float64)
    shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    wanted = {f"class {place}": f"{100 * share:.1f} %" for place, share in enumerate(shares)}
    assert dict(rows) == wanted
