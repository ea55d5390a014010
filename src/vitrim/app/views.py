"""Results as HTML and as text to copy. Whatever a user typed or uploaded is escaped."""

from __future__ import annotations

import base64
import json
import shlex
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrim.app.records import Front, Result

__all__ = ["command_of", "error_html", "front_html", "pictures_html", "python_of", "result_html"]

FOLDER = Path(__file__).parent


def result_html(result: Result) -> str:
    """Classes, agreement, cost and tokens of a result."""
    return _render("result", result=result, method=result.method)


def pictures_html(result: Result, block: int) -> str:
    """The image and what is left of it after every block, of which ``block`` is visible."""
    shown = [
        {"block": one.block, "words": one.words, "data": base64.b64encode(one.png).decode()} for one in result.pictures
    ]
    return _render("pictures", pictures=shown, block=block)


def front_html(front: Front) -> str:
    """The picture and the table of a front."""
    return _render("front", front=front, png=base64.b64encode(front.png).decode())


def error_html(message: str) -> str:
    """A message where a result would stand.

    Example:
        >>> error_html("not <b>an image").strip()
        '<p class="v-error" role="alert">not &lt;b&gt;an image</p>'
    """
    return _render("result", error=message)


def python_of(result: Result) -> str:
    """The Python lines that reduce this model in the same way; ``CHECKPOINT`` stands for a file of weights."""
    lines = ["import vitrim", "from vitrim.loading import create_model", ""]
    given = [repr(result.model)]
    given += ["checkpoint='CHECKPOINT'"] if result.checkpoint else []
    given += ["pretrained=True"] if result.weights == "pretrained" else []
    given += [f"options={dict(result.options)!r}"] if result.options else []
    lines += [f"model = create_model({', '.join(given)})"]
    return "\n".join([*lines, f"reduction = vitrim.reduce_(model, {result.method!r})"])


def command_of(result: Result) -> str:
    """The command that writes the same pictures; ``CHECKPOINT`` stands for a file of weights."""
    weights = " --checkpoint CHECKPOINT" if result.checkpoint else ""
    weights = " --pretrained" if result.weights == "pretrained" else weights
    options = "".join(
        f" --model-option {shlex.quote(f'{key}={_text(value)}')}" for key, value in result.options.items()
    )
    return f'vitrim show "{result.model}" IMAGE{weights}{options} -m "{result.method}" --out pictures'


def _text(value: Any) -> str:
    """The value of an option as it is written on the command line.

    Example:
        >>> _text([32, 64]), _text("avg"), _text(True)
        ('[32, 64]', 'avg', 'true')
    """
    return value if isinstance(value, str) else json.dumps(value)


@cache
def _template(name: str) -> Any:
    from jinja2 import Environment

    text = (FOLDER / f"{name}.html.jinja").read_text(encoding="utf-8")
    return Environment(autoescape=True).from_string(text)


def _render(name: str, **values: Any) -> str:
    return str(_template(name).render(**values))
