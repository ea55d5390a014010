"""This machine: its devices, threads and random generators, and the facts that numbers depend on."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from vitrim.errors import VitrimError, first_line, unknown
from vitrim.version import __version__

DEVICES = ("cpu", "cuda", "mps", "xpu")
PACKAGES = {"open_clip": "open_clip_torch"}
"""Packages of host libraries whose import name differs."""


def select_device(device: str) -> torch.device:
    """The torch device ``device``; raise `VitrimError` if this machine does not have it."""
    try:
        selected = torch.device(device)
    except (RuntimeError, TypeError):
        raise VitrimError(
            f"unknown device '{device}'; valid: {', '.join(DEVICES)}, or one of several, e.g. cuda:0"
        ) from None
    if selected.type not in DEVICES:
        raise unknown("device", device, DEVICES)
    if not torch.get_device_module(selected.type).is_available():
        raise VitrimError(f"device '{device}' cannot be used here: torch finds none on this machine")
    try:
        torch.empty(1, device=selected)
    except (RuntimeError, AssertionError) as error:
        raise VitrimError(f"device '{device}' cannot be used here: {first_line(error)}") from error
    return selected


def set_threads(threads: int | None) -> int:
    """Set the number of CPU threads, unless None, and return the current number."""
    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def environment(*, device: str = "cpu", dtype: str = "float32", seed: int | None = None) -> dict[str, Any]:
    """The facts besides the command that numbers depend on: versions, device, dtype, threads, seed."""
    from vitrim.core.tables import libraries, missing_libraries

    hosts = [library for library in libraries() if library not in ("vitrim", *missing_libraries())]
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else processor()
    return {
        "vitrim": __version__,
        "torch": str(torch.__version__),
        "numba": next((found.version for found in distributions(name="numba")), None),  # decisions by `core.compiled`
        **{
            library: found.version  # a repository on the path has none
            for library in hosts
            for found in distributions(name=PACKAGES.get(library, library))
        },
        "python": platform.python_version(),
        "device": device,
        "device_name": name,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "seed": seed,
    }


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextmanager
def seeded_draws(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the generators of the CPU and of ``device`` within the block, and restore them afterwards.

    On an accelerator other than CUDA its generators keep their new state.
    """
    # `torch.manual_seed` would also seed generators of other accelerators, which are not restored. It is used only
    # where torch cannot fork the generators in a common way.
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if on_cuda else []):
        if device.type not in ("cpu", "cuda", "meta"):
            torch.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        if on_cuda:
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed)
        yield
