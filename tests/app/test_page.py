"""The functions behind the page's events, and the page as gradio describes it; for a browser see test_browser.py."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from app_files import EXAMPLES, MODEL, Here
from vitrim.app.messages import Limits, Settings
from vitrim.app.service import Service
from vitrim.app.serving import check_port
from vitrim.errors import VitrimError

if TYPE_CHECKING:
    from vitrim.app.page import Events

pytestmark = pytest.mark.skipif(find_spec("gradio") is None, reason="the page needs gradio: pip install '.[app]'")


def page_file() -> Any:
    """The module of the page. It imports gradio, for seconds, which only the process that runs these tests needs."""
    return import_module("vitrim.app.page")


@pytest.fixture(scope="module")
def answers(jobs: Here, tmp_path_factory: pytest.TempPathFactory) -> Events:
    return page_file().Events(jobs, tmp_path_factory.mktemp("examples"))


@pytest.fixture(scope="module")
def upload() -> dict[str, str]:
    return {"path": str(EXAMPLES / "ship.png")}


def visible(html: str) -> list[int]:
    """The blocks whose pictures are not hidden."""
    return [int(number) for number in re.findall(r'<figure data-block="(\d+)">', html)]


def test_a_result(answers: Events, upload: dict[str, str]) -> None:
    given = (upload, MODEL, "tome", 8, "inflect=-1", ["topk"], 2)
    shown, slider, text, python, command = answers.run(*given)
    assert visible(shown) == [2, 2]
    assert shown.count("<img") == shown.count("alt=") == 1 + 2 * 6
    assert "the model says <b>ship</b>" in shown
    assert slider["maximum"] == 5
    first, second = text.splitlines()
    assert first == "tome:r=8,inflect=-1.0"
    assert second.startswith("topk:keep_rate=0.")
    assert command == f'vitrim show "{MODEL}" IMAGE -m "{first}" -m "{second}" --out pictures'
    scope: dict[str, Any] = {}
    exec(python, scope)
    assert scope["reduction"].config.describe() == first


@pytest.mark.slow
def test_methods_break_behind_their_options_and_nowhere_else(answers: Events, upload: dict[str, str]) -> None:
    shown = answers.run(upload, MODEL, "tome", 8, "inflect=-1", [], 2)[0]
    assert "tome:<wbr>r=8,<wbr>inflect=-1.0" in shown


@pytest.mark.slow
def test_the_copied_command_is_one(answers: Events, upload: dict[str, str], tmp_path: Path) -> None:
    from vitrim.core.registry import parse_method

    command = answers.run(upload, MODEL, "atm", 0.9, "", [], 0)[-1]
    words = shlex.split(command)
    assert words[:4] == ["vitrim", "show", MODEL, "IMAGE"]
    assert parse_method(words[words.index("-m") + 1]).name == "atm"


def test_a_model_that_takes_the_place_of_another_shows_what_it_knows(answers: Events) -> None:
    """An example that it does not know goes; an image of the user's own stays."""
    known = answers.known[MODEL]
    unknown = next(name for name in answers.files if name not in known)
    *_, radio, image = answers.model(MODEL, "tome", {"path": answers.files[unknown]})
    assert (radio["choices"], radio["value"], image) == (known, known[0], answers.files[known[0]])
    for name, kept in ((known[-1], answers.files[known[-1]]), (None, "/tmp/mine.jpg")):
        *_, radio, image = answers.model(MODEL, "tome", {"path": kept})
        assert (radio["value"], image) == (name, page_file().gr.skip())
    assert answers.example(known[0]) == answers.files[known[0]]
    assert answers.example("../../secret") == page_file().gr.skip()


def test_the_text_to_copy_is_of_this_model(service: Service, ship: bytes) -> None:
    python_of, command_of, html = (getattr(page_file(), name) for name in ("python_of", "command_of", "html"))
    result = service.run(ship, Settings(MODEL, "tome", 8, ""))
    assert "create_model('vitrim:cifar10_vit')" in python_of(result)
    own = replace(result, model="test_vit", checkpoint=True, options={"img_size": [64, 32], "global_pool": "avg"})
    assert (
        "create_model('test_vit', checkpoint='CHECKPOINT', options={'img_size': [64, 32], 'global_pool': 'avg'})"
        in python_of(own)
    )
    words = shlex.split(command_of(own))
    assert words[:10] == [
        *("vitrim", "show", "test_vit", "IMAGE", "--checkpoint", "CHECKPOINT"),
        *("--model-option", "img_size=[64, 32]", "--model-option", "global_pool=avg"),
    ]
    assert "--pretrained" in command_of(replace(result, weights="pretrained"))
    assert "CHECKPOINT stands for your file of weights" in html("result", result=own)
    assert "CHECKPOINT" not in html("result", result=result)


