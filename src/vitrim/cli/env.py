"""``vitrim env``: facts for a bug report about the machine and its packages."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from typing import Any

from vitrim import __version__
from vitrim.cli.output import Output

TRIED = """
torch 2.9.0 2.15.0, torchvision 0.24.0 0.29.2, timm 1.0.22 1.0.31, transformers 5.2.0 5.24.0,
open_clip_torch 3.2.0 3.3.0, numpy any 2.4.6, safetensors any 0.8.0, pydantic 2.10.0 2.14.4, PyYAML any 6.0.4,
typer 0.20.0 0.29.2, rich any 15.0.0, filelock 4.0.0 4.3.1, datasets 4.0.0 5.2.0, pillow any 12.3.0,
accelerate 1.12.0 1.15.0, torchmetrics any 1.9.0, tensorboard any 2.21.0, scikit-learn any 1.9.1,
matplotlib any 3.11.2, onnx 1.23.2 1.23.2, onnxscript 0.7.2 0.7.2, onnxruntime 1.32.0 1.32.0,
openvino 2026.4.1 2026.4.1, nncf 3.4.0 3.4.0, optuna any 5.0.0, gradio 6.31.0 6.31.0, numba 0.63.0 0.68.1
"""
PACKAGES = {name: (low, new) for name, low, new in map(str.split, TRIED.split(","))}
"""Packages of ``constraints-oldest.txt`` and ``constraints.txt`` with lowest ("any") and newest tested version."""


def env(*, output: Output) -> None:
    """Print versions, processor and devices, for a bug report."""
    found = report()
    rows = list(_lines(found))
    width = max(len(name) for name, _ in rows)
    output.print(*(f"{name:<{width}}  {value}" for name, value in rows))
    if found["untried"]:
        output.print(f"warning: outside of the versions that were tried: {', '.join(found['untried'])}")
    output.write("env", **found)


def report() -> dict[str, Any]:
    """Versions, processor and devices of this machine. Missing packages are None."""
    import torch

    from vitrim.core.versions import installed, numbers
    from vitrim.engines.machine import DEVICES

    packages = {package: installed(package) for package in PACKAGES}
    return {
        "vitrim": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "packages": packages,
        "tried": {package: list(bounds) for package, bounds in PACKAGES.items()},
        "untried": [
            package
            for package, (lowest, newest) in PACKAGES.items()
            if (own := packages[package]) and not numbers(lowest) <= numbers(own) <= numbers(newest)
        ],
        "cpu": _cpu(),
        "devices": [kind for kind in DEVICES if torch.get_device_module(kind).is_available()],
        "cuda": _cuda(),
    }


def _cpu() -> dict[str, Any]:
    import torch

    from vitrim.engines.machine import processor

    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    return {
        "name": processor(),
        "cores": os.cpu_count(),
        "usable_cores": os.cpu_count() if affinity is None else len(affinity(0)),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _cuda() -> dict[str, Any]:
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "devices": [
            {
                "name": device.name,
                "capability": f"{device.major}.{device.minor}",
                "memory_gib": device.total_memory / 2**30,
            }
            for device in found
        ],
    }


def _lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield from ((name, found[name]) for name in ("vitrim", "python", "platform"))
    for package, number in found["packages"].items():
        lowest, newest = found["tried"][package]
        yield package, f"{number or 'not installed':<14} tried: {lowest} to {newest}"
    cpu, cuda = found["cpu"], found["cuda"]
    yield "cpu", cpu["name"]
    yield "cores", f"{cpu['cores']}, {cpu['usable_cores']} of them usable; threads of torch: {cpu['threads']}"
    yield "capability", cpu["capability"]
    yield "devices", ", ".join(found["devices"])
    built = [f"{kind} {cuda[kind]}" for kind in ("cuda", "hip", "cudnn") if cuda[kind] is not None]
    yield "torch is for", ", ".join(built) or "cpu only"
    for index, device in enumerate(cuda["devices"]):
        yield f"cuda:{index}", f"{device['name']}, {device['memory_gib']:.1f} GiB, capability {device['capability']}"
