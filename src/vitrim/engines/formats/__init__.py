"""The formats of exported models: a format writes a torch.export program, and opens the file in its engine."""

from __future__ import annotations

from pathlib import Path

from vitrim.core.tables import enter
from vitrim.engines.formats.base import Format
from vitrim.engines.formats.onnx import ONNX
from vitrim.engines.formats.openvino import OpenVINO
from vitrim.engines.formats.pt2 import AOTI, PT2
from vitrim.errors import VitrimError, check_known

_FORMATS: dict[str, type[Format]] = {kind.name: kind for kind in (ONNX, OpenVINO, PT2, AOTI)}


def register_format(kind: type[Format]) -> type[Format]:
    """Class decorator that registers a format by its name."""
    enter(_FORMATS, kind.name, kind, f"format '{kind.name}'")
    return kind


def formats() -> dict[str, type[Format]]:
    """All formats by name: those in this folder, and registered ones."""
    return dict(_FORMATS)


def engines() -> dict[str, type[Format]]:
    """The formats whose engines can run here, by name of the engine."""
    return {kind.engine: kind for kind in formats().values() if kind.missing() is None}


def format_named(name: str | None, path: Path) -> type[Format]:
    """The format ``name`` or, for None, that of the suffix of ``path``; `VitrimError` if they are unknown or differ.

    Example:
        >>> format_named(None, Path("m.onnx")).engine, format_named(None, Path("m.pt2")).engine
        ('onnxruntime', 'torch.export')
    """
    every = formats()
    # aoti shares the suffix of pt2 and must be named; sorted, pt2 comes last and wins
    endings = {kind.suffix: kind for kind in sorted(every.values(), key=lambda kind: kind.name)}
    if name is None:
        if path.suffix not in endings:
            raise VitrimError(
                f"cannot tell the format of {path}: end it in {', '.join(sorted(endings))}, or say it with --to"
            )
        return endings[path.suffix]
    check_known("format", name, every)
    if path.suffix != every[name].suffix:
        raise VitrimError(f"a file of format {name} ends in {every[name].suffix}, and {path} does not")
    return every[name]
