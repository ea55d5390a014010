"""``vitrim env``: the facts a bug report needs about the machine and what is installed on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vitrim import __version__
from vitrim.cli.output import Output

PACKAGES = (
    *("torch", "torchvision", "timm", "transformers", "numpy", "safetensors", "pydantic", "PyYAML", "typer", "rich"),
    *("datasets", "pillow", "accelerate", "torchmetrics", "tensorboard", "scikit-learn", "matplotlib"),
    *("filelock", "open_clip_torch", "onnx", "onnxruntime", "openvino", "optuna", "gradio", "numba"),
)
"""The packages vitrim needs, always or for some commands, and the libraries whose models it reduces."""


def env(*, output: Output) -> None:
    """Print versions, processor and devices, for the report of a problem."""
    found = report()
    rows = list(_lines(found))
    width = max(len(name) for name, _ in rows)
    output.print(*(f"{name:<{width}}  {value}" for name, value in rows))
    output.write("env", **found)


def report() -> dict[str, Any]:
    """Versions, processor and devices of this machine. Packages that are not installed are None."""
    import torch

    from vitrim.measure.machine import DEVICES

    packages: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = None
    return {
        "vitrim": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "packages": packages,
        "cpu": _cpu(),
        "devices": [kind for kind in DEVICES if torch.get_device_module(kind).is_available()],
        "cuda": _cuda(),
    }


def _cpu() -> dict[str, Any]:
    import torch

    from vitrim.measure.machine import processor

    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    return {
        "name": processor(),
        "cores": os.cpu_count(),
        "usable_cores": os.cpu_count() if affinity is None else len(affinity(0)),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _cuda() -> dict[str, Any]:
    """The version of CUDA or ROCm that torch was built for, and the devices it finds."""
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
    """The same facts in words: a name and a value on every line."""
    yield from ((name, found[name]) for name in ("vitrim", "python", "platform"))
    yield from ((package, number or "not installed") for package, number in found["packages"].items())
    cpu, cuda = found["cpu"], found["cuda"]
    yield "cpu", cpu["name"]
    yield "cores", f"{cpu['cores']}, {cpu['usable_cores']} of them usable; threads of torch: {cpu['threads']}"
    yield "capability", cpu["capability"]
    yield "devices", ", ".join(found["devices"])
    built = [f"{kind} {cuda[kind]}" for kind in ("cuda", "hip", "cudnn") if cuda[kind] is not None]
    yield "torch is for", ", ".join(built) or "cpu only"
    for index, device in enumerate(cuda["devices"]):
        yield f"cuda:{index}", f"{device['name']}, {device['memory_gib']:.1f} GiB, capability {device['capability']}"
