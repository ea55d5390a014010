"""Draw the data flow of a reduced block as docs/images/data_flow.svg.

python docs/draw_data_flow.py
"""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).parent / "images" / "data_flow.svg"
WIDTH, HEIGHT = 1000, 430
INK, PALE, ACCENT, WARM = "#1d2733", "#eef2f7", "#1f5fbf", "#b4530a"


def box(x: float, y: float, width: float, height: float, lines: list[str], colour: str = INK, fill: str = PALE) -> str:
    """A rounded box with centred lines, the first of them bold."""
    middle, top = x + width / 2, y + height / 2 - 9 * (len(lines) - 1)
    text = "".join(
        f'<text x="{middle}" y="{top + 18 * row + 5}" text-anchor="middle" fill="{colour}" '
        f'font-weight="{600 if row == 0 else 400}" font-size="{15 if row == 0 else 13}">{line}</text>'
        for row, line in enumerate(lines)
    )
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{fill}" stroke="{colour}"/>{text}'


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = INK) -> str:
    """A line with a head at its second end."""
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="1.5" '
        f'marker-end="url(#{"warm" if colour == WARM else "ink"})"/>'
    )


def note(x: float, y: float, text: str, colour: str = INK, anchor: str = "middle") -> str:
    """A line of small text."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="13" fill="{colour}">{text}</text>'


def seeded_draws() -> str:
    """The SVG: the model above, one of its blocks below it, and what a method adds at the bottom."""
    parts = []
    for index, lines in enumerate(
        (["image"], ["host: patches", "to tokens"], ["ReducedBlock", "L times"], ["host: head"])
    ):
        x = 40 + 250 * index
        parts.append(box(x, 20, 170, 56, lines, ACCENT if index == 2 else INK))
        if index < 3:
            parts.append(arrow(x + 170, 48, x + 248, 48))
    parts.append(
        f'<path d="M 540 76 L 40 128 M 710 76 L 960 128" stroke="{ACCENT}" stroke-dasharray="4 4" fill="none"/>'
    )
    parts.append(f'<rect x="24" y="128" width="952" height="150" rx="9" fill="none" stroke="{ACCENT}"/>')
    parts.append(note(40, 150, "one block: N tokens and their state go in, M of them come out", ACCENT, "start"))
    steps = (["norm, project", "q, k, v"], ["attention"], ["+"], ["norm, MLP"], ["+"])
    widths, x, ends = (150, 150, 44, 150, 44), 120.0, []
    for lines, width in zip(steps, widths, strict=True):
        parts += [box(x, 172, width, 56, lines), arrow(x - 60, 200, x - 2, 200)]
        ends.append((x, x + width))
        x += width + 62
    parts.append(arrow(ends[-1][1], 200, ends[-1][1] + 56, 200))
    sites = (
        (ends[0][0] - 32, "before"),
        (ends[0][1] + 30, "query"),
        (ends[2][1] + 30, "between"),
        (ends[4][1] + 26, "after"),
    )
    for place, name in sites:
        parts += [arrow(place, 330, place, 206, WARM), note(place + 5, 262, name, WARM, "start")]
    parts.append(
        box(
            24,
            332,
            952,
            76,
            [
                "a reducer, at one of four sites",
                "the method decides, from x, attention and state: a Hard or Soft assignment of N tokens to M",
                "the core applies it: moves tokens and sizes, keeps the prefix, brings pruned patches back",
            ],
            WARM,
            "#fdf3ea",
        )
    )
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
        for name, colour in (("ink", INK), ("warm", WARM))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif"><title>Data flow of a reduced model</title><defs>{heads}</defs>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    FILE.write_text(seeded_draws(), encoding="utf-8")