def test_a_last_block_of_the_class_token_alone_is_explained(service: Service, ship: bytes) -> None:
    html = page_file().html
    whole, alone = (
        service.run(ship, Settings(MODEL, "tome", 4, f"last_block={last}")) for last in ("full", "class_token")
    )
    assert alone.reduced[0].side.tokens[-1] == 1
    assert "the head reads the class token alone" in html("result", result=alone)
    assert "the head reads the class token alone" not in html("result", result=whole)


@pytest.mark.parametrize(
    ("image", "changes", "message"),
    [
        (None, {}, "give an image"),
        ({"path": "/nowhere/x.png"}, {}, "the upload is no longer there"),
        ({"path": None}, {}, "the upload is no longer there"),
        ({"path": __file__}, {}, "not an image of a known format"),
        ("", {"method": "<script>"}, "unknown method &#39;&lt;script&gt;&#39;"),
        ("", {"model": ["a", 1]}, "unknown model"),
        ("", {"value": None}, "is no number"),
        ("", {"beside": ["<script>"]}, "unknown method &#39;&lt;script&gt;&#39;"),
        ("", {"beside": ["topk", "atm", "evit", "ats"]}, "at most 3"),
        ("", {"more": "<img src=x onerror=alert(1)>=3"}, "&lt;img src"),
    ],
)
def test_errors_stand_where_the_result_would(
    image: Any, changes: dict[str, Any], message: str, answers: Events, upload: dict[str, str]
) -> None:
    given = {"model": MODEL, "method": "tome", "value": 8, "more": "", "beside": [], "block": 0} | changes
    shown, *_, command = answers.run(upload if image == "" else image, **given)
    assert command == ""
    assert message in shown
    assert 'role="alert"' in shown
    assert "<script" not in shown
    assert "<img" not in shown


def test_a_file_beyond_the_limit_is_not_read(answers: Events, tmp_path: Path) -> None:
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(6_000_000)
    shown = answers.run({"path": str(large)}, MODEL, "tome", 8, "", [], 0)[0]
    assert "the file has 6.0 MB; at most 5 MB are read" in shown
    assert "the file has 6.0 MB" in answers.front({"path": str(large)})


def test_the_slider_follows_the_method(answers: Events) -> None:
    update = answers.method(MODEL, "topk")
    assert (update["minimum"], update["maximum"], update["value"]) == (0.05, 1.0, 0.7)
    assert "share of patch tokens kept" in update["label"]
    methods, slider, *_ = answers.model(MODEL, "no such", None)
    assert methods["value"] in methods["choices"]
    assert slider["interactive"]
    assert not answers.method("no such", "topk")["interactive"]


def test_a_front(answers: Events, tmp_path: Path) -> None:
    path = tmp_path / "front.json"
    scores = {"target": "macs=0.5", "setting": "constant", "config": "<b>", "share": 0.5, "scores": {"agree": 0}}
    path.write_text(json.dumps({"tuned": {}, "rows": [scores]}))
    html = answers.front({"path": str(path)})
    assert "&lt;b&gt;" in html
    assert "data:image/png;base64," in html
    assert answers.front(None) == ""
    assert "not valid JSON" in answers.front({"path": __file__})


@pytest.fixture(scope="module")
def config(jobs: Here, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    page = page_file().make_page(jobs, Limits(), tmp_path_factory.mktemp("drawings"))
    yield page.get_config_file()
    page.close()


def test_no_event_is_an_api_and_one_job_runs_at_a_time(config: dict[str, Any]) -> None:
    assert config["dependencies"]
    for event in config["dependencies"]:
        assert event["api_visibility"] == "private", event["api_name"]
    assert not config["analytics_enabled"]


def test_inputs_have_labels_and_the_camera_is_off(config: dict[str, Any]) -> None:
    inputs = {"image", "dropdown", "slider", "textbox", "file"}
    given = [part["props"] for part in config["components"] if part["type"] in inputs]
    assert len(given) >= 10
    assert all(props["label"] for props in given)
    (image,) = [part["props"] for part in config["components"] if part["type"] == "image"]
    assert image["sources"] == ["upload", "clipboard"]


def test_a_page_holds_no_state(config: dict[str, Any]) -> None:
    """Nothing on the server that one user's event could leave for another's."""
    assert [part for part in config["components"] if part["type"] in ("state", "browserstate")] == []


def test_an_address_that_cannot_be_served_at() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(VitrimError, match=rf"cannot serve at 127\.0\.0\.1:{port}: Address already in use"):
            check_port("127.0.0.1", port)
    with pytest.raises(VitrimError, match=r"cannot serve at 203\.0\.113\.7"):
        check_port("203.0.113.7", 7860)
