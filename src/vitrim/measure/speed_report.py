"""Timings in words: the table of a setting, which engine to use, and where reducing does not pay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import cycle
from typing import Any

from vitrim import style
from vitrim.measure.latency import APART
from vitrim.measure.limit import PLAIN_SLICE
from vitrim.measure.records import Row
from vitrim.report import Report, Table

MEANING = (
    "p50, p95 ms: median and 95th percentile of one batch over the rounds",
    "peak MiB: what one forward allocates beyond weights and images; - where the engine has memory of its own",
    "speed-up: over the fastest dense model, the median of the ratios within a round; q1-q3: their quartiles",
    "promised: MACs of the dense model over those of the method, which is the speed-up if time were MACs",
    "ratio: speed-up over promised",
    "own engine: speed-up over the dense model on the same engine in the same precision",
)
"""Explanations of the columns of a table."""
LIMIT = (
    "of limit: speed over that of the plain slice, x[:, :n] with the same counts and no decision, which is the limit "
    "and no method to use; q1-q3 in the words below"
)
NEW = (
    "new ms, new speed-up: on images that the engine meets for the first time, where engines prepare for every new "
    "number of tokens; the other columns: on the same images again"
)
AGREE = "agree %: images with the same top-1 as the dense model in fp32"
PARTS_MEANING = (
    "ms of one batch, medians. tower: of images; selection: all that is spent on choosing; language model: on the "
    "prompt; rest: connector, embeddings, shortening of prompts",
    "KV cache MiB: keys and values that the language model holds of a prompt at the end",
)
ALONE = "eager", "compile"
"""Engines that need no column if they are the only one."""


@dataclass
class SpeedReport(Report):
    """The findings of `vitrim.bench`: notes on the conditions, and a table for every setting.

    Attributes:
        words: for every table, advice on which engine to use, or what does not pay.
        parts_tables: for every table of prompts, the times of their parts.
    """

    words: list[list[str]] = field(default_factory=list)
    parts_tables: list[Table] = field(default_factory=list)

    def add(self, rows: Sequence[Row]) -> None:
        self.rows = [*self.rows, *rows]
        self.tables.append(table(rows))
        self.words.append(in_words(rows))
        if "parts_ms" in rows[0]:
            self.parts_tables.append(parts_table(rows))

    @property
    def figure(self) -> Any:
        """A matplotlib figure of milliseconds per image of every row, with a panel per batch size."""
        return draw(self.rows)

    def setting(self, place: int) -> Iterator[Any]:
        """The parts that a terminal shows for one setting; the first one explains the columns."""
        table = self.tables[place]
        yield from table.parts()
        if place in (0, -len(self.tables)):
            yield from (line for line in MEANING if _explains(line, table))
            yield from [AGREE] * any("agreement" in row for row in self.rows)
            yield from [LIMIT] * any("of_limit" in row for row in self.rows)
            yield from [NEW] * any("new_speedup" in row for row in self.rows)
        if self.parts_tables:
            yield from self.parts_tables[place].parts()
            if place in (0, -len(self.tables)):
                yield from PARTS_MEANING
        yield from self.words[place]
        yield ""

    def parts(self) -> Iterator[Any]:
        yield from self.notes
        for place in range(len(self.tables)):
            yield from self.setting(place)

    def _repr_html_(self) -> str:
        lines = (line for words in self.words for line in words)
        tables = "".join(table.html() for table in self.parts_tables)
        return super()._repr_html_() + tables + "".join(f"<p>{escape(line)}</p>" for line in lines)


def _explains(line: str, table: Table) -> bool:
    """True for a line on a column that ``table`` has, or on several."""
    name = line.partition(":")[0]
    return name not in ("ratio", "own engine") or name in table.columns


def table(rows: Sequence[Row]) -> Table:
    """The table of one setting, dense first; several engines one below the other, fastest first."""
    dense = [row for row in rows if row["method"] == rows[0]["method"]]
    several, first = _several(rows), rows[0]
    kernels = "; ".join(_kernel_text(row, several) for row in dense)
    title = f"{first['model']}, {setting_text(first, several)}; {kernels}; rounds: {first['rounds']}"
    agreement = any("agreement" in row for row in rows)
    limited, new = any("of_limit" in row for row in rows), "new_speedup" in first
    cells = [
        {**_cells(row, several, agreement), **(_limit_cell(row) if limited else {}), **(_new_cells(row) if new else {})}
        for row in (_by_engine(rows) if several else rows)
    ]
    columns, texts = tuple(cells[0]), [tuple(each.values()) for each in cells]
    text_columns = columns.index("images/s") if several else 1
    return Table(f"batch_{first['batch_size']}", title, columns, texts, text_columns=text_columns)


def _by_engine(rows: Sequence[Row]) -> list[Row]:
    """The rows by part and engine: the engine of the fastest row first, and in it dense, then the fastest method."""
    parts, dense = list(dict.fromkeys(row.get("part") for row in rows)), rows[0]["method"]
    best: dict[str, float] = {}
    for row in rows:
        best[engine_of(row)] = max(best.get(engine_of(row), 0.0), row["speedup"])

    def place(row: Row) -> tuple[Any, ...]:
        engine = engine_of(row)
        return parts.index(row.get("part")), -best[engine], engine, row["method"] != dense, -row["speedup"]

    return sorted(rows, key=place)


def parts_table(rows: Sequence[Row]) -> Table:
    """The times of the parts of a prefill (and answer) at one setting, and the size of the KV cache, dense first."""
    several, first = _several(rows), rows[0]
    number = first["new_tokens"]
    parts = list(first["parts_ms"])
    answer = f" and an answer of {number} token{'s' * (number > 1)}" if number else ""
    title = f"parts of the prefill{answer}, {setting_text(first, several)}"
    names = [f"decoding {number - 1}" if part == "decoding" else part for part in parts]
    columns = ("method", *(["engine"] if several else []), *names, "KV cache MiB")
    cells = []
    for row in rows:
        held = row["kv_cache_bytes"]
        cache = "-" if held is None else f"{held / 2**20:.2f}"
        own = [row["method"], *([engine_of(row)] if several else [])]
        cells.append((*own, *(f"{row['parts_ms'][part]:.2f}" for part in parts), cache))
    return Table(f"parts_{first['batch_size']}", title, columns, cells, text_columns=2 if several else 1)


def in_words(rows: Sequence[Row]) -> list[str]:
    """Advice for one setting: which engine to use, or which method does not pay."""
    dense, several = [row for row in rows if row["method"] == rows[0]["method"]], _several(rows)
    own = {(engine_of(row), row.get("part")): row for row in dense}
    # a file may use an engine without dense rows
    against = [(row, own.get((engine_of(row), row.get("part")), rows[0])) for row in rows]
    return [
        *([prepared(rows)] if {row["engine"] for row in rows} != {ALONE[0]} else []),
        *(advice(rows) if several else []),
        *(line for row, base in against if row is not base for line in verdicts(row, base, several=several)),
        *limits(rows),
        *unrest(rows),
    ]


def bounds(row: Mapping[str, Any]) -> tuple[float, float]:
    """The least and greatest plausible speed-up of a row, over its quartiles and the medians of both halves of rounds.

    Example:
        >>> bounds({"speedup_q1": 1.1, "speedup_q3": 1.2, "speedup_halves": [1.15, 0.9]})
        (0.9, 1.2)
    """
    found = [row["speedup_q1"], row["speedup_q3"], *row.get("speedup_halves", ())]
    return min(found), max(found)


def doubt(row: Mapping[str, Any]) -> str:
    """The reason why a speed-up is not a clear gain.

    Example:
        >>> doubt({"speedup_q1": 0.9, "speedup_q3": 1.2}), doubt({"speedup_q1": 0.8, "speedup_q3": 0.9})
        ('its quartiles 0.90-1.20 include 1', 'its quartiles 0.80-0.90 are below 1')
    """
    quartiles = f"its quartiles {row['speedup_q1']:.2f}-{row['speedup_q3']:.2f}"
    if bounds(row)[1] < 1.0:
        return f"{quartiles} are below 1"
    inside = row["speedup_q1"] <= 1.0 <= row["speedup_q3"]
    return f"{quartiles} include 1" if inside else "the halves of the rounds disagree"


def unrest(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line if something disturbed the timings of a setting.

    Example:
        >>> rows = [{"method": "dense"}, {"method": "tome:r=8", "speedup_halves": [1.3, 0.9]}]
        >>> list(unrest(rows))
        ['disturbed: the two halves of the rounds disagree (tome:r=8 1.30x, then 0.90x); another run may say otherwise']
    """
    halves = [(row["method"], *row["speedup_halves"]) for row in rows if "speedup_halves" in row]
    apart = [each for each in halves if max(each[1:]) > APART * min(each[1:])]
    texts = [rows[0]["disturbed"]] if "disturbed" in rows[0] else []
    if apart:
        name, first, last = max(apart, key=lambda each: max(each[1:]) / min(each[1:]))
        texts.append(f"the two halves of the rounds disagree ({name} {first:.2f}x, then {last:.2f}x)")
    if texts:
        yield f"disturbed: {'; '.join(texts)}; another run may say otherwise"


