"""Counts: tokens per block against numpy, and their figures."""

from __future__ import annotations

import numpy as np
import pytest

from made_tables import IMAGES, NAMES, PATCHES, rows
from vitrim.analysis.families.counts import counts, draw_removed, draw_share_of_bound, draw_tokens
from vitrim.analysis.family import Tables
from vitrim.analysis.record import Record
from vitrim.report import Table


def test_counts_are_those_of_numpy(records: list[Record]) -> None:
    found = rows(counts(records[:1]), "counts")
    left = records[0].tokens()
    before = np.concatenate([np.full((IMAGES, 1), PATCHES + 1), left[:, :-1]], 1)
    for block, row in enumerate(found):
        assert (row["tokens"], row["tokens_std"]) == pytest.approx((left[:, block].mean(), left[:, block].std()))
        assert row["removed"] == pytest.approx((before - left)[:, block].mean())
        assert [row["p10"], row["median"], row["p90"]] == np.quantile(left[:, block], [0.1, 0.5, 0.9]).tolist()


def test_the_first_block_removes_what_is_gone_after_it(records: list[Record]) -> None:
    left = np.tile([7, 5, 5, 2], (IMAGES, 1))
    left[0] = [9, 6, 6, 1]
    header = {**records[0].header, "bounds": [8, 7, 6, 5], "thresholds": [0.1, 0.2, 0.3, 0.4]}
    found = rows(counts([Record(header, {**records[0].arrays, "num_tokens": left})]), "counts")
    assert [row["removed"] for row in found] == pytest.approx([10 - 7.05, 7.05 - 5.025, 0, 5.025 - 1.975])
    assert [(row["least"], row["most"]) for row in found] == [(7, 9), (5, 6), (5, 6), (1, 2)]
    assert [(row["bound"], row["threshold"]) for row in found] == [(8, 0.1), (7, 0.2), (6, 0.3), (5, 0.4)]


def test_tokens_removed_and_the_bound(made: Tables) -> None:
    tokens = draw_tokens(made).axes[0]
    line = next(line for line in tokens.lines if line.get_label() == NAMES[0])
    assert line.get_ydata().tolist() == [row["tokens"] for row in rows(made, "counts", method=NAMES[0])]
    bars = draw_removed(made).axes[1].patches
    assert [bar.get_height() for bar in bars] == [row["removed"] for row in rows(made, "counts", method=NAMES[0])]
    shares = draw_share_of_bound(made).axes[0].lines
    assert [line.get_label() for line in shares] == [NAMES[2]]
    assert shares[0].get_ydata()[0] == rows(made, "counts", method=NAMES[2])[0]["tokens"] / 17


def test_thresholds_are_a_line_over_the_bars(made: Tables) -> None:
    counts = made["counts"]
    with_thresholds = [(*row[:-1], 0.9 - 0.1 * row[1]) if row[0] == NAMES[2] else row for row in counts.rows]
    figure = draw_removed(Tables({"counts": Table("counts", "", counts.columns, with_thresholds)}))
    [line] = [line for axis in figure.axes for line in axis.lines]
    assert line.get_ydata().tolist() == pytest.approx([0.9, 0.8, 0.7, 0.6])
