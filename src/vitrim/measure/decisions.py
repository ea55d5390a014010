"""Decisions: the fate of every input token, per image and block, and the file format of such records."""

from __future__ import annotations

import json
import math
import stat
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrim.core.reduce import Reduction
from vitrim.core.registry import host_of
from vitrim.errors import VitrimError, first_line
from vitrim.files import safe_name, written
from vitrim.measure.contestants import Contestant, ModelOutput
from vitrim.measure.probes import Gauge, Lists
from vitrim.measure.records import Batch
from vitrim.measure.run import Findings

FORMAT = 1


@dataclass(frozen=True)
class Decisions:
    """The fate of the tokens of images under one method, in the order of their ids.

    Attributes:
        header: ``method``, ``num_prefix``, ``soft`` (tokens are mixtures, and ``source`` names the token with the
            largest weight), and entries of the caller; JSON-serialisable.
        ids: (I,) int64, indices of the images in their dataset.
        source: (I, L, N0) int32: the token that holds input token i after block l, prefix counted, -1 for none.
        num_tokens: (I, L) int32, tokens of each image after each block, with prefix, without padding.

    Example:
        >>> decisions = Decisions({"method": "none"}, np.arange(1), np.zeros((1, 2, 3), np.int32), np.ones((1, 2)))
        >>> decisions.source.shape
        (1, 2, 3)
    """

    header: Mapping[str, Any]
    ids: NDArray[Any]
    source: NDArray[Any]
    num_tokens: NDArray[Any]

    def save(self, file: str | Path) -> None:
        """Write a compressed .npz without pickles, in the narrowest integer types."""
        source = narrowed(self.source)
        header = {**self.header, "format": FORMAT, "pruned": int(np.iinfo(source.dtype).max)}
        # The value that stands for -1 is in the header: the reader need not know the type's width.
        arrays = {"ids": self.ids, "source": source, "num_tokens": self.num_tokens.astype(np.int32)}
        write_arrays(file, header, arrays)

    @classmethod
    def load(cls, file: str | Path) -> Decisions:
        """Read a file of `save`."""
        header, arrays = read_arrays(file, "record of decisions", FORMAT)
        try:
            return cls(header, arrays["ids"], widened(arrays["source"], header["pruned"]), arrays["num_tokens"])
        except KeyError as error:
            raise VitrimError(f"{file} is no record of decisions: it has no {error}") from error


class DecisionsProbe(Gauge):
    """A gauge that records `Decisions`; it adds no columns to rows."""

    def __init__(self, reduction: Reduction | None = None, name: str = "") -> None:
        self.reduction, self.name = reduction, name
        self.lists = Lists("ids", "source", "num_tokens")
        super().__init__({"record": self.lists})

    def start(self, contestant: Contestant) -> Gauge:
        """Start the record of one model; that of the dense model stays empty."""
        return DecisionsProbe(contestant.reduction, contestant.name)

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        if self.reduction is not None:
            self.lists.update(ids=batch.ids, **whereabouts(self.reduction, len(batch)))

    def decisions(self) -> Decisions | None:
        """The record; None for the dense model."""
        found = self.lists.each()
        if self.reduction is None or not found:
            return None
        model, config = self.reduction.model, self.reduction.config
        # Processes and shuffled batches come in any order; the file is in that of the dataset.
        order, num_prefix = found["ids"].argsort(), host_of(model).facts(model).num_prefix
        header = {"method": self.name, "num_prefix": num_prefix, "soft": config.kind == "soft"}
        return Decisions(header, *(found[name][order].numpy() for name in ("ids", "source", "num_tokens")))


def whereabouts(reduction: Reduction, images: int) -> dict[str, Tensor]:
    """``source`` and ``num_tokens`` (see `Decisions`) of the last forward of B images, which was recorded."""
    states = reduction.states[1:]
    # Until the first reduction one row of indices serves all images.
    source = torch.stack([state.source.expand(images, -1) for state in states], 1)
    counts = [
        torch.full((images,), state.num_tokens) if state.mask is None else state.mask.sum(1).cpu() for state in states
    ]
    return {
        "source": source.to("cpu", torch.int32),
        "num_tokens": torch.stack(counts, 1).to("cpu", torch.int32),
    }


def save_decisions(findings: Findings, folder: Path) -> list[Path]:
    """Write the `Decisions` of every method into ``folder``, as ``METHOD.npz``, and return the files."""
    files = []
    for gauge in chain.from_iterable(findings.gauges):
        found = gauge.decisions() if isinstance(gauge, DecisionsProbe) else None
        if found is not None:
            files.append(folder / f"{file_name(found.header['method'])}.npz")
            found.save(files[-1])
    return files