def engine_of(row: Mapping[str, Any]) -> str:
    """The engine of a row with its precision.

    Example:
        >>> engine_of({"engine": "openvino", "precision": "int8"}), engine_of({"engine": "eager", "precision": "fp32"})
        ('openvino int8', 'eager')
    """
    return str(row["engine"]) if row["precision"] == "fp32" else f"{row['engine']} {row['precision']}"


def named(row: Mapping[str, Any]) -> str:
    """The method of a row; below fp32 with engine and precision.

    Example:
        >>> named({"method": "tome:r=8", "precision": "int8", "engine": "openvino"})
        'tome:r=8 on openvino int8'
    """
    return row["method"] if row["precision"] == "fp32" else f"{row['method']} on {engine_of(row)}"


def ms_per_image(row: Mapping[str, Any]) -> float:
    """The median time of one image of a batch."""
    return float(row["latency_ms"]["p50"] / row["batch_size"])


def _several(rows: Sequence[Mapping[str, Any]]) -> bool:
    return len({engine_of(row) for row in rows}) > 1


def _kernel_text(dense: Mapping[str, Any], several: bool) -> str:
    """The faster attention kernel of a dense row, and the times of the others."""
    times = dense["dense_p50_ms"]
    kernel = min(times, key=times.__getitem__)
    slower = [f"{name}: {p50:.2f} ms" for name, p50 in times.items() if name != kernel]
    of = (f" {dense['part']}" if "part" in dense else "") + (f" on {engine_of(dense)}" if several else "")
    return f"dense{of} is {kernel} attention" + "".join(f" ({text})" for text in slower)


