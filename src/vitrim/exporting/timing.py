"""The speed of exported models, timed in turn with the eager ones on the same images and threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.core.reduce import HANDLE
from vitrim.core.registry import ask
from vitrim.errors import VitrimError, unknown
from vitrim.exporting.exported import Exported
from vitrim.exporting.format import Array, Format, as_array, engines
from vitrim.exporting.program import Program
from vitrim.exporting.writing import export
from vitrim.measure.latency import (
    Budget,
    dense_copies,
    fastest,
    images_per_second,
    paired_speedup,
    summarise,
    time_interleaved,
)
from vitrim.measure.records import DENSE, Row

EAGER = "eager"


def on_engine(
    model: nn.Module, method: MethodConfig | str | None, engine: str, images: Tensor, folder: str | Path
) -> Callable[[], Array]:
    """A call that runs ``images`` through ``model``, exported for ``engine``: a candidate for `time_interleaved`.

    The file is for batches of so many images only: an engine that knows all shapes beforehand is faster, the more so
    the more small operations there are (OpenVINO at batch 1: dense by 2 %, ToMe by 7 %).

    Args:
        model: as of `vitrim.export`.
        method: likewise; None for the model as it is.
        engine: one of `engines`: onnxruntime, openvino, torch.export, aoti.
        images: (B, C, H, W) float32.
        folder: the file is written there; the engine may read it for as long as it runs.

    Raises:
        VitrimError: an engine that is unknown or not installed, or as `vitrim.export`.

    Example:
        >>> import timm
        >>> model = timm.create_model("test_vit", img_size=32, patch_size=8, depth=2, num_classes=3).eval()
        >>> with TemporaryDirectory() as folder:
        ...     on_engine(model, "tome:r=2", "torch.export", torch.zeros(2, 3, 32, 32), folder)().shape
        (2, 3)
    """
    known = engines()
    if engine not in known:
        raise unknown("engine", engine, known)
    kind: type[Format] = known[engine]
    place = Path(folder) / f"{'dense' if method is None else 'reduced'}-{engine}{kind.suffix}"
    height, width = images.shape[2:]
    file = export(model, method, place, to=kind.name, batch=len(images), size=(height, width), check=0)
    return file.on(as_array(images))


def time_exported(
    model: nn.Module, reduced: nn.Module, exported: Exported, images: Tensor, budget: Budget | None = None
) -> list[Row]:
    """Time a model eager and exported, dense and reduced, in turn on the same images.

    Eager dense is the faster of the attention kernels of the host.

    Args:
        model: dense.
        reduced: the same, reduced as it was exported.
        exported: its file.
        images: (B, ...) as the file takes them.
        budget: how long to time.

    Returns:
        Four rows, ``engine`` eager and that of the file, each dense and reduced, with ``latency_ms, images_per_second,
        speedup, speedup_q1, speedup_q3`` (over the dense one of the same engine), ``over_eager`` (over eager dense),
        ``promised_speedup`` (dense MACs over reduced MACs) and ``ratio`` (speedup over promise).
    """
    known = exported.metadata
    with TemporaryDirectory() as folder:
        dense = _dense_file(model, exported, Path(folder))
        array = as_array(images)
        told = ask(reduced).preprocessing(reduced) if known["input"]["dtype"] == "uint8" else None
        eager = {kernel: partial(Program(copy, told).eval(), images) for kernel, copy in dense_copies(model).items()}
        runs: dict[str, Callable[[], object]] = {
            **{f"{EAGER} {kernel}": run for kernel, run in eager.items()},
            "eager reduced": partial(Program(reduced, told).eval(), images),
            "exported dense": dense.on(array),
            "exported reduced": exported.on(array),
        }
        with torch.inference_mode():
            times = time_interleaved(runs, "cpu", budget)
    kernel = fastest({name: times[f"{EAGER} {name}"] for name in eager}, eager)
    base = f"{EAGER} {kernel}"
    promise = known["dense_gmacs"] / known["gmacs"]
    rows = []
    for engine, name, run, against, promised in (
        (EAGER, DENSE, base, base, 1.0),
        (EAGER, known["method"], "eager reduced", base, promise),
        (exported.engine, DENSE, "exported dense", "exported dense", 1.0),
        (exported.engine, known["method"], "exported reduced", "exported dense", promise),
    ):
        latency, speedup = summarise(times[run]), paired_speedup(times[against], times[run])
        rows.append(
            Row(
                name,
                {
                    "engine": engine,
                    "batch_size": len(images),
                    "threads": exported.threads or torch.get_num_threads(),
                    "rounds": len(times[run]),
                    "latency_ms": {"p50": latency.p50_ms, "p95": latency.p95_ms, "min": latency.min_ms},
                    "images_per_second": images_per_second(len(images), latency.p50_ms),
                    "speedup": speedup.median,
                    "speedup_q1": speedup.q1,
                    "speedup_q3": speedup.q3,
                    "over_eager": paired_speedup(times[base], times[run]).median,
                    "promised_speedup": promised,
                    "ratio": speedup.median / promised,
                },
            )
        )
    return rows


def _dense_file(model: nn.Module, exported: Exported, folder: Path) -> Exported:
    """The dense model, exported as the reduced one was."""
    known = exported.metadata
    if hasattr(model, HANDLE):
        raise VitrimError("timing starts from the dense model: call vitrim.restore_(model) first")
    shape = known["input"]["shape"]
    in_graph = known["input"]["dtype"] == "uint8"
    file = export(
        model,
        None,
        folder / f"dense{exported.kind.suffix}",
        to=exported.format,
        batch=exported.batch,
        opset=known["opset"],
        dtype=known["weights"],
        preprocess=in_graph,
        size=tuple(shape[1:3] if in_graph else shape[2:]),
        check=0,
    )
    return replace(file, threads=exported.threads)
