"""Speed over time: one file of speed ratios per commit, and the page that draws them.

    python benchmarks/track.py                  # measure this commit: benchmarks/track/DATE-COMMIT.json
    python benchmarks/track.py --page           # draw all files: docs/speeds.md and docs/images/speeds.svg
    python benchmarks/track.py --rounds 3 --model vit_tiny_patch16_224 --out /tmp/track

A ratio is the speed-up over the dense model with its faster attention kernel, divided by what MACs promise: it is
comparable between machines of different speed, as long as batch size, threads and number type are the same. Dense and
reduced are timed in one interleaved run. Files of different settings are not compared with each other.

The page names what lost more than 5 % from one file to the next; the changelog then says so, too.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HISTORY = ROOT / "benchmarks" / "track"
PAGE = ROOT / "docs" / "speeds.md"
FIGURE = ROOT / "docs" / "images" / "speeds.svg"
METHODS = (
    "none",
    "tome:r=13,last_block=class_token",
    "atm:granularity=image,theta_min=0.4,alpha=0.4,beta=0.0",
    "topk:keep_rate=0.525",
    "evit:keep_rate=0.495",
    "mctf:r=16",
    "dpc_knn:keep_rate=0.54",
)
LOSS = 0.05
"""A ratio that falls by more than this share is named."""
COLOURS = ("#444444", "#1f5fbf", "#b4530a", "#1a7f5a", "#8a3ffc", "#c2185b", "#7a6a00")
Record = dict[str, Any]


# ---- measuring -------------------------------------------------------------------------------------------------------


def git(*arguments: str) -> str:
    """Output of git in this repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def measure_commit(model_name: str, batch_sizes: Sequence[int], threads: int, rounds: int) -> Record:
    """Ratios of all methods at every batch size, with what they depend on."""
    import torch

    from vitrim.core.registry import parse_method
    from vitrim.loading import create_model
    from vitrim.measure.inputs import random_images
    from vitrim.measure.latency import Budget
    from vitrim.measure.machine import processor
    from vitrim.speed.bench import measure

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = create_model(model_name).eval()
    methods = {text: parse_method(text) for text in METHODS}
    budget = Budget(min_rounds=rounds, min_seconds=0.0, max_rounds=rounds, warmup_rounds=1)
    keys = ("speedup", "speedup_q1", "speedup_q3", "promised_speedup", "ratio")
    rows = [
        {"method": row["method"], "batch": size, **{key: round(row[key], 4) for key in keys}}
        for size in batch_sizes
        for row in measure(model, methods, random_images(model, size), budget=budget)
        if row["method"] != "dense"
    ]
    return {
        "commit": git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain") else ""),
        "date": git("show", "-s", "--format=%cs", "HEAD"),
        "measured": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="minutes"),
        "settings": {"model": model_name, "dtype": "float32", "threads": threads, "rounds": rounds},
        "load": [round(value, 1) for value in os.getloadavg()],
        "processor": processor(),
        "torch": str(torch.__version__),
        "rows": rows,
    }


# ---- drawing ---------------------------------------------------------------------------------------------------------


