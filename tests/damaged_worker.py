"""Runs ``vitrim eval`` on every case of `damaged_data` that has to be refused; `test_damaged.py` reads what came of it.

    python damaged_worker.py FOLDER

One process for all of them, with a bound on its memory. ``FOLDER/found.jsonl`` has two lines for every case, its name
and what the command said, as far as the process came; the last one is the memory that all of them took.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import typer
from torch import nn

import vitrim.cli
from damaged_data import NAMES, Case, cases
from tiny_hosts.timm_vit import vit
from vitrim import loading
from vitrim.cli import main
from vitrim.core.registry import ask
from vitrim.models.segmenter import LinearDecoder, Segmenter
from vitrim.models.vitdet import Detector

MEMORY = 2**30
"""Bytes that all cases together may take beyond what the libraries do."""
SECONDS = 20
"""For one case: one that waits for a pipe would wait without end."""

CLASSES = len(NAMES)


def backbone() -> nn.Module:
    model = vit(dynamic_img_size=True)()
    return ask(model).without_head(model)


def detector(masks: bool) -> nn.Module:
    small = {"channels": 8, "hidden": 8, "rpn_layers": 1, "box_layers": 1, "samples": 16}
    return Detector(backbone(), CLASSES, masks=masks, **small).eval()


MODELS = {
    "classification": vit(),
    "multilabel": vit(),
    "segmentation": lambda: Segmenter(backbone(), LinearDecoder(32, CLASSES), CLASSES).eval(),
    **{task: partial(detector, task == "instances") for task in ("detection", "instances")},
}


class WaitedTooLongError(BaseException):
    """Nothing of the program may catch it."""


def _alarm(*_: object) -> None:
    raise WaitedTooLongError


def run(case: Case, folder: Path) -> dict[str, Any]:
    """What ``vitrim eval`` says to a case: ``code``, ``err``, or the ``problem`` that it ended in."""
    root = folder / "data"
    root.mkdir()
    sys.argv = ["vitrim", "eval", f"tiny_{case.task}", "--data", case.write(root), *case.options]
    sys.argv += ["--split", "val"] if sys.argv[4].startswith(("coco:", "masks:")) else []
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        return {"problem": f"{type(error).__name__}: {error}"[:300]}
    finally:
        signal.alarm(0)
        shutil.rmtree(root)
    return {"code": code, "err": err.getvalue()}


def all_cases(folder: Path) -> None:
    models: dict[str, Any] = {f"tiny_{task}": create() for task, create in MODELS.items()}
    for name, model in models.items():
        model.vitrim_origin = loading.Origin(name, "random", {}, None, 0)
    loading.create_model = lambda name, **given: models[name]
    vitrim.progress.SILENT_SECONDS = SECONDS  # signs of life follow the clock: the first case waits for imports
    vitrim.cli.app = typer.main.get_command(vitrim.cli.app)  # built once, not for every case
    datasets.config.HF_DATASETS_CACHE = str(folder / "cache")
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _alarm)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    with (folder / "found.jsonl").open("w") as found:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for case in cases():
            if not case.harmless:
                print(json.dumps({"case": case.name}), file=found, flush=True)
                print(json.dumps(run(case, folder)), file=found, flush=True)
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(json.dumps({"megabytes": more // 2**10}), file=found)


if __name__ == "__main__":
    all_cases(Path(sys.argv[1]))