def setting_text(row: Mapping[str, Any], several: bool = False) -> str:
    """ "batch 8" if several engines or precisions are compared, else e.g. "batch 8, bf16, compiled"."""
    if several:
        return f"batch {row['batch_size']}"
    on = {ALONE[0]: "", ALONE[1]: ", compiled"}.get(row["engine"], f", on {row['engine']}")
    return f"batch {row['batch_size']}, {row['precision']}{on}"


def _cells(row: Row, several: bool, agreement: bool) -> dict[str, str]:
    """The texts of a row by column."""
    latency, peak = row["latency_ms"], row["peak_memory_mib"]
    return {
        "method": row["method"],
        **({"part": row["part"]} if "part" in row else {}),
        **({"image tokens": f"{row['image_tokens']:g}"} if "image_tokens" in row else {}),
        **({"engine": engine_of(row)} if several else {}),
        "images/s": f"{row['images_per_second']:.1f}",
        "p50 ms": f"{latency['p50']:.2f}",
        "p95 ms": f"{latency['p95']:.2f}",
        "peak MiB": "-" if peak is None else f"{peak:.1f}",
        "speed-up": f"{row['speedup']:.2f}",
        "q1-q3": f"{row['speedup_q1']:.2f}-{row['speedup_q3']:.2f}",
        "promised": f"{row['macs_speedup']:.2f}",
        # over one dense model for all engines, a ratio would mix what the engine and what the method gains
        **({"own engine": f"{row['engine_speedup']:.2f}"} if several else {"ratio": f"{row['ratio']:.2f}"}),
        **({"agree %": f"{100 * row['agreement']:.1f}" if "agreement" in row else ""} if agreement else {}),
    }


def _limit_cell(row: Row) -> dict[str, str]:
    return {"of limit": f"{row['of_limit']:.2f}" if "of_limit" in row else ""}


def _new_cells(row: Row) -> dict[str, str]:
    return {"new ms": f"{row['new_p50_ms']:.2f}", "new speed-up": f"{row['new_speedup']:.2f}"}


