"""The page in a real browser, served by `vitrim app` in a process of its own."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from app_files import MODEL
from browsers import Watched, chromium
from full_matrix import cells
from vitrim.core.registry import methods

FREE = [name for name, kind in methods().items() if kind.traits.training_free and kind.tunable is not None]
SECONDS, STEP_SECONDS = 180.0, 60.0
"""Until the server answers, and for a step on the page: machines that are shared are slow."""
WATCHING = """
import socket, sys
connect = socket.socket.connect
def watched(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(("127.", "::1")):
        print("CONNECTS TO", address, file=sys.stderr, flush=True)
    return connect(self, address)
socket.socket.connect = watched
if __name__ == "__main__":
    from vitrim.cli import main
    main()
"""
"""The server tells of every connection that it makes to another machine."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("browser"),
    # the server imports it, which takes seconds
    pytest.mark.skipif(find_spec("gradio") is None, reason="the page needs gradio: pip install '.[app]'"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


class Server:
    """A running ``vitrim app``."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        script, self.said = folder / "watched_app.py", folder / "said"
        script.write_text(WATCHING)
        command = [sys.executable, str(script), "app", MODEL, "--no-browser", "--port", str(port), "--threads", "1"]
        with self.said.open("w") as out:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        self.address = f"http://127.0.0.1:{port}/"

    def wait(self) -> None:
        end = time.monotonic() + SECONDS
        while "the page is at" not in self.said.read_text():
            assert self.process.poll() is None, self.said.read_text()
            assert time.monotonic() < end, self.said.read_text()
            time.sleep(0.1)


@pytest.fixture(scope="module")
def server(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """After the browser, so that nothing is started where there is none."""
    started = Server(tmp_path_factory.mktemp("app"))
    try:
        started.wait()
        yield started
    finally:
        started.process.terminate()
        assert started.process.wait(30) == 143
    said = started.said.read_text()
    assert "CONNECTS TO" not in said


def open_page(browser: Any, server: Server, **options: Any) -> Watched:
    """A page with its first result."""
    watched = Watched(browser, **options)
    watched.page.set_default_timeout(STEP_SECONDS * 1000)
    watched.page.goto(server.address)
    watched.page.wait_for_selector(".v-verdict")
    return watched


@pytest.fixture(scope="module")
def wide(browser: Any, server: Server) -> Iterator[Watched]:
    watched = open_page(browser, server)
    yield watched
    assert watched.elsewhere() == []
    assert watched.complaints == []
    watched.close()


@pytest.fixture(scope="module")
def narrow(browser: Any, server: Server) -> Iterator[Watched]:
    """As on a phone at night."""
    watched = open_page(browser, server, width=375, dark=True)
    yield watched
    assert watched.elsewhere() == []
    assert watched.complaints == []
    watched.close()


def choose(watched: Watched, method: str) -> None:
    """Take a method, and wait for its result."""
    take(watched, method)
    wait_for_method(watched, method)


def take(watched: Watched, method: str) -> None:
    field = watched.page.locator("#v-method input")
    field.focus()
    field.fill(method)  # which leaves all that have it in their name: pitome, too, for tome
    watched.page.get_by_role("option", name=method, exact=True).click()


def wait_for_method(watched: Watched, text: str) -> None:
    """Wait until the text of the first method begins so."""
    found = watched.page.locator(".v-method code").first
    found.and_(watched.page.get_by_text(re.compile(f"^{re.escape(text)}"))).wait_for()


def shown(watched: Watched) -> Any:
    """The picture of the chosen block under the first method."""
    return watched.page.locator(".v-card figure[data-block]:not([hidden]) img").first


def test_the_first_result(wide: Watched) -> None:
    page = wide.page
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.title().startswith("vitrim")
    assert "the model says cat" in page.locator(".v-verdict").inner_text()
    assert page.locator(".v-card").count() == 4
    assert page.locator(".v-card img").count() == 1 + 3 * 6
    assert page.locator(".v-card figure[data-block]:not([hidden])").count() == 3
    assert "vitrim.reduce_(model, 'tome:r=8')" in page.locator("#v-python textarea").input_value()


@pytest.mark.parametrize("method", cells(FREE, ["topk", "algm"]))
def test_methods_show_their_pictures(method: str, wide: Watched) -> None:
    choose(wide, method)
    original = wide.page.locator(".v-card figure.v-input img")
    words = str(shown(wide).get_attribute("alt"))
    untouched = "after block 5: all 64 patches are there" in words  # ATM merges nothing in this photograph
    assert untouched or "after block 5: of 64 patches" in words
    assert (shown(wide).get_attribute("src") == original.get_attribute("src")) is untouched
    assert not untouched or method == "atm"


def test_sliders_by_keyboard(wide: Watched) -> None:
    page = wide.page
    choose(wide, "tome")
    amount, block = page.locator("#v-amount input[type=range]"), page.locator("#v-block input[type=range]")
    amount.focus()
    amount.press("ArrowRight")
    wait_for_method(wide, "tome:r=9")
    before = shown(wide).get_attribute("alt")
    block.focus()
    block.press("ArrowLeft")
    page.wait_for_selector(".v-card figure[data-block='4']:not([hidden])")
    assert shown(wide).get_attribute("alt") != before
    block.press("ArrowRight")


def test_everything_is_reached_by_tab(wide: Watched) -> None:
    page = wide.page
    page.locator("button[role=tab]").first.focus()
    reached = set()
    for _ in range(45):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("(e => e.getAttribute('aria-label') || e.innerText || e.type)(document.activeElement)")
        )
    page.get_by_role("tab").first.focus()
    # a list that stays open behind the focus covers the page
    page.locator("[role=option]").first.wait_for(state="hidden")
    wanted = ("cat", "Run", "model", "method", "range", "More options", "beside it")
    assert [name for name in wanted if not any(name in str(one) for one in reached)] == []


def test_a_front(wide: Watched, tmp_path: Path) -> None:
    row = {"target": "macs=0.5", "setting": "constant", "config": "tome:r=8", "share": 0.6, "scores": {"agree": 0.1}}
    path = tmp_path / "front.json"
    path.write_text(json.dumps({"tuned": {}, "rows": [{**row, "on_front": True}]}))
    wide.page.get_by_role("tab", name="Front of a search").click()
    wide.page.locator("input[type=file][accept='.json']").set_input_files(path)
    wide.page.locator(".v-chart img").wait_for()
    assert "tome:r=8" in wide.page.locator(".v-result table").last.inner_text()
    wide.page.get_by_role("tab", name="Image").click()


@pytest.mark.slow  # `test_service.py` has two users who share nothing but weights
def test_two_users_at_once(wide: Watched, request: pytest.FixtureRequest) -> None:
    """Each sees the result of what they chose, and what one has done leaves no trace with the other."""
    other: Watched = request.getfixturevalue("narrow")  # opened now
    assert other.page.locator("#v-text input, #v-text textarea").input_value().startswith("tome:r=8\n"), (
        "a new page is not where the other user left theirs"
    )
    for watched, method in ((wide, "topk"), (other, "evit")):
        take(watched, method)
    other.page.get_by_label("frog").click()
    wait_for_method(other, "evit")
    other.page.locator(".v-verdict").get_by_text("frog").first.wait_for()
    wait_for_method(wide, "topk")


@pytest.mark.parametrize("name", ["narrow", "wide"])
def test_small_dark_and_accessible(name: str, request: pytest.FixtureRequest) -> None:
    watched: Watched = request.getfixturevalue(name)
    assert watched.sideways() <= 0
    light = watched.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
    assert (light < 60) == (name == "narrow")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
    found = axe.Axe().run(watched.page, options={"runOnly": {"type": "tag", "values": tags}}).response
    assert len(found["passes"]) > 20
    assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found["violations"]] == []


UPLOADS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cmyk.jpg": (lambda path: Image.new("CMYK", (40, 40), (0, 90, 90, 10)).save(path), "the image is in CMYK"),
    "tiny.png": (lambda path: Image.new("RGB", (2, 2)).save(path), "at least 8 x 8"),
    "broken.png": (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(500)), "not an image of a known format"),
}


@pytest.mark.parametrize("name", cells(UPLOADS, ["cmyk.jpg"]))
def test_uploads(name: str, wide: Watched, tmp_path: Path) -> None:
    make, line = UPLOADS[name]
    make(tmp_path / name)
    clear = wide.page.get_by_label("Remove Image")
    if clear.count():
        clear.first.click()
    wide.page.locator("input[type=file]").first.set_input_files(tmp_path / name)
    wide.page.locator(".v-note, .v-error").get_by_text(line).first.wait_for()


def test_files_of_the_server_are_out_of_reach(server: Server) -> None:
    """Neither as an upload that was none, nor as an address that the server should fetch, nor by its own route."""
    config = json.load(urllib.request.urlopen(f"{server.address}config"))
    event = next(one["id"] for one in config["dependencies"] if len(one["inputs"]) == 7)
    secret = str(Path(__file__).resolve())

    def post(path: str, session: str) -> str:
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        body = {"data": [file, MODEL, "tome", 8, "", [], 0], "fn_index": event, "session_hash": session}
        request = urllib.request.Request(
            f"{server.address}gradio_api/queue/join", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request).close()
        with urllib.request.urlopen(f"{server.address}gradio_api/queue/data?session_hash={session}") as answers:
            return next(line.decode() for line in answers if b"process_completed" in line)

    for number, path in enumerate((secret, "http://127.0.0.1:9/x.png")):
        answer = json.loads(post(path, str(number)).removeprefix("data: "))
        assert not answer["success"]
        assert answer["output"] == {"error": None}, "and the answer says nothing of the file"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{server.address}gradio_api/file={secret}")
