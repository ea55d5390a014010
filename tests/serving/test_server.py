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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import served

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-vllm` makes an environment that has it")

SELECT = "divprune:keep=0.25"
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
USUAL = ("--dtype", "float32", "--max-model-len", "512", "--limit-mm-per-prompt", '{"image": 3}', "--enforce-eager")
REQUESTS = 200
AT_ONCE = 32
START = 550
"""Seconds that a server may take to start."""
KINDS = {
    # prompts are cut into pieces of 24 tokens, so most images are, too; multiprocessing and prefix caching are usual
    "chunks": ("--max-num-batched-tokens", "24", "--max-num-seqs", "8"),
}


def environment(select: str | None) -> dict[str, str]:
    usual = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "VITRIM_"))}
    return {**kept, **usual, "OMP_NUM_THREADS": "1", **({"VITRIM_SELECT": select} if select else {})}


def command(place: Path, *options: str) -> list[str]:
    # `vllm serve` of the CPU build looks for a distribution called vllm, and ends: it is called vllm-cpu
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(place), *USUAL, *options]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    place = tmp_path_factory.mktemp("llava")
    made = served.folder("llava", place)
    (place / "template.jinja").write_text(TEMPLATE)
    return place, made


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, model: tuple[Path, Any]) -> Iterator[str]:
    """The address of a running server."""
    place, _ = model
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = place / f"{request.param}.log"
    options = ("--port", str(port), "--served-model-name", "tiny", "--chat-template", str(place / "template.jinja"))
    with log.open("w") as out:
        run = subprocess.Popen(
            command(place, *options, *KINDS[request.param]), env=environment(SELECT), stdout=out, stderr=out
        )
    try:
        end = time.monotonic() + START
        while True:
            if run.poll() is not None or time.monotonic() > end:
                pytest.fail(log.read_text()[-3000:])
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        run.terminate()
        run.wait(timeout=60)


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


def test_no_answer_is_wrong_or_lost(server: str, model: tuple[Path, Any]) -> None:
    """Many requests at once, of prompts that share images."""
    import openai
    from transformers import AutoProcessor

    place, made = model
    prompts = asked()
    expected = served.by_transformers(made, AutoProcessor.from_pretrained(place), prompts, SELECT)
    client = openai.OpenAI(base_url=server, api_key="none", timeout=600, max_retries=0)

    def ask(number: int) -> tuple[list[int], int]:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": content(prompts[number % len(prompts)])}],
            temperature=0,
            max_tokens=served.NEW,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        return answer.choices[0].token_ids, answer.usage.prompt_tokens

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, range(REQUESTS)))
    assert len(answers) == REQUESTS
    for number, (tokens, length) in enumerate(answers):
        text, images = prompts[number % len(prompts)]
        assert length == len(text.split()) + len(images) * (16 - 1)  # 16 of 64 patches are left
        assert list(tokens) == expected[number % len(prompts)][0]


@pytest.mark.parametrize(
    ("select", "words"), [("visionzip", "needs the attention"), ("divprune:keep=2", "keep"), ("nosuch", "divprune")]
)
def test_a_bad_setting_ends_the_server_in_one_line(select: str, words: str, model: tuple[Path, Any]) -> None:
    done = subprocess.run(command(model[0]), env=environment(select), capture_output=True, text=True, timeout=START)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("vitrim.errors.VitrimError: ")
    assert words in last