def limits(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence on the share of its limit that every sliced method reaches.

    Example:
        >>> row = {"method": "tome:r=8", "engine": "openvino", "precision": "int8", "of_limit": 0.92,
        ...        "of_limit_q1": 0.91, "of_limit_q3": 0.93}
        >>> list(limits([row]))
        ['tome:r=8 reaches 0.92 (0.91-0.93) of the speed of its plain slice on openvino int8']
    """
    for row in rows:
        if "of_limit" in row:
            share, q1, q3 = (f"{row[key]:.2f}" for key in ("of_limit", "of_limit_q1", "of_limit_q3"))
            yield f"{row['method']} reaches {share} ({q1}-{q3}) of the speed of its plain slice on {engine_of(row)}"


def prepared(rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on the seconds that compiling or exporting took, by engine.

    Example:
        >>> rows = [{"engine": engine, "precision": "fp32", "prepare_seconds": seconds}
        ...         for engine, seconds in [("eager", 0.0), ("onnxruntime", 12.0), ("onnxruntime", 14.0)]]
        >>> prepared(rows)
        'made ready, per model: onnxruntime 13.0 s'
    """
    seconds: dict[str, list[float]] = {}
    for row in rows:
        if row["engine"] != ALONE[0]:
            seconds.setdefault(engine_of(row), []).append(row["prepare_seconds"])
    texts = [f"{name} {sum(each) / len(each):.1f} s" for name, each in seconds.items()]
    return f"made ready, per model: {', '.join(texts)}"


def advice(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The best engine for the dense model and every method, its speed over the fastest dense model, and the fastest."""
    parts = list(dict.fromkeys(row.get("part") for row in rows))
    return [line for part in parts for line in _advice([row for row in rows if row.get("part") == part])]


def _advice(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    best = {method: max(each, key=lambda row: row["speedup"]) for method, each in by_method.items()}
    dense, *others = by_method
    part = f" ({rows[0]['part']})" if "part" in rows[0] else ""
    first = best[dense]
    base = f"dense on {engine_of(first)} ({first['dense_kernel']})"
    slower = [f"{1 / row['speedup']:.2f}x on {engine_of(row)}" for row in by_method[dense] if row is not first]
    where = f"at {setting_text(rows[0], several=True)}"
    lines = [f"fastest {base}{part} {where}" + (f"; it takes {', '.join(slower)}" if slower else "")]
    if first["precision"] != "fp32" and "agreement" in first:
        right = f"; top-1 {100 * first['top1']:.1f} %" if "top1" in first else ""
        agrees = f"{100 * first['agreement']:.1f} % of {first['scored']} images"
        lines.append(f"dense in {first['precision']} on {first['engine']} has the top-1 of fp32 in {agrees}{right}")
    for method in others:
        row = best[method]
        promise = f"where its MACs promise {row['macs_speedup']:.2f}x"
        speed = f"{row['speedup']:.2f}x ({row['speedup_q1']:.2f}-{row['speedup_q3']:.2f})"
        if shows_only_cost(method):
            continue
        low, high = bounds(row)
        if engine_of(row) not in map(engine_of, by_method[dense]):  # a file's own engine
            alone = f"{method}{part} on {engine_of(row)}, where dense was not timed"
            lines.append(f"{alone}: {speed} the speed of {base}, {promise}")
        elif low > 1.0:
            lines.append(f"{method}{part}: use {engine_of(row)}; it has {speed} the speed of {base}, {promise}")
        elif high >= 1.0:
            lines.append(f"{method}{part} shows no clear gain {where}: on {engine_of(row)} {speed} {base}, {promise}")
        else:
            at_best = f"at best, on {engine_of(row)}, {speed} the speed of {base}"
            lines.append(f"{method}{part} does not pay {where}: {at_best}, {promise}")
    fastest = max(best, key=lambda method: float(best[method]["speedup"]))
    if fastest != dense and not shows_only_cost(fastest) and bounds(best[fastest])[0] > 1.0:
        lines.append(f"fastest{part} {where}: {fastest} on {engine_of(best[fastest])}; `vitrim eval` measures its loss")
    return lines


def shows_only_cost(method: str) -> bool:
    """True if a method only shows vitrim's own overhead, or what others cost."""
    return method.partition(":")[0] == "none" or method.startswith(PLAIN_SLICE)


def verdicts(row: Mapping[str, Any], dense: Mapping[str, Any], *, several: bool = False) -> list[str]:
    """A sentence on the gain at this setting, and another if the method needs more memory.

    Args:
        dense: row of the dense model on the same engine.
        several: engines are compared; `advice` then covers speed.

    Example:
        >>> dense = {"peak_memory_mib": 9.0}
        >>> row = {"method": "tome:r=8", "batch_size": 1, "precision": "bf16", "engine": "eager",
        ...        "dense_kernel": "fused", "speedup": 0.97, "speedup_q1": 0.95, "speedup_q3": 0.99,
        ...        "macs_speedup": 1.45, "peak_memory_mib": 8.0}
        >>> verdicts(row, dense)
        ['tome:r=8 does not pay at batch 1, bf16: 0.97x the speed of dense (fused), where its MACs promise 1.45x']
    """
    where = f"at {setting_text(row)}"
    promise = f"where its MACs promise {row['macs_speedup']:.2f}x"
    lines: list[str] = []
    if shows_only_cost(row["method"]):
        return lines
    method = row["method"] + (f" ({row['part']})" if "part" in row else "")
    if several:
        pass
    elif bounds(row)[1] < 1.0:
        speed = f"{row['speedup']:.2f}x the speed of dense ({row['dense_kernel']})"
        lines.append(f"{method} does not pay {where}: {speed}, {promise}")
    elif bounds(row)[0] <= 1.0:
        lines.append(f"{method} shows no clear gain {where}: {row['speedup']:.2f}x, but {doubt(row)}, {promise}")
    else:
        speed = f"{row['speedup']:.2f}x ({row['speedup_q1']:.2f}-{row['speedup_q3']:.2f}) the speed of dense"
        lines.append(f"{method} pays {where}: {speed} ({row['dense_kernel']}), {promise}")
    peak, dense_peak = row["peak_memory_mib"], dense["peak_memory_mib"]
    if peak is not None and dense_peak is not None and peak > 1.01 * dense_peak:  # 1 % allows for bookkeeping
        lines.append(f"{method} needs more memory than dense {where}: {peak:.2f} against {dense_peak:.2f} MiB")
    return lines


def draw(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A figure of milliseconds per image of dense and reduced models, a panel per batch size: shorter bars are better.

    Bars are medians, coloured by engine and precision; a line marks the fastest dense model.
    """
    sizes = list(dict.fromkeys(row["batch_size"] for row in rows))
    # entire models only
    rows = [row for row in rows if row.get("part") in (None, "whole model")]
    engines = list(dict.fromkeys(engine_of(row) for row in rows))
    names = list(dict.fromkeys(row["method"] for row in rows))
    figure, axes = style.panels(len(sizes), across=2, size=(4.6, 0.6 + 0.16 * len(names) * (len(engines) + 1)))
    colours = dict(zip(engines, cycle(style.OKABE_ITO), strict=False))
    for axis, size in zip(axes, sizes, strict=True):
        own = [row for row in rows if row["batch_size"] == size]
        labels = names if sizes.index(size) % 2 == 0 else [""] * len(names)  # beside the first panel of a row
        for row in own:
            height = names.index(row["method"]) * (len(engines) + 1) + engines.index(engine_of(row))
            time = ms_per_image(row)
            axis.barh(height, time, color=colours[engine_of(row)], height=0.9)
            ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}
            axis.text(time, height, f" {time:.1f}", va="center", fontsize=style.TEXT - 1, bbox=ground)
        dense = min(ms_per_image(row) for row in own if row["method"] == names[0])
        axis.axvline(dense, color=style.DENSE_COLOUR, linewidth=0.8, linestyle=":", zorder=0)
        axis.set_yticks([place * (len(engines) + 1) + (len(engines) - 1) / 2 for place in range(len(names))], labels)
        axis.tick_params(labelsize=style.TEXT)
        axis.invert_yaxis()
        axis.set_xlabel("ms per image", fontsize=style.TEXT)
        axis.set_title(f"{rows[0]['model']}, batch {size}", fontsize=style.TITLE)
    from matplotlib.patches import Patch

    style.below(figure, [Patch(color=colours[name], label=name) for name in engines], across=2)
    return figure
