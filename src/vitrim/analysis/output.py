"""The folder of an analysis: records, tables and the common record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrim.analysis.record import Record
from vitrim.analysis.tables import Outcome
from vitrim.errors import VitrimError
from vitrim.files import check_folder, json_text, write_text
from vitrim.measure.decisions import file_name, write_arrays

__all__ = ["SUMMARY", "check_output", "read_report", "write_records", "write_tables"]

SUMMARY = "analysis.json"
ARRAYS_FORMAT = 1
"""Of the arrays of a family, see `vitrim.measure.decisions.read_arrays`."""


def check_output(folder: Path) -> None:
    """Refuse a folder that cannot be written to, or holds files of something else than an analysis.

    Raises:
        VitrimError: it is such a folder. Nothing is created.

    Example:
        >>> check_output(Path("reports/new"))
    """
    check_folder(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SUMMARY).is_file():
        raise VitrimError(f"{folder} is not empty and holds no analysis: name another folder")


def read_report(folder: Path) -> list[Record]:
    """The records of a finished analysis; ``report`` of their headers is the name of its folder.

    Raises:
        VitrimError: the folder holds none, or one that was stopped, or a record in it cannot be read.
    """
    files = sorted(folder.glob("record_*.npz")) if (folder / SUMMARY).is_file() else []
    if not files:
        raise VitrimError(f"{folder} holds no finished analysis: give the --out of `vitrim analyze` with a model")
    if json.loads((folder / SUMMARY).read_text(encoding="utf-8")).get("complete") is False:
        raise VitrimError(f"the analysis in {folder} was stopped before all images were seen: run it again")
    found = [Record.load(file) for file in files]
    return [replace(one, header={**one.header, "report": str(folder)}) for one in found]


def write_records(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Write ``record_METHOD.npz`` of each record into ``folder``, which is made if it does not exist; of several models
    ``record_MODEL_METHOD.npz``. Records of an analysis that was there before are deleted then: they may be of others.

    Returns:
        The files.

    Raises:
        VitrimError: a file cannot be written.
    """
    files = []
    several = len({record.header.get("model") for record in records}) > 1
    for record in records:
        name = f"{record.header['model']}_{record.method}" if several else record.method
        files.append(folder / f"record_{file_name(name)}.npz")
        record.save(files[-1])
    for old in set(folder.glob("record_*.npz")) - set(files):
        old.unlink()
    return files


def write_tables(folder: Path, outcomes: Mapping[str, Outcome], found: Mapping[str, Any]) -> list[Path]:
    """Write ``tables/TABLE.csv``, ``arrays/FAMILY.npz`` where a family has any, and ``analysis.json``.

    Args:
        folder: made if it does not exist.
        outcomes: by family.
        found: entries of the summary besides tables and notes, that JSON can hold.

    Returns:
        The files.

    Raises:
        VitrimError: a file cannot be written.
    """
    files = []
    tables = {table.name: table for outcome in outcomes.values() for table in outcome.tables}
    for name, table in tables.items():
        files.append(folder / "tables" / f"{name}.csv")
        write_text(files[-1], table.csv())
    for name, outcome in outcomes.items():
        if outcome.arrays:
            files.append(folder / "arrays" / f"{name}.npz")
            write_arrays(files[-1], {"format": ARRAYS_FORMAT, "family": name}, outcome.arrays)
    summary = {
        **found,
        "tables": {name: table.records() for name, table in tables.items() if table.shown != ()},
        "notes": [note for outcome in outcomes.values() for note in outcome.notes],
    }
    files.append(folder / SUMMARY)
    write_text(files[-1], json_text(summary, indent=2) + "\n")
    return files
