"""Predictions of all models of a comparison, a row per image, as a CSV or parquet file."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from vitrim.errors import VitrimError, check_installed
from vitrim.files import check_file, csv_text, write_text, written
from vitrim.measure.probes import Predictions
from vitrim.measure.run import Findings

ENDINGS = (".csv", ".parquet")


def check_predictions(file: Path) -> None:
    """Check that predictions can be written to ``file``, before any work."""
    if file.suffix not in ENDINGS:
        raise VitrimError(f"predictions are written to a file that ends in {' or '.join(ENDINGS)}, not to {file}")
    if file.suffix == ".parquet":
        check_installed("a parquet file", "pyarrow")
    check_file(file)


def save_predictions(findings: Findings, dataset: Any, file: Path) -> Path:
    """Write a row per image with its index, file and label, and per model the predicted class and its probability."""
    found = [next(one for one in gauges if isinstance(one, Predictions)).table() for gauges in findings.gauges]
    ids = found[0]["ids"]
    columns: dict[str, list[Any]] = {"image": ids}
    places = getattr(dataset, "images", None)
    if isinstance(places, list | tuple) and all(isinstance(places[one], Path) for one in ids):
        columns["file"] = [str(places[one]) for one in ids]
    columns["label"] = found[0]["labels"]
    for row, own in zip(findings.rows, found, strict=True):
        columns |= {row.method: own["classes"], f"{row.method} probability": own["probabilities"]}
    if file.suffix == ".csv":
        write_text(file, csv_text(columns, zip(*columns.values(), strict=True)))
        return file
    pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    with written(file) as new:
        parquet.write_table(pyarrow.table(columns), new)
    return file
