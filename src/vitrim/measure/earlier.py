"""Former keywords of functions that now take objects: they work for one more release, with a deprecation warning."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from vitrim.errors import VitrimError, check_known
from vitrim.files import check_file, written

Function = TypeVar("Function", bound=Callable[..., Any])

RENAMED = {
    "model": "models",
    "model_options": "ModelSpec.options",
    "seed": "ModelSpec.seed",
    "data": "DataSpec.source",
    "data_options": "DataSpec.options",
    "few_images": "DataSpec.few",
    "text_tokens": "Prompt.text",
    "prompt_images": "Prompt.images",
    "format": "Results.formats",
    "repeats": "Budget.min_rounds",
    "search": "SearchSpec.strategy",
    "front": "target",
    "capacity": "freeze",
    "on_setting": "on_report",
    "on_stop": "on_report",
}
"""New names of fields and parameters."""
JOINED = {"files": "methods", "more_models": "models"}
"""Lists that were joined with another list."""


def earlier(**objects: Any) -> Callable[[Function], Function]:
    """A decorator that still accepts, as keywords, the fields of a function's object parameters.

    Args:
        objects: parameters that are objects, each with its dataclass, or with several alternatives. The first field of
            the first dataclass may be passed in place of the object: a model, a source, a folder.

    Example:
        >>> @dataclasses.dataclass
        ... class Images:
        ...     source: str
        ...     limit: int | None = None
        >>> count = earlier(data=Images)(lambda data: data)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     count("folder", limit=3)
        Images(source='folder', limit=3)
        >>> print(caught[0].message)
        limit is a field now, and no keyword from the next release on: data=Images(..., limit=...)
    """
    kinds = {name: kind if isinstance(kind, tuple) else (kind,) for name, kind in objects.items()}

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*given: Any, **named: Any) -> Any:
            former = {name: named.pop(name) for name in list(named) if name not in signature.parameters}
            if not former:
                return function(*given, **named)
            figure = former.pop("figure", None)
            bound = signature.bind_partial(*given, **named)
            bound.apply_defaults()
            unknown = _translate(former, named, bound, kinds)
            call = functools.partial(function, *bound.args, **bound.kwargs, **unknown)
            return call() if figure is None else _with_figure(call, figure)

        return cast(Function, run)

    return decorate


def _translate(
    former: dict[str, Any], named: dict[str, Any], bound: inspect.BoundArguments, kinds: dict[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Move ``former`` keywords into the arguments of ``bound``, and return those that no argument replaces."""
    fields = [
        (name, kind, one.name) for name, each in kinds.items() for kind in each for one in dataclasses.fields(kind)
    ]
    arguments, unknown = bound.arguments, dict[str, Any]()
    inside: dict[tuple[str, Any], dict[str, Any]] = {}
    for name, value in former.items():
        new = RENAMED.get(name, name)
        place = next((one for one in fields if new in (one[2], f"{one[1].__name__}.{one[2]}")), None)
        if name == "threads":
            from vitrim.measure.machine import set_threads

            _tell("threads are those of torch from the next release on: torch.set_num_threads(...)")
            set_threads(value)
        elif name == "compiled":
            _tell('compiled=True is engine="compile" from the next release on')
            arguments["engine"] = "compile" if value else arguments["engine"]
        elif name in JOINED:
            _tell(f"{name} are given among the {JOINED[name]} from the next release on")
            own = arguments.get(JOINED[name])
            own = list(own) if isinstance(own, list | tuple) else [] if own is None else [own]
            arguments[JOINED[name]] = [*own, *value]
        elif new in bound.signature.parameters:
            _tell(f"{name} is called {new} now, and has its old name for this release")
            if new in named:
                raise VitrimError(f"{name} is called {new} now: give one of them")
            arguments[new] = value
        elif place is None:
            unknown[name] = value
        else:
            parameter, kind, field = place
            inside.setdefault((parameter, kind), {})[field] = value
            shown = f"{parameter}={kind.__name__}(..., {field}=...)"
            _tell(f"{name} is a field now, and no keyword from the next release on: {shown}")
    for (parameter, kind), values in inside.items():
        arguments[parameter] = _with(arguments.get(parameter), kind, kinds[parameter][0], values)
    return unknown


def _with_figure(call: Callable[[], Any], figure: Any) -> Any:
    """The report of ``call``, with its figure written to a file."""
    _tell("a report has its figure from the next release on: report.figure.savefig(...)")
    file = Path(figure)
    format = file.suffix.removeprefix(".")
    check_known("format", format, ("png", "svg"))
    check_file(file)
    report = call()
    with written(file) as beside:
        report.figure.savefig(beside, format=format)
    report.files.append(file)
    return report


def _with(own: Any, kind: Any, usual: Any, values: dict[str, Any]) -> Any:
    """``own``, converted to ``kind`` if necessary, with the fields ``values``, which must not contradict it."""
    first = dataclasses.fields(kind)[0]
    if own is not None and (kind is not usual or (first.name in values and not isinstance(own, kind))):
        raise VitrimError(f"give {first.name} or what stands in its place, not both")
    if not isinstance(own, kind):
        bare = own is None and first.default is not dataclasses.MISSING
        own = kind() if bare else kind(**{first.name: own})
    return dataclasses.replace(own, **values)


def _tell(line: str) -> None:
    warnings.warn(line, DeprecationWarning, stacklevel=4)
