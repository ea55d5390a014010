"""The folder of a long measurement, from which it can go on after a stop."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vitrim.errors import VitrimError, first_line
from vitrim.files import check_folder, save_file
from vitrim.measure.probes import State
from vitrim.measure.processes import Processes
from vitrim.measure.run import Measurement

FORMAT = 1
SECONDS_BETWEEN = 30.0


class Partial:
    """The folder of a measurement that can be resumed: one file per process, each written whole or not at all.

    Args:
        folder: made if it does not exist.
        settings: everything the numbers depend on; a folder of other settings is refused.
        processes: this process and its like.
        resume: whether to go on from what the folder holds. Otherwise it must hold no measurement.

    Raises:
        VitrimError: the folder cannot be written to, holds a measurement of other settings or of another number of
            processes, or is damaged. Nothing is written then.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], processes: Processes, *, resume: bool = False) -> None:
        check_folder(folder)
        self.folder, self.processes = folder, processes
        self.settings: dict[str, Any] = json.loads(json.dumps({**settings, "processes": processes.count}))
        self.written = time.monotonic()
        self.file = folder / f"part-{processes.index}.safetensors"
        if (folder / "part-0.safetensors").is_file():  # of the first process: without it nothing was finished
            if not resume:
                raise VitrimError(f"{folder} holds an evaluation: add --resume to go on, or name another folder")
            self._check_settings(_header(folder / "part-0.safetensors"))

    def _check_settings(self, header: dict[str, Any]) -> None:
        old, new = _dotted(header["settings"]), _dotted(self.settings)
        for name in [*new, *old]:
            if old.get(name) != new.get(name):
                raise VitrimError(
                    f"{self.folder} holds an evaluation with {name}={_short(old.get(name))}, this one has "
                    f"{_short(new.get(name))}: resume with the same settings, or name another folder"
                )

    def restore(self, measurement: Measurement) -> int:
        """Take over what this process had gathered, and return how many of its batches that was."""
        if not self.file.is_file():
            return 0
        header = _header(self.file)
        self._check_settings(header)
        states: dict[str, State] = {}
        try:
            with safe_open(self.file, "pt") as parts:
                for name in sorted(parts.keys()):
                    gauge, _, key = name.partition("/")
                    _enter(states.setdefault(gauge, {}), key, parts.get_tensor(name))
            measurement.load(states, images=header["images"], turns=header["turns"])
        except (OSError, SafetensorError) as error:
            raise VitrimError(f"cannot read {self.file}: {first_line(error)}") from error
        except (KeyError, ValueError) as error:
            raise VitrimError(f"{self.file} is damaged ({first_line(error)}): name another folder") from error
        return int(header["turns"])

    def keep(self, measurement: Measurement, *, now: bool = False) -> None:
        """Write what this process has gathered, if the last time is a while ago or ``now`` is given."""
        if not now and time.monotonic() - self.written < SECONDS_BETWEEN:
            return
        tensors: dict[str, Tensor] = {}  # copies: a file takes no tensor twice, and gauges may share some
        for gauge, state in measurement.state().items():
            for key, value in state.items():
                if isinstance(value, list):
                    tensors |= {f"{gauge}/{key}/{place:08d}": one.clone() for place, one in enumerate(value)}
                else:
                    tensors[f"{gauge}/{key}"] = value.clone()
        header = {
            "format": FORMAT,
            "settings": self.settings,
            "images": measurement.images,
            "turns": measurement.turns,
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            beside = self.file.with_suffix(".new")
            save_file(tensors, beside, {"vitrim": json.dumps(header)})
            beside.replace(self.file)
        except (OSError, SafetensorError) as error:
            raise VitrimError(f"cannot write {self.file}: {first_line(error)}") from error
        self.written = time.monotonic()


def weights_fingerprint(model: nn.Module) -> str:
    """64 hexadecimal digits that differ for models with other parameters or buffers.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> weights_fingerprint(layer) == weights_fingerprint(layer), len(weights_fingerprint(layer))
        (True, 64)
    """
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _enter(state: State, key: str, value: Tensor) -> None:
    """Put one tensor of the file into ``state``; those of a list are numbered, and come in order."""
    name, slash, _ = key.partition("/")
    if slash:
        entries = state.setdefault(name, [])
        if not isinstance(entries, list):
            raise ValueError(f"{name} is a tensor and a list")
        entries.append(value)
    else:
        state[name] = value


def _header(file: Path) -> dict[str, Any]:
    try:
        with safe_open(file, "pt") as parts:
            header = json.loads((parts.metadata() or {})["vitrim"])
        if header["format"] != FORMAT:
            raise VitrimError(f"{file} has format {header['format']}, this vitrim reads {FORMAT}: name another folder")
        if not isinstance(header["settings"], dict):
            raise ValueError("no settings")
        if not all(type(header[name]) is int and header[name] >= 0 for name in ("images", "turns")):
            raise ValueError("no numbers of images and batches")
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise VitrimError(f"{file} is no partial evaluation, or is damaged: name another folder") from error
    return dict(header)


def _dotted(settings: dict[str, Any], above: str = "") -> dict[str, Any]:
    """The settings by dotted names, so that a message names what differs and not the section around it.

    Example:
        >>> _dotted({"data": {"images": 12}, "model": "test_vit"})
        {'data.images': 12, 'model': 'test_vit'}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _dotted(value, f"{above}{name}.") if isinstance(value, dict) else {f"{above}{name}": value}
    return found


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