def file_name(method: str) -> str:
    """A method's text as a file name: letters, digits, dots and minus signs stay; a long name ends in a checksum."""
    return safe_name(method, ".-")


# ---- the file: arrays with a header, without pickles -----------------------------------------------------------------

HEADER = "header"
LARGEST = 2 * 2**30
"""Most bytes of the arrays in one file."""
READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
DAMAGES = (
    *(KeyError, ValueError, TypeError, EOFError, RuntimeError, MemoryError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, OverflowError, tokenize.TokenError),
)
"""Errors of reading a damaged file; a deeply nested header is a RecursionError or a MemoryError."""


def narrowed(source: NDArray[Any]) -> NDArray[Any]:
    """Tokens (..., N0) from -1 to N0 - 1 in the narrowest integers; -1 becomes the largest of an unsigned type."""
    tokens = source.shape[-1]
    # One value less than the type has, because its largest one stands for -1.
    narrow = np.uint8 if tokens < np.iinfo(np.uint8).max else np.uint16 if tokens < 2**16 - 1 else np.int32
    return np.where(source < 0, np.iinfo(narrow).max, source).astype(narrow)


def widened(source: NDArray[Any], pruned: int) -> NDArray[np.int32]:
    """Undo `narrowed`; ``pruned`` is the value that represents -1."""
    wide = source.astype(np.int32)
    wide[source == pruned] = -1
    return wide


def write_arrays(file: str | Path, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write ``arrays`` and a JSON-serialisable ``header`` atomically, creating parent folders."""
    text: dict[str, Any] = {HEADER: np.array(json.dumps(dict(header)))}
    with written(Path(file)) as place, place.open("wb") as out:
        np.savez_compressed(out, **text, **arrays)  # type: ignore[arg-type]


def read_arrays(file: str | Path, what: str, version: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Read a file of `write_arrays`, with ``what`` in format ``version``; `VitrimError` for any damage."""
    file = Path(file)
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # opening a pipe would block
            raise VitrimError(f"cannot read {file}: it is no file")
        with file.open("rb") as opened:
            if not zipfile.is_zipfile(opened):  # numpy's message would recommend unpickling, which is unsafe
                raise VitrimError(f"{file} is no {what}: it is no .npz file, or was cut short")
            # A stranger's file: the sizes that its entries claim are checked before an array is read.
            fault = next(_faults(opened), None)
            if fault is not None:
                raise VitrimError(f"{file} is no {what}: {fault}")
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as stored:
                header = json.loads(str(stored[HEADER]))
                if not isinstance(header, dict) or "format" not in header:
                    raise VitrimError(f"{file} is no {what}: its header names no format")
                if header["format"] != version:
                    raise VitrimError(f"{file} has format {header['format']}, this vitrim reads {version}")
                json.dumps(header, ensure_ascii=False).encode()  # lone surrogates cannot be printed
                return header, {name: stored[name] for name in stored.files if name != HEADER}
    except OSError as error:
        raise VitrimError(f"cannot read {file}: {error.strerror or first_line(error)}") from error
    except VitrimError:
        raise
    except DAMAGES as error:
        raise VitrimError(f"{file} is no {what}: {first_line(error)}") from error


def _faults(opened: BinaryIO) -> Iterator[str]:
    """Yield what is wrong with the entries of an .npz file, without reading the arrays; only the first is sure."""
    with zipfile.ZipFile(opened) as stored:
        entries = stored.infolist()
        names = {entry.filename for entry in entries}
        if f"{HEADER}.npy" not in names or len(names) < len(entries):
            yield "it has no header, or two arrays of one name"
        # The sizes in the list are checked against the headers below, so neither can lie alone.
        if sum(entry.file_size for entry in entries) > LARGEST:
            yield f"its arrays would take more than {LARGEST / 2**30:.0f} GiB"
        for entry in entries:
            name = entry.filename
            if entry.flag_bits & 1 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                yield f"{name} is encrypted, or compressed as no array is"
            with stored.open(entry) as content:
                read = READERS.get(np.lib.format.read_magic(content))
                if read is None:
                    yield f"{name} is of an unknown version"
                    return
                shape, _, dtype = read(content)
                start = content.tell()
            if dtype.kind not in ("U" if name == f"{HEADER}.npy" else "biuf"):
                yield f"{name} holds {dtype}, no numbers"
            # Exactly the bytes of its shape and dtype: numpy would otherwise ask for memory that the file does not
            # fill.
            if min(shape, default=0) < 0 or start + math.prod(shape) * dtype.itemsize != entry.file_size:
                yield f"{name} of shape {shape} and {dtype} does not have {entry.file_size} bytes"