def read(folder: Path) -> list[Record]:
    """All files of a folder, the oldest commit first."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def comparable(one: Record, other: Record) -> bool:
    """Return whether two records are of the same settings, processor and torch."""
    keys = ("model", "dtype", "threads")
    same = all(one["settings"][key] == other["settings"][key] for key in keys)
    return same and one["processor"] == other["processor"] and one["torch"] == other["torch"]


def by_row(record: Record) -> dict[tuple[str, int], Mapping[str, Any]]:
    return {(row["method"], row["batch"]): row for row in record["rows"]}


def losses(records: Sequence[Record]) -> Iterator[str]:
    """Sentences about ratios that fell by more than `LOSS` between neighbours, beyond their quartiles.

    Example:
        >>> base = {"settings": {"model": "m", "dtype": "float32", "threads": 2}, "processor": "p", "torch": "2"}
        >>> row = {"method": "tome:r=8", "batch": 8, "promised_speedup": 1.4}
        >>> old = {**row, "ratio": 1.0, "speedup_q1": 1.38, "speedup_q3": 1.42}
        >>> new = {**row, "ratio": 0.9, "speedup_q1": 1.24, "speedup_q3": 1.28}
        >>> list(losses([{**base, "commit": "a", "rows": [old]}, {**base, "commit": "b", "rows": [new]}]))
        ['`tome:r=8` at batch 8: 1.00 at a, 0.90 at b']
    """
    for before, after in itertools.pairwise(records):
        if not comparable(before, after):
            continue
        earlier = by_row(before)
        for key, row in by_row(after).items():
            old = earlier.get(key)
            if old is None or row["ratio"] >= (1 - LOSS) * old["ratio"]:
                continue
            if row["speedup_q3"] / row["promised_speedup"] < old["speedup_q1"] / old["promised_speedup"]:
                yield (
                    f"`{key[0]}` at batch {key[1]}: {old['ratio']:.2f} at {before['commit']}, "
                    f"{row['ratio']:.2f} at {after['commit']}"
                )


def figure(records: Sequence[Record]) -> str:
    """An SVG with a line per method, at the largest batch size that every record has."""
    width, height, left, top, low, high = 900, 360, 60, 20, 0.4, 1.3
    sizes = set.intersection(*({row["batch"] for row in record["rows"]} for record in records))
    batch, step = max(sizes), 560 / max(len(records) - 1, 1)

    def place(index: int, ratio: float) -> tuple[float, float]:
        share = (min(max(ratio, low), high) - low) / (high - low)
        return left + index * step, top + (1 - share) * (height - 2 * top - 30)

    parts = [f'<rect width="{width}" height="{height}" fill="white"/>']
    for level in (0.4, 0.6, 0.8, 1.0, 1.2):
        y = place(0, level)[1]
        parts.append(f'<line x1="{left}" x2="{left + 560}" y1="{y:.0f}" y2="{y:.0f}" stroke="#dde3ea"/>')
        parts.append(f'<text x="{left - 10}" y="{y + 4:.0f}" text-anchor="end">{level:.1f}</text>')
    for colour, method in zip(COLOURS, METHODS, strict=True):
        found = [(index, by_row(record).get((method, batch))) for index, record in enumerate(records)]
        points = [place(index, row["ratio"]) for index, row in found if row is not None]
        path = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3" fill="{colour}"/>' for x, y in points]
        y = top + 20 * METHODS.index(method) + 10
        parts.append(f'<text x="{left + 590}" y="{y}" fill="{colour}">{method.partition(",")[0]}</text>')
    for index, record in ((0, records[0]), (len(records) - 1, records[-1])):
        x = place(index, low)[0]
        parts.append(f'<text x="{x:.0f}" y="{height - 16}" text-anchor="middle">{record["date"]}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-size="13" '
        f'font-family="system-ui, sans-serif"><title>Ratio of speed-up to promise at batch {batch}, by commit</title>'
        f"{''.join(parts)}</svg>\n"
    )


def page(records: Sequence[Record]) -> str:
    """The Markdown of docs/speeds.md."""
    last = records[-1]
    settings = last["settings"]
    none = "None so far." if len(records) > 1 else "One commit was measured so far: there is nothing to compare yet."
    lost = [f"* {line}" for line in losses(records)] or [none]
    rows = [
        f"| `{row['method']}` | {row['batch']} | {row['speedup']:.2f} "
        f"[{row['speedup_q1']:.2f}, {row['speedup_q3']:.2f}] | {row['promised_speedup']:.2f} | {row['ratio']:.2f} |"
        for row in last["rows"]
    ]
    busy = "; the machine was busy" if last["load"][0] > settings["threads"] + 1 else ""
    return "\n".join(
        [
            "# Speed over time",
            "",
            "How much of the speed-up that its MACs promise does a method reach, and did a commit change that? A",
            "ratio of 1.0 is all of it. `benchmarks/track.py --page` writes this page from one file per measured",
            "commit in `benchmarks/track`.",
            "",
            "![Ratio of speed-up to promise by commit](images/speeds.svg)",
            "",
            f"The last was of commit {last['commit']} of {last['date']}, {settings['model']}, {settings['dtype']},",
            f"{settings['threads']} threads, {settings['rounds']} interleaved rounds, torch {last['torch']},",
            f"{last['processor']}{busy}.",
            "",
            "| method | batch | speed-up | promised | ratio |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "## Ratios that fell by more than 5 %",
            "",
            "From one file to the next with the same settings, where their quartiles do not overlap:",
            "",
            *lost,
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure this commit, or draw the page."""
    parser = argparse.ArgumentParser(description="speed ratios of this commit, or the page that draws all of them")
    parser.add_argument("--page", action="store_true", help="draw, do not measure")
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--batch-size", default="1,8", help="several with commas")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=HISTORY, help="folder of the files")
    options = parser.parse_args(arguments)
    if options.page:
        records = read(options.out)
        PAGE.write_text(page(records), encoding="utf-8")
        FIGURE.write_text(figure(records), encoding="utf-8")
        return
    sizes = [int(size) for size in options.batch_size.split(",")]
    record = measure_commit(options.model, sizes, options.threads, options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{record['measured'][:16].replace(':', '')}-{record['commit'].rstrip('+')}.json"
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
