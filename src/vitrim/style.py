"""The look of all figures: one colour per method, legible text, files that do not depend on the machine."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrim.core.registry import methods as registered
from vitrim.errors import check_installed, check_known
from vitrim.files import check_file, written
from vitrim.report import DENSE

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""The colours of Okabe and Ito, distinct for any colour vision; those with the most contrast on white come first."""
DENSE_COLOUR = "#000000"
SHADES = (1.0, 0.6, 0.35, 1.5, 0.8)
"""Lightness of the first seven colours and of the next cycles: darker, paler, then in between."""
ORDER = (
    *("tome", "topk", "diffrate", "atm", "evit", "mctf", "dynamicvit"),
    *("cropr", "kmedoids", "dpc_knn", "pitome", "l2", "random", "zero_tprune"),
    *("gtp", "linf", "l1", "tofu", "bat", "ats", "algm"),
    *("atc", "ppt", "saint", "vid_tldr", "cubist_merge", "pixelprune"),
    *("a_vit", "evo_vit", "patchmerger", "sit", "sinkhorn", "ia_red2"),
)
"""Methods in the order of colours: often compared methods come first; the registry's others follow by name."""
COMPARED = ("tome", "topk", "atm", "mctf", "random")
"""Methods with colours in a figure of many: good first choices, close alternatives, and the random baseline."""
MARKERS = "osD^vP*X<>p"
APART = 3
"""Steps in `MARKERS` from one shade of a colour to the next."""
BOUND, CHANCE = (0, (5, 2)), (0, (1, 1.5))
"""Dash patterns of lower bounds and of chance levels."""
SMALL, TEXT, TITLE = 8, 9, 10
"""Font sizes in points of ticks and legends, of labels, and of titles."""
DPI = 150
FORMATS = ("png", "svg")


def method_of(name: str) -> str:
    """The method in the name of a record.

    Example:
        >>> method_of("topk:keep_rate=0.7 on deit_tiny"), method_of("dense with cifar10")
        ('topk', 'dense')
    """
    return name.partition(":")[0].partition(" ")[0]


def colours(names: Iterable[str]) -> dict[str, str]:
    """The colour of every record by name: one per method, whatever its options, and the same in every report.

    The dense model is black. Unregistered methods come last, in order of appearance.

    Args:
        names: all records of a report, so that a method has one colour in all figures.

    Example:
        >>> colours(["dense", "topk", "tome:r=4", "tome:r=8"])
        {'dense': '#000000', 'topk': '#e69f00', 'tome:r=4': '#0072b2', 'tome:r=8': '#0072b2'}
    """
    every = list(dict.fromkeys(names))
    places = _places(every)
    return {name: DENSE_COLOUR if method_of(name) == DENSE else _colour(places[method_of(name)]) for name in every}


def _places(names: Iterable[str]) -> dict[str, int]:
    """The index of every method in the order of colours, with unregistered methods of ``names`` last."""
    reducing = [name for name, config in registered().items() if config.kind != "none"]
    known = dict.fromkeys([*ORDER, *reducing, *(method_of(name) for name in names if method_of(name) != DENSE)])
    return {method: place for place, method in enumerate(known)}


def _colour(place: int) -> str:
    """The colour at an index: those of Okabe and Ito, then darker, then mixed with white.

    Example:
        >>> [_colour(place) for place in (0, 7, 21)]
        ['#0072b2', '#00446b', '#80b8d8']
    """
    from matplotlib.colors import to_hex, to_rgb

    light = SHADES[place // len(OKABE_ITO) % len(SHADES)]
    white = max(0.0, light - 1.0)
    red, green, blue = (
        min(light, 1.0) * part * (1 - white) + white for part in to_rgb(OKABE_ITO[place % len(OKABE_ITO)])
    )
    return to_hex((red, green, blue))


def markers(names: Iterable[str]) -> dict[str, str]:
    """The marker of every record by name; settings of one method differ, and so do methods with shades of one colour.

    Example:
        >>> markers(["tome:r=4", "tome:r=8", "topk", "cropr:r=4"])
        {'tome:r=4': 'o', 'tome:r=8': 's', 'topk': 'o', 'cropr:r=4': '^'}
    """
    every = list(dict.fromkeys(names))
    places = _places(every)
    seen: dict[str, int] = {}
    found = {}
    for name in every:
        place = seen.get(method_of(name), 0)
        seen[method_of(name)] = place + 1
        shade = places.get(method_of(name), 0) // len(OKABE_ITO)  # the dense model has none
        found[name] = MARKERS[(place + APART * shade) % len(MARKERS)]
    return found


def sheet(width: float, height: float) -> Any:
    """An empty figure, size in inches: a `vitrim.plain.Sheet`, without global state or a screen."""
    check_installed("a figure", "matplotlib")
    from vitrim.plain import Sheet

    return Sheet(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")


def panels(count: int, *, across: int, size: tuple[float, float], above: float = 0.4) -> tuple[Any, list[Any]]:
    """A figure with ``count`` panels, at most ``across`` in a row, and its axes in reading order.

    Args:
        size: size of a panel in inches, labels included.
        above: extra inches for a title and a legend.
    """
    columns = min(across, count)
    rows = math.ceil(count / columns)
    figure = sheet(columns * size[0], rows * size[1] + above)
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for axis in axes[count:]:
        axis.set_axis_off()
    for axis in axes[:count]:
        axis.tick_params(labelsize=SMALL)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[:count]


def stars_and_dots(figure: Any, shades: Mapping[str, str], shapes: Mapping[str, str], across: int) -> None:
    """Write a legend with the dense model as a star, and records with their colours and markers."""
    from matplotlib.lines import Line2D

    looks = {DENSE: (DENSE_COLOUR, "*", 11), **{name: (shades[name], shapes[name], None) for name in shapes}}
    below(
        figure,
        [
            Line2D([], [], color=colour, marker=marker, markersize=size, linestyle="none", label=name)
            for name, (colour, marker, size) in looks.items()
        ],
        across,
    )


def below(figure: Any, handles: Sequence[Any], across: int = 3) -> None:
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=across, fontsize=SMALL, frameon=False)


def names_below(figure: Any, axes: Sequence[Any], names: Iterable[str] | None = None, across: int = 3) -> None:
    """Write a legend of all labels in the panels, each once, below them, in the order of ``names`` or of appearance."""
    found: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        found.update(zip(labels, handles, strict=True))
    below(figure, [found[name] for name in (found if names is None else names) if name in found], across)


def encoded(figure: Any, kind: str = "png") -> bytes:
    """The bytes of a figure's file, reproducible."""
    import matplotlib

    check_known("format", kind, FORMATS)
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "vitrim"}):
        figure.savefig(out, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return out.getvalue()


def check(path: Path) -> None:
    """Check that a figure could be drawn and written to ``path``, before the work behind it."""
    check_installed("a figure", "matplotlib")
    check_known("format", path.suffix.removeprefix("."), FORMATS)
    check_file(path)


def save(figure: Any, path: Path) -> None:
    """Write a figure atomically, creating parent folders; the suffix, one of `FORMATS`, decides the format."""
    check_file(path)
    write(encoded(figure, path.suffix.removeprefix(".")), path)


def write(content: bytes, path: Path) -> None:
    """Write the bytes of a figure atomically, creating parent folders."""
    with written(path) as place:
        place.write_bytes(content)
