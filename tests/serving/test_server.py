"""vLLM's server, started as a user starts it, asked through the OpenAI client with images in base64."""

from __future__ import annotations

import base64
import io
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import guarded
import served

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-vllm` makes an environment that has it")

SELECT = "divprune:keep=0.25"
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
USUAL = ("--dtype", "float32", "--max-model-len", "512", "--limit-mm-per-prompt", '{"image": 3}', "--enforce-eager")
REQUESTS = 200
AT_ONCE = 32
START = 550
"""Seconds that a server may take to start."""
pytestmark = pytest.mark.timeout(START + 400)  # of a test, which starts at most one
CHUNKS = ("--max-num-batched-tokens", "24", "--max-num-seqs", "8")
"""Prompts are cut into pieces of 24 tokens, so most images are, too; multiprocessing and prefix caching are usual."""
TWO = ("--tensor-parallel-size", "2")


def environment(select: str | None, allowed: str | None = None) -> dict[str, str]:
    usual = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "VITRIM_"))}
    own = {"VITRIM_SELECT": select, "VITRIM_SELECT_ALLOWED": allowed}
    return {**kept, **usual, "OMP_NUM_THREADS": "1", **{name: given for name, given in own.items() if given}}


def command(place: Path, *options: str) -> list[str]:
    # `vllm serve` of the CPU build looks for a distribution called vllm, and ends: it is called vllm-cpu
    module = "vllm.entrypoints.launchers.api_server.entry"
    return [sys.executable, "-m", module, "--model", str(place), *USUAL, *options]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    place = tmp_path_factory.mktemp("llava")
    made = served.folder("llava", place)
    (place / "template.jinja").write_text(TEMPLATE)
    return place, made


@contextmanager
def running(place: Path, *options: str, allowed: str | None = None) -> Iterator[tuple[Any, subprocess.Popen[bytes]]]:
    """A client of a server, and the server."""
    import openai

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = place / f"{port}.log"
    usual = ("--port", str(port), "--served-model-name", "tiny", "--chat-template", str(place / "template.jinja"))
    with (
        log.open("w") as out,
        guarded.started(command(place, *usual, *options), environment(SELECT, allowed), out) as run,
    ):
        end = time.monotonic() + START
        while True:
            if run.poll() is not None or time.monotonic() > end:
                pytest.fail(log.read_text()[-3000:])
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600, max_retries=0), run


def asked() -> list[served.Prompt]:
    """Prompts as the template makes them: no, one, two and three images in front of the text."""
    pictures = [served.photograph(seed) for seed in range(6)]
    sets = [[], pictures[:1], pictures[1:2], pictures[:2], pictures[2:4], pictures[3:6], pictures[:1]]
    return [
        (" ".join(["<image>"] * len(images) + [f"w{7 * number + word}" for word in range(3 + number)]), images)
        for number, images in enumerate(sets)
    ]


def content(prompt: served.Prompt) -> list[dict[str, Any]]:
    text, images = prompt
    parts: list[dict[str, Any]] = []
    for image in images:
        file = io.BytesIO()
        image.save(file, format="PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return [*parts, {"type": "text", "text": text.replace("<image>", "").strip()}]


@pytest.fixture(scope="module")
def expected(model: tuple[Path, Any]) -> list[list[int]]:
    """The tokens that transformers answers to every prompt."""
    from transformers import AutoProcessor

    place, made = model
    found = served.by_transformers(made, AutoProcessor.from_pretrained(place), asked(), SELECT)
    return [tokens for tokens, _ in found]


def right(client: Any, number: int, expected: list[list[int]], select: str | None = None, left: int = 16) -> None:
    """Ask one of the prompts: the answer is that of transformers, from ``left`` of 64 patches of an image."""
    text, images = asked()[number]
    extra: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
    if select is not None:
        extra["mm_processor_kwargs"] = {"vitrim_select": select}
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": content((text, images))}],
        temperature=0,
        max_tokens=served.NEW,
        extra_body=extra,
    )
    assert answer.usage.prompt_tokens == len(text.split()) + len(images) * (left - 1)
    assert answer.choices[0].token_ids == expected[number]


def test_no_answer_is_wrong_or_lost(model: tuple[Path, Any], expected: list[list[int]]) -> None:
    """Many requests at once, of prompts that share images; then a worker is killed amid others.

    The server ends by itself: until then, requests are answered right or with an error, and soon.
    """
    import openai

    def attempt(number: int) -> bool:
        try:
            right(client, number % len(expected), expected)
        except openai.APIError:
            return False
        return True

    with ThreadPoolExecutor(AT_ONCE) as pool, running(model[0], *CHUNKS) as (client, server):
        assert all(pool.map(attempt, range(REQUESTS)))
        under = psutil.Process(server.pid).children(recursive=True)
        (worker,) = [process for process in under if process.name().startswith("VLLM::Worker")]
        late = [pool.submit(attempt, number) for number in range(4 * AT_ONCE)]
        wait(late, return_when=FIRST_COMPLETED)  # the server is at work on the next ones
        worker.kill()
        done, hanging = wait(late, timeout=100)
        assert not hanging
        found = [answered.result() for answered in done]
        assert any(found)
        assert not all(found)
        server.wait(timeout=100)  # with code 0, in vLLM 0.32
        assert not psutil.wait_procs(under, timeout=30)[1]


def test_two_workers_answer_as_one_does(model: tuple[Path, Any], expected: list[list[int]]) -> None:
    """Each has a half of every layer. Requests choose among what is allowed; the rest is refused by a line."""
    import openai
    from transformers import AutoProcessor

    place, made = model
    dense = served.by_transformers(made, AutoProcessor.from_pretrained(place), asked(), None)
    whole = [tokens for tokens, _ in dense]
    allowed = {"allowed": "none pool:tokens=9"}
    with running(place, *TWO, "--trust-request-mm-kwargs", **allowed) as (client, _), ThreadPoolExecutor(4) as pool:
        for text, words in {
            "random": "allowed: divprune:keep=0.25, none, pool:tokens=9",
            "divprun": "'divprune'",
        }.items():
            with pytest.raises(openai.BadRequestError, match=words) as caught:
                right(client, 1, expected, text)
            assert "\n" not in caught.value.body["message"]
        plain = [pool.submit(right, client, number, expected) for number in range(len(expected))]
        chosen = [pool.submit(right, client, number, whole, "none", 64) for number in range(len(whole))]
        for answered in plain + chosen:
            answered.result()


@pytest.mark.slow  # vLLM gives both replicas two minutes to start, which a busy machine exceeds
def test_two_replicas_answer_as_one_does(model: tuple[Path, Any], expected: list[list[int]]) -> None:
    with running(model[0], "--data-parallel-size", "2") as (client, server), ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda number: right(client, number % len(expected), expected), range(AT_ONCE)))
        under = psutil.Process(server.pid).children(recursive=True)
        assert sum(process.name().startswith("VLLM::EngineCor") for process in under) == 2


def test_a_bad_setting_ends_the_server_in_one_line(model: tuple[Path, Any]) -> None:
    done = subprocess.run(
        command(model[0]), env=environment("visionzip"), capture_output=True, text=True, timeout=START
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("vitrim.errors.VitrimError: ")
    assert "needs the attention" in last
